"""Every committed row of a topic is read exactly once, or it is told which one is not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewPartitions,
    ResourcePatternType,
    ResourceType,
)
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from topics import make_topic

import onceflow
from onceflow import Flow, Handle, faults, sinks
from onceflow.errors import BadInput, JobError, OutOfRange, PlanChanged, ServerSilent
from onceflow.protocol.home import JobFolder
from onceflow.sources import Kafka
from onceflow.spark.running_query import keep_quiet
from onceflow.testing.servers import Kafka as Servers

ORDERS = "id long, item string"
IMPATIENT = {"request.timeout.ms": "1500", "default.api.timeout.ms": "1500"}
Declare = Callable[[Flow], None]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


class World:
    """A topic of its own, and jobs that write what they read to files."""

    def __init__(self, root: Path, kafka: Any, spark: SparkSession) -> None:
        self.root, self.servers, self.spark = root, kafka.servers, spark
        self.topic = f"orders-{uuid.uuid4().hex[:8]}"
        self.client = {"bootstrap.servers": self.servers, "log_level": 2}
        self.admin = AdminClient(self.client)

    def create(self, topic: str = "", partitions: int = 2, **config: str) -> str:
        return make_topic(self.servers, topic or self.topic, partitions, **config)

    def delete(self, topic: str = "") -> None:
        for future in self.admin.delete_topics([topic or self.topic]).values():
            future.result()
        wait_for(lambda: (topic or self.topic) not in self.admin.list_topics(timeout=10).topics)

    def put(self, values: Iterable[Any], *, topic: str = "", **message: Any) -> None:
        """Messages round the partitions; what is not bytes becomes JSON."""
        producer = Producer({**self.client, "linger.ms": 0})
        self._send(producer, values, topic, message)
        assert producer.flush(30) == 0

    def transact(self, values: Iterable[Any], *, commit: bool = True) -> None:
        producer = Producer({**self.client, "transactional.id": self.topic})
        producer.init_transactions(30)
        producer.begin_transaction()
        self._send(producer, values, "", {})
        producer.flush(30)
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)

    def _send(self, producer: Producer, values: Iterable[Any], topic: str, message: Any) -> None:
        count = len(self.admin.list_topics(timeout=10).topics[topic or self.topic].partitions)
        for number, value in enumerate(values):
            data = value if isinstance(value, bytes | None) else json.dumps(value).encode()
            place = {"partition": number % count, **message}
            producer.produce(topic or self.topic, data, **place)

    def source(self, **options: Any) -> Kafka:
        return Kafka(options.pop("topics", self.topic), servers=self.servers, **options)

    def to(self, name: str = "out") -> sinks.Files:
        return sinks.Files(self.root / name)

    def copy(self, source: Kafka | None = None, *columns: str, **options: Any) -> Declare:
        source = source or self.source(**{"value": ORDERS, **options})
        names = columns or ("id", "_partition", "_offset")
        return lambda flow: flow.write(
            "out", flow.read("orders", source).select(*names), to=self.to()
        )

    def start(self, declare: Declare | None = None, **options: Any) -> Handle:
        job = onceflow.job("shop", every="0ms")(declare or self.copy())
        return onceflow.start(job, home=self.root / "home", spark=self.spark, **options)

    def live(self, declare: Declare | None = None) -> None:
        self.start(declare, once=True).wait()

    def broken(self, point: str, declare: Declare | None = None) -> None:
        """The same, but it fails at that point."""
        faults.arm(point, "raise")
        with pytest.raises(faults.InjectedFault):
            self.live(declare)
        faults.disarm()

    def rows(self, name: str = "out") -> list[dict[str, Any]]:
        paths = sorted((self.root / name).rglob("*.parquet"))
        return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.rows())

    def decided(self, query: str = "out") -> list[Any]:
        queries = JobFolder(self.root / "home", "shop").queries()
        return [d for q in queries if q.name == query for d in q.epoch_log().read().decisions]

    def committed(self, group: str) -> dict[int, int]:
        """Partition -> offset, as a lag tool sees it."""
        with contextlib.closing(Consumer({**self.client, "group.id": group})) as consumer:
            places = [TopicPartition(self.topic, partition) for partition in (0, 1)]
            for _ in range(600):
                try:
                    found = consumer.committed(places, timeout=60)
                    return {place.partition: place.offset for place in found if place.offset >= 0}
                except KafkaException as error:  # the group's coordinator is being loaded
                    if error.args[0].code() != KafkaError.NOT_COORDINATOR:
                        raise
                time.sleep(0.1)
            raise TimeoutError(f"group {group} has no coordinator")


@contextlib.contextmanager
def logged(spark: Any, path: Path) -> Iterator[None]:
    """All that the JVM logs at INFO goes to a file."""
    log4j = spark._jvm.org.apache.logging.log4j
    core, builder = log4j.core, log4j.core.appender.FileAppender.newBuilder()
    appender = builder.withFileName(str(path)).setName("test").build()
    root = core.LoggerContext.getContext(False).getRootLogger()
    appender.start()
    root.addAppender(appender)
    spark.sparkContext.setLogLevel("INFO")
    try:
        yield
    finally:
        keep_quiet(spark)
        root.removeAppender(appender)
        appender.stop()


def order(number: int) -> dict[str, Any]:
    return {"id": number, "item": f"item {number}"}


def orders(first: int, count: int) -> list[dict[str, Any]]:
    return [order(number) for number in range(first, first + count)]


@pytest.fixture
def world(tmp_path: Path, kafka: Any, spark: SparkSession) -> World:
    return World(tmp_path, kafka, spark)


# ---------------------------------------------------------------- declaring


@pytest.mark.parametrize(
    ("topics", "options", "says"),
    [
        ([], {}, "at least one"),
        (["a", "a"], {}, "name each topic once"),
        ("a,b", {}, "'a,b' is not the name of a topic"),
        (re.compile("a", re.IGNORECASE), {}, "has flags"),
        ("a", {"isolation": "none"}, "isolation='none'"),
        ("a", {"max_rows_per_epoch": 0}, "max_rows_per_epoch=0"),
        ("a", {"on_bad": "skip"}, "on_bad='skip'"),
        ("a", {"on_bad": sinks.Files("bad")}, "no rows to reject"),
        (["a", "b"], {"start": {0: 1}}, "names no topic"),
        ("a", {"start": "yesterday"}, "start='yesterday'"),
        ("a", {"settings": {"group.id": "x"}}, "use group="),
        ("a", {"settings": {"kafka.client.id": "x"}}, "without 'kafka.'"),
    ],
)
def test_a_source_that_cannot_work_is_refused_when_it_is_made(
    topics: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobError) as refused:
        Kafka(topics, servers="127.0.0.1:1", **options)
    assert says in str(refused.value)


def test_a_field_may_not_have_the_name_of_a_column_of_kafka(world: World) -> None:
    world.create()
    with pytest.raises(JobError, match="has a field '_offset'"):
        world.live(world.copy(value="id long, _offset long"))


# ---------------------------------------------------------------- rows


def test_rows_come_once_with_their_place(world: World) -> None:
    world.create(partitions=3)
    before = datetime.now(UTC).replace(tzinfo=None) - timedelta(seconds=1)
    world.put(orders(0, 9), key=b"k", headers=[("h", b"\x00"), ("h", None)])
    every = ("id", "item", "_key", "_topic", "_partition", "_offset", "_timestamp", "_headers",
             "_tombstone")  # fmt: skip
    assert world.source(value=ORDERS).stream(world.spark, "x").columns == list(every)
    world.live(world.copy(None, *every))
    world.put(orders(9, 3))
    world.live(world.copy(None, *every))
    found = sorted(world.rows(), key=lambda row: row["id"])
    assert [row["id"] for row in found] == list(range(12))
    assert {(r["_partition"], r["_offset"]) for r in found} == {
        (p, o) for p in range(3) for o in range(4)
    }
    headers = [{"key": "h", "value": b"\x00"}, {"key": "h", "value": None}]
    assert (found[0]["_key"], found[0]["_headers"]) == (b"k", headers)
    assert (found[9]["_key"], found[9]["_headers"]) == (None, None)
    assert {row["_topic"] for row in found} == {world.topic}
    assert all(row["_timestamp"].replace(tzinfo=None) > before for row in found)
    assert [d.rows for d in world.decided()] == [9, 3]


def test_bytes_strings_and_objects(world: World) -> None:
    world.create(partitions=1)
    key = json.dumps({"shop": 7}).encode()
    world.put([b"\xff\x00", None], key=key)
    world.live(world.copy(world.source(key="shop int"), "value", "_key"))
    assert world.rows() == [
        {"value": b"\xff\x00", "_key": {"shop": 7}},
        {"value": None, "_key": {"shop": 7}},
    ]
    other = world.create(f"{world.topic}-text", 1)
    world.put(["größe 🙂".encode()], topic=other, key="schlüssel".encode())

    def declare(flow: Flow) -> None:
        source = world.source(topics=other, value="string", key="string")
        flow.write("text", flow.read("text", source).select("value", "_key"), to=world.to("text"))

    world.live(declare)
    assert world.rows("text") == [{"value": "größe 🙂", "_key": "schlüssel"}]


def test_a_tombstone_is_a_row_of_nulls_that_says_so(world: World) -> None:
    world.create(partitions=1)
    world.put([order(1), None, {}], key=b"1")
    world.live(world.copy(None, "id", "_key", "_offset", "_tombstone"))
    assert [(r["id"], r["_tombstone"]) for r in world.rows()] == [
        (1, False), (None, True), (None, False),
    ]  # fmt: skip


def test_no_more_rows_an_epoch_than_asked_for(world: World) -> None:
    world.create()
    world.put(orders(0, 20))
    world.live(world.copy(max_rows_per_epoch=6))
    assert world.ids() == list(range(20))
    assert max(d.rows for d in world.decided()) <= 6


def test_several_topics_and_topics_that_come_later(world: World) -> None:
    names = [world.create(f"{world.topic}-{part}", 1) for part in "ab"]
    for number, name in enumerate(names):
        world.put(orders(number * 10, 3), topic=name)
    listed = world.source(topics=names, value=ORDERS)
    pattern = world.source(topics=re.compile(f"{world.topic}-[a-z]"), value=ORDERS)

    def declare(flow: Flow) -> None:
        flow.write("listed", flow.read("listed", listed).select("id"), to=world.to("listed"))
        flow.write("out", flow.read("all", pattern).select("id"), to=world.to())

    world.live(declare)
    world.put(orders(20, 3), topic=world.create(f"{world.topic}-c", 2))
    world.put(orders(30, 3), topic=world.create(f"x{world.topic}-d", 1))  # not the whole name
    world.live(declare)
    assert sorted(r["id"] for r in world.rows("listed")) == [0, 1, 2, 10, 11, 12]
    assert world.ids() == [0, 1, 2, 10, 11, 12, 20, 21, 22]


def test_partitions_that_are_added_are_read_from_their_beginning(world: World) -> None:
    world.create(partitions=1)
    world.put(orders(0, 5))
    # the running query hears of new partitions when it next asks for topics
    with world.start(world.copy(start="latest")):
        world.put(orders(5, 5))
        wait_for(lambda: world.ids() == list(range(5, 10)))
        (future,) = world.admin.create_partitions([NewPartitions(world.topic, 3)]).values()
        future.result()
        wait_for(lambda: len(world.admin.list_topics().topics[world.topic].partitions) == 3)
        world.put(orders(10, 9))
        wait_for(lambda: world.ids() == list(range(5, 19)))
    assert {row["_partition"] for row in world.rows()} == {0, 1, 2}


# ---------------------------------------------------------------- where it begins


def test_latest_is_where_the_job_was_started_first(world: World) -> None:
    world.create()
    world.put(orders(0, 4))
    world.broken("open.ready", world.copy(start="latest"))
    world.put(orders(4, 4))
    world.live(world.copy(start="latest"))
    assert world.ids() == [4, 5, 6, 7]


def test_offsets_and_times_to_begin_at(world: World) -> None:
    world.create(retention_ms="-1")  # its rows are years old
    world.put(orders(0, 10), timestamp=1_700_000_000_000)
    world.put(orders(10, 10), timestamp=1_700_000_060_000)
    at = datetime.fromtimestamp(1_700_000_060, UTC)
    for name, start, expected in (
        ("offsets", {world.topic: {0: 9, 1: 8}}, {18, 17, 19}),
        ("short", {0: 9}, {18, *range(1, 20, 2)}),
        ("time", at, set(range(10, 20))),
        ("text", at.isoformat(), set(range(10, 20))),
        ("future", at + timedelta(days=9999), set()),
    ):
        source = world.source(value=ORDERS, start=start)

        def declare(flow: Flow, name: str = name, source: Kafka = source) -> None:
            flow.write(name, flow.read(name, source).select("id"), to=world.to(name))

        world.live(declare)
        assert {row["id"] for row in world.rows(name)} == expected, name
    for start, kind in (({0: 99}, OutOfRange), ({7: 0}, JobError)):
        other = onceflow.job("other")(world.copy(start=start))
        with pytest.raises(kind, match=r"it has 0 to 10|no partition 7"):
            onceflow.start(other, home=world.root / "home", spark=world.spark)


# ---------------------------------------------------------------- transactions


def test_aborted_rows_are_not_seen_and_markers_make_no_epochs(world: World) -> None:
    world.create()
    world.transact(orders(0, 6))
    world.transact(orders(100, 6), commit=False)
    world.transact(orders(6, 6))
    with world.start() as handle:
        wait_for(lambda: world.ids() == list(range(12)))
        epochs = handle.status["queries"]["out"]
        world.transact(orders(200, 2), commit=False)  # one epoch that has no rows, and no more
        world.transact(orders(12, 2))
        wait_for(lambda: world.ids() == list(range(14)))
        assert handle.status["queries"]["out"] <= epochs + 4
        seen = len(world.decided())
        rounds = handle.queries["out"].lastProgress
        wait_for(lambda: handle.queries["out"].lastProgress["timestamp"] > rounds["timestamp"])
        assert len(world.decided()) == seen
    world.live()
    assert len(world.decided()) == seen
    world.live(lambda flow: flow.write(
        "dirty",
        flow.read("dirty", world.source(value=ORDERS, isolation="read_uncommitted")).select("id"),
        to=world.to("dirty"),
    ))  # fmt: skip
    assert Counter(row["id"] // 100 for row in world.rows("dirty")) == {0: 14, 1: 6, 2: 2}


# ---------------------------------------------------------------- exactly once


@pytest.mark.parametrize("point", ["epoch.staged", "epoch.decided", "epoch.published"])
def test_an_epoch_that_was_broken_off_is_not_lost_and_not_doubled(world: World, point: str) -> None:
    world.create()
    for first in (0, 10):
        world.put(orders(first, 10))
        world.broken(point)
        world.live()
        assert world.ids() == list(range(first + 10))


def test_a_commit_that_spark_lost_repeats_nothing(world: World) -> None:
    world.create()
    for first in (0, 10, 20):
        world.transact(orders(first, 10))
        world.live()
        newest = max(world.root.glob("home/shop/lineages/*/out/commits/[0-9]*"), key=str)
        newest.unlink()
    world.live()
    assert world.ids() == list(range(30))


# ---------------------------------------------------------------- rows that cannot be parsed

BAD = [b"", b"{", b"null", b"[1]", b'{"id": "x"}', b'{"id": 1} {"id": 2}', b'{"id": 1}\xff']


@pytest.mark.parametrize("value", BAD)
def test_a_row_that_cannot_be_parsed_stops_the_job_with_its_place(
    world: World, value: bytes
) -> None:
    world.create()
    world.put([*orders(0, 5), value])
    for declare in (
        world.copy(None, "id"),
        world.copy(None, "_offset"),  # looks at no field
        lambda flow: flow.write(
            "out", flow.read("orders", world.source(value=ORDERS)).where("id < 3"), to=world.to()
        ),
    ):
        with pytest.raises(BadInput) as stopped:
            world.live(declare)
        assert f"topic {world.topic}, partition 1, offset 2 cannot be parsed" in str(stopped.value)
        assert "on_bad=<a sink>" in stopped.value.hint
        assert world.rows() == []


def test_rows_that_cannot_be_parsed_go_to_the_sink_that_is_named(world: World) -> None:
    world.create(partitions=1)
    world.put([order(0), *BAD, None, order(1)], key=b"k")
    bad = sinks.Files(world.root / "bad")
    world.live(world.copy(on_bad=bad))
    world.put([b"late", order(2)])
    world.live(world.copy(on_bad=bad))
    assert [row["id"] for row in world.rows()] == [0, None, 1, 2]
    found = sorted(world.rows("bad"), key=lambda row: row["offset"])
    assert [(row["value"], row["offset"]) for row in found] == [
        *((value, number) for number, value in enumerate(BAD, 1)), (b"late", 10),
    ]  # fmt: skip
    assert list(found[0]) == [
        "topic", "partition", "offset", "timestamp", "key", "value", "reason",
    ]  # fmt: skip
    assert {(row["topic"], row["partition"]) for row in found} == {(world.topic, 0)}
    assert found[0]["key"] == b"k"
    assert found[0]["reason"] == "the value is not a JSON object that fits the schema"
    assert found[len(BAD) - 1]["reason"] == "the value is not UTF-8"


def test_a_key_that_cannot_be_parsed_is_a_bad_row_too(world: World) -> None:
    world.create(partitions=1)
    world.put([order(0)], key=b"7")
    with pytest.raises(BadInput, match="the key is not a JSON object"):
        world.live(world.copy(key="shop int"))


# ---------------------------------------------------------------- rows that are gone


def drop_below(world: World, offsets: dict[int, int]) -> None:
    places = [TopicPartition(world.topic, p, offset) for p, offset in offsets.items()]
    for future in world.admin.delete_records(places).values():
        future.result()


def test_rows_that_kafka_removed_are_named(world: World) -> None:
    world.create()
    world.put(orders(0, 10))
    world.live()
    world.put(orders(10, 10))
    drop_below(world, {0: 7, 1: 9})
    with pytest.raises(OutOfRange) as gone:
        world.live()
    assert f"topic {world.topic}, partition 0: offsets 5 to 6 are gone" in str(gone.value)
    assert f"topic {world.topic}, partition 1: offsets 5 to 8 are gone" in str(gone.value)
    assert f"start={{'{world.topic}': {{0: 7, 1: 9}}}}" in gone.value.hint
    assert world.ids() == list(range(10))


def test_rows_that_kafka_removes_under_a_running_job_are_named(world: World) -> None:
    world.create(partitions=1)
    world.put(orders(0, 10))
    handle = world.start()
    wait_for(lambda: world.ids() == list(range(10)))
    faults.arm("epoch.checked", lambda _: drop_below(world, {0: 13}))  # planned, and not yet read
    world.transact(orders(10, 10))
    with pytest.raises(OutOfRange, match="partition 0: offsets 10 to 12 are gone"):
        handle.wait(60)
    assert world.ids() == list(range(10))


def test_a_topic_that_was_created_again_is_another_one(world: World) -> None:
    world.create()
    world.put(orders(0, 4))
    world.live()
    world.delete()
    with pytest.raises(JobError, match=f"has no topic {world.topic}"):
        world.live()
    world.create()
    world.put(orders(50, 10))  # as many rows as before, and more
    with pytest.raises(OutOfRange, match="was deleted and created again"):
        world.live()
    assert world.ids() == list(range(4))


@pytest.mark.parametrize("running", [False, True])
def test_a_topic_that_joined_later_and_was_created_again_is_another_one(
    world: World, running: bool
) -> None:
    world.put(orders(0, 4), topic=world.create(f"{world.topic}-a"))
    pattern = re.compile(f"{world.topic}-[ab]")
    declare = world.copy(world.source(topics=pattern, value=ORDERS))
    later = f"{world.topic}-b"
    if running:
        with world.start(declare):
            wait_for(lambda: world.ids() == list(range(4)))
            world.put(orders(4, 4), topic=world.create(later))
            wait_for(lambda: world.ids() == list(range(8)))
    else:
        world.live(declare)
        world.put(orders(4, 4), topic=world.create(later))
        world.live(declare)
    world.live(declare)
    world.delete(later)
    world.put(orders(50, 10), topic=world.create(later))  # as many rows as before, and more
    with pytest.raises(OutOfRange, match=f"topic {later} was deleted and created again"):
        world.live(declare)
    assert world.ids() == list(range(8))


def test_a_topic_that_joins_is_known_before_its_first_rows_are_decided(world: World) -> None:
    world.put(orders(0, 4), topic=world.create(f"{world.topic}-a"))
    pattern = re.compile(f"{world.topic}-[ab]")
    declare = world.copy(world.source(topics=pattern, value=ORDERS))
    handle = world.start(declare)
    wait_for(lambda: world.ids() == list(range(4)))
    kept = world.root / "home/shop/starts/orders" / f"{world.topic}-b.json"
    seen: list[bool] = []

    def crash(_: Any) -> None:
        seen.append(kept.exists())
        raise faults.InjectedFault

    faults.arm("epoch.checked", crash)
    world.put(orders(4, 4), topic=world.create(f"{world.topic}-b"))
    with pytest.raises(faults.InjectedFault):
        handle.wait(60)
    faults.disarm()
    assert seen == [True]
    world.live(declare)
    assert world.ids() == list(range(8))


def test_a_topic_that_is_not_asked_for_any_more_is_named(world: World) -> None:
    names = [world.create(f"{world.topic}-{part}", 1) for part in "ab"]
    world.put(orders(0, 3), topic=names[0])
    world.live(world.copy(topics=names))
    with pytest.raises(JobError, match=f"no longer names topic {names[1]}"):
        world.live(world.copy(topics=names[:1]))


def test_a_topic_that_joins_without_its_first_rows_is_named(world: World) -> None:
    world.put(orders(0, 4), topic=world.create(f"{world.topic}-a"))
    declare = world.copy(topics=re.compile(f"{world.topic}(-a)?"))
    world.live(declare)
    world.put(orders(4, 4), topic=world.create(partitions=1))
    drop_below(world, {0: 2})
    with pytest.raises(
        OutOfRange, match="partition 0 was added later; its offsets 0 to 1 are gone"
    ):
        world.live(declare)


def test_rows_that_kafka_removes_before_the_first_decision_are_named(world: World) -> None:
    world.create(partitions=1)
    world.put(orders(0, 10))
    faults.arm("epoch.checked", lambda _: drop_below(world, {0: 3}))
    with pytest.raises(OutOfRange, match="partition 0: offsets 0 to 2 are gone"):
        world.live()
    assert world.rows() == []


def test_a_failure_for_want_of_rows_that_are_all_there_is_tried_again(world: World) -> None:
    world.create()
    said = f"Partition {world.topic}-0 offset was changed from 9 to 4"  # by a broker that lags

    def fails(flow: Flow) -> None:
        rows = flow.read("orders", world.source(value=ORDERS))
        no = F.raise_error(F.lit(said)).cast("long")
        flow.write("out", rows.select(no.alias("id"), "_partition", "_offset"), to=world.to())

    for first in (0, 10):  # nothing is decided, and something is
        world.put(orders(first, 10))
        with pytest.raises(PlanChanged, match="nothing is missing behind the last decision") as no:
            world.live(fails)
        assert no.value.retryable
        assert "ends at offset 4" in str(no.value)
        world.live()
        assert world.ids() == list(range(first + 10))


def test_a_topic_that_goes_under_a_running_job_stops_it(world: World) -> None:
    world.create()
    world.put(orders(0, 4))
    handle = world.start(world.copy(settings=IMPATIENT))
    wait_for(lambda: world.ids() == list(range(4)))
    world.delete()
    with pytest.raises(OutOfRange, match="partition 0 is gone; it was read up to offset 2"):
        handle.wait(120)


def test_a_topic_with_fewer_partitions_than_before_is_refused(world: World) -> None:
    names = [world.create(f"{world.topic}-{part}") for part in "ab"]
    for name in names:
        world.put(orders(0, 4), topic=name)
    pattern = re.compile(f"{world.topic}-[ab]")
    declare = world.copy(world.source(topics=pattern, value=ORDERS))
    world.live(declare)
    world.delete(names[1])
    with pytest.raises(OutOfRange, match="-b, partition 1 is gone; it was read up to offset 2"):
        world.live(declare)


# ---------------------------------------------------------------- brokers


def test_a_broker_that_does_not_answer_is_named_before_anything_starts(world: World) -> None:
    nobody = Kafka(world.topic, servers="127.0.0.1:1", value=ORDERS)
    with pytest.raises(ServerSilent, match=r"no answer from Kafka at 127\.0\.0\.1:1") as silent:
        world.start(world.copy(nobody))
    assert silent.value.retryable


def test_a_topic_that_is_not_there_is_named(world: World) -> None:
    with pytest.raises(JobError, match=f"has no topic {world.topic}"):
        world.start()


def test_a_job_outlives_its_broker(world: World, kafka: Any) -> None:
    world.create()
    world.put(orders(0, 10))
    source = world.source(value=ORDERS, settings=IMPATIENT)
    handle = world.start(world.copy(source))
    wait_for(lambda: world.ids() == list(range(10)))
    kafka.kill()
    try:
        with pytest.raises(ServerSilent, match="Kafka does not answer"):
            handle.wait(120)
        with pytest.raises(ServerSilent):
            world.live()
    finally:
        kafka.start()
    world.put(orders(10, 10))
    world.live(world.copy(source))
    assert world.ids() == list(range(20))


def test_the_cut_of_each_published_epoch_is_told_to_a_consumer_group(world: World) -> None:
    world.create()
    world.put([*orders(0, 9), b"bad"])
    world.live(world.copy(on_bad=world.to("bad")))
    assert world.committed("onceflow.shop.out") == {0: 5, 1: 5}
    assert world.committed("onceflow.shop.orders.rejected") == {0: 5, 1: 5}
    group = f"lag-{world.topic}"
    with world.start(world.copy(on_bad=world.to("bad"), group=group)):
        world.put(orders(10, 4))
        wait_for(lambda: world.committed(group) == {0: 7, 1: 7})
    # it is for others to look at: what it says is never read
    with contextlib.closing(Consumer({**world.client, "group.id": "onceflow.shop.out"})) as other:
        other.commit(offsets=[TopicPartition(world.topic, 0, 0)], asynchronous=False)
    world.live(world.copy(on_bad=world.to("bad")))
    assert world.ids() == [*range(9), *range(10, 14)]


def test_a_session_without_the_connector_says_how_to_get_it(world: World) -> None:
    world.create()
    code = f"""
import onceflow
from onceflow.errors import SetupError
from onceflow.sources import Kafka
spark = onceflow.get_session("local[1]")
try:
    Kafka({world.topic!r}, servers={world.servers!r}).stream(spark, "orders")
except SetupError as error:
    print(error)
"""
    without = {name: value for name, value in os.environ.items() if name != "ONCEFLOW_JARS"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=without, capture_output=True, text=True, check=True
    )
    assert "this Spark session has no Kafka connector" in ran.stdout
    assert "ONCEFLOW_JARS" in ran.stdout
    assert "spark.jars.packages" in ran.stdout


# ---------------------------------------------------------------- users and rights

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A broker where the user `shop`, who comes through the proxy, may do nothing yet."""
    settings = {
        "listener.security.protocol.map":
            "PLAIN:PLAINTEXT,BEHIND:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.behind.plain.sasl.jaas.config": f'{PLAIN} required user_shop="tops3cret";',
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }  # fmt: skip
    with Servers(tmp_path_factory.mktemp("guarded") / "kafka", settings=settings) as kafka:
        yield kafka


def allow(world: World, kind: ResourceType, name: str, operation: AclOperation) -> None:
    """Give the user a right. Brokers hear of it a moment later: they are asked until they have."""
    right = (kind, name, ResourcePatternType.LITERAL, "User:shop", "*", operation)
    (future,) = world.admin.create_acls([AclBinding(*right, AclPermissionType.ALLOW)]).values()
    future.result()


def test_users_and_rights(tmp_path: Path, guarded: Any, spark: SparkSession) -> None:
    world = World(tmp_path, guarded, spark)
    world.create()
    world.put(orders(0, 10))
    with guarded.proxy() as proxy:
        log = tmp_path / "spark.log"

        def live(password: str = "tops3cret") -> None:
            user = {"sasl.username": "shop", "sasl.password": password}
            settings = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", **user}
            source = Kafka(world.topic, servers=proxy.address, value=ORDERS, settings=settings)
            with logged(spark, log):
                world.live(world.copy(source))

        with pytest.raises(JobError, match="does not accept this user") as refused:
            live("wr0ng")
        assert "wr0ng" not in str(refused.value)
        with pytest.raises(JobError, match=f"denies access to topic {world.topic}"):
            live()
        allow(world, ResourceType.TOPIC, world.topic, AclOperation.DESCRIBE)
        with pytest.raises(JobError, match=rf"Not authorized to access topics: \[{world.topic}\]"):
            live()
        allow(world, ResourceType.TOPIC, world.topic, AclOperation.READ)
        live()
        assert world.ids() == list(range(10))
        assert world.committed("onceflow.shop.out") == {}  # a right of its own, and not needed
        allow(world, ResourceType.GROUP, "onceflow.shop.out", AclOperation.READ)
        world.put(orders(10, 2))
        live()
        assert world.committed("onceflow.shop.out") == {0: 6, 1: 6}
    text = log.read_text()
    assert "sasl.jaas.config" in text
    for path in [log, *(p for p in (tmp_path / "home").rglob("*") if p.is_file())]:
        assert b"tops3cret" not in path.read_bytes(), path
