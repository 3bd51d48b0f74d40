"""The embedded log as a Python data source of Spark, batch and stream.

An offset is {"log": id, "path": …, "commit": n, "at": time, "next": [offset of each partition]}:
the range up to `next`, planned when commit n was the newest and the last rows had been added at
`at`, which no other commit has. The driver notes in the folder `path` which rows it still needs.
`commit` separates rows that were taken back before the plan (they are skipped) from rows that were
taken back later (an error: they may have been read). `at` shows if a log was set back and has grown
again.

This module imports PySpark; `log.source` imports it when a stream is created.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from onceflow.contract.schema import arrow_schema
from onceflow.errors import Damaged, OutOfRange
from onceflow.log.commits import Dropped, Offsets, above, covers, later, segments_of
from onceflow.log.embedded import EmbeddedLog
from onceflow.log.log_reader import first_offsets
from onceflow.log.segments import OURS, Slice, read_slice

_LEAST_ROWS = 50_000  # in a task: for fewer a task costs more than it saves


class LogDataSource(DataSource):
    """`spark.readStream.format("onceflow_log")`; `onceflow.sources.Log` fills in the options."""

    @classmethod
    def name(cls) -> str:
        return "onceflow_log"

    def schema(self) -> StructType:
        log = EmbeddedLog(self.options["path"])
        own = {f["name"]: f for f in json.loads(log.facts.schema)["fields"]}
        ours = {
            n: {"name": n, "type": t, "nullable": False, "metadata": {}} for n, t in OURS.items()
        }
        names = json.loads(self.options["columns"])
        fields = [{**{**own, **ours}[name], "nullable": name not in OURS} for name in names]
        return StructType.fromJson({"type": "struct", "fields": fields})

    def reader(self, schema: StructType) -> LogReader:
        return LogReader(dict(self.options))

    def streamReader(self, schema: StructType) -> LogStreamReader:
        return LogStreamReader(dict(self.options))


class Task(InputPartition):
    """The slices that one task reads."""

    def __init__(self, path: str, schema: str, columns: list[str], slices: list[Slice]) -> None:
        self.path = path
        self.schema = schema
        self.columns = columns
        self.slices = slices


def read_task(task: Task) -> Iterator[Any]:
    schema = arrow_schema(task.schema)
    for part in task.slices:
        try:
            yield from read_slice(task.path, part, schema, task.columns)
        except Damaged:  # perhaps it was trimmed a moment ago
            EmbeddedLog(task.path).refuse_gone(part)
            raise


def tasks(log: EmbeddedLog, slices: list[Slice], options: dict[str, str]) -> list[Task]:
    """Consecutive slices in tasks of about the same number of rows."""
    total = sum(part.take for part in slices)
    wanted = max(1, min(int(options.get("tasks", "1")), total // _LEAST_ROWS))
    groups: list[list[Slice]] = [[]]
    share, filled = -(-total // wanted), 0
    for part in slices:
        left = part
        while left.take:
            if filled >= share:
                groups.append([])
                filled = 0
            take = min(left.take, share - filled)
            groups[-1].append(Slice(left.segment, left.skip, take))
            filled += take
            left = Slice(left.segment, left.skip + take, left.take - take)
    names = json.loads(options["columns"])
    found = [Task(str(log.path), log.facts.schema, names, group) for group in groups if group]
    return found or [Task(str(log.path), log.facts.schema, names, [])]


class LogReader(DataSourceReader):
    """The log as it is now."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options

    def partitions(self) -> list[Task]:
        log = EmbeddedLog(self.options["path"])
        start = first_offsets(log, json.loads(self.options["start"]))
        return tasks(log, log.slices(start, list(log.view.next)), self.options)

    def read(self, partition: Task) -> Iterator[Any]:  # type: ignore[override]
        return read_task(partition)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The log as it grows."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self._log: EmbeddedLog | None = None
        self._target: Offsets | None = None
        self._known = 0  # the newest `at` of an offset that was found in the log

    @property
    def log(self) -> EmbeddedLog:
        if self._log is None:
            self._log = EmbeddedLog(self.options["path"])
        return self._log

    def initialOffset(self) -> dict[str, Any]:
        return self._offset(first_offsets(self.log, json.loads(self.options["start"])))

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = list(self.log.refresh().view.next)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self.options.get("max_rows_per_epoch")
        return ReadMaxRows(int(limit)) if limit else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self.log.refresh()
        self._refuse(start)
        end = self._target or list(self.log.view.next)
        end = later(end, start["next"])
        if isinstance(limit, ReadMaxRows):
            end = admit(self.log, start["next"], end, limit.max_rows)
        return start if end == start["next"] else self._offset(end)

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._offset(list(self.log.view.next))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Task]:
        self.log.refresh()
        self._refuse(start)
        self._refuse_taken_back(end)
        slices = self.log.slices(start["next"], end["next"])
        return tasks(self.log, slices, self.options)

    def read(self, partition: Task) -> Iterator[Any]:  # type: ignore[override]
        return read_task(partition)

    def commit(self, end: dict[str, Any]) -> None:
        pass

    def _offset(self, following: Offsets) -> dict[str, Any]:
        log = self.log
        return {"log": log.facts.id, "path": str(log.path), "commit": log.view.position,
                "at": log.view.appended_at, "next": following}  # fmt: skip

    def _refuse(self, start: dict[str, Any]) -> None:
        """Raise an error if this is another log, or if rows that we read are no longer in it."""
        log = self.log
        if start["log"] != log.facts.id:
            raise OutOfRange(
                f"{log} is not the log that the job has read so far",
                hint="bring the old log back, or start the job under a new home",
            )
        log.refuse_range(start["next"], start["next"])
        if start["at"] != self._known and not log.has_appended_at(start["at"]):
            raise OutOfRange(
                f"{log} was set back, and other rows were appended since: offsets that the job has "
                "read have other rows now",
                hint="bring back the log as it was (its newest copy)",
            )
        self._known = start["at"]
        drop = self._taken_back(start)
        if drop is not None:
            raise OutOfRange(
                f"{log}: rows that were read (partition {drop.partition}, offsets {drop.first} "
                f"to {drop.end - 1}) were taken back by the job that had written them",
                hint="restore this job too, to an epoch before it read them",
            )

    def _refuse_taken_back(self, end: dict[str, Any]) -> None:
        drop = self._taken_back(end)
        if drop is not None:
            raise OutOfRange(
                f"{self.log}: rows that this epoch would read (partition {drop.partition}, "
                f"offset {drop.first}) were taken back since it was planned",
                hint="start the job again; Spark then plans the epoch again",
            )

    def _taken_back(self, offset: dict[str, Any]) -> Dropped | None:
        """Rows below the offset that were taken back after it was planned."""
        for drop in self.log.view.dropped:
            if offset["commit"] < drop.commit and drop.first < offset["next"][drop.partition]:
                return drop
        return None


def admit(log: EmbeddedLog, start: Offsets, end: Offsets, most: int) -> Offsets:
    """The end of a range of at most so many rows, in the order of commits. It divides a commit
    only if the commit alone has more."""
    reached, left = list(start), most
    for commit in log.commit_log.published(above(start)):
        if covers(reached, end):
            break
        after = list(reached)
        rows = 0
        for segment in segments_of(commit):
            p = segment.partition
            last = min(segment.end, end[p])
            gone = log.view.has_dropped(segment)
            if last > after[p]:
                rows += 0 if gone else last - after[p]
                after[p] = last
        if rows <= left:
            reached, left = after, left - rows
            continue
        if left == most:  # one commit alone is too large
            reached = _part(reached, after, left)
        break
    return reached


def _part(start: Offsets, end: Offsets, rows: int) -> Offsets:
    reached = list(start)
    for p, last in enumerate(end):
        take = min(rows, last - reached[p])
        reached[p] += take
        rows -= take
    return reached
