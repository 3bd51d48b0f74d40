"""The built-in jobs of `onceflow verify`, as a job file.

They read the log `in` of the working directory and write under `out`. `ONCEFLOW_VERIFY_SINKS`
names the sink: files, sqlite, log, kafka, postgres, or all or servers for the job that has several
outputs. `ONCEFLOW_VERIFY_GUARANTEE` is the guarantee of the outputs. `ONCEFLOW_VERIFY_KAFKA` and
`ONCEFLOW_VERIFY_POSTGRES` name the servers, `ONCEFLOW_VERIFY_PLACE` the topic and the schema of the
case.
"""

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from onceflow import Flow, job
from onceflow.contract.sink import Sink
from onceflow.files.sink import Files as FilesSink
from onceflow.harness.builtin_catalog import SEVERAL
from onceflow.harness.server_sinks import Kafka, Postgres
from onceflow.harness.servers import TRANSACTION_TIMEOUT
from onceflow.harness.workload import SCHEMA
from onceflow.kafka.source import Kafka as KafkaSource
from onceflow.log.sink import Log as LogSink
from onceflow.log.source import Log
from onceflow.protocol.keyed_spec import Keyed
from onceflow.spark.arrow_map import map_in_arrow
from onceflow.sqlite.sink import Sqlite
from onceflow.state.process import KeyedProcess
from onceflow.state.ready.running import Deduplicate
from onceflow.state.states import MapState, ReducingState, Timer, ValueState

DELAY, WINDOW = "10 seconds", "10 seconds"
SETTINGS: Any = {"every": "0ms", "keep_epochs": 3}  # old files are removed early and often


class Files(FilesSink):
    """`Files` that rolls up early and often."""

    roll_up_every = 8


def target(rows: DataFrame | Keyed, *, key: str = "", sink: str = "") -> Sink:
    place = os.environ.get("ONCEFLOW_VERIFY_PLACE", "")
    match sink or os.environ.get("ONCEFLOW_VERIFY_SINKS", "files"):
        case "files":
            return Files("out/files")
        case "sqlite":
            return Sqlite("out/out.db", table="result", key=key or ())
        case "kafka":
            return Kafka(
                place, servers=os.environ["ONCEFLOW_VERIFY_KAFKA"], key=key or "key",
                value=rows.columns, slots=2, create={"partitions": 2}, timeout=30.0,
                transaction_timeout=TRANSACTION_TIMEOUT,
            )  # fmt: skip
        case "postgres":
            return Postgres(
                os.environ["ONCEFLOW_VERIFY_POSTGRES"], table="result", schema=place,
                key=key or (), epoch_column=None if key else "_epoch", timeout=30.0,
            )  # fmt: skip
        case _:
            return LogSink("out/log", key=key or "key", partitions=2)


def write(flow: Flow, rows: DataFrame | Keyed, *, key: str = "", **routing: Any) -> None:
    """To the sink of the case, or as `routing` says. With a key in update mode."""
    options = routing or {"to": target(rows, key=key), "mode": "update" if key else "append"}
    guarantee = os.environ.get("ONCEFLOW_VERIFY_GUARANTEE") or "exactly-once"
    flow.write("result", rows, guarantee=guarantee, **options)


def read(flow: Flow, name: str = "rows", *, offsets: bool = False) -> DataFrame:
    rows = flow.read(name, Log("in")).drop("_appended_at")
    return tripped(rows if offsets else rows.drop("_partition", "_offset"))


def tripped(rows: DataFrame) -> DataFrame:
    return map_in_arrow(rows, tripwire(os.path.abspath("tripwires")), rows.schema)


def tripwire(folder: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A task that finds a wire removes it, and fails or stops in the middle of its rows."""

    def rows(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import time

        for batch in batches:
            half = batch.num_rows // 2
            yield batch.slice(0, half)
            for name in os.listdir(folder) if half and os.path.isdir(folder) else ():
                try:
                    os.rename(f"{folder}/{name}", f"{folder}.hit/{name}")
                except FileNotFoundError:
                    continue  # another task was first
                if name.startswith("fail"):
                    raise RuntimeError("this attempt fails half way")
                time.sleep(float(name.partition("-")[2]))
            yield batch.slice(half)

    return rows


@job("echo", **SETTINGS)
def echo(flow: Flow) -> None:
    """Rows as they come."""
    rows = read(flow).select("number", "id", "key", "value")
    write(flow, rows)


@job("sum", **SETTINGS)
def running_sum(flow: Flow) -> None:
    """A running count and sum of each key, in update mode."""
    sums = read(flow).groupBy("key").agg(
        F.count("*").alias("count"), F.sum("value").alias("total")
    )  # fmt: skip
    write(flow, sums, key="key")


@job("windows", **SETTINGS)
def windows(flow: Flow) -> None:
    """Count and sum of each window and key, once the watermark has passed the window."""
    counts = (
        read(flow).withWatermark("at", DELAY)
        .groupBy(F.window("at", WINDOW), "key")
        .agg(F.count("*").alias("count"), F.sum("value").alias("total"))
        .select(F.unix_millis("window.start").alias("begin"), "key", "count", "total")
    )  # fmt: skip
    write(flow, counts)


@job("distinct", **SETTINGS)
def distinct(flow: Flow) -> None:
    """Each id once."""
    first = read(flow).withWatermark("at", DELAY).dropDuplicatesWithinWatermark(["id"])
    rows = first.select("id", "key", "value")
    write(flow, rows)


@job("join", **SETTINGS)
def join(flow: Flow) -> None:
    """Each repetition with the first row of its id."""
    first = read(flow, "first").where("not again").withWatermark("at", DELAY)
    again = read(flow, "again").where("again").withWatermark("at", DELAY)
    left = first.select("id", "key", "at", F.col("number").alias("first"))
    right = again.select(
        F.col("id").alias("id2"), F.col("at").alias("at2"), F.col("number").alias("again")
    )
    near = F.expr("id = id2 and at2 between at - interval 5 seconds and at + interval 5 seconds")
    pairs = left.join(right, near).select("id", "key", "first", "again")
    write(flow, pairs)


@job("several", **SETTINGS)
def several(flow: Flow) -> None:
    """Rows as they come, to three outputs of one query."""
    rows = read(flow).select("number", "id", "key", "value")
    outputs = SEVERAL[os.environ.get("ONCEFLOW_VERIFY_SINKS", "all")]
    routed = rows.withColumn("outcome", F.array(*map(F.lit, outputs))[F.col("number") % 3])
    to = {name: target(routed, sink=name) for name in outputs}
    write(flow, routed, to=to, by="outcome")


@job("dice", **SETTINGS)
def dice(flow: Flow) -> None:
    """Rows by a random face of a die: every evaluation gives other rows."""
    rows = read(flow)
    throw = F.floor(F.rand() * 5000)
    sums = rows.withColumn("face", throw.cast("long")).groupBy("face").agg(
        F.count("*").alias("count"), F.sum("value").alias("total")
    )  # fmt: skip
    write(flow, sums, key="face")


@job("topic", **SETTINGS)
def topic(flow: Flow) -> None:
    """Rows as they come, from a Kafka topic."""
    name = os.environ["ONCEFLOW_VERIFY_PLACE"] + "-in"
    servers = os.environ["ONCEFLOW_VERIFY_KAFKA"]
    rows = tripped(flow.read("rows", KafkaSource(name, servers=servers, value=SCHEMA)))
    rows = rows.select("number", "id", "key", "value")
    write(flow, rows)


# ---------------------------------------------------------------- keyed state


class Numbered(KeyedProcess):
    """Count and sum of each key. Raises if a row is no repetition and has not the next number."""

    latest = ValueState("long")
    seen = ReducingState("long", "count")
    total = ReducingState("long", "sum")
    output = "key string, count long, total long"

    def process_key(self, key: str, rows: list[dict[str, Any]], state: Any) -> dict[str, Any]:
        for row in sorted(rows, key=lambda row: row["number"]):
            follows = 0 if state.latest is None else state.latest + 1
            if row["sequence"] >= follows if row["again"] else row["sequence"] != follows:
                raise ValueError(f"{follows} must follow, and row {row} came")
            state.latest = max(follows - 1, row["sequence"])
            state.fold("seen", 1)
            state.fold("total", row["value"])
        return {"key": key, "count": state.seen, "total": state.total}


@job("keyed", **SETTINGS)
def keyed(flow: Flow) -> None:
    """`sum` as a keyed step, which checks that each row comes once."""
    sums = flow.keyed(read(flow), by="key", process=Numbered())
    write(flow, sums, key="key")


class Windows(KeyedProcess):
    """Count and sum of each window of a key, once the watermark has passed the window."""

    windows = MapState("long", "struct<count: long, total: long>")  # by their begin
    closes = Timer()  # the earliest window
    output = "begin long, key string, count long, total long"

    def process_key(self, key: str, rows: list[dict[str, Any]], state: Any) -> None:
        for row in rows:
            window = state.windows.setdefault(row["begin"], {"count": 0, "total": 0})
            window["count"] += 1
            window["total"] += row["value"]
        state.closes = self.end(state)

    def on_timer_key(self, key: str, state: Any) -> dict[str, Any]:
        begin = min(state.windows)
        window = state.windows.pop(begin)
        state.closes = self.end(state)
        return {"begin": begin, "key": key, **window}

    def end(self, state: Any) -> datetime | None:
        if not state.windows:
            return None
        begin = datetime.fromtimestamp(min(state.windows) // 1000, UTC)
        return begin + timedelta(seconds=10)


@job("timers", **SETTINGS)
def timers(flow: Flow) -> None:
    """`windows` as a keyed step: a timer for each window of a key."""
    begin = F.unix_millis(F.window("at", WINDOW).getField("start"))
    rows = read(flow, offsets=True).withColumn("begin", begin)
    counts = flow.keyed(rows, by="key", process=Windows(), event_time="at", watermark=DELAY)
    write(flow, counts)


class Once(Deduplicate):
    """Each id once. Raises if it is given an id that has expired."""

    def process(self, keys: Any, rows: Any) -> Any:
        oldest = pc.min(pc.struct_field(pc.list_flatten(keys["ids"]), "at")).as_py()
        now = self.time.watermark_at
        if oldest is not None and now is not None and oldest <= now - timedelta(seconds=10):
            raise ValueError(f"an id of {oldest} is still there at {now}")
        return super().process(keys, rows)


@job("expiring", **SETTINGS)
def expiring(flow: Flow) -> None:
    """`distinct` as a keyed step whose state expires."""
    once = Once(id="id", ttl="10 seconds")
    rows = read(flow, offsets=True)
    first = flow.keyed(rows, by="key", process=once, event_time="at", watermark=DELAY)
    first = first.then(lambda df: df.select("id", "key", "value"))
    write(flow, first)


class Thrown(KeyedProcess):
    """The count of a face of the die before this epoch and now, and the sum of its values."""

    thrown = ReducingState("long", "count")
    output = "face long, before long, count long, value long"

    def process(self, keys: Any, rows: Any) -> Any:
        count, before = self.fold("thrown"), pc.fill_null(keys["thrown"], 0)
        value = self.sum(rows["value"])
        out = {"face": keys["face"], "before": before, "count": count, "value": value}
        return out, {"thrown": count}


class Followed(KeyedProcess):
    """Count and sum of each face. Raises if a throw is missing between the steps, or doubled."""

    sides = MapState("long", "long")
    total = ReducingState("long", "sum")
    output = "face long, count long, total long"

    def process_key(self, face: int, rows: list[dict[str, Any]], state: Any) -> dict[str, Any]:
        for row in rows:
            known = sum(state.sides.values())
            if known != row["before"]:
                raise ValueError(f"{known} throws are known here, and {row} says otherwise")
            state.sides[row["side"]] = state.sides.get(row["side"], 0) + row["count"] - known
            state.fold("total", row["value"])
        return {"face": face, "count": sum(state.sides.values()), "total": state.total}


@job("steps", **SETTINGS)
def steps(flow: Flow) -> None:
    """`dice` as two keyed steps with another random column between them."""
    rows = read(flow).withColumn("face", F.floor(F.rand() * 500).cast("long"))
    thrown = flow.keyed(rows, by="face", process=Thrown())
    beside = thrown.then(lambda df: df.withColumn("side", F.floor(F.rand() * 6).cast("long")))
    sums = flow.keyed(beside, by="face", process=Followed())
    write(flow, sums, key="face")
