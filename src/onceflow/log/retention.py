"""Taking old rows away: by hand (`trim`) or by the age and size that a log was created with.

Nothing is taken that a reader still needs. A trim is three steps, each of which the next trim
finishes if it was killed: a commit that moves the earliest offsets, the removal of the files, and
a commit that says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from onceflow.commits import Commit, Reference
from onceflow.errors import Fenced, JobError, OutOfRange
from onceflow.ledger import Position
from onceflow.log.commits import Offsets, Segment, covers, segments_of
from onceflow.log.embedded import EmbeddedLog
from onceflow.log.readers import readers
from onceflow.testing.faults import reach


@dataclass(frozen=True)
class Trimmed:
    """What a trim took away."""

    low: Offsets
    rows: int
    files: int
    bytes: int


def trim(log: EmbeddedLog, below: Offsets) -> Trimmed:
    """Take away the rows below these offsets. Refuses if a reader still needs one of them."""
    log.refresh()
    if not covers(log.view.next, below):
        raise OutOfRange(
            f"{log} ends at {_show(log.view.next)}; it cannot be trimmed to {_show(below)}",
            hint="name offsets that are there",
        )
    for reader in readers(log.path):
        if not covers(reader.needs, below):
            raise JobError(
                f"reader {reader.name} (home {reader.home}, lineage {reader.lineage[:8]}) still "
                f"needs {log} from {_show(reader.needs)}; asked was to trim to {_show(below)}",
                hint="let the job go on, or trim less; if the job is gone for good: "
                f"onceflow log trim {log.path} --forget {reader.name}",
            )
    return _trim(log, below)


def retain(log: EmbeddedLog) -> Trimmed | None:
    """What the log was created to keep, and what readers need, stays; older rows go."""
    facts = log.facts
    if facts.retain_ms is None and facts.retain_bytes is None:
        return None
    below = list(log.view.low)
    for reference in _leaves(log, log.view.manifests):
        if not _expired(log, reference):
            break
        below = reference["next"]
    for reader in readers(log.path):
        below = [min(pair) for pair in zip(below, reader.needs, strict=True)]
    below = [max(pair) for pair in zip(below, log.view.low, strict=True)]
    return None if below == log.view.low else _trim(log, below)


def _expired(log: EmbeddedLog, reference: Reference) -> bool:
    facts = log.facts
    old = facts.retain_ms is not None and reference["at"] < (
        time.time_ns() // 1000 - facts.retain_ms * 1000
    )
    kept = log.view.bytes - int(reference["bytes"])  # what would be left without it
    return old or (facts.retain_bytes is not None and kept >= facts.retain_bytes)


def _leaves(log: EmbeddedLog, references: list[Reference]) -> Iterator[Reference]:
    """The manifests that list files, oldest first."""
    for reference in references:
        if reference["level"] == 0:
            yield reference
        else:
            yield from _leaves(log, log.commits.read_manifest(reference["name"])["manifests"])


def _trim(log: EmbeddedLog, below: Offsets) -> Trimmed:
    before = log.view.low
    below = [max(pair) for pair in zip(below, before, strict=True)]
    touched = list(log.segments(log.view.cleaned, below))
    facts = {"log": log.facts.id, "below": below}
    last = max((segment.at for segment in touched), default=0)
    log.commits.append(lambda: {"type": "trim", "last": last, **facts})
    reach("trim.committed")
    gone = [segment for segment in touched if segment.end <= below[segment.partition]]
    for segment in gone:
        (log.path / segment.path).unlink(missing_ok=True)
        reach("trim.removed-one")
    log.commits.append(lambda: {"type": "clean", **facts})
    log.refresh()
    log.commits.roll_up(every=1)
    log.commits.sweep()
    log.refresh()
    rows = sum(b - a for a, b in zip(before, below, strict=True))
    return Trimmed(list(log.view.low), rows, len(gone), sum(s.bytes for s in gone))


def take_back(log: EmbeddedLog, output: str, *, cut: Position, to: Position, term: int) -> int:
    """Drop what `output` published after `cut`, and nobody else's rows, in one commit that also
    moves its ledger to `to` (the cut in a new lineage). Returns how many rows went.

    Their offsets are never used again. A reader that has read them is told so.
    """
    gone: list[Segment] = []

    def make() -> Commit | None:
        ledger = log.view.ledger(output)
        if ledger.position == to:
            return None  # done before
        if ledger.term > term:
            raise Fenced(f"{log} has seen term {ledger.term}, this driver has term {term}")
        gone[:] = [
            segment
            for commit in log.commits.published()
            if commit.get("output") == output and commit.get("lineage") == cut.lineage
            and commit["epoch"] > cut.epoch
            for segment in segments_of(commit)
            if not log.view.has_dropped(segment)
        ]  # fmt: skip
        return {
            "type": "drop", "log": log.facts.id, "output": output, "term": term,
            "lineage": to.lineage, "epoch": to.epoch, "decision": ledger.decision,
            "drop": [[s.partition, s.first, s.end] for s in gone],
        }  # fmt: skip

    if log.commits.append(make) is None:
        return 0
    log.refresh()
    for segment in gone:
        (log.path / segment.path).unlink(missing_ok=True)
    return sum(segment.rows for segment in gone)


def _show(offsets: Offsets) -> str:
    return ", ".join(f"{p}:{offset}" for p, offset in enumerate(offsets))
