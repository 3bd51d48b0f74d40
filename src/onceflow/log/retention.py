"""Taking old rows away: by hand (`trim`) or by the age and size that a log was created with.

Nothing is taken that a reader still needs. A trim is three steps, each of which the next trim
finishes if it was killed: a commit that moves the earliest offsets, the removal of the files, and
a commit that says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from onceflow.contract.ledger import Position
from onceflow.errors import Fenced, JobError, OutOfRange, TargetBehind
from onceflow.faults.points import reach
from onceflow.folders.commit_log import Commit, Forgotten, Reference
from onceflow.log.commits import Offsets, Segment, covers, segments_of
from onceflow.log.readable import ReadableLog
from onceflow.log.readers import Reader, readers


@dataclass(frozen=True)
class Trimmed:
    """What a trim took away, or would take."""

    low: Offsets
    rows: int
    files: int
    bytes: int


def trim(log: ReadableLog, below: Offsets, *, dry_run: bool = False) -> Trimmed:
    """Take away the rows below these offsets. Refuses if a reader still needs one of them."""
    while True:
        with suppress(Forgotten):  # another trim is faster than ours: look again
            return _refuse_or_trim(log.refresh(), below, dry_run)


def _refuse_or_trim(log: ReadableLog, below: Offsets, dry_run: bool) -> Trimmed:
    count = log.facts.partitions
    if len(below) != count:
        raise JobError(
            f"{log} has {count} partition{'s' * (count > 1)}, not {len(below)}",
            hint="name an offset for each",
        )
    if not covers(log.view.next, below):
        raise OutOfRange(
            f"{log} ends at {_show(log.view.next)}; it cannot be trimmed to {_show(below)}",
            hint="name offsets that are there",
        )
    below = _later(below, log.view.low)
    for reader in _readers(log):
        if not covers(_later(reader.needs, log.view.low), below):
            raise JobError(
                f"reader {reader.name} (home {reader.home}, lineage {reader.lineage[:8]}) still "
                f"needs {log} from {_show(reader.needs)}; asked was to trim to {_show(below)}",
                hint="let the job go on, or trim less; if the job is gone for good: "
                f"onceflow log trim {log.path} --forget {reader.name}",
            )
    return _plan(log, below)[0] if dry_run else _trim(log, below)


def retain(log: ReadableLog) -> Trimmed | None:
    """What the log was created to keep, and what readers need, stays; older rows go."""
    facts = log.facts
    if facts.retain_ms is None and facts.retain_bytes is None:
        return None
    before = None if facts.retain_ms is None else time.time_ns() // 1000 - facts.retain_ms * 1000
    with suppress(Forgotten):  # another one is at it
        below = expired(log, before=before, keep_bytes=facts.retain_bytes)
        for reader in _readers(log):
            below = [min(pair) for pair in zip(below, reader.needs, strict=True)]
        below = _later(below, log.view.low)
        return None if below == log.view.low else _trim(log, below)
    return None


def _readers(log: ReadableLog) -> list[Reader]:
    found = readers(log.path)
    for reader in found:
        if len(reader.needs) != log.facts.partitions:
            raise JobError(
                f"reader {reader.name} (home {reader.home}) read another log that was here, "
                f"with {len(reader.needs)} partitions",
                hint=f"onceflow log trim {log.path} --forget {reader.name}",
            )
    return found


def expired(
    log: ReadableLog, *, before: int | None = None, keep_bytes: int | None = None
) -> Offsets:
    """The offsets up to which rows were appended before a time (microseconds since 1970), or are
    not among the newest so many bytes. Whole commits; at least `keep_bytes` stay."""
    while True:
        with suppress(Forgotten):  # a trim is at work: look again
            return _expired(log, before, keep_bytes)
        log.refresh()


def _expired(log: ReadableLog, before: int | None, keep_bytes: int | None) -> Offsets:
    view = log.view

    def old(at: int, bytes_up_to: int) -> bool:
        return (before is not None and at < before) or (
            keep_bytes is not None and view.bytes - bytes_up_to >= keep_bytes
        )

    below, commits, up_to = list(view.low), view.recent, view.bytes
    for reference in _leaves(log, view.manifests):
        if not old(reference["at"], reference["bytes"]):
            commits = log.commits.read_manifest(reference["name"])["commits"]
            up_to = reference["bytes"]
            break
        below = _later(reference["next"], view.low)
    up_to -= sum(segment.bytes for commit in commits for segment in segments_of(commit))
    for commit in commits:
        segments = segments_of(commit)
        up_to += sum(segment.bytes for segment in segments)
        if not old(commit["at"], up_to):
            break
        for segment in segments:
            below[segment.partition] = max(below[segment.partition], segment.end)
    return below


def _leaves(log: ReadableLog, references: list[Reference]) -> Iterator[Reference]:
    """The manifests that list files, oldest first."""
    for reference in references:
        if reference["level"] == 0:
            yield reference
        else:
            yield from _leaves(log, log.commits.read_manifest(reference["name"])["manifests"])


def _plan(log: ReadableLog, below: Offsets) -> tuple[Trimmed, list[Segment]]:
    """What a trim takes away, and the segments that it touches."""
    low = log.view.low
    touched = list(log.segments(log.view.cleaned, below))
    rows = sum(max(0, min(s.end, below[s.partition]) - max(s.first, low[s.partition]))
               for s in touched)  # fmt: skip
    gone = _whole(touched, below)
    return Trimmed(below, rows, len(gone), sum(s.bytes for s in gone)), touched


def _whole(segments: list[Segment], below: Offsets) -> list[Segment]:
    return [segment for segment in segments if segment.end <= below[segment.partition]]


def _trim(log: ReadableLog, below: Offsets) -> Trimmed:
    planned, touched = _plan(log, below)
    if below == log.view.low == log.view.cleaned:
        return planned
    last = max((segment.at for segment in touched), default=0)
    log.commits.append(lambda: {"type": "trim", "last": last, "below": below})
    reach("trim.committed")
    gone = _whole(touched, below)
    for segment in gone:
        (log.path / segment.path).unlink(missing_ok=True)
        reach("trim.removed-one")
    remove_dropped(log)  # while their names are known

    def clean() -> Commit:  # what another trim has counted in between is not counted again
        left = [s for s in gone if s.end > log.view.cleaned[s.partition]]
        return {"type": "clean", "removed": sum(s.bytes for s in left), "below": below}

    log.commits.append(clean)
    log.refresh().roll_up()
    log.commits.sweep()
    log.refresh()
    return planned


def _later(offsets: Offsets, others: Offsets) -> Offsets:
    return [max(pair) for pair in zip(offsets, others, strict=True)]


# ---------------------------------------------------------------- taking back


def take_back(
    log: ReadableLog,
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
    Their offsets are never used again. A reader that has read them is told so.
    """
    gone: list[Segment] = []

    def make() -> Commit | None:
        ledger = log.view.ledger(output)
        if ledger.position is not None and ledger.position.lineage == to.lineage:
            return None  # done before; it may have published more since
        if ledger.term > term:
            raise Fenced(f"{log} has seen term {ledger.term}, this driver has term {term}")
        after = published_after(log, output, cut)
        gone[:] = [s for s in after if not log.view.has_dropped(s)]
        left = [s for s in gone if s.end > log.view.cleaned[s.partition]]
        return {
            "type": "drop", "output": output, "term": term, "lineage": to.lineage,
            "epoch": to.epoch, "drop": _ranges(gone),
            "decision": ledger.decision if decision is None else decision,
            "removed": sum(s.bytes for s in left),
        }  # fmt: skip

    done = log.commits.append(make)
    reach("drop.committed")
    remove_dropped(log.refresh())
    return 0 if done is None else sum(segment.rows for segment in gone)


def published_after(log: ReadableLog, output: str, cut: Position) -> list[Segment]:
    """What `output` published after the cut; `TargetBehind` if it cannot go back to there."""
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
            "go back to there",
            hint="go back to an epoch whose rows are there, or bring back an older copy",
        )
    return after


def remove_dropped(log: ReadableLog) -> None:
    """Remove the files of what was taken back: who did it may have been killed in between."""
    dropped = log.view.dropped
    if not dropped:
        return

    def wanted(reference: Reference) -> bool:
        return any(reference["next"][drop.partition] > drop.first for drop in dropped)

    for commit in log.commits.remembered(wanted):
        for segment in filter(log.view.has_dropped, segments_of(commit)):
            (log.path / segment.path).unlink(missing_ok=True)
            reach("drop.removed-one")


def _split(
    log: ReadableLog, output: str, cut: Position, *, later: bool
) -> tuple[list[Segment], list[Segment]]:
    """What `output` published after the cut, and what the cut's own lineage published up to it.

    Epochs are numbered through from one lineage to the next. So if the ledger is in a `later` one,
    all above the cut came after it; else what others published came before it."""
    after: list[Segment] = []
    kept: list[Segment] = []
    for commit in log.commits.remembered():
        if commit.get("output") != output:
            continue
        inside = commit["lineage"] == cut.lineage
        if commit["epoch"] > cut.epoch and (inside or later):
            after += segments_of(commit)
        elif inside:
            kept += segments_of(commit)
    return after, kept


def _ranges(segments: list[Segment]) -> list[list[int]]:
    """[partition, first, end] of all rows, with as few ranges as there can be."""
    found: list[list[int]] = []
    for segment in sorted(segments, key=lambda s: (s.partition, s.first)):
        if found and found[-1][0] == segment.partition and found[-1][2] == segment.first:
            found[-1][2] = segment.end
        else:
            found.append([segment.partition, segment.first, segment.end])
    return found


def _show(offsets: Offsets) -> str:
    return ", ".join(f"{p}:{offset}" for p, offset in enumerate(offsets))
