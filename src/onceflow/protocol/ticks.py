"""A stream without rows whose offset moves when a timer is due, so that Spark runs an epoch even if
no rows come.

Spark runs an epoch when a source has a new offset. The driver writes the time of the next timer to
a file (`set_wake`, after each epoch and before Spark starts). From that time on this source reports
a new offset, until the driver writes another time with the next epoch.

This module imports PySpark, so other modules import it only when they build a stream.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)

NAME = "onceflow_ticks"


def with_ticks(df: Any, path: Path) -> Any:
    """Add the ticks to a stream: the same rows, and an epoch at the time in the file `path`."""
    from onceflow.spark.running_query import register_data_source

    spark = df.sparkSession
    register_data_source(spark, TickSource)
    reader = spark.readStream.name(NAME).format(NAME).option("path", str(path)).schema(df.schema)
    return df.union(reader.load())


def set_wake(path: Path, at: int | None) -> None:
    """Write the time of the next timer in microseconds; None if none is due until rows come."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"at": at}))
    os.replace(part, path)


class TickSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def streamReader(self, schema: Any) -> TickReader:
        return TickReader(Path(self.options["path"]))


class TickReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, path: Path) -> None:
        self._path = path

    def initialOffset(self) -> dict[str, int]:
        return {"tick": 0}

    def prepareForTriggerAvailableNow(self) -> None:
        """Nothing to prepare: a timer that is due after all rows are read still gets its epoch."""

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        try:
            at = json.loads(self._path.read_text())["at"]
        except FileNotFoundError:
            at = None
        due = at is not None and time.time() * 1e6 >= at
        return {"tick": start["tick"] + 1} if due else start

    def reportLatestOffset(self) -> dict[str, int] | None:
        return None

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return iter(())

    def commit(self, end: dict[str, int]) -> None:
        pass
