"""The embedded log: a folder that is a partitioned, append-only, replayable log.

    <log>/partition=<p>/<unique>.parquet   segments; they never change
    <log>/_commits, <log>/_manifests       which segments count, with their offsets
    <log>/_readers                         who reads, and what each still needs
    <log>/_appending                       producers at work; what a dead one left is removed
    <log>/_adding                          the same for outputs that keep no ledger

Readers see whole commits only. Any number of producers may append at once: who loses the put of a
commit reads the winner's and puts its own behind it, with other offsets and the same segments.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.schema import arrow_schema, columns, refuse_difference
from onceflow.errors import Damaged, JobError, OutOfRange
from onceflow.folders.commit_log import Commit, CommitLog
from onceflow.log.appending import sweep
from onceflow.log.commits import Facts, LogCommits, Offsets, Segment, above, covers, segments_of
from onceflow.log.creation import (
    KIND,
    refuse_facts,
    refuse_other_kind,
    refuse_strange_folder,
    spark_json,
)
from onceflow.log.producing import Appended, append
from onceflow.log.segments import OURS, Slice, read_slice

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_SCHEMA = "value string, event_time timestamp"
ROLL_UP_EVERY = 16  # commits: opening a log never reads more than these one by one


class EmbeddedLog:
    """Rows that were appended are there exactly once, at offsets that never change.

    It does not keep an order between partitions, and it is for one machine's disk: for traffic
    of many machines use Kafka.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """An existing log. See `create`."""
        self.path = Path(os.path.abspath(path))
        self.view = LogCommits(keep=True)
        self.commits = CommitLog(self.path, KIND, self.view)
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

    def refresh(self) -> EmbeddedLog:
        """Read what was committed since."""
        if not (self.path / "_commits").is_dir():
            says = "is not a log" if self.path.exists() else "does not exist"
            raise JobError(
                f"{self.path} {says}", hint=f"create it: onceflow log create {self.path}"
            )
        self.commits.catch_up()
        if self.view.facts is None:
            raise JobError(
                f"{self.path} has no commits: it is not a log, or its creation was interrupted",
                hint=f"onceflow log create {self.path}",
            )
        return self

    # -------------------------------------------------------------- creation

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        schema: str | pa.Schema = DEFAULT_SCHEMA,
        *,
        partitions: int = 1,
        key: Iterable[str] = (),
        retain_ms: int | None = None,
        retain_bytes: int | None = None,
        exist_ok: bool = False,
    ) -> EmbeddedLog:
        """A new log. `exist_ok`: one that is there already will do, if its columns are these."""
        root = Path(os.path.abspath(path))
        facts = Facts(
            id=str(uuid.uuid4()),
            schema=spark_json(schema),
            partitions=partitions,
            key=tuple(key),
            retain_ms=retain_ms,
            retain_bytes=retain_bytes,
        )
        refuse_facts(facts)
        refuse_strange_folder(root)
        view = LogCommits()
        log = CommitLog(root, KIND, view)

        def make() -> Commit | None:
            if view.facts is not None:
                return None
            return {"type": "create", "facts": asdict(facts), "at": _now()}

        done = log.append(make)
        if done is None and view.facts is not None and view.facts.id != facts.id:
            if not exist_ok:
                raise JobError(f"{root} is a log already", hint="append to it, or name a new one")
            refuse_difference(f"Log({str(root)!r})", columns(view.facts.schema),
                              columns(facts.schema))  # fmt: skip
        return cls(root)

    # -------------------------------------------------------------- appending

    def append(
        self,
        rows: pa.Table | Iterable[pa.Table],
        *,
        producer: str = "",
        sequence: int | None = None,
        digest: Callable[[], str] | None = None,
    ) -> Appended:
        """Append all rows in one commit, or none of them.

        With `producer` and `sequence` (a number that grows) an append that is tried again is
        done once: the log remembers the last sequence of each producer. That it is the same
        append is told by the rows, or by what `digest` says when all rows were taken.
        """
        return append(self, rows, producer=producer, sequence=sequence, digest=digest)

    def commit_of(self, written: Iterable[dict[str, Any]]) -> Commit:
        """A commit that adds these files at the head as it stands now."""
        following, files = list(self.view.next), []
        for file in written:
            files.append({**file, "first": following[file["partition"]]})
            following[file["partition"]] += file["rows"]
        return {"at": max(_now(), self.view.at), "files": files}

    def keep_house(self, commit: int = 0) -> None:
        """After a commit: roll up and retain now and then, remove what dead producers left."""
        from onceflow.log.retention import retain

        mine = commit % ROLL_UP_EVERY == 0  # else who should have rolled up was killed
        if self.roll_up(slack=0 if mine else 2 * ROLL_UP_EVERY):
            self.refresh()
            retain(self)
        sweep(self.path, self)

    def roll_up(self, *, slack: int = 0) -> bool:
        return self.commits.roll_up(every=ROLL_UP_EVERY, slack=slack)

    # -------------------------------------------------------------- reading

    def segments(self, start: Offsets, end: Offsets) -> Iterator[Segment]:
        """The segments that have rows of the range, in the order of their commits."""
        reached = list(start)
        for commit in self.commits.published(above(start)):
            if covers(reached, end):
                return
            for segment in segments_of(commit):
                p = segment.partition
                reached[p] = max(reached[p], segment.end)
                inside = segment.end > start[p] and segment.first < end[p]
                if inside and not self.view.has_dropped(segment):
                    yield segment

    def slices(self, start: Offsets, end: Offsets) -> list[Slice]:
        """What to read for a range; `OutOfRange` if some of it is gone or not there yet."""
        self.refuse_range(start, end)
        found = []
        try:
            for segment in self.segments(start, end):
                first = max(segment.first, start[segment.partition])
                last = min(segment.end, end[segment.partition])
                if last > first:
                    found.append(Slice(segment, first - segment.first, last - first))
        except Damaged:  # a manifest may have been trimmed away while we looked
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
        """The rows; `OutOfRange` if they are trimmed while they are read."""
        for part in slices:
            try:
                yield from read_slice(self.path, part, self.schema, columns)
            except Damaged:
                self.refuse_gone(part)
                raise

    def refuse_gone(self, part: Slice) -> None:
        """`OutOfRange` if rows that were there when they were asked for are so no more."""
        segment, first = part.segment, part.segment.first + part.skip
        self.refresh()
        if first < self.view.low[segment.partition] or self.view.has_dropped(segment):
            raise OutOfRange(
                f"{self}: rows that are being read (partition {segment.partition}, offset {first}) "
                "were trimmed or taken back in the meantime",
                hint="read again from what the log has now",
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
        """Did a commit add rows at just that time? True also if it was trimmed since."""
        if time_us <= max(self.view.trimmed_at, self.view.created_at):
            return True
        newer = self.commits.remembered(lambda reference: reference["at"] >= time_us)
        return any(commit["at"] == time_us for commit in newer)

    def offsets_at(self, time_us: int) -> Offsets:
        """The offsets of the first rows that were appended at or after a time."""
        if time_us > max(_now(), self.view.at):
            raise OutOfRange(f"{self}: {_when(time_us)} is in the future", hint="name a past time")
        self._refuse_trimmed(time_us)
        try:
            found = self._first_since(time_us)
        except Damaged:  # a manifest may have been trimmed away while we looked
            self.refresh()._refuse_trimmed(time_us)
            raise
        # What was taken back may be trimmed as well: nothing is lost behind `low`.
        return [
            max(low, following if at is None else at)
            for at, low, following in zip(found, self.view.low, self.view.next, strict=True)
        ]

    def _first_since(self, time_us: int) -> list[int | None]:
        found: list[int | None] = [None] * self.facts.partitions
        for commit in self.commits.published(lambda reference: reference["at"] >= time_us):
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


def _now() -> int:
    return time.time_ns() // 1000


def _when(time_us: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat().replace("+00:00", "Z")
