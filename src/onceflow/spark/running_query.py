"""The running query, as Spark's JVM knows it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from onceflow.errors import BadInput, JobError, PlanChanged
from onceflow.spark import parquet_writer as writing
from onceflow.spark.file_source_log import SourceEntries, is_file_offset

_REPORTED_BY_US = (
    "sql.execution.streaming",
    "scheduler.TaskSetManager",
    "executor",
    "util.Utils",
    "sql.execution.datasources",
    "api.python",
)
# Parts of the names of logical operators.
_STATEFUL = (
    "Aggregate", "Deduplicate", "Distinct", "Limit", "GroupsWithState", "InPandasWithState",
    "TransformWithState",
)  # fmt: skip
_STATE_WRITER = "org.apache.spark.sql.execution.streaming.operators.stateful.StateStoreWriter"


@dataclass(frozen=True)
class Load:
    """The work of an epoch: the size of its input (`Plan.input`), and the rows of state with which
    it begins."""

    input: int
    state_rows: int


@dataclass(frozen=True)
class Plan:
    """The range of the epoch that Spark is about to run, from Spark's memory."""

    epoch: int
    start: dict[str, Any]
    end: dict[str, Any]
    files: dict[str, list[str]]  # file source -> the files of this epoch

    def input(self) -> int:
        """The approximate size of the input: bytes of files, else the distance of the offsets
        (rows, for logs and Kafka). Compare it only with other epochs of the same query."""
        total = 0
        for name, end in self.end.items():
            if name in self.files:
                paths = (unquote(urlparse(path).path) for path in self.files[name])
                total += sum(os.path.getsize(path) for path in paths if os.path.exists(path))
            else:
                total += _numbers(end) - _numbers(self.start.get(name, 0))
        return total

    def compare_files(self, entries: SourceEntries) -> str:
        """Compare the files in Spark's plan with those in the source's log. Return the difference;
        "" if there is none."""
        for name, numbers in entries.items():
            logged = sorted(
                json.loads(line)["path"] for lines in numbers.values() for line in lines
            )
            planned = sorted(self.files.get(name, []))
            if len(planned) > len(logged) and set(planned) == set(logged):
                raise _read_twice(name, logged)
            if logged != planned:
                odd = sorted(set(logged) ^ set(planned))[:3]
                return (
                    f"source {name}: its log names {len(logged)} files, the plan has "
                    f"{len(planned)} ({', '.join(odd)})"
                )
        return ""


def _read_twice(source: str, logged: list[str]) -> BadInput:
    """Spark treats some names as patterns and reads other files of the epoch once more."""
    names = [unquote(urlparse(path).path) for path in logged]
    odd = [name for name in names if set("[]{}*?\\") & set(name)] or names
    return BadInput(
        f"source {source}: Spark would read files twice because of the name {', '.join(odd[:3])}",
        hint="rename it without *, ?, [, ], {, } and \\, or read the folder by sources.Files",
    )


class RunningQuery:
    """Spark's own object behind an active streaming query."""

    def __init__(self, spark: Any, query_id: str) -> None:
        self._jvm = spark._jvm
        query = spark._jsparkSession.streams().get(query_id)
        if query is None:
            raise PlanChanged(f"Spark has no active query {query_id}", hint="start the job again")
        self._query = query.streamingQuery() if hasattr(query, "streamingQuery") else query
        self._sources = {
            pair._2(): pair._1() for pair in _iterate(self._query.sourceToIdMap().iterator())
        }
        self._state_writer = self._jvm.java.lang.Class.forName(
            _STATE_WRITER, True, self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        )
        self._stateful: bool | None = None

    def plan(self) -> Plan:
        context = self._query.getLatestExecutionContext()
        start: dict[str, Any] = {}
        end: dict[str, Any] = {}
        files: dict[str, list[str]] = {}
        started, ended, data = context.startOffsets(), context.endOffsets(), context.newData()
        for name, source in self._sources.items():
            for offsets, into in ((started, start), (ended, end)):
                found = offsets.get(source)
                if found.isDefined():
                    into[name] = json.loads(found.get().json())
            if is_file_offset(end.get(name)):
                new = data.get(source)
                files[name] = self._input_files(new.get()) if new.isDefined() else []
        return Plan(context.batchId(), start, end, files)

    def _input_files(self, plan: Any) -> list[str]:
        join = self._jvm.org.apache.hadoop.util.StringUtils.join
        found: list[str] = []
        for leaf in _iterate(plan.collectLeaves().iterator()):
            if leaf.getClass().getSimpleName() == "LogicalRelation":
                text = join("\n", leaf.relation().location().inputFiles())
                found += text.split("\n") if text else []
        return found

    def refuse_shuffle_behind_state(self) -> None:
        """Refuse a shuffle behind state: a task that is repeated behind it could mix the rows of
        two attempts."""

        def walk(node: Any, exchange: bool) -> None:
            if self._state_writer.isInstance(node):
                if exchange:
                    raise JobError(
                        "the query shuffles rows behind its last stateful operator (an orderBy, "
                        "a repartition, or a batch join), so state and rows could come from "
                        "different attempts",
                        hint="write the rows unsorted and sort when reading; repartition before "
                        "the aggregation",
                    )
                return
            exchange = exchange or "Exchange" in node.getClass().getSimpleName()
            for child in _iterate(node.children().iterator()):
                walk(child, exchange)

        walk(self._query.lastExecution().executedPlan(), False)

    def state_written(self) -> dict[str, list[list[str]]]:
        """The state ids that the action of this epoch wrote: operator -> partition -> ids."""
        if self._stateful is False:
            return {}
        ids: dict[str, list[list[str]]] = {}

        def walk(node: Any) -> None:
            if self._state_writer.isInstance(node):
                operator = str(node.getStateInfo().operatorId())
                ids[operator] = [
                    list(info.stateStoreCkptId().get())
                    for info in node.getStateStoreCheckpointInfo()
                ]
            for child in _iterate(node.children().iterator()):
                walk(child)

        walk(self._query.lastExecution().executedPlan())
        self._stateful = bool(ids)
        return ids

    def load(self, plan: Plan) -> Load:
        """The load of the epoch. Call it before the action."""
        report = self._query.lastProgress()
        operators = [] if report is None else report.stateOperators()
        return Load(plan.input(), sum(int(operator.numRowsTotal()) for operator in operators))

    def report(self, epoch: int) -> dict[str, Any] | None:
        """Spark's report on an epoch, if Spark has finished the epoch and still has the report."""
        reports = self._query.recentProgress()
        for number in range(len(reports) - 1, -1, -1):
            if reports[number].batchId() < epoch:
                break
            if reports[number].batchId() == epoch:
                found: dict[str, Any] = json.loads(reports[number].json())
                if "addBatch" in found["durationMs"]:  # others are of triggers without an epoch
                    return found
        return None

    def write_parquet(self, root: Path, options: Mapping[str, str]) -> None:
        """Run the one action over this epoch: write its rows to files under a new folder `root`."""
        writing.write_parquet(self._jvm, self._query.lastExecution(), str(root), options)

    def observed(self, name: str) -> dict[str, Any] | None:
        """The values that the plan observed under that name, after the action; None if Spark
        observed nothing."""
        found = self._query.lastExecution().observedMetrics().get(name)
        if not found.isDefined():
            return None
        values: dict[str, Any] = json.loads(found.get().json())
        return values

    def next_watermark(self) -> int:
        """The watermark of the next epoch in milliseconds. This updates Spark's tracker; Spark does
        the same after the epoch, and doing it twice changes nothing."""
        tracker = self._query.watermarkTracker()
        tracker.updateWatermark(self._query.lastExecution().executedPlan())
        return int(tracker.currentWatermark())


def stateful_operations(df: Any) -> list[str]:
    """The operations of a streaming DataFrame for which Spark keeps state, by Spark's names."""
    found = []
    left = [df._jdf.queryExecution().analyzed()]
    while left:
        node = left.pop()
        name, children = node.getClass().getSimpleName(), list(_iterate(node.children().iterator()))
        streams = sum(child.isStreaming() for child in children)
        known = any(part in name for part in _STATEFUL)
        if (known and streams) or (name == "Join" and streams == 2):
            found.append(name)
        left += children
    return found


def is_deterministic(df: Any) -> bool:
    """Is the DataFrame deterministic, as far as Spark knows? Spark takes a Python function to be
    deterministic unless it is marked otherwise."""
    left = [df._jdf.queryExecution().analyzed()]
    while left:
        node = left.pop()
        if not node.deterministic():
            return False
        left += _iterate(node.children().iterator())
    return True


def _numbers(offset: Any) -> int:
    """The sum of all numbers in an offset, whatever its shape is."""
    if isinstance(offset, dict) and "next" in offset:
        offset = offset["next"]  # of a log: its other numbers do not count rows
    if isinstance(offset, dict | list):
        parts = offset.values() if isinstance(offset, dict) else offset
        return sum(_numbers(part) for part in parts)
    return offset if isinstance(offset, int) else 0


def _iterate(iterator: Any) -> Iterator[Any]:
    while iterator.hasNext():
        yield iterator.next()


# Spark's source runner puts these keys into a map that the tasks of another query may serialise at
# that moment (java.io.OptionalDataException). If the keys are there already, it only replaces them.
_RUNNER_PUTS = {
    "SPARK_LOCAL_DIRS": "",
    "SPARK_AUTH_SOCKET_TIMEOUT": "15",
    "SPARK_BUFFER_SIZE": "65536",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}


def register_data_source(spark: Any, source: type) -> None:
    for name, value in _RUNNER_PUTS.items():
        spark.sparkContext.environment.setdefault(name, value)
    spark.dataSource.register(source)


def is_classic(spark: Any) -> bool:
    """Can the driver's JVM be reached? With Spark Connect it cannot."""
    return hasattr(spark, "_jsparkSession")


def end_jvm(spark: Any, seconds: float) -> None:
    """Stop the session and wait for its JVM, which ends when its standard input closes."""
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=seconds)


def jvm_process() -> int | None:
    """The process id of the JVM that PySpark started; None if PySpark did not start it."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    return None if process is None else int(process.pid)


@contextlib.contextmanager
def no_state_snapshots(spark: Any) -> Iterator[None]:
    """Keep Spark from writing snapshots of state: it writes them after the epochs, even to a folder
    that was removed in the meantime."""
    name = "spark.sql.streaming.stateStore.minDeltasForSnapshot"
    before = spark.conf.get(name)
    spark.conf.set(name, "1000000")
    try:
        yield
    finally:
        spark.conf.set(name, before)


def keep_no_checksums(spark: Any) -> None:
    """Switch off Hadoop's `.crc` files: they take a tenth of the time of a small epoch. Spark's
    files of state and the files of onceflow have checksums of their own.

    (A RawLocalFileSystem writes none either, but Spark cannot write a snapshot of state through
    it.)
    """
    files = _local_files(spark)
    files.setWriteChecksum(False)
    files.setVerifyChecksum(False)


def has_raw_files(spark: Any) -> bool:
    """Is the local file system a RawLocalFileSystem? Then Spark fails as soon as it writes a
    snapshot of state (a ClassCastException)."""
    return "Raw" in str(_hadoop(spark).get("fs.file.impl", ""))


def _local_files(spark: Any) -> Any:
    return spark._jvm.org.apache.hadoop.fs.FileSystem.getLocal(_hadoop(spark))


def _hadoop(spark: Any) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()


def keep_quiet(spark: Any) -> None:
    """Log errors only. setLogLevel resets every logger, so switch off again those whose errors
    onceflow reports itself."""
    spark.sparkContext.setLogLevel("ERROR")
    log4j = spark._jvm.org.apache.logging.log4j
    for name in _REPORTED_BY_US:
        log4j.core.config.Configurator.setLevel(f"org.apache.spark.{name}", log4j.Level.OFF)
