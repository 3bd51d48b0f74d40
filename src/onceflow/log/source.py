"""The embedded log as a source."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from onceflow.contract.source import Keep, Source, start_position
from onceflow.errors import JobError
from onceflow.log.embedded import EmbeddedLog
from onceflow.log.log_reader import first_offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Log(Source):
    """Every committed row of the log is read exactly once, with its offset.

    There is no order between partitions. Rows of one commit come in one epoch, unless the commit
    has more than `max_rows_per_epoch`.

    `start`: "earliest", "latest", {partition: offset} or a time (a datetime, or text such as
    "2026-11-15T10:00:00Z": rows that were appended at or after it). It applies to the first start
    only; later the job continues where it stopped. In addition to the columns of the log there are
    `_partition`, `_offset` and `_appended_at`; `columns` limits which columns are read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        start: str | datetime | dict[int, int] = "earliest",
        columns: Iterable[str] | None = None,
        max_rows_per_epoch: int | None = None,
    ) -> None:
        self.path = os.path.abspath(path)
        self._start = start_position(start)
        self.columns = None if columns is None else list(columns)
        self.max_rows_per_epoch = max_rows_per_epoch
        if isinstance(columns, str):
            raise JobError(f"columns={columns!r} must be a list", hint=f"columns=[{columns!r}]")
        if max_rows_per_epoch is not None and max_rows_per_epoch < 1:
            raise JobError(f"max_rows_per_epoch={max_rows_per_epoch} must be at least 1")

    def __str__(self) -> str:
        return f"Log({self.path!r})"

    def stream(self, spark: SparkSession, name: str) -> DataFrame:
        """The rows as a stream. Without a job, `start` applies to a query that has no checkpoint
        yet; a job keeps the offsets of its first start."""
        options = self._options(spark, self._start)
        return spark.readStream.name(name).format("onceflow_log").options(**options).load()

    def read(self, spark: SparkSession) -> DataFrame:
        """The committed rows, as they are at this moment."""
        start = first_offsets(EmbeddedLog(self.path), self._start)
        return spark.read.format("onceflow_log").options(**self._options(spark, start)).load()

    def pin(self) -> dict[str, Any] | None:
        """The offsets at which a first start begins; None if they would be the same later."""
        if self._start == "earliest":
            return None
        log = EmbeddedLog(self.path)
        return {"log": log.facts.id, "next": first_offsets(log, self._start)}

    def pinned(self, pin: dict[str, Any], keep: Keep) -> Log:
        """This source, beginning at the offsets of `pin`."""
        log = EmbeddedLog(self.path)
        if pin["log"] != log.facts.id:
            raise JobError(
                f"{self} is not the log with which this job was first started",
                hint="bring the old log back, or start the job under a new home",
            )
        source = Log(self.path, columns=self.columns, max_rows_per_epoch=self.max_rows_per_epoch)
        source._start = pin["next"]
        return source

    def _options(self, spark: SparkSession, start: Any) -> dict[str, str]:
        from onceflow.log.data_source import LogDataSource
        from onceflow.spark.running_query import register_data_source

        log = EmbeddedLog(self.path)
        register_data_source(spark, LogDataSource)
        options = {
            "path": self.path,
            "columns": json.dumps(log.columns(self.columns)),
            "start": json.dumps(start),
            "tasks": str(spark.sparkContext.defaultParallelism),
        }
        if self.max_rows_per_epoch:
            options["max_rows_per_epoch"] = str(self.max_rows_per_epoch)
        return options
