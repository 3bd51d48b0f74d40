"""What the checker of `onceflow verify` sees in topics and tables that were made by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from onceflow.harness import server_targets
from onceflow.harness.server_targets import LEDGER, left_open, read_server
from onceflow.harness.targets import Away, Target
from onceflow.harness.topic import TopicLog
from onceflow.harness.workload import Workload, table
from onceflow.testing.servers import Kafka, Postgres

_numbers = itertools.count()


@pytest.fixture
def topic(kafka: Kafka) -> Target:
    """With a ledger of two slots."""
    name = f"reading-{next(_numbers)}"
    admin = AdminClient({"bootstrap.servers": kafka.servers, "log_level": 0})
    for made in admin.create_topics([NewTopic(name, 2), NewTopic(name + LEDGER, 2)]).values():
        made.result(30)
    return Target("result/result", "kafka", kafka.servers, name)


@contextmanager
def transaction(target: Target, *, ends: str = "commit") -> Iterator[Any]:
    name = f"{target.table}-{next(_numbers)}"
    producer = Producer(
        {"bootstrap.servers": target.path, "transactional.id": name, "log_level": 0}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    yield producer
    producer.flush(30)
    if ends:
        getattr(producer, f"{ends}_transaction")(30)


def row(producer: Any, target: Target, number: int) -> None:
    producer.produce(target.table, json.dumps({"number": number}), str(number))


def record(producer: Any, target: Target, slot: int, number: int, slots: int) -> None:
    said = {"number": number, "last": {"lineage": "l", "epoch": number - 1, "slots": slots},
            "before": {"lineage": "l", "epoch": number - 2, "slots": slots} if number > 1
            else None}  # fmt: skip
    ledger = target.table + LEDGER
    producer.produce(ledger, json.dumps(said), b"job/result/result", partition=slot)
    producer.produce(ledger, b"not ours", b"somebody else", partition=slot)


def test_only_committed_rows_are_read_by_one_who_reads_on_and_by_one_who_begins(
    topic: Target,
) -> None:
    known: dict[str, Any] = {}
    for number, ends in enumerate(["commit", "abort", "commit", "abort"]):
        with transaction(topic, ends=ends) as producer:
            row(producer, topic, number)
        read_server(topic, "job", known)
    anew = sorted(read_server(topic, "job").rows)
    assert anew == [(0,), (2,)]
    while sorted(read_server(topic, "job", known).rows) != anew:
        pass
    known["reader"].close()


def test_a_publication_counts_once_all_of_its_slots_have_it(topic: Target) -> None:
    for number, slots in ((1, (0, 1)), (2, (0,))):
        for slot in slots:
            with transaction(topic) as producer:
                record(producer, topic, slot, number, slots=2)
    assert read_server(topic, "job").ledger == 0
    with transaction(topic) as producer:
        record(producer, topic, 1, 2, slots=2)
    assert read_server(topic, "job").ledger == 1


def test_an_open_transaction_is_left_behind(topic: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_targets, "_ENDED_WITHIN", 0.5)
    assert list(left_open(topic)) == []
    with transaction(topic, ends="") as producer:
        record(producer, topic, 1, 1, slots=2)
    (said,) = left_open(topic)
    assert said == f"a transaction is open in {topic.table}{LEDGER}, partition 1"
    producer.abort_transaction(30)
    assert list(left_open(topic)) == []


def test_a_server_that_does_not_answer_is_away() -> None:
    for target in (
        Target("result/result", "kafka", "127.0.0.1:1", "rows"),
        Target("result/result", "postgres", "postgresql://me@127.0.0.1:1/rows", "a.b"),
    ):
        with pytest.raises(Away):
            read_server(target, "job", {})


def test_a_schema_holds_target_and_ledger_and_no_lock(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_targets, "_ENDED_WITHIN", 0.5)
    schema = f"reading_{next(_numbers)}"
    target = Target("result/result", "postgres", postgres.dsn, f"{schema}.result")
    with psycopg.connect(postgres.dsn, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {schema}")
        assert read_server(target, "job").rows == []
        db.execute(f"CREATE TABLE {schema}.result (number bigint, _epoch bigint)")
        columns = "output text, epoch bigint, lineage text"
        db.execute(f"CREATE TABLE {schema}._onceflow_ledger ({columns})")
        db.execute(f"INSERT INTO {schema}._onceflow_ledger VALUES ('job/result/result', 7, 'l')")
        db.execute(f"INSERT INTO {schema}.result VALUES (4, 7)")
        found = read_server(target, "job")
        assert (found.names, found.rows, found.epochs) == (("number",), [(4,)], [7])
        assert found.ledger == 7
        assert list(left_open(target)) == []
        with db.transaction():
            db.execute(f"INSERT INTO {schema}.result VALUES (5, 8)")
            assert read_server(target, "job").rows == [(4,)]
            assert list(left_open(target)) == [
                f"backend {db.info.backend_pid} is in a transaction in schema {schema}"
            ]
        db.execute(f"CREATE UNLOGGED TABLE {schema}._onceflow_abc_1_8 (number bigint)")
        assert list(left_open(target)) == [f"table {schema}._onceflow_abc_1_8"]


def test_rows_whose_append_was_tried_again_are_in_the_topic_once(kafka: Kafka) -> None:
    log = TopicLog(kafka.servers, f"fed-{next(_numbers)}")
    rows = [table(Workload(1).row(n) for n in range(at, at + 3)) for at in (0, 3)]
    log.append(rows[0], producer="feed", sequence=0)
    log._producer = None  # as after an answer that got lost
    for sequence in (0, 1):
        log.append(rows[sequence], producer="feed", sequence=sequence)
    assert sorted(log._last_numbers()) == [0, 1, 2, 3, 4, 5]
