"""The committed rows of a Kafka topic or a PostgreSQL table, read without onceflow.

It follows the documented layout. A topic has a compacted ledger topic beside it,
`<topic>-onceflow-ledger`: slot k writes to partition k, with job/query/output as key, in the same
transaction as its rows; a record names its number, its publication (`last`, with its `slots`) and
the one that it follows (`before`). A schema has a table `_onceflow_ledger`, one row an output.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from onceflow.harness.targets import Away, Corrupt, Published, Target, fill

LEDGER = "-onceflow-ledger"
_SHORT = 1.0  # seconds for one poll; a server that does not answer is polled again
_LONG = 60.0  # seconds to read everything, once the job has stopped
_ENDED_WITHIN = 20.0  # seconds: the transactions of killed drivers time out
QUIET: dict[str, Any] = {"log_level": 0, "error_cb": lambda error: None}

Ends = dict[tuple[str, int], int]  # topic and partition -> offset


def read_server(target: Target, job: str, known: dict[str, Any] | None = None) -> Published:
    """`known` keeps a consumer from one call to the next. Without it everything is read again, from
    the beginning to the end. Raises `Away` if the server does not answer in time."""
    if target.kind == "postgres":
        return _read_table(target, job)
    if known is None:
        with closing(Reader(target.path, [target.table, target.table + LEDGER])) as reader:
            reader.read_all(_LONG)
            return reader.published(target, job)
    if "reader" not in known:
        known["reader"] = Reader(target.path, [target.table, target.table + LEDGER])
    kept: Reader = known["reader"]
    kept.read_on(_SHORT)
    return kept.published(target, job)


def left_open(target: Target) -> Iterator[str]:
    """Open transactions and unneeded tables that remain after the job has stopped."""
    look = _left_in_schema if target.kind == "postgres" else _held_back
    deadline = time.monotonic() + _ENDED_WITHIN
    while left := list(look(target)):
        if time.monotonic() > deadline:
            yield from left
            return
        time.sleep(0.2)


# ---------------------------------------------------------------- Kafka


class Reader:
    """A consumer of committed messages. It begins at the first offset and never skips: an offset
    that is gone is an error."""

    def __init__(self, servers: str, topics: list[str]) -> None:
        from confluent_kafka import Consumer

        self._servers, self._topics = servers, topics
        self._consumer: Any = Consumer({
            "bootstrap.servers": servers, "group.id": "onceflow-verify",
            "enable.auto.commit": False, "isolation.level": "read_committed",
            "auto.offset.reset": "error", "enable.partition.eof": True, "fetch.wait.max.ms": 50,
            **QUIET,
        })  # fmt: skip
        self._next: Ends = {}  # partitions that are read, and how far
        self.messages: dict[tuple[str, int], list[tuple[bytes, bytes]]] = {}  # key, value
        self._rows: dict[tuple[str, int], list[dict[str, Any]]] = {}  # those that are parsed

    def close(self) -> None:
        self._consumer.close()

    def read_on(self, seconds: float) -> None:
        """Read what is there by now, within this time."""
        deadline = time.monotonic() + seconds
        if not self._next:
            there = ends(self._servers, self._topics, seconds=seconds)
            if {topic for topic, _ in there} != {*self._topics}:
                return  # the job has not created them all
            self._assign(there)
        while time.monotonic() < deadline and self._read_some():
            pass

    def read_all(self, seconds: float, *, last: int | None = None) -> None:
        """Read to the current end of the committed messages. `last`: only so many offsets of each
        partition."""
        deadline = time.monotonic() + seconds
        upto = ends(self._servers, self._topics, seconds=seconds)
        self._assign(upto, last=last)
        while any(self._next[place] < end for place, end in upto.items()):
            self._read_some()
            if time.monotonic() > deadline:
                raise Away(f"{', '.join(self._topics)} could not be read in {seconds:.0f} s")

    def _assign(self, upto: Ends, *, last: int | None = None) -> None:
        from confluent_kafka import TopicPartition

        self._next = {p: 0 if last is None else max(0, end - last) for p, end in upto.items()}
        self.messages = {place: [] for place in upto}
        self._consumer.assign([TopicPartition(t, p, at) for (t, p), at in self._next.items()])

    def _read_some(self) -> bool:
        """Read a batch. Did anything come?"""
        from confluent_kafka import KafkaError

        found = self._consumer.consume(1000, 0.1)
        for message in found:
            place, error = (message.topic(), message.partition()), message.error()
            if error is None:
                if message.offset() < self._next[place]:
                    raise Corrupt(f"{place[0]}, partition {place[1]} came twice from its broker")
                self._next[place] = message.offset() + 1
                self.messages[place].append((message.key(), message.value()))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._next[place] = max(self._next[place], message.offset())  # behind markers
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise Corrupt(f"{place[0]}, partition {place[1]}: {error.str()}")
        return bool(found)

    def published(self, target: Target, job: str) -> Published:
        found = Published()
        for place in sorted(place for place in self.messages if place[0] == target.table):
            rows = self._rows.setdefault(place, [])
            rows += [_parsed(place[0], value) for _, value in self.messages[place][len(rows) :]]
            found.names = found.names or tuple(rows[0] if rows else ())
            found.rows += [tuple(row.values()) for row in rows]
        found.epochs, found.has_epochs = [None] * len(found.rows), False
        at = _position(self._records(target, f"{job}/{target.output}"))
        found.ledger, found.lineage = (at["epoch"], at["lineage"]) if at else (None, "")
        return found

    def _records(self, target: Target, output: str) -> dict[int, dict[str, Any]]:
        """The last record of each slot."""
        return {
            slot: _parsed(topic, value)
            for (topic, slot), messages in self.messages.items()
            if topic == target.table + LEDGER
            for key, value in messages
            if key == output.encode()
        }


def _position(records: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """The last publication that all slots have."""
    newest = max(records.values(), key=lambda record: record["number"], default=None)
    if newest is None or newest["last"] is None:
        return None
    numbers = {slot: record["number"] for slot, record in records.items()}
    whole = all(numbers.get(k) == newest["number"] for k in range(newest["last"]["slots"]))
    said: dict[str, Any] | None = newest["last"] if whole else newest["before"]
    return said


def _parsed(topic: str, value: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(value)
        return found
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{topic} holds {value!r:.80}: {error}") from error


def ends(
    servers: str, topics: list[str], *, committed: bool = True, seconds: float = _LONG
) -> Ends:
    """The end of each partition; a missing topic has none. `committed`: the end for readers of
    committed messages, who cannot read past the beginning of an open transaction."""
    from confluent_kafka import IsolationLevel, KafkaException

    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    admin = kafka_admin().AdminClient({"bootstrap.servers": servers, **QUIET})
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _list_ends(admin, topics, level, max(0.1, deadline - time.monotonic()))
        except (KafkaException, TimeoutError) as error:  # or a leader that is not known yet
            if time.monotonic() > deadline:
                raise Away(f"Kafka at {servers}: {error}") from error
            time.sleep(0.05)


def _list_ends(admin: Any, topics: list[str], level: Any, seconds: float) -> Ends:
    from confluent_kafka import TopicPartition

    there = admin.list_topics(timeout=seconds).topics
    places = {
        TopicPartition(topic, partition): kafka_admin().OffsetSpec.latest()
        for topic in topics
        if topic in there
        for partition in there[topic].partitions
    }
    if not places:
        return {}
    said = admin.list_offsets(places, isolation_level=level, request_timeout=seconds)
    return {(p.topic, p.partition): said[p].result(seconds + 1).offset for p in places}


def kafka_admin() -> Any:
    """The module, which has no usable types."""
    import confluent_kafka.admin

    return confluent_kafka.admin


def _held_back(target: Target) -> Iterator[str]:
    topics = [target.table, target.table + LEDGER]
    stable = ends(target.path, topics)
    for (topic, partition), end in ends(target.path, topics, committed=False).items():
        if stable.get((topic, partition), 0) < end:
            yield f"a transaction is open in {topic}, partition {partition}"


# ---------------------------------------------------------------- PostgreSQL


def _connect(target: Target) -> Any:
    import psycopg

    limit = f"-c statement_timeout={int(_LONG * 1000)}"
    try:
        return psycopg.connect(target.path, connect_timeout=2, options=limit)
    except psycopg.OperationalError as error:
        raise Away(f"PostgreSQL: {error}") from None


def _read_table(target: Target, job: str) -> Published:
    import psycopg

    schema, _, table = target.table.partition(".")
    try:
        with closing(_connect(target)) as db:
            db.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ  # rows and ledger as one
            found, have = Published(), _tables(db, schema)
            if "_onceflow_ledger" in have:
                asked = f"SELECT epoch, lineage FROM {schema}._onceflow_ledger WHERE output = %s"
                said = db.execute(asked, (f"{job}/{target.output}",)).fetchone()
                found.ledger, found.lineage = (said[0], said[1] or "") if said else (None, "")
            if table in have:
                fill(found, db.execute(f'SELECT * FROM {schema}."{table}"'))
            return found
    except psycopg.OperationalError as error:
        raise Away(f"PostgreSQL: {error}") from None


def _tables(db: Any, schema: str) -> set[str]:
    asked = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
    return {name for (name,) in db.execute(asked, (schema,))}


def _left_in_schema(target: Target) -> Iterator[str]:
    schema, _, table = target.table.partition(".")
    with closing(_connect(target)) as db:
        kept = {"_onceflow_ledger", "_onceflow_rewind", f"_onceflow_before_{table}"}
        for name in sorted(_tables(db, schema) - {table, *kept}):
            if name.removeprefix("_onceflow_before_").startswith("fork_"):
                continue  # of a fork of the job, which stays
            yield f"table {schema}.{name}"
        locks = db.execute(
            "SELECT DISTINCT pid FROM pg_locks JOIN pg_class ON pg_class.oid = relation "
            "JOIN pg_stat_activity USING (pid) WHERE backend_type = 'client backend' "
            "AND relnamespace = to_regnamespace(%s) AND pid <> pg_backend_pid()",
            (schema,),
        )
        for (backend,) in locks:
            yield f"backend {backend} is in a transaction in schema {schema}"
