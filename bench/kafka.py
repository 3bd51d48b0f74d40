"""Into Kafka exactly once, against Spark's own Kafka sink, which is at-least-once.

    python bench/kafka.py [--only throughput,latency,windows,memory,guarantees] [--turns 7]
                          [--rows 4000000] [--seconds 20]

- throughput: JSON that waits in a topic, through both into topics of their own, in two epochs;
  each row of ours is counted by a consumer that reads committed
- latency: 10,000 rows/s are appended; time from append until a consumer sees a row: one that reads
  committed for onceflow, uncommitted for Spark
- windows: the same with a count by window and key (update mode), from the last row of a count
- memory: of Python, while an epoch of a million rows is published
- guarantees: the time of a tiny epoch with each
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from guarantees import guarantees
from measure import alternate, peak_memory, progress, ratio, spread

import onceflow
from onceflow import sinks, sources
from onceflow.spark import jars
from onceflow.testing.servers import Kafka

_ALL = "throughput,latency,windows,memory,guarantees"
_ROW = "id long, ad string, user long, price double, at timestamp"
_TIMED = "id long, ad string, at long"  # microseconds
_PARTITIONS = 4
_RATE = 10_000  # rows a second
_WARM = 10.0  # seconds at the beginning of a turn that do not count
_LEAST = 1000  # rows of a turn that must be seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=_ALL)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn of latency")
    parser.add_argument("--serve", metavar="SERVERS", help=argparse.SUPPRESS)
    parser.add_argument("--append", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--watch", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.append:
        return append(*options.append)
    if options.watch:
        return watch(*options.watch)
    os.environ["ONCEFLOW_JARS"] = str(jars.fetch("connector"))
    if options.serve:
        return serve(options.serve)
    folder = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
    try:
        with Kafka(folder / "kafka", java=("-Xmx1g",)) as kafka:
            spark = onceflow.get_session("local[2]")
            bench = Bench(spark, folder, kafka.servers)
            for name in options.only.split(","):
                if name == "throughput":
                    throughput(bench, options.rows, options.turns)
                elif name in ("latency", "windows"):
                    latency(bench, options.turns, options.seconds, windows=name == "windows")
                elif name == "memory":
                    memory(bench)
                elif name == "guarantees":
                    guarantees(spark, folder, options.turns, bench.sink)
                else:
                    parser.error(f"there is no {name}; there are {_ALL}")
            spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


class Bench:
    """A session, a broker, and queries from one topic to another."""

    def __init__(self, spark: Any, folder: Path, servers: str, *, named: bool = True) -> None:
        self.spark, self.folder, self.servers, self._named = spark, folder, servers, named
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def topic(self, name: str) -> str:
        name = f"{name}-{uuid.uuid4().hex[:8]}"
        self._admin.create_topics([NewTopic(name, _PARTITIONS, 1)])[name].result(30)
        return name

    def drop(self, *topics: str) -> None:
        for future in self._admin.delete_topics(list(topics)).values():
            future.result(30)

    def sink(self, topic: str, **options: Any) -> sinks.Kafka:
        given = {"create": {"partitions": _PARTITIONS}, **options}
        return sinks.Kafka(topic, servers=self.servers, **given)

    def read(self, topic: str, schema: str, start: str = "earliest", most: int = 1 << 40) -> Any:
        """The JSON of a topic as columns, by Spark alone."""
        from pyspark.sql import functions as F

        stream = self.spark.readStream.name("rows") if self._named else self.spark.readStream
        stream = stream.format("kafka").option("kafka.bootstrap.servers", self.servers)
        stream = stream.option("subscribe", topic).option("startingOffsets", start)
        stream = stream.option("maxOffsetsPerTrigger", most)
        text = F.col("value").cast("string")
        return stream.load().select(F.from_json(text, schema).alias("row")).select("row.*")

    def spark_writer(self, df: Any, topic: str, key: str, mode: str = "append") -> Any:
        """All columns but the key as JSON, by Spark's own sink."""
        from pyspark.sql import functions as F

        value = F.to_json(F.struct(*(name for name in df.columns if name != key)))
        writer = df.select(F.col(key).alias("key"), value.alias("value")).writeStream
        writer = writer.format("kafka").option("kafka.bootstrap.servers", self.servers)
        writer = writer.option("checkpointLocation", str(self.home())).option("topic", topic)
        return writer.outputMode(mode)

    def home(self) -> Path:
        return self.folder / f"home-{uuid.uuid4().hex[:8]}"

    def count(self, topic: str, isolation: str) -> int:
        """Rows that a consumer sees."""
        consumer, left, rows = consumer_of(self.servers, topic, isolation), _PARTITIONS, 0
        while left:
            for message in consumer.consume(10_000, 0.2):
                error = message.error()
                if error is None:
                    rows += 1
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    left -= 1
        consumer.close()
        return rows


def consumer_of(servers: str, topic: str, isolation: str) -> Consumer:
    consumer = Consumer({
        "bootstrap.servers": servers, "group.id": "bench", "isolation.level": isolation,
        "enable.auto.commit": False, "enable.partition.eof": True,
    })  # fmt: skip
    consumer.assign([TopicPartition(topic, p, 0) for p in range(_PARTITIONS)])
    return consumer


# ---------------------------------------------------------------- throughput


def throughput(bench: Bench, rows: int, turns: int) -> None:
    given = fill(bench, rows)
    most, written = rows // 2 + 1000, []  # partitions are not equally long

    def columns(df: Any) -> Any:
        return df.where("price >= 0").selectExpr("*", "price * 1.19 AS gross")

    def ours(stream: Any) -> None:
        topic = bench.topic("ours")
        written.append((topic, "read_committed"))
        query = onceflow.write(
            columns(stream), "bench", to=bench.sink(topic, key="ad", slots=2),
            home=bench.home(), once=True,
        )  # fmt: skip
        query.awaitTermination()

    def plain() -> None:
        ours(bench.read(given, _ROW, most=most))

    def with_our_source() -> None:
        source = sources.Kafka(given, servers=bench.servers, value=_ROW, max_rows_per_epoch=most)
        stream = source.stream(bench.spark, "rows")
        ours(stream.select("id", "ad", "user", "price", "at"))

    def theirs() -> None:
        topic = bench.topic("theirs")
        written.append((topic, "read_uncommitted"))
        df = columns(bench.read(given, _ROW, most=most))
        query = bench.spark_writer(df, topic, "ad").trigger(availableNow=True).start()
        query.awaitTermination()

    def check() -> None:
        topic, isolation = written.pop()
        found = bench.count(topic, isolation)
        assert found == rows, f"{topic} has {found} rows, not {rows}"
        bench.drop(topic)

    sides = alternate(
        {"spark": theirs, "onceflow": plain, "onceflow, its source too": with_our_source},
        turns,
        check,
    )
    print(f"\nthroughput: {rows:,} rows of JSON, topic to topic, in 2 epochs, 2 slots")
    for side in sides.values():
        speed = [rows / wall / 1000 for wall in side.wall]
        print(f"  {side}, {spread(speed, 'k rows/s')}")
    for name in list(sides)[1:]:
        wall = 1 / ratio(sides[name].wall, sides["spark"].wall)
        cpu = 1 / ratio(sides[name].cpu, sides["spark"].cpu)
        print(f"  {name} / spark: {wall:.2f} by wall time, {cpu:.2f} by cpu, which is that of the "
              "broker too (goal: at least 0.75)")  # fmt: skip
    bench.drop(given)


def fill(bench: Bench, rows: int) -> str:
    """A topic with so many rows of about a hundred bytes."""
    topic = bench.topic("given")
    progress(f"writing {rows:,} rows")
    row = bench.spark.range(0, rows, 1, _PARTITIONS).selectExpr(
        "to_json(struct(id, concat('ad-', id % 1000) AS ad, id * 7919 % 1000000 AS user, "
        "id % 997 / 8 AS price, timestamp_micros(1700000000000000 + id) AS at)) AS value"
    )
    writer = row.write.format("kafka").option("kafka.bootstrap.servers", bench.servers)
    writer.option("topic", topic).save()
    return topic


# ---------------------------------------------------------------- latency


def latency(bench: Bench, turns: int, seconds: float, *, windows: bool) -> None:
    """The spread of each turn's own median and 99th percentile."""
    mode = "update" if windows else "append"

    def ours(given: str, topic: str) -> Running:
        @onceflow.job("bench", every="0 seconds")
        def job(flow: onceflow.Flow) -> None:
            rows = timed_rows(bench, given, mode)
            flow.write("rows", rows, to=bench.sink(topic, key="ad"), mode=mode)

        handle = onceflow.start(job, home=bench.home(), spark=bench.spark)
        return Running(lambda: epoch_times(handle.queries["rows"]), handle.stop)

    def theirs(given: str, topic: str) -> Running:
        rows = timed_rows(bench, given, mode)
        query = bench.spark_writer(rows, topic, "ad", mode).start()
        return Running(lambda: epoch_times(query), query.stop)

    found: dict[str, Seen] = {}
    with other_session(bench.servers) as start_there:
        sides: dict[str, Callable[[str, str], Running]] = {
            "spark": theirs,
            "onceflow": ours,
            "spark as it comes": lambda given, topic: start_there(given, topic, mode),
        }
        for turn in range(turns + 1):
            for name, start in sides.items():
                isolation = "read_committed" if name == "onceflow" else "read_uncommitted"
                given, topic = bench.topic("given"), bench.topic("seen")
                query = start(given, topic)
                times = measured(bench.servers, given, topic, isolation, seconds)
                epochs = query.epochs()
                query.stop()
                bench.drop(given, topic)
                centiles = statistics.quantiles(times, n=100)
                seen = (centiles[49], centiles[98], statistics.median(epochs[len(epochs) // 2 :]))
                progress(f"turn {turn} of {turns}, {name}: {len(times):,} rows, median "
                         f"{seen[0]:.0f} ms, 99 of 100 below {seen[1]:.0f} ms, epoch "
                         f"{seen[2]:.0f} ms")  # fmt: skip
                if turn:
                    found.setdefault(name, Seen()).add(*seen)
    what = "a count by window and key" if windows else "stateless"
    print(f"\nfrom append to visible, {what}: {_RATE:,} rows/s, one slot, {turns} times each")
    for name, side in found.items():
        print(f"  {name}: {side}")
    ours_seen = found["onceflow"]
    for name in ("spark", "spark as it comes"):
        middle = ratio(ours_seen.middle, found[name].middle)
        high = ratio(ours_seen.high, found[name].high)
        goal = "" if windows else " (goal: at most 1.1)"
        print(f"  onceflow / {name}: median {middle:.2f}, 99 of 100 {high:.2f}{goal}; epoch "
              f"{ratio(ours_seen.epoch, found[name].epoch):.2f}")  # fmt: skip


@dataclass
class Seen:
    """Milliseconds, a value for each turn."""

    middle: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    epoch: list[float] = field(default_factory=list)

    def add(self, middle: float, high: float, epoch: float) -> None:
        self.middle.append(middle)
        self.high.append(high)
        self.epoch.append(epoch)

    def __str__(self) -> str:
        return (
            f"median {spread(self.middle, 'ms')}, 99 of 100 below {spread(self.high, 'ms')}, "
            f"an epoch takes {spread(self.epoch, 'ms')}"
        )


def timed_rows(bench: Bench, topic: str, mode: str) -> Any:
    """As they come, or counted by window and key, with the time of the last that was counted."""
    from pyspark.sql import functions as F

    rows = bench.read(topic, _TIMED, "latest")
    if mode == "append":
        return rows
    rows = rows.selectExpr("*", "timestamp_micros(at) AS time").withWatermark("time", "5 seconds")
    counts = rows.groupBy("ad", F.window("time", "1 second"))
    counts = counts.agg(F.count("*").alias("count"), F.max("at").alias("at"))
    return counts.select("ad", F.col("window.start").alias("start"), "count", "at")


def epoch_times(query: Any) -> list[float]:
    return [float(report["durationMs"]["triggerExecution"]) for report in query.recentProgress]


def measured(servers: str, given: str, topic: str, isolation: str, seconds: float) -> list[float]:
    """Milliseconds from append to visible, of each row."""
    appending = subprocess.Popen([sys.executable, __file__, "--append", servers, given])
    try:
        watching = [servers, topic, isolation, str(seconds)]
        done = subprocess.run(
            [sys.executable, __file__, "--watch", *watching], check=True, stdout=subprocess.PIPE
        )
    finally:
        appending.terminate()
        appending.wait()
    found: list[float] = json.loads(done.stdout)
    return found


def append(servers: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 1})
    number, begin = 0, time.time()
    while True:
        now = time.time()
        while number < (now - begin) * _RATE:
            row = {"id": number, "ad": f"ad-{number % 100}", "at": int(now * 1e6)}
            producer.produce(topic, json.dumps(row))
            number += 1
        producer.poll(0.005)


def watch(servers: str, topic: str, isolation: str, seconds: str) -> None:
    consumer, found = consumer_of(servers, topic, isolation), list[float]()
    first = seen = 0.0
    while not first or seen < first + _WARM + float(seconds) or len(found) < _LEAST:
        message = consumer.poll(1.0)
        if message is None or message.error() is not None:
            continue
        batch = [message, *consumer.consume(10_000, 0)]
        seen = time.time()
        first = first or seen
        if seen > first + _WARM:
            rows = [json.loads(m.value() or "") for m in batch if m.error() is None]
            found += [(seen - row["at"] / 1e6) * 1000 for row in rows]
    print(json.dumps(found))


@dataclass
class Running:
    """A query, wherever it runs."""

    epochs: Callable[[], list[float]]  # milliseconds of each of the last
    stop: Callable[[], object]


@contextlib.contextmanager
def other_session(servers: str) -> Iterator[Callable[[str, str, str], Running]]:
    """Spark as it comes needs a JVM of its own; it runs when it is asked to."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", servers],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stdin, stdout = child.stdin, child.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(*words: str) -> Any:
        print(*words, file=stdin, flush=True)
        return json.loads(stdout.readline())

    def start(given: str, topic: str, mode: str) -> Running:
        ask("start", given, topic, mode)
        return Running(lambda: ask("epochs"), lambda: ask("stop"))

    try:
        yield start
    finally:
        stdin.close()
        child.wait(60)


def serve(servers: str) -> None:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    named = ",".join(map(str, Path(os.environ["ONCEFLOW_JARS"]).glob("*.jar")))
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    spark = builder.config("spark.jars", named).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    with tempfile.TemporaryDirectory(prefix="onceflow-bench-") as folder:
        bench = Bench(spark, Path(folder), servers, named=False)
        query: Any = None
        for line in sys.stdin:
            match line.split():
                case ["start", given, topic, mode]:
                    rows = timed_rows(bench, given, mode)
                    query = bench.spark_writer(rows, topic, "ad", mode).start()
                    said: object = "started"
                case ["epochs"]:
                    said = epoch_times(query)
                case _:
                    said = query.stop()
            print(json.dumps(said), flush=True)
        spark.stop()


# ---------------------------------------------------------------- memory


def memory(bench: Bench) -> None:
    """An epoch that is twenty times as large must not take more."""
    print("\nmemory of Python at most, while an epoch is published (100 bytes a row)")
    sizes = {rows: fill(bench, rows) for rows in (50_000, 1_000_000)}
    for slots in (1, 2):
        for rows, given in sizes.items():
            topic = bench.topic("kept")
            with peak_memory() as peak:
                query = onceflow.write(
                    bench.read(given, _ROW), "bench", home=bench.home(), once=True,
                    to=bench.sink(topic, key="ad", slots=slots),
                )  # fmt: skip
                query.awaitTermination()
            found = bench.count(topic, "read_committed")
            assert found == rows, f"{topic} has {found} rows"
            print(f"  slots={slots}, {rows:,} rows: driver {peak['driver']:.0f} MB, largest worker "
                  f"{peak['worker']:.0f} MB")  # fmt: skip
            bench.drop(topic)


if __name__ == "__main__":
    main()
