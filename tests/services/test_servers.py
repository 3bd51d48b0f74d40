"""The servers of these tests can be broken, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from onceflow.errors import SetupError
from onceflow.testing.servers import Kafka, Postgres, commit, end_txn

QUIET = {"log_level": 0, "error_cb": lambda error: None}


def make_topic(servers: str, *, partitions: int = 1, replicas: int = 1) -> str:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": servers, **QUIET})
    admin.create_topics([NewTopic(topic, partitions, replicas)])[topic].result(30)
    return topic


def a_transaction(servers: str, topic: str, rows: Iterable[str], **settings: object) -> Producer:
    """One that holds these rows, and is still open."""
    facts = {"bootstrap.servers": servers, "transactional.id": topic, **QUIET, **settings}
    producer = Producer(facts)
    producer.init_transactions(30)
    producer.begin_transaction()
    for row in rows:
        producer.produce(topic, row)
    producer.flush(30)
    return producer


def read_committed(servers: str, topic: str) -> Counter[str]:
    """All committed rows up to where the topic ends now; waits for transactions that are ending."""
    facts = {"bootstrap.servers": servers, "group.id": topic, "isolation.level": "read_committed",
             "enable.partition.eof": True, **QUIET}  # fmt: skip
    consumer, rows = Consumer(facts), Counter[str]()
    try:
        partitions = consumer.list_topics(topic, 30).topics[topic].partitions
        places = [TopicPartition(topic, number, 0) for number in partitions]
        left = {p.partition: consumer.get_watermark_offsets(p, 30)[1] for p in places}
        consumer.assign(places)
        while left:
            message = consumer.poll(30)
            assert message is not None, "neither a row nor the end"
            if message.error() is None:
                rows[message.value().decode()] += 1
            elif message.offset() >= left.get(message.partition(), 0):
                left.pop(message.partition(), None)
    finally:
        consumer.close()
    return rows


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def table(postgres: Postgres) -> str:
    name = f"t_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres.dsn) as connection:
        connection.execute(f"CREATE TABLE {name} (n int)")  # type: ignore[arg-type]
    return name


def count(postgres: Postgres, table: str) -> int:
    with psycopg.connect(postgres.dsn) as connection:
        row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # type: ignore[arg-type]
    assert row is not None
    return int(row[0])


# ---------------------------------------------------------------- killed and frozen


def test_a_broker_that_was_killed_has_its_committed_rows_and_aborts_the_others(
    kafka: Kafka,
) -> None:
    topic = make_topic(kafka.servers)
    producer = a_transaction(kafka.servers, topic, ["a", "b"])
    producer.commit_transaction(30)
    producer.begin_transaction()
    producer.produce(topic, "never")
    producer.flush(30)
    before = kafka.pid()
    kafka.kill()
    assert kafka.pid() is None
    kafka.start()
    assert kafka.pid() not in (None, before)
    successor = a_transaction(kafka.servers, topic, ["c"])
    successor.commit_transaction(30)
    assert read_committed(kafka.servers, topic) == Counter("abc")


def test_a_frozen_broker_does_not_answer_until_it_is_thawed(kafka: Kafka) -> None:
    topic = make_topic(kafka.servers)
    producer = a_transaction(kafka.servers, topic, ["a"])
    kafka.freeze()
    try:
        with pytest.raises(KafkaException):
            producer.commit_transaction(1)
    finally:
        kafka.thaw()
    producer.commit_transaction(30)  # the same commit again
    assert read_committed(kafka.servers, topic) == Counter("a")


def test_postgres_that_was_killed_has_what_was_committed_and_nothing_else(
    postgres: Postgres, table: str
) -> None:
    with psycopg.connect(postgres.dsn) as connection:
        connection.execute(f"INSERT INTO {table} VALUES (1)")  # type: ignore[arg-type]
    lost = psycopg.connect(postgres.dsn)
    lost.execute(f"INSERT INTO {table} VALUES (2)")  # type: ignore[arg-type]
    postgres.kill()
    assert postgres.pid is None
    with pytest.raises(psycopg.OperationalError):
        lost.commit()
    lost.close()
    postgres.start()
    assert count(postgres, table) == 1


def test_a_frozen_postgres_does_not_answer_until_it_is_thawed(
    postgres: Postgres, table: str
) -> None:
    with psycopg.connect(postgres.dsn) as connection:
        postgres.freeze()
        try:
            connection.pgconn.send_query(f"INSERT INTO {table} VALUES (1)".encode())
            with pytest.raises(psycopg.errors.ConnectionTimeout):
                psycopg.connect(postgres.dsn, connect_timeout=2)
            connection.pgconn.consume_input()
            assert connection.pgconn.is_busy()
        finally:
            postgres.thaw()
        assert connection.pgconn.get_result() is not None
        assert connection.pgconn.get_result() is None
        connection.commit()
    assert count(postgres, table) == 1


# ---------------------------------------------------------------- lost answers


def test_the_answer_of_a_commit_is_lost_after_postgres_did_it(
    postgres: Postgres, table: str
) -> None:
    with postgres.proxy() as proxy, proxy.losing(commit) as lost:
        connection = psycopg.connect(postgres.dsn_through(proxy))
        connection.execute(f"INSERT INTO {table} VALUES (1)")  # type: ignore[arg-type]
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
        connection.close()
    assert lost.count == 1
    assert count(postgres, table) == 1


def test_the_answers_of_commit_transaction_are_lost_after_kafka_did_it(kafka: Kafka) -> None:
    topic = make_topic(kafka.servers)
    with kafka.proxy() as proxy:
        producer = a_transaction(proxy.address, topic, ["a", "b"])
        with proxy.losing(end_txn) as lost, pytest.raises(KafkaException):
            producer.commit_transaction(5)
    assert lost.count >= 1
    assert read_committed(kafka.servers, topic) == Counter("ab")


def test_a_proxy_carries_everything_else_and_cuts_when_told(
    postgres: Postgres, kafka: Kafka, table: str
) -> None:
    with postgres.proxy() as proxy:
        connection = psycopg.connect(postgres.dsn_through(proxy))
        connection.execute(f"INSERT INTO {table} VALUES (1)")  # type: ignore[arg-type]
        connection.commit()
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        connection.close()
        psycopg.connect(postgres.dsn_through(proxy)).close()
    assert count(postgres, table) == 1
    topic = make_topic(kafka.servers)
    with kafka.proxy() as proxy:
        producer = a_transaction(proxy.address, topic, map(str, range(1000)))
        proxy.cut()
        producer.commit_transaction(30)  # on a new connection
        assert read_committed(proxy.address, topic) == Counter(map(str, range(1000)))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))


# ---------------------------------------------------------------- Spark and several brokers


def test_a_session_reads_kafka_with_the_jars_that_are_named(kafka: Kafka, spark: Any) -> None:
    topic = make_topic(kafka.servers)
    a_transaction(kafka.servers, topic, "abc").commit_transaction(30)
    assert read_committed(kafka.servers, topic) == Counter("abc")
    options = {"kafka.bootstrap.servers": kafka.servers, "subscribe": topic}
    rows = spark.read.format("kafka").options(**options).load().selectExpr("string(value)")
    assert Counter(row[0] for row in rows.collect()) == Counter("abc")


@pytest.mark.slow
def test_three_brokers_take_rows_for_all_replicas_while_one_is_dead(tmp_path: Path) -> None:
    with Kafka(tmp_path / "kafka", brokers=3) as kafka:
        topic = make_topic(kafka.servers, partitions=3, replicas=3)
        for i, row in enumerate("abc"):  # each in its turn
            kafka.kill(i)
            a_transaction(kafka.servers, topic, [row]).commit_transaction(60)
            kafka.start(i)
        assert read_committed(kafka.servers, topic) == Counter("abc")


# ---------------------------------------------------------------- nothing is left


@pytest.mark.parametrize(
    ("kind", "how"),
    [(Kafka, "frozen"), (Postgres, "as it is"), (Postgres, "frozen"), (Postgres, "killed")],
)
def test_nothing_is_left_running_or_on_disk(
    kind: Callable[[Path], Kafka | Postgres], how: str, tmp_path: Path
) -> None:
    with kind(tmp_path / "server") as server:
        assert belonging_to(tmp_path)
        if how == "frozen":
            server.freeze()
        elif how == "killed":
            server.kill()
            assert not belonging_to(tmp_path)
    assert not belonging_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_shared_memory_is_left_of_a_postgres_that_was_killed(tmp_path: Path) -> None:
    with Postgres(tmp_path / "server") as server:
        segment = segment_of(tmp_path / "server")
        assert segment in shared_memory()
        server.kill()
    assert segment not in shared_memory()


def test_nothing_is_left_of_servers_whose_test_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from onceflow.testing.servers import Postgres\n"
        "server = Postgres(Path(sys.argv[1]) / 'server').__enter__()\n"
        "server.freeze()\n"
        "print('frozen', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == b"frozen\n"
        segment = segment_of(tmp_path / "server")
        test.kill()
    wait_until(lambda: not belonging_to(tmp_path) and not any(tmp_path.iterdir()))
    assert segment not in shared_memory()


def belonging_to(folder: Path) -> list[str]:
    """Processes that are named or at work there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_text().replace("\0", " ")
            if str(folder) in command or str(folder) in os.readlink(path / "cwd"):
                found.append(command)
    return found


def segment_of(folder: Path) -> str:
    return (folder / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]


def shared_memory() -> set[str]:
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {line.split()[1] for line in lines}


# ---------------------------------------------------------------- what goes wrong


def test_a_broker_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    wrong = {"num.io.threads": "0"}
    with pytest.raises(SetupError, match=r"num\.io\.threads"):
        Kafka(tmp_path / "kafka", settings=wrong).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_postgres_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    wrong = {"max_connections": "-1"}
    with pytest.raises(SetupError, match="max_connections"):
        Postgres(tmp_path / "postgres", settings=wrong).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="is there already"):
        Postgres(tmp_path).__enter__()
    assert tmp_path.is_dir()


def test_servers_of_the_environment_are_used_and_not_broken(
    kafka: Kafka, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEFLOW_KAFKA", kafka.servers)
    monkeypatch.setenv("ONCEFLOW_POSTGRES", postgres.dsn)
    with Kafka(tmp_path / "k") as their_kafka, Postgres(tmp_path / "p") as their_postgres:
        assert (their_kafka.servers, their_postgres.dsn) == (kafka.servers, postgres.dsn)
        for server in (their_kafka, their_postgres):
            for break_it in (server.kill, server.start, server.freeze, server.thaw, server.proxy):
                with pytest.raises(SetupError, match="a server that is not ours: ONCEFLOW_"):
                    break_it()
    assert kafka.pid()
    assert postgres.pid
    monkeypatch.setenv("ONCEFLOW_KAFKA", "127.0.0.1:1")
    with pytest.raises(SetupError, match=r"127\.0\.0\.1:1, where no broker answers"):
        Kafka(tmp_path / "k").__enter__()
    wrong = psycopg.conninfo.make_conninfo(postgres.dsn, password="not-this-one")
    monkeypatch.setenv("ONCEFLOW_POSTGRES", wrong)
    with pytest.raises(SetupError, match="ONCEFLOW_POSTGRES names does not let us in") as refused:
        Postgres(tmp_path / "p").__enter__()
    assert "not-this-one" not in str(refused.value)


def test_the_password_is_asked_for_and_not_shown(postgres: Postgres) -> None:
    facts = psycopg.conninfo.conninfo_to_dict(postgres.dsn)
    assert facts["password"]
    assert str(facts["password"]) not in repr(postgres) + str(vars(postgres).get("_process"))
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(psycopg.conninfo.make_conninfo(postgres.dsn, password="wrong"))
