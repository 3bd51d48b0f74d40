"""Take back what an output published to a log after a cut, and nobody else's rows.

One commit drops the segments and moves the ledger; then their files are removed. If a driver is
killed before that, the next start removes the files.
"""

from __future__ import annotations

from onceflow.contract.ledger import Position, needs_rewind
from onceflow.errors import TargetBehind
from onceflow.faults.points import reach
from onceflow.folders.commit_log import Commit, Reference
from onceflow.log.commits import Segment, segments_of
from onceflow.log.log_reader import LogReader


def take_back(
    log: LogReader,
    output: str,
    *,
    cut: Position,
    to: Position,
    term: int,
    decision: str | None = None,
) -> int:
    """Drop what `output` published after `cut`, and nobody else's rows, in one commit that also
    moves its ledger to `to` (the cut in a new lineage). Returns how many rows went.

    `decision` is the nonce of the cut's own decision; without it the ledger keeps the last one.
    Their offsets are never used again. A reader that has read them gets an error.
    """
    gone: list[Segment] = []

    def make() -> Commit | None:
        ledger = log.view.ledger(output)
        if not needs_rewind(ledger, to, term=term, target=log):
            return None
        after = published_after(log, output, cut)
        gone[:] = [s for s in after if not log.view.has_dropped(s)]
        left = [s for s in gone if s.end > log.view.cleaned[s.partition]]
        return {
            "type": "drop", "output": output, "term": term, "lineage": to.lineage,
            "epoch": to.epoch, "drop": _ranges(gone),
            "decision": ledger.decision if decision is None else decision,
            "removed": sum(s.bytes for s in left),
        }  # fmt: skip

    done = log.commit_log.append(make)
    reach("drop.committed")
    remove_dropped(log.refresh())
    return 0 if done is None else sum(segment.rows for segment in gone)


def published_after(log: LogReader, output: str, cut: Position) -> list[Segment]:
    """The segments that `output` published after the cut; `TargetBehind` if it cannot go back
    to the cut."""
    at = log.view.ledger(output).position
    ahead = at is None or (at.lineage == cut.lineage and at.epoch < cut.epoch)
    if ahead and cut.epoch >= 0:
        raise TargetBehind(
            f"{log} has published {'nothing' if at is None else f'up to epoch {at.epoch}'} of "
            f"{output}, so it cannot go back to epoch {cut.epoch}",
            hint="bring back the log as it was (its newest copy)",
        )
    later = at is not None and at.lineage != cut.lineage
    after, kept = _split(log, output, cut, later=later)
    if any(map(log.view.has_dropped, kept)):
        raise TargetBehind(
            f"{log} has taken back epochs up to {cut.epoch} of {output} before, so it cannot "
            "go back to that epoch",
            hint="go back to an epoch whose rows are there, or bring back an older copy",
        )
    return after


def remove_dropped(log: LogReader) -> None:
    """Remove files of rows that were taken back; a killed driver may have left some."""
    dropped = log.view.dropped
    if not dropped:
        return

    def wanted(reference: Reference) -> bool:
        return any(reference["next"][drop.partition] > drop.first for drop in dropped)

    for commit in log.commit_log.remembered(wanted):
        for segment in filter(log.view.has_dropped, segments_of(commit)):
            (log.path / segment.path).unlink(missing_ok=True)
            reach("drop.removed-one")


def _split(
    log: LogReader, output: str, cut: Position, *, later: bool
) -> tuple[list[Segment], list[Segment]]:
    """What `output` published after the cut, and what the cut's own lineage published up to it.

    Epochs are numbered through from one lineage to the next. So if the ledger is in a `later` one,
    all above the cut came after it; else what others published came before it."""
    after: list[Segment] = []
    kept: list[Segment] = []
    for commit in log.commit_log.remembered():
        if commit.get("output") != output:
            continue
        inside = commit["lineage"] == cut.lineage
        if commit["epoch"] > cut.epoch and (inside or later):
            after += segments_of(commit)
        elif inside:
            kept += segments_of(commit)
    return after, kept


def _ranges(segments: list[Segment]) -> list[list[int]]:
    """[partition, first, end] of all rows, with as few ranges as possible."""
    found: list[list[int]] = []
    for segment in sorted(segments, key=lambda s: (s.partition, s.first)):
        if found and found[-1][0] == segment.partition and found[-1][2] == segment.first:
            found[-1][2] = segment.end
        else:
            found.append([segment.partition, segment.first, segment.end])
    return found
