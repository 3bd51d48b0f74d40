"""Read the embedded log: its commits, and the segments of a range of offsets."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from onceflow.contract.schema import arrow_schema
from onceflow.errors import Damaged, JobError, OutOfRange
from onceflow.folders.commit_log import Commit, CommitLog
from onceflow.log.commits import Facts, LogState, Offsets, Segment, above, covers, segments_of
from onceflow.log.new_log import KIND, refuse_other_kind
from onceflow.log.segments import OURS, Slice, read_slice

if TYPE_CHECKING:
    import pyarrow as pa


class LogReader:
    """An existing log: its commits, its segments and the rows of a range of offsets."""

    roll_up_every = 16  # commits: opening a log never reads more than these one by one

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.view = LogState(keep=True)
        self.commit_log = CommitLog(self.path, KIND, self.view)
        if (self.path / "_commits").is_dir():
            refuse_other_kind(self.path)
        self.refresh()

    def __str__(self) -> str:
        return f"Log({str(self.path)!r})"

    @property
    def facts(self) -> Facts:
        assert self.view.facts is not None
        return self.view.facts

    @property
    def schema(self) -> pa.Schema:
        return arrow_schema(self.facts.schema)

    def refresh(self) -> Self:
        """Read the commits that are new."""
        if not (self.path / "_commits").is_dir():
            says = "is not a log" if self.path.exists() else "does not exist"
            raise JobError(
                f"{self.path} {says}", hint=f"create it: onceflow log create {self.path}"
            )
        self.commit_log.catch_up()
        if self.view.facts is None:
            raise JobError(
                f"{self.path} has no commits: it is not a log, or its creation was interrupted",
                hint=f"onceflow log create {self.path}",
            )
        return self

    def commit_of(self, written: Iterable[dict[str, Any]]) -> Commit:
        """A commit that adds these files at the head as it stands now."""
        following, files = list(self.view.next), []
        for file in written:
            files.append({**file, "first": following[file["partition"]]})
            following[file["partition"]] += file["rows"]
        return {"at": max(now(), self.view.at), "files": files}

    def roll_up(self, *, slack: int = 0) -> bool:
        return self.commit_log.roll_up(every=self.roll_up_every, slack=slack)

    # -------------------------------------------------------------- reading

    def segments(self, start: Offsets, end: Offsets) -> Iterator[Segment]:
        """The segments that have rows of the range, in the order of their commits."""
        reached = list(start)
        for commit in self.commit_log.published(above(start)):
            if covers(reached, end):
                return
            for segment in segments_of(commit):
                p = segment.partition
                reached[p] = max(reached[p], segment.end)
                inside = segment.end > start[p] and segment.first < end[p]
                if inside and not self.view.has_dropped(segment):
                    yield segment

    def slices(self, start: Offsets, end: Offsets) -> list[Slice]:
        """The slices of a range; `OutOfRange` if some rows are gone or do not exist yet."""
        self.refuse_range(start, end)
        found = []
        try:
            for segment in self.segments(start, end):
                first = max(segment.first, start[segment.partition])
                last = min(segment.end, end[segment.partition])
                if last > first:
                    found.append(Slice(segment, first - segment.first, last - first))
        except Damaged:  # a trim may have removed a manifest meanwhile
            self.refresh().refuse_range(start, end)
            raise
        return found

    def refuse_range(self, start: Offsets, end: Offsets) -> None:
        for p, (first, last, low, head) in enumerate(
            zip(start, end, self.view.low, self.view.next, strict=True)
        ):
            if first < low and first < last:
                raise OutOfRange(
                    f"{self}: offset {first} of partition {p} is gone, the earliest is {low}: "
                    "the log was trimmed",
                    hint="start a new job at start='earliest', or bring the log back from a backup",
                )
            if last > head:
                raise OutOfRange(
                    f"{self}: offset {last} of partition {p} is not there, the log ends at {head}: "
                    "it was set back or replaced",
                    hint="bring back the log as it was (its newest copy)",
                )

    def read(self, start: Offsets | None = None, end: Offsets | None = None,
             columns: Iterable[str] | None = None) -> Iterator[pa.RecordBatch]:  # fmt: skip
        """The committed rows as Arrow batches, in the order of their commits."""
        names = self.columns(columns)
        begin, stop = start or list(self.view.low), end or list(self.view.next)
        return self.read_slices(self.slices(begin, stop), names)

    def read_slices(self, slices: Iterable[Slice], columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows; `OutOfRange` if they are trimmed during the read."""
        for part in slices:
            try:
                yield from read_slice(self.path, part, self.schema, columns)
            except Damaged:
                self.refuse_gone(part)
                raise

    def refuse_gone(self, part: Slice) -> None:
        """`OutOfRange` if rows were trimmed or taken back since the reader planned to read them."""
        segment, first = part.segment, part.segment.first + part.skip
        self.refresh()
        if first < self.view.low[segment.partition] or self.view.has_dropped(segment):
            raise OutOfRange(
                f"{self}: rows that are being read (partition {segment.partition}, offset {first}) "
                "were trimmed or taken back in the meantime",
                hint="start again at an offset that the log has now",
            )

    def columns(self, wanted: Iterable[str] | None = None) -> list[str]:
        have = [*self.schema.names, *OURS]
        names = have if wanted is None else list(wanted)
        wrong = [name for name in names if name not in have]
        if wrong or not names:
            raise JobError(
                f"{self} has no column {', '.join(wrong) or '(none was named)'}",
                hint=f"its columns are {', '.join(have)}",
            )
        return names

    def has_appended_at(self, time_us: int) -> bool:
        """Did a commit add rows at exactly that time? True even if they were trimmed since."""
        if time_us <= max(self.view.trimmed_at, self.view.created_at):
            return True
        newer = self.commit_log.remembered(lambda reference: reference["at"] >= time_us)
        return any(commit["at"] == time_us for commit in newer)

    def offsets_at(self, time_us: int) -> Offsets:
        """The offsets of the first rows that were appended at or after a time."""
        if time_us > max(now(), self.view.at):
            raise OutOfRange(f"{self}: {_when(time_us)} is in the future", hint="name a past time")
        self._refuse_trimmed(time_us)
        try:
            found = self._first_since(time_us)
        except Damaged:  # a trim may have removed a manifest meanwhile
            self.refresh()._refuse_trimmed(time_us)
            raise
        # Rows that were taken back may be trimmed as well: below `low` nothing is missed.
        return [
            max(low, following if at is None else at)
            for at, low, following in zip(found, self.view.low, self.view.next, strict=True)
        ]

    def _first_since(self, time_us: int) -> list[int | None]:
        found: list[int | None] = [None] * self.facts.partitions
        for commit in self.commit_log.published(lambda reference: reference["at"] >= time_us):
            if commit["at"] < time_us:
                continue
            for segment in segments_of(commit):
                p = segment.partition
                found[p] = segment.first if found[p] is None else found[p]
            if None not in found:
                break
        return found

    def _refuse_trimmed(self, time_us: int) -> None:
        if self.view.trimmed_at and time_us <= self.view.trimmed_at:
            raise OutOfRange(
                f"{self}: rows since {_when(time_us)} were trimmed",
                hint="use start='earliest' for what is left",
            )


def first_offsets(log: LogReader, start: Any) -> list[int]:
    """The offsets of a start position in the log as it is now."""
    if isinstance(start, list):
        return start  # of an earlier start: the read reports rows that are gone
    if start == "earliest":
        return list(log.view.low)
    if start == "latest":
        return list(log.view.next)
    if "at" in start:
        return log.offsets_at(start["at"])
    asked, partitions = dict(start["offsets"]), range(log.facts.partitions)
    strange = [p for p in asked if p not in partitions]
    if strange:
        raise JobError(
            f"{log} has no partition {', '.join(map(str, strange))}",
            hint=f"it has 0 to {log.facts.partitions - 1}",
        )
    offsets = [asked.get(p, log.view.low[p]) for p in partitions]
    log.refuse_range(offsets, [max(o, n) for o, n in zip(offsets, log.view.next, strict=True)])
    return offsets


def now() -> int:
    return time.time_ns() // 1000


def _when(time_us: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat().replace("+00:00", "Z")
