"""The Kafka sink against a real broker: slots, zombies, outages, and what it refuses."""

from __future__ import annotations

import json
import re
import resource
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)
from pyspark.errors import StreamingQueryException
from topics import (
    admin,
    ends,
    make_topic,
    message_rows,
    partitions,
    topic_exists,
    topic_id,
    wait_for_markers,
)

import onceflow
from onceflow import faults
from onceflow.cli import cli
from onceflow.contract.ledger import Committable, Ledger, Outcome, Position, Publication
from onceflow.contract.schema import arrow_schema, parse_schema
from onceflow.errors import (
    BadRows,
    Fenced,
    JobError,
    LeaseHeld,
    PublishFailed,
    PublishUnknown,
    TargetBehind,
    TargetError,
)
from onceflow.kafka.client import Cluster
from onceflow.kafka.ledger import Published, Record, transactional_id
from onceflow.kafka.slot import Part, Slot, _ShutOut
from onceflow.sinks import Files, Kafka, open_target
from onceflow.testing.processes import in_another_process, is_killed
from onceflow.testing.servers import Kafka as Broker
from onceflow.testing.servers import end_txn
from onceflow.testing.stand_in import LINEAGE, OUTPUT, StandIn

SCHEMA = parse_schema("id long, name string")


class Everywhere(Kafka):
    few_rows = 0  # also the smallest epoch is spread over all slots


class Driver(StandIn):
    """Stages each row in a file of its own, as if each came from another task."""

    def _write(self, rows: list[dict[str, Any]], root: Path, group: int | None) -> None:
        for n, row in enumerate(rows):
            table = pa.Table.from_pylist([row], arrow_schema(self.schema))
            pq.write_table(table, root / f"part-{n:05d}.parquet")


class Place:
    """A topic, and drivers that write to it."""

    def __init__(self, servers: str, home: Path, *, partitions: int = 2, **config: str) -> None:
        self.servers, self.home = servers, home
        self.topic = make_topic(servers, f"t{uuid.uuid4().hex[:12]}", partitions, **config)
        self.ledger = f"{self.topic}-onceflow-ledger"

    def driver(
        self, term: int, *, schema: str = SCHEMA, servers: str = "", **options: Any
    ) -> Driver:
        sink = Everywhere(self.topic, servers=servers or self.servers, **options)
        return Driver(sink=sink, home=self.home, schema=schema, term=term, folders=lambda *_: ())

    def ids(self) -> list[int]:
        found = message_rows(self.servers, self.topic)
        return sorted(json.loads(message.value)["id"] for message in found)

    def records(self) -> dict[int, Record]:
        """The last committed record of each slot, as anybody reads it."""
        found = message_rows(self.servers, self.ledger)
        return {m.partition: Record.load(m.value, "") for m in found}

    def producer(self, name: str, **settings: Any) -> Any:
        producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "transactional.id": name,
                "log_level": 0,
                **settings,
            }
        )
        producer.init_transactions(30)
        return producer


@pytest.fixture
def place(kafka: Broker, tmp_path: Path) -> Place:
    return Place(kafka.servers, tmp_path)


@pytest.fixture
def by_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots are published by this process, also where it has a Spark session."""
    monkeypatch.setattr("onceflow.kafka.sink._session", lambda: None)


def rows(epoch: int, count: int = 3) -> list[dict[str, Any]]:
    return [{"id": 100 * epoch + n, "name": f"row {n}"} for n in range(count)]


def ids(*epochs: int, count: int = 3) -> list[int]:
    return [row["id"] for epoch in epochs for row in rows(epoch, count)]


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


# ---------------------------------------------------------------- slots


def test_two_slots_are_published_by_a_spark_job_and_their_ledgers_agree(
    place: Place, spark: Any
) -> None:
    driver = place.driver(1, slots=2).open()
    decided = [driver.run(epoch, rows(epoch)) for epoch in range(3)]
    assert {file.partition for file in decided[-1].files} == {"slot=0", "slot=1"}
    assert place.ids() == ids(0, 1, 2)
    assert {slot: record.number for slot, record in place.records().items()} == {0: 3, 1: 3}
    assert driver.publish(decided[-1]) is Outcome.ALREADY_PUBLISHED
    successor = place.driver(2, slots=2).open(decided[-1])
    successor.run(3, rows(3))
    assert place.ids() == ids(0, 1, 2, 3)


def test_a_slot_that_fails_in_a_spark_job_is_published_later_with_the_slots_of_its_decision(
    place: Place, spark: Any
) -> None:
    driver = place.driver(1, slots=2).open()
    decided = driver.stage(0, rows(0, 4))
    lost = Path(next(file.path for file in decided.files if file.partition == "slot=1"))
    lost.rename(lost.with_suffix(".away"))
    with pytest.raises(TargetBehind, match="is gone"):
        driver.publish(decided)
    assert len(place.ids()) == 2
    lost.with_suffix(".away").rename(lost)
    successor = place.driver(2, slots=3).open(decided)
    assert place.ids() == ids(0, count=4)
    successor.run(1, rows(1))
    assert place.ids() == [*ids(0, count=4), *ids(1)]


def test_a_zombie_is_fenced_in_its_spark_job(place: Place, spark: Any) -> None:
    older = place.driver(1, slots=2).open()
    decided = older.stage(0, rows(0))
    newer = place.driver(2, slots=2)
    newer.fence()
    with pytest.raises(Fenced):
        older.publish(decided)
    assert place.ids() == []
    newer.recover(decided)
    assert place.ids() == ids(0)


@pytest.mark.usefixtures("by_driver")
def test_slots_can_be_changed_between_runs_also_after_a_crash_between_two_commits(
    place: Place,
) -> None:
    place.driver(1, slots=1).open().run(0, rows(0))
    three = place.driver(2, slots=3).open()
    three.run(1, rows(1))
    decided = three.stage(2, rows(2))
    faults.arm("kafka.committed-one", "raise", visit=2)
    with pytest.raises(faults.InjectedFault):
        three.publish(decided)
    assert [place.records()[slot].number for slot in range(3)] == [3, 3, 2]
    two = place.driver(3, slots=2)
    assert two.fence().position == Position(LINEAGE, 1), "slot 2 does not have epoch 2"
    assert two.recover(decided) is Outcome.PUBLISHED
    assert place.ids() == ids(0, 1, 2)
    two.run(3, rows(3))
    one = place.driver(4, slots=1).open()
    one.run(4, [])
    last = place.driver(5, slots=3).open().run(5, rows(5))
    assert place.ids() == ids(0, 1, 2, 3, 5)
    assert place.driver(6).sink.published(OUTPUT) == Ledger(5, last.position, last.decision)


@pytest.mark.usefixtures("by_driver")
@pytest.mark.parametrize("visit", [1, 2, 3])
def test_a_crash_between_slots_is_completed_by_the_next_driver(place: Place, visit: int) -> None:
    driver = place.driver(1, slots=3).open()
    decided = driver.stage(0, rows(0, 6))
    faults.arm("kafka.committed-one", "raise", visit=visit)
    with pytest.raises(faults.InjectedFault):
        driver.publish(decided)
    assert len(place.ids()) == 2 * visit
    place.driver(2, slots=1).open(decided)
    assert place.ids() == ids(0, count=6)


def test_a_producer_that_was_kept_while_another_process_published_its_slot_reads_again(
    place: Place,
) -> None:
    """As when Spark gives the next task of a slot to another Python worker, and then not."""
    driver = place.driver(1).open()
    kept, other = (Slot(driver.sink._target, OUTPUT, 0) for _ in range(2))
    before = None
    for epoch, slot in enumerate((kept, other, kept, kept, other)):
        decided = driver.stage(epoch, rows(epoch))
        part = Part(0, decided.files, decided, epoch + 1, 1, before, "token 1")
        before = slot.publish(part).last
        driver.ledger = Ledger(1, decided.position, decided.decision)
        assert other.publish(part).number == epoch + 1
    assert place.ids() == ids(*range(5))


# ---------------------------------------------------------------- zombies


def test_a_zombie_that_comes_after_the_leader_publishes_nothing_and_the_leader_goes_on(
    place: Place,
) -> None:
    zombie = place.driver(1).open()
    decided = zombie.stage(0, rows(0))
    leader = place.driver(2).open(decided)
    with pytest.raises(Fenced):
        zombie.fence()  # takes the slot from the leader, and learns that it may not
    leader.run(1, rows(1))
    with pytest.raises(Fenced):
        zombie.publish(zombie.stage(2, rows(7)))
    leader.run(2, rows(2))
    assert place.ids() == ids(0, 1, 2)
    assert place.records()[0].term == 2


@pytest.mark.parametrize("point", ["kafka.begun", "kafka.written"])
def test_a_leader_whose_slot_is_taken_in_the_middle_of_a_publish_takes_it_again(
    place: Place, point: str
) -> None:
    leader = place.driver(1).open()
    leader.run(0, rows(0))
    name = transactional_id(place.ledger, OUTPUT, 0)
    faults.arm(point, lambda _: place.producer(name))
    leader.run(1, rows(1))
    assert place.ids() == ids(0, 1)


# ---------------------------------------------------------------- somebody else's transaction


@pytest.fixture
def hidden(place: Place) -> tuple[Place, Publication, Any]:
    """Epoch 1 is published behind the beginning of a transaction that somebody else left open."""
    driver = place.driver(1).open()
    driver.run(0, rows(0))
    foreign = place.producer(f"foreign-{uuid.uuid4().hex}")
    foreign.begin_transaction()
    foreign.produce(place.ledger, b"{}", b"other", partition=0)
    foreign.flush(30)
    decided = driver.stage(1, rows(1))
    driver.publish(decided)
    return place, decided, foreign


def test_an_open_transaction_does_not_hide_our_last_record(
    hidden: tuple[Place, Publication, Any],
) -> None:
    place, decided, foreign = hidden
    with pytest.raises(PublishUnknown, match="hides"):
        place.driver(2, timeout=6).open(decided)
    foreign.abort_transaction(30)
    successor = place.driver(3)
    assert successor.fence().position == decided.position
    assert successor.recover(decided) is Outcome.ALREADY_PUBLISHED
    assert place.ids() == ids(0, 1)


def test_a_ledger_that_is_read_to_the_last_stable_offset_doubles_an_epoch(
    hidden: tuple[Place, Publication, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant that the test above is there for."""
    place, decided, foreign = hidden
    right = Cluster.ends
    monkeypatch.setattr(Cluster, "ends", lambda *of, stable: right(*of, stable=True))
    place.driver(2).open(decided)
    foreign.abort_transaction(30)
    assert place.ids() == sorted([*ids(0), *ids(1), *ids(1)])


def test_a_job_killed_in_a_transaction_does_not_stop_another_job_on_the_same_topic(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both jobs write to partition 0 of the ledger; the transaction may stay open for minutes."""
    monkeypatch.setattr("onceflow.kafka.ledger._LEFT_OPEN", 2.0)
    other = "other/query/output"
    last = Published(LINEAGE, 0, "decision", slots=1)
    record = Record(1, "token 1", topic_id(place.servers, place.topic), number=1, last=last)

    driver = place.driver(1).open()
    driver.run(0, rows(0))
    killed = place.producer(
        transactional_id(place.ledger, other, 0), **{"transaction.timeout.ms": 900_000}
    )
    killed.begin_transaction()
    killed.produce(place.topic, b'{"id": -1}')
    killed.produce(place.ledger, record.dump(), other.encode(), partition=0)
    killed.flush(30)
    decided = driver.run(1, rows(1))

    successor = place.driver(2, timeout=20)
    assert successor.fence().position == decided.position
    assert successor.recover(decided) is Outcome.ALREADY_PUBLISHED
    successor.run(2, rows(2))
    with pytest.raises(KafkaException):
        killed.commit_transaction(30)
    assert place.ids() == ids(0, 1, 2)


def test_a_driver_whose_transaction_another_job_ended_publishes_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused between its ledger record and its commit for so long that it seemed dead."""
    monkeypatch.setattr("onceflow.kafka.ledger._LEFT_OPEN", 1.0)
    paused = place.driver(1)
    paused.output, paused.home = "other/query/output", place.home / "other"
    paused.open()
    running = place.driver(1)
    running.open().run(0, rows(0))

    faults.arm("kafka.written", lambda _: place.driver(2).open().run(1, rows(1)))
    paused.run(0, rows(5))
    assert place.ids() == ids(0, 1, 5)


# ---------------------------------------------------------------- bad days of a broker


@pytest.mark.parametrize("point", ["kafka.begun", "kafka.written", "kafka.committed-one"])
def test_a_broker_that_is_killed_and_started_in_the_middle_loses_and_doubles_nothing(
    place: Place, kafka: Broker, point: str
) -> None:
    driver = place.driver(1).open()
    driver.run(0, rows(0))
    starts: list[threading.Thread] = []

    def kill(_: str) -> None:
        kafka.kill()
        starts.append(threading.Thread(target=kafka.start))
        starts[0].start()

    faults.arm(point, kill)
    try:
        driver.run(1, rows(1))
    finally:
        starts[0].join()
    driver.run(2, rows(2))
    assert place.ids() == ids(0, 1, 2)


def test_a_commit_whose_answer_gets_lost_is_asked_for_again(place: Place, kafka: Broker) -> None:
    with kafka.proxy() as proxy:
        driver = place.driver(1, servers=proxy.address).open()
        driver.run(0, rows(0))
        decided = driver.stage(1, rows(1))
        with proxy.losing(end_txn) as lost:
            threading.Thread(target=_cut_short, args=(lost, proxy)).start()
            driver.publish(decided)
        assert lost.count
        driver.run(2, rows(2))
    assert place.ids() == ids(0, 1, 2)


def _cut_short(lost: Any, proxy: Any) -> None:
    """From the second on, answers come through."""
    until(lambda: lost.count > 0)
    lost.is_meant = lambda _: False


def test_a_commit_that_is_never_answered_is_unknown_and_the_ledger_knows(
    place: Place, kafka: Broker
) -> None:
    with kafka.proxy() as proxy:
        driver = place.driver(1, servers=proxy.address, timeout=3).open()
        decided = driver.stage(0, rows(0))
        with proxy.losing(end_txn), pytest.raises(PublishUnknown):
            driver.publish(decided)
    successor = place.driver(2).open(decided)
    assert place.ids() == ids(0)
    successor.run(1, rows(1))
    assert place.ids() == ids(0, 1)


def test_a_broker_that_cannot_be_reached_is_said_and_can_be_tried_again(
    place: Place, tmp_path: Path
) -> None:
    with pytest.raises(PublishFailed, match=r"127\.0\.0\.1:9") as said:
        place.driver(1, servers="127.0.0.1:9", timeout=2).open()
    assert said.value.retryable


# ---------------------------------------------------------------- downtime


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that ends transactions and forgets their ids within seconds, and knows rights."""
    settings = {
        "transactional.id.expiration.ms": "1000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
        "producer.id.expiration.ms": "1000",
        "producer.id.expiration.check.interval.ms": "500",
        "transaction.max.timeout.ms": "60000",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with Broker(tmp_path_factory.mktemp("forgetful") / "kafka", settings=settings) as broker:
        yield broker


@pytest.mark.kill
def test_a_job_that_is_down_until_its_ids_have_expired_loses_and_doubles_nothing(
    forgetful: Broker, tmp_path: Path
) -> None:
    place = Place(forgetful.servers, tmp_path)
    driver = place.driver(1, transaction_timeout=1).open()
    driver.run(0, rows(0))
    decided = driver.stage(1, rows(1))
    assert is_killed(_killed_at, "kafka.written", place, decided)
    wait_for_markers(place.servers, place.topic, 60)  # the broker ended what was left open
    until(lambda: _forgotten(place.servers, transactional_id(place.ledger, OUTPUT, 0)))
    successor = place.driver(3, transaction_timeout=1).open(decided)
    assert place.ids() == ids(0, 1)
    until(lambda: _forgotten(place.servers, transactional_id(place.ledger, OUTPUT, 0)))
    successor.run(2, rows(2))  # its own id has expired, while it was at work
    assert place.ids() == ids(0, 1, 2)


def _killed_at(point: str, place: Place, decided: Publication) -> None:
    driver = place.driver(2, transaction_timeout=1)
    driver.fence()
    faults.arm(point, "kill")
    driver.publish(decided)


def _forgotten(servers: str, name: str) -> bool:
    """Does the broker's own topic say so?"""
    found = message_rows(servers, "__transaction_state", committed=False)
    last = {message.key: message.value for message in found if name.encode() in message.key}
    return set(last.values()) == {None}


def test_rows_that_take_longer_than_the_transaction_may_are_published_by_a_longer_one(
    forgetful: Broker, tmp_path: Path
) -> None:
    place = Place(forgetful.servers, tmp_path)
    driver = place.driver(1, transaction_timeout=1).open()
    driver.run(0, rows(0))
    decided = driver.stage(1, rows(1))

    def wait_for_the_broker(_: str) -> None:
        wait_for_markers(place.servers, place.topic, 60)  # it ends the transaction

    faults.arm("kafka.written", wait_for_the_broker)
    with pytest.raises(PublishFailed, match=r"transaction\.timeout\.ms"):
        driver.publish(decided)
    assert place.ids() == ids(0)
    place.driver(2, transaction_timeout=30).open(decided)
    assert place.ids() == ids(0, 1)


def test_a_transaction_timeout_that_the_broker_does_not_allow_is_refused(
    forgetful: Broker, tmp_path: Path
) -> None:
    with pytest.raises(TargetError, match=r"transaction\.max\.timeout\.ms"):
        Place(forgetful.servers, tmp_path).driver(1, transaction_timeout=61).open()


# ---------------------------------------------------------------- rights

WRITE = ["DESCRIBE", "WRITE", "DESCRIBE_CONFIGS"]
LEDGER = [*WRITE, "READ", "CREATE", "ALTER"]


def _allow(place: Place, kind: str, name: str, operations: list[str]) -> None:
    """Who has rights on something has these and no others. (Everybody is User:ANONYMOUS here.)"""
    found = [
        AclBinding(ResourceType[kind], name, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
                   AclOperation[operation], AclPermissionType.ALLOW)
        for operation in operations
    ]  # fmt: skip
    for made in admin(place.servers).create_acls(found).values():
        made.result(30)


def test_the_rights_that_the_docs_name_are_enough(forgetful: Broker, tmp_path: Path) -> None:
    place = Place(forgetful.servers, tmp_path)
    _allow(place, "TOPIC", place.topic, WRITE)
    _allow(place, "TOPIC", place.ledger, LEDGER)
    for slot in range(2):
        name = transactional_id(place.ledger, OUTPUT, slot)
        _allow(place, "TRANSACTIONAL_ID", name, ["DESCRIBE", "WRITE"])
    place.driver(1, transaction_timeout=9).open().run(0, rows(0))
    place.driver(2, slots=2, transaction_timeout=9).open().run(1, rows(1))
    assert place.driver(3).sink.published(OUTPUT).position == Position(LINEAGE, 1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("topic", r"--operation Write .*--topic t"),
        ("id", r"--operation Write --transactional-id onceflow-"),
    ],
)
def test_a_right_that_is_missing_is_named(
    forgetful: Broker, tmp_path: Path, kind: str, said: str
) -> None:
    place = Place(forgetful.servers, tmp_path)
    if kind == "topic":
        _allow(place, "TOPIC", place.topic, ["DESCRIBE", "DESCRIBE_CONFIGS", "READ"])
    else:
        name = transactional_id(place.ledger, OUTPUT, 0)
        _allow(place, "TRANSACTIONAL_ID", name, ["DESCRIBE"])
    with pytest.raises(TargetError, match="uthorization failed") as refused:
        place.driver(1, transaction_timeout=9).open().run(0, rows(0))
    assert re.search(said, refused.value.hint)


def test_a_right_that_is_lost_is_named_also_where_the_client_hears_of_it_while_rows_are_sent(
    forgetful: Broker, tmp_path: Path
) -> None:
    place = Place(forgetful.servers, tmp_path)
    driver = place.driver(1, transaction_timeout=60).open()
    driver.run(0, rows(0))
    _allow(place, "TOPIC", place.topic, ["DESCRIBE", "DESCRIBE_CONFIGS", "READ"])
    with pytest.raises(TargetError, match="uthorization failed") as refused:
        driver.publish(_many(driver, 1, count=300_000, size=100))
    assert re.search(r"--operation Write .*--topic t", refused.value.hint)
    assert place.ids() == ids(0)


# ---------------------------------------------------------------- messages


def test_keys_go_where_the_java_client_sends_them(kafka: Broker, tmp_path: Path) -> None:
    place = Place(kafka.servers, tmp_path, partitions=7)
    hashes = {
        "21": -973932308,
        "foobar": -790332482,
        "a-little-bit-long-string": -985981536,
        "a-little-bit-longer-string": -1486304829,
        "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        "abc": 479470107,
    }  # of the tests of org.apache.kafka.common.utils.Utils
    driver = place.driver(1, key="name").open()
    driver.run(0, [{"id": 0, "name": name} for name in hashes])
    found = {m.key.decode(): m.partition for m in message_rows(place.servers, place.topic)}
    assert found == {name: (code & 0x7FFFFFFF) % 7 for name, code in hashes.items()}


def test_rows_of_a_key_stay_in_their_order(kafka: Broker, tmp_path: Path, spark: Any) -> None:
    place = Place(kafka.servers, tmp_path, partitions=3)
    sink = Everywhere(place.topic, servers=place.servers, key="name", slots=2)
    driver = StandIn(sink=sink, home=tmp_path, schema=SCHEMA, term=1, folders=lambda *_: ())
    driver.open()
    for epoch in range(2):  # the first half of the keys is in one file, the second in the other
        driver.run(epoch, [
            {"id": 10_000 * epoch + n, "name": f"{half} {n % 5}"}
            for half in ("a", "b") for n in range(4000)
        ])  # fmt: skip
    seen: dict[bytes, list[int]] = {}
    for message in message_rows(place.servers, place.topic):
        seen.setdefault(message.key, []).append(json.loads(message.value)["id"])
    assert len(seen) == 10
    assert all(found == sorted(found) and len(found) == 1600 for found in seen.values())


def test_keys_values_headers_and_tombstones(place: Place) -> None:
    schema = parse_schema("k string, v binary, h map<string, binary>, rest long")
    driver = place.driver(1, schema=schema, key="k", value="v", headers="h").open()
    driver.run(0, [
        {"k": "a", "v": b"\x00\xff", "h": [("x", b"1"), ("x", b"2"), ("y", None)], "rest": 1},
        {"k": "b", "v": None, "h": None, "rest": 2},
        {"k": None, "v": b"", "h": [], "rest": 3},
    ])  # fmt: skip
    found = message_rows(place.servers, place.topic)
    assert {(m.key, m.value): m.headers for m in found} == {
        (b"a", b"\x00\xff"): [("x", b"1"), ("x", b"2"), ("y", None)],
        (b"b", None): [],
        (None, b""): [],
    }


def test_a_message_that_the_topic_does_not_take_is_refused_before_anything_is_decided(
    kafka: Broker, tmp_path: Path
) -> None:
    place = Place(kafka.servers, tmp_path, max_message_bytes="5000")
    driver = place.driver(1, key="id").open()
    driver.run(0, [{"id": 7, "name": "x" * 4800}])
    with pytest.raises(BadRows, match=r"key '8' makes a message of 5,1\d\d bytes.* accepts 5,000"):
        driver.stage(1, [*rows(1), {"id": 8, "name": "x" * 5000}])
    driver.run(1, rows(1))
    assert len(message_rows(place.servers, place.topic)) == 4


def test_publishing_holds_few_rows_in_memory(kafka: Broker, tmp_path: Path) -> None:
    place = Place(kafka.servers, tmp_path)
    count, size = 300_000, 1000
    grown = in_another_process(_publish_many, place, count, size)
    print(f"{count * size >> 20} MB in one epoch, {grown >> 20} MB more memory")
    assert grown < 200 << 20
    assert sum(ends(place.servers, place.topic, stable=False).values()) > count


def _publish_many(place: Place, count: int, size: int) -> int:
    driver = place.driver(1).open()
    driver.run(0, rows(0))
    decided = _many(driver, 1, count=count, size=size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    driver.publish(decided)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def _many(driver: Driver, epoch: int, *, count: int, size: int) -> Publication:
    """An epoch of one large file."""
    schema, path = arrow_schema(SCHEMA), driver.home / "many.parquet"
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, count, 10_000):
            names = [f"{n:07d}".ljust(size) for n in range(first, first + 10_000)]
            numbers = pa.array(range(first, first + 10_000), pa.int64())
            writer.write_batch(pa.record_batch([numbers, pa.array(names)], schema=schema))
    file = Committable(str(path), count, path.stat().st_size, 0, "slot=0")
    return replace(driver.stage(epoch, []), files=(file,))


# ---------------------------------------------------------------- what it refuses


def test_a_topic_that_is_not_there_is_refused(kafka: Broker) -> None:
    with pytest.raises(TargetError, match="there is no topic nowhere"):
        Kafka("nowhere", servers=kafka.servers).prepare(OUTPUT, SCHEMA, "append")


def test_a_topic_that_was_deleted_and_created_again_is_noticed(place: Place) -> None:
    last = place.driver(1).open().run(0, rows(0))
    admin(place.servers).delete_topics([place.topic])[place.topic].result(30)
    until(lambda: not topic_exists(place.servers, place.topic))
    make_topic(place.servers, place.topic)
    with pytest.raises(TargetBehind, match="created again"):
        place.driver(2).open(last)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key": "nobody"}, "no column nobody"),
        ({"value": "place"}, "cannot be a message by itself"),
        ({"headers": "name"}, "cannot be headers"),
        ({"key": ["id", "name", "place"]}, "no column is left"),
    ],
)
def test_columns_that_make_no_message_are_refused(
    place: Place, options: dict[str, Any], said: str
) -> None:
    schema = parse_schema("id long, name string, place struct<x: long>")
    with pytest.raises(JobError, match=said):
        place.driver(1, schema=schema, **options).open()


def test_update_mode_needs_a_key(place: Place) -> None:
    with pytest.raises(JobError, match="has no key"):
        place.driver(1).sink.prepare(OUTPUT, SCHEMA, "update")


def test_settings_that_a_guarantee_rests_on_cannot_be_changed() -> None:
    with pytest.raises(JobError, match="acks"):
        Kafka("t", servers="h:1", settings={"acks": "1"})


def test_a_target_is_found_again_by_what_it_says_of_itself_and_says_no_secret(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENT", "orders")
    settings = {"client.id": "env:CLIENT", "ssl.key.password": "abracadabra"}
    last = place.driver(4, settings=settings).open().run(0, rows(0))
    target = json.loads(json.dumps(place.driver(5, settings=settings).sink.describe()))
    assert "abracadabra" not in str(target)
    found = open_target(target)
    assert found is not None
    assert found.published(OUTPUT) == Ledger(4, last.position, last.decision)


# ---------------------------------------------------------------- a whole job


def test_a_query_with_two_slots_is_exact_through_a_crash(
    place: Place, spark: Any, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for n in range(4):
        numbers = pa.array(range(n * 15_000, (n + 1) * 15_000), pa.int64())
        pq.write_table(pa.table({"id": numbers}), tmp_path / "in" / f"{n}.parquet")

    def live(slots: int) -> None:
        reader = spark.readStream.name("rows").schema("id long").option("maxFilesPerTrigger", 2)
        lines = reader.parquet(str(tmp_path / "in")).repartition(2)
        to = Kafka(place.topic, servers=place.servers, slots=slots)
        query = onceflow.write(lines, "lines", to=to, home=tmp_path / "home", once=True)
        query.awaitTermination(120)

    faults.arm("epoch.decided", "raise")
    with pytest.raises(StreamingQueryException, match=r"epoch\.decided"):
        live(2)
    live(3)
    assert place.ids() == list(range(60_000))
    assert {slot: r.last.slots for slot, r in place.records().items() if r.last} == {0: 2, 1: 2}


@pytest.mark.parametrize("epochs", [1, 3])  # large: written by Spark; small: by the driver
def test_messages_that_are_too_large_go_to_the_output_for_bad_rows_through_a_crash(
    kafka: Broker, spark: Any, tmp_path: Path, epochs: int
) -> None:
    place = Place(kafka.servers, tmp_path, max_message_bytes="5000")
    (tmp_path / "in").mkdir()
    large, already = {5, 17, 28}, {9, 21}
    for n in range(3):
        numbers = range(n * 10, n * 10 + 10)
        columns = {
            "id": pa.array(numbers, pa.int64()),
            "text": ["x" * 6000 if i in large else None if i == 3 else "x" for i in numbers],
            "at": pa.array([i * 1_000_001 for i in numbers], pa.timestamp("us", "UTC")),
            "outcome": ["bad" if i in already else "good" for i in numbers],
        }
        pq.write_table(pa.table(columns), tmp_path / "in" / f"{n}.parquet")

    def live() -> None:
        reader = spark.readStream.name("rows").option("maxFilesPerTrigger", 4 - epochs)
        kinds = "id long, text string, at timestamp, outcome string"
        good = Kafka(place.topic, servers=place.servers)
        query = onceflow.write(
            reader.schema(kinds).parquet(str(tmp_path / "in")), "orders",
            to={"good": good, "bad": Files(tmp_path / "bad")}, by="outcome", on_bad="bad",
            home=tmp_path / "home", once=True,
        )  # fmt: skip
        query.awaitTermination(120)

    faults.arm("epoch.decided", "raise", visit=epochs)
    with pytest.raises(StreamingQueryException, match=r"epoch\.decided"):
        live()
    live()
    assert place.ids() == sorted({*range(30)} - large - already)
    bad = pq.read_table(tmp_path / "bad").sort_by("id")
    given = pq.read_table(tmp_path / "in").filter(
        pc.is_in(pc.field("id"), pa.array(large | already))
    )
    assert bad.select(given.column_names).to_pylist() == given.sort_by("id").to_pylist()


def test_what_a_job_left_open_is_listed_and_ended_by_command(
    place: Place, spark: Any, tmp_path: Path
) -> None:
    def live() -> None:
        lines = spark.readStream.name("rows").schema("id long").parquet(str(tmp_path / "in"))
        to = Kafka(place.topic, servers=place.servers)
        query = onceflow.write(lines, "lines", to=to, home=tmp_path / "home", once=True)
        query.awaitTermination(120)

    def command(*arguments: str) -> Any:
        ran = CliRunner().invoke(
            cli, ["kafka", "transactions", "lines", "--home", f"{tmp_path}/home", *arguments]
        )
        return ran if "--json" not in arguments else json.loads(ran.stdout)

    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": pa.array(range(9), pa.int64())}), tmp_path / "in" / "0.parquet")
    live()
    assert "nothing is open" in command().stdout
    [said] = command("--json")
    left = place.producer(said["ids"][0])
    left.begin_transaction()
    left.produce(place.topic, b"torn", partition=1)
    left.flush(30)
    [said] = command("--json")
    assert [(held["topic"], held["partition"]) for held in said["open"]] == [(place.topic, 1)]
    assert "of this job, or of another program" in command().stdout
    assert "nothing is open" in command("--abort").stdout
    with pytest.raises(KafkaException):
        left.commit_transaction(30)
    live()
    assert place.ids() == list(range(9))


@pytest.mark.parametrize("queries", [1, 2])
def test_what_one_output_left_open_does_not_hide_the_ledger_of_another(
    place: Place, spark: Any, tmp_path: Path, queries: int
) -> None:
    """Both are in partition 0 of the ledger topic, of one query or of two of a job."""

    @onceflow.job("lines")
    def lines(flow: onceflow.Flow) -> None:
        rows = spark.readStream.name("rows").schema("id long").parquet(str(tmp_path / "in"))
        first, second = (Kafka(place.topic, servers=place.servers, timeout=15) for _ in range(2))
        if queries == 1:
            by = rows.selectExpr("*", "if(id % 2 = 0, 'first', 'second') AS parity")
            flow.write("all", by, to={"first": first, "second": second}, by="parity")
        else:
            flow.write("first", rows.where("id % 2 = 0"), to=first)
            flow.write("second", rows.where("id % 2 = 1"), to=second)

    def live() -> None:
        with onceflow.start(lines, home=tmp_path / "home", spark=spark, once=True) as handle:
            assert handle.wait(120)

    def leave_open() -> Any:
        """As a driver that was killed while it published to the second output."""
        output = "lines/all/second" if queries == 1 else "lines/second/second"
        name = transactional_id(place.ledger, output, 0)
        left = place.producer(name, **{"transaction.timeout.ms": 900_000})
        left.begin_transaction()
        left.produce(place.topic, b"torn", partition=1)
        left.produce(place.ledger, b"torn", output.encode(), partition=0)
        left.flush(30)
        return left

    (tmp_path / "in").mkdir()
    for n in range(2):
        numbers = pa.array(range(9 * n, 9 * n + 9), pa.int64())
        pq.write_table(pa.table({"id": numbers}), tmp_path / "in" / f"{n}.parquet")
        live()
        leave_open()
    live()
    assert place.ids() == list(range(18))

    leave_open()
    options = ["lines", "--abort", "--home", f"{tmp_path}/home"]
    ran = CliRunner().invoke(cli, ["kafka", "transactions", *options])
    assert ran.stdout.count("nothing is open") == 2, ran.output


def test_a_slot_that_is_lost_again_and_again_is_said_with_the_cause(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = place.driver(1).open().sink
    assert isinstance(sink, Kafka)

    def begin(_: Slot) -> None:
        raise _ShutOut("there is a newer producer")

    monkeypatch.setattr(Slot, "_begin", begin)
    with pytest.raises(PublishFailed, match="lost again each time: there is a newer producer"):
        sink.end_transactions(OUTPUT)


def test_what_is_open_is_not_ended_while_a_driver_leads(
    place: Place, spark: Any, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    lines = spark.readStream.name("rows").schema("id long").parquet(str(tmp_path / "in"))
    to = Kafka(place.topic, servers=place.servers)
    query = onceflow.write(lines, "lines", to=to, home=tmp_path / "home")
    try:
        options = ["lines", "--abort", "--home", f"{tmp_path}/home"]
        ran = CliRunner().invoke(cli, ["kafka", "transactions", *options])
    finally:
        query.stop()
    assert isinstance(ran.exception, LeaseHeld)


# ---------------------------------------------------------------- weaker guarantees


def test_rows_are_added_without_a_ledger(place: Place) -> None:
    driver = place.driver(1).open()
    decided = driver.stage(0, rows(0))
    driver.sink.add(decided)
    driver.sink.add(decided)
    assert place.ids() == sorted([*ids(0), *ids(0)])
    assert driver.sink.published(OUTPUT).position is None
    assert partitions(place.servers, place.ledger) == 1
