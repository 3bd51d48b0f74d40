"""Remove old rows: on command (`trim`) or by the age and size in the settings of a log.

Rows that a reader still needs are kept. A trim has three steps; if it is killed, the next trim
finishes them: a commit that moves the earliest offsets, the removal of the files, and a commit that
records the removal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from onceflow.errors import JobError, OutOfRange
from onceflow.faults.points import reach
from onceflow.folders.commit_log import Commit, Forgotten, Reference
from onceflow.log.commits import Offsets, Segment, covers, later, segments_of
from onceflow.log.log_reader import LogReader
from onceflow.log.reader_positions import Reader, readers
from onceflow.log.take_back import remove_dropped


@dataclass(frozen=True)
class Trimmed:
    """The rows and files that a trim removed, or would remove."""

    low: Offsets
    rows: int
    files: int
    bytes: int


def trim(log: LogReader, below: Offsets, *, dry_run: bool = False) -> Trimmed:
    """Remove the rows below these offsets. Refuses if a reader still needs one of them."""
    while True:
        with suppress(Forgotten):  # another trim was faster: start over
            return _refuse_or_trim(log.refresh(), below, dry_run)


def _refuse_or_trim(log: LogReader, below: Offsets, dry_run: bool) -> Trimmed:
    count = log.facts.partitions
    if len(below) != count:
        raise JobError(
            f"{log} has {count} partition{'s' * (count > 1)}, not {len(below)}",
            hint="name an offset for each",
        )
    if not covers(log.view.next, below):
        raise OutOfRange(
            f"{log} ends at {_show(log.view.next)}; it cannot be trimmed to {_show(below)}",
            hint="name offsets that the log has",
        )
    below = later(below, log.view.low)
    for reader in _readers(log):
        if not covers(later(reader.needs, log.view.low), below):
            raise JobError(
                f"reader {reader.name} (home {reader.home}, lineage {reader.lineage[:8]}) still "
                f"needs {log} from {_show(reader.needs)}; it cannot be trimmed to "
                f"{_show(below)}",
                hint="let the job continue, or trim less; if you will never run the job again: "
                f"onceflow log trim {log.path} --forget {reader.name}",
            )
    return _plan(log, below)[0] if dry_run else _trim(log, below)


def retain(log: LogReader) -> Trimmed | None:
    """Remove rows that the settings of the log no longer keep and no reader needs."""
    facts = log.facts
    if facts.retain_ms is None and facts.retain_bytes is None:
        return None
    before = None if facts.retain_ms is None else time.time_ns() // 1000 - facts.retain_ms * 1000
    with suppress(Forgotten):  # another trim is running
        below = expired(log, before=before, keep_bytes=facts.retain_bytes)
        for reader in _readers(log):
            below = [min(pair) for pair in zip(below, reader.needs, strict=True)]
        below = later(below, log.view.low)
        return None if below == log.view.low else _trim(log, below)
    return None


def _readers(log: LogReader) -> list[Reader]:
    found = readers(log.path)
    for reader in found:
        if len(reader.needs) != log.facts.partitions:
            raise JobError(
                f"reader {reader.name} (home {reader.home}) has read an older log in this place, "
                f"with {len(reader.needs)} partitions",
                hint=f"onceflow log trim {log.path} --forget {reader.name}",
            )
    return found


def expired(log: LogReader, *, before: int | None = None, keep_bytes: int | None = None) -> Offsets:
    """The offsets below which rows were appended before a time (microseconds since 1970), or are
    not among the newest `keep_bytes`. Counts whole commits; at least `keep_bytes` stay."""
    while True:
        with suppress(Forgotten):  # a trim is running: start over
            return _expired(log, before, keep_bytes)
        log.refresh()


def _expired(log: LogReader, before: int | None, keep_bytes: int | None) -> Offsets:
    view = log.view

    def old(at: int, bytes_up_to: int) -> bool:
        return (before is not None and at < before) or (
            keep_bytes is not None and view.bytes - bytes_up_to >= keep_bytes
        )

    below, commits, up_to = list(view.low), view.recent, view.bytes
    for reference in _leaves(log, view.manifests):
        if not old(reference["at"], reference["bytes"]):
            commits = log.commit_log.read_manifest(reference["name"])["commits"]
            up_to = reference["bytes"]
            break
        below = later(reference["next"], view.low)
    up_to -= sum(segment.bytes for commit in commits for segment in segments_of(commit))
    for commit in commits:
        segments = segments_of(commit)
        up_to += sum(segment.bytes for segment in segments)
        if not old(commit["at"], up_to):
            break
        for segment in segments:
            below[segment.partition] = max(below[segment.partition], segment.end)
    return below


def _leaves(log: LogReader, references: list[Reference]) -> Iterator[Reference]:
    """The manifests that list files, oldest first."""
    for reference in references:
        if reference["level"] == 0:
            yield reference
        else:
            yield from _leaves(log, log.commit_log.read_manifest(reference["name"])["manifests"])


def _plan(log: LogReader, below: Offsets) -> tuple[Trimmed, list[Segment]]:
    """The result of a trim, and the segments that it affects."""
    low = log.view.low
    touched = list(log.segments(log.view.cleaned, below))
    rows = sum(max(0, min(s.end, below[s.partition]) - max(s.first, low[s.partition]))
               for s in touched)  # fmt: skip
    gone = _whole(touched, below)
    return Trimmed(below, rows, len(gone), sum(s.bytes for s in gone)), touched


def _whole(segments: list[Segment], below: Offsets) -> list[Segment]:
    return [segment for segment in segments if segment.end <= below[segment.partition]]


def _trim(log: LogReader, below: Offsets) -> Trimmed:
    planned, touched = _plan(log, below)
    if below == log.view.low == log.view.cleaned:
        return planned
    last = max((segment.at for segment in touched), default=0)
    log.commit_log.append(lambda: {"type": "trim", "last": last, "below": below})
    reach("trim.committed")
    gone = _whole(touched, below)
    for segment in gone:
        (log.path / segment.path).unlink(missing_ok=True)
        reach("trim.removed-one")
    remove_dropped(log)  # while their names are known

    def clean() -> Commit:  # without files that another trim has counted meanwhile
        left = [s for s in gone if s.end > log.view.cleaned[s.partition]]
        return {"type": "clean", "removed": sum(s.bytes for s in left), "below": below}

    log.commit_log.append(clean)
    log.refresh().roll_up()
    log.commit_log.sweep()
    log.refresh()
    return planned


def _show(offsets: Offsets) -> str:
    return ", ".join(f"{p}:{offset}" for p, offset in enumerate(offsets))
