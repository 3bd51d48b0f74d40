"""The newest rows of a log, and the rows that follow them."""

from __future__ import annotations

from contextlib import suppress

from onceflow.folders.commit_log import Forgotten
from onceflow.log.commits import Offsets, segments_of
from onceflow.log.embedded import EmbeddedLog
from onceflow.log.segments import Slice


def last_slices(log: EmbeddedLog, count: int, partition: int | None = None) -> list[Slice]:
    """The last `count` rows in the order of their commits. Reads only the newest commits.
    With `partition`: only rows of that partition."""
    while True:
        with suppress(Forgotten):  # a trim is running: start over
            return _last_slices(log, count, partition)
        log.refresh()


def _last_slices(log: EmbeddedLog, count: int, partition: int | None) -> list[Slice]:
    view = log.view
    wanted = range(log.facts.partitions) if partition is None else [partition]
    left = min(count, sum(view.rows(p) for p in wanted))
    found: list[Slice] = []
    for commit in log.commit_log.newest():
        for segment in reversed(segments_of(commit)):
            first = max(segment.first, view.low[segment.partition])
            rows = min(left, segment.end - first)
            if rows > 0 and segment.partition in wanted and not view.has_dropped(segment):
                found.append(Slice(segment, segment.rows - rows, rows))
                left -= rows
        if left <= 0:
            break
    return found[::-1]


def slices_from(log: EmbeddedLog, start: Offsets, partition: int | None = None) -> list[Slice]:
    """The rows from `start` on. With `partition`: only rows of that partition."""
    end = list(log.view.next)
    if partition is not None:
        start = [start[p] if p == partition else end[p] for p in range(len(end))]
    return log.slices(start, end)
