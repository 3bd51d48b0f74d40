"""Rows into a Kafka topic, published by one transaction for each epoch and slot."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from onceflow.contract.abilities import CanAdd, CanCleanUp, CanRefuseRows, CanStage, Staged
from onceflow.contract.ledger import (
    Committable,
    Ledger,
    Outcome,
    Publication,
    Verdict,
    judge,
)
from onceflow.contract.schema import columns, refuse_difference
from onceflow.contract.sink import Sink
from onceflow.errors import JobError, PublishFailed, SchemaMismatch, TargetBehind, TargetError
from onceflow.faults.points import reach
from onceflow.kafka.client import Cluster, Topic, confluent
from onceflow.kafka.ledger import LEDGER_TOPIC, Record, Slots, read_records, transactional_id
from onceflow.kafka.settings import check_sink_settings, without_secrets
from onceflow.kafka.sink_rows import Layout
from onceflow.kafka.slot import Part, Slot, Target, produce
from onceflow.kafka.slot_job import publish_parts

_GLANCE = 2.0  # seconds for which `published` waits for an open transaction
_LARGEST = 60_000_000  # bytes: below what a producer buffers in all
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


class Kafka(Sink, CanStage, CanRefuseRows, CanAdd, CanCleanUp):
    """Every row of a decided epoch is in the topic exactly once, for consumers that read committed.

    Consumers with `isolation.level=read_uncommitted` see rows of aborted transactions. With one
    slot an epoch is atomic; with more, each slot is. The sink does not notice when somebody else
    writes to the topic or trims it; it does notice a topic that was deleted and created again.

    `key` and `value` are a column, unchanged, or a list of columns, as a JSON object; without
    `value`: all columns that key and headers do not use. A null key is no key; a null in a single
    value column is a tombstone. `headers` is a column of map<string, binary> or
    array<struct<key: string, value: binary>>. Rows of a key go to the partition that the Java
    client chooses and stay in the order in which one Spark task had them.

    `settings` are those of librdkafka; `env:NAME` stands for a variable of the environment, whose
    value is written to no file. `create` creates the topic if there is none:
    `create={"partitions": 6, "replication": 3, "retention.ms": "-1"}`.
    """

    kind = "kafka"
    modes = ("append", "update")
    no_rewind = "a topic keeps its rows"
    shared = True
    few_rows = 20_000  # an epoch with fewer goes to one slot: a Spark job would cost more
    place = "topic"

    def __init__(
        self,
        topic: str,
        *,
        servers: str,
        key: str | Iterable[str] | None = None,
        value: str | Iterable[str] | None = None,
        headers: str | None = None,
        slots: int = 1,
        settings: Mapping[str, Any] | None = None,
        ledger: str | None = None,
        create: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        transaction_timeout: float = 900.0,
    ) -> None:
        self.topic = topic
        self.ledger = ledger or f"{topic}-onceflow-ledger"
        for name in (self.topic, self.ledger):
            if not _NAME.fullmatch(name):
                raise JobError(f"{name!r} is not a name for a topic", hint="use letters and digits")
        if not 1 <= slots <= 1000:
            raise JobError(
                f"slots={slots} is out of range", hint="use 1 to 1000; one for each core is enough"
            )
        if not (timeout > 0 and transaction_timeout >= 1):
            raise JobError("timeout and transaction_timeout are seconds", hint="1 or more")
        self.slots = slots
        self.create = None if create is None else dict(create)
        self.settings = check_sink_settings(settings or {})
        self._target = Target(
            cluster=Cluster(servers, self.settings, timeout),
            topic=self.topic,
            ledger=self.ledger,
            layout=Layout(_tuple(key), _tuple(value), headers),
            transaction_timeout=transaction_timeout,
        )
        self._said: Slots | None = None  # the ledger, as this driver wrote it last
        self._token = ""
        self._taken: dict[int, Slot] = {}
        self._adding: Any = None
        self._failures: list[Any] = []

    def __str__(self) -> str:
        return str(self._target)

    def arguments(self) -> dict[str, Any]:
        return {
            "topic": self.topic, "servers": self._cluster.servers,
            "ledger": self.ledger, "settings": without_secrets(self.settings),
            "slots": self.slots, **asdict(self._target.layout), "create": self.create,
            "timeout": self._cluster.timeout,
            "transaction_timeout": self._target.transaction_timeout,
        }  # fmt: skip

    @property
    def _cluster(self) -> Cluster:
        return self._target.cluster

    # -------------------------------------------------------------- before an epoch

    def prepare(self, output: str, schema: str, mode: str) -> None:
        self.refuse_mode(mode, "a topic keeps every row; use Sqlite or Postgres for complete")
        layout = self._target.layout
        if mode == "update" and layout.key is None:
            raise JobError(
                f"{self} has no key, so it cannot take output mode 'update'",
                hint="name the key: Kafka(topic, servers=…, key=…)",
            )
        layout.refuse(str(self), schema)
        topics = self._cluster.topics([self.topic, self.ledger])
        if topics[self.topic] is None and self.create is None:
            raise TargetError(
                f"there is no topic {self.topic} in Kafka at {self._cluster.servers}",
                hint=f"create it (kafka-topics --create --topic {self.topic}), correct its name, "
                'or let the sink create it: create={"partitions": 6}',
            )
        newest = self._read(output, topics[self.ledger], 0).newest
        if newest is not None and newest.columns:
            try:
                refuse_difference(str(self), newest.columns, columns(schema))
            except SchemaMismatch as error:
                hint = "write to a new topic, or give the output a new name"
                raise SchemaMismatch(error.message, hint=hint) from error

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        """Choose a slot for each file. All files of a task go to one, to keep the order of a key's
        rows."""
        for file in staged.files:
            self._target.layout.refuse_too_large(str(self), file, self._target.largest)
        slots = 1 if sum(file.rows for file in staged.files) < self.few_rows else self.slots
        rows: Counter[str] = Counter()
        for file in staged.files:
            rows[_task(file)] += file.rows
        load, chosen = [0] * slots, {}
        for task, count in rows.most_common():
            chosen[task] = slot = load.index(min(load))
            load[slot] += count
        return tuple(replace(f, partition=f"slot={chosen[_task(f)]}") for f in staged.files)

    def unstorable(self, file: Committable, schema: str) -> dict[int, str]:
        return dict(self._target.layout.too_large(file, self._target.largest))

    # -------------------------------------------------------------- ledger and publish

    def published(self, output: str) -> Ledger:
        return self._read(output, self._cluster.topics([self.ledger])[self.ledger], _GLANCE).ledger

    def _read(self, output: str, ledger: Topic | None, patience: float) -> Slots:
        """The ledger as others see it: a transaction that is open now may hide the last records."""
        if ledger is None:
            return Slots({})
        partitions = range(ledger.partitions)
        found = read_records(self._cluster, self.ledger, output, partitions, patience=patience)
        return Slots(found)

    def shut_out(self, output: str) -> None:
        _, partitions = self._make_topics()
        most = self._cluster.topic_setting(self.topic, "max.message.bytes")
        self._target = replace(self._target, largest=min(int(most or 1_000_000), _LARGEST))
        self._said = None
        self._taken = {number: Slot(self._target, output, number) for number in range(partitions)}
        for slot in self._taken.values():
            slot.shut_out()

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        if (
            self._said is not None or not self._taken
        ):  # called again, or without `shut_out` before it
            self.shut_out(output)
        topic, partitions = self._make_topics()
        self._token, self._said = token, None
        records = {}
        for number in range(partitions):
            slot = self._taken.setdefault(number, Slot(self._target, output, number))
            records[number] = slot.fence(term=term, token=token, topic_id=topic.id)
        for number, record in records.items():
            if record.topic != topic.id and record.last is not None:
                raise TargetBehind(
                    f"{self}: the topic was deleted and created again (slot {number} published to "
                    f"another one)",
                    hint="bring back the topic, or give the output a new name to start over",
                )
        for number in range(self.slots, partitions):
            self._taken.pop(
                number
            ).close()  # no longer used; publishing a decision that has them takes them again
        self._said = Slots(records)
        return self._said.ledger

    def _make_topics(self) -> tuple[Topic, int]:
        topics = self._cluster.topics([self.topic, self.ledger])
        topic, ledger = topics[self.topic], topics[self.ledger]
        if topic is None:
            wanted = {k: str(v) for k, v in (self.create or {}).items()}
            partitions = int(wanted.pop("partitions", "1"))
            replication = int(wanted.pop("replication", "-1"))
            self._cluster.create(self.topic, partitions, replication, wanted)
            topic = self._there(self.topic)
        if ledger is None:
            self._cluster.create(self.ledger, self.slots, topic.replication, LEDGER_TOPIC)
            ledger = self._there(self.ledger)
        if ledger.partitions < self.slots:
            self._cluster.grow(self.ledger, self.slots)
            ledger = self._there(self.ledger, self.slots)
        return topic, ledger.partitions

    def _there(self, name: str, partitions: int = 1) -> Topic:
        """Wait until the broker knows a new topic or new partitions: not all brokers do at once."""
        deadline = time.monotonic() + self._cluster.timeout
        while time.monotonic() < deadline:
            found = self._cluster.topics([name])[name]
            if found is not None and found.partitions >= partitions:
                return found
            time.sleep(0.05)
        raise PublishFailed(
            f"topic {name} was created, but Kafka at {self._cluster.servers} does not know it yet",
            hint="check that all brokers run; onceflow tries again",
        )

    def publish(self, publication: Publication) -> Outcome:
        said = self._said
        if said is None:
            ledger = self._there(self.ledger)
            said = Slots(
                read_records(
                    self._cluster, self.ledger, publication.output, range(ledger.partitions)
                )
            )
        if judge(said.ledger, publication, str(self)) is Verdict.ALREADY_PUBLISHED:
            return Outcome.ALREADY_PUBLISHED
        number, before = said.follow(publication)
        files = _by_slot(publication.files)
        parts = [
            Part(slot, tuple(files.get(slot, ())), publication, number, max(files) + 1, before,
                 self._token)
            for slot in range(max(files) + 1)
            if slot not in said.records or said.records[slot].number != number
        ]  # fmt: skip
        records = {**said.records}
        try:
            for slot, record in self._publish(parts):
                records[slot] = record
        finally:
            self._said = Slots(records)
        if self._said.ledger.position != publication.position:
            raise TargetBehind(
                f"{self}: the ledger does not have epoch {publication.epoch} in every slot",
                hint="bring back the ledger topic as it was",
            )
        reach("kafka.committed")
        return Outcome.PUBLISHED

    def _publish(self, parts: list[Part]) -> Iterator[tuple[int, Record]]:
        session = _session() if len(parts) > 1 else None
        if session is not None:
            for part in parts:
                self._slot(part).close()  # a task takes it over
            yield from publish_parts(session, self._target, parts).items()
            return
        for part in parts:
            yield part.slot, self._slot(part).publish(part)

    def _slot(self, part: Part) -> Slot:
        output = part.publication.output
        return self._taken.setdefault(part.slot, Slot(self._target, output, part.slot))

    def close(self) -> None:
        for slot in self._taken.values():
            slot.close()
        self._adding = None

    # -------------------------------------------------------------- without a ledger

    def add(self, publication: Publication) -> None:
        if not all(os.path.exists(file.path) for file in publication.files):
            return
        kafka, target, failures = confluent(), self._target, self._failures
        if self._adding is None:
            largest = {"message.max.bytes": max(1000, target.largest)}
            self._adding = self._cluster.producer(on_delivery=self._note, **largest)
        failures.clear()
        try:
            for file in publication.files:
                for messages in target.layout.read(file.path):
                    produce(self._adding, target, messages)
            left = self._adding.flush(self._cluster.timeout)
        except kafka.KafkaException as error:
            self._adding = None
            raise self._cluster.explain(error.args[0], "write", topic=self.topic) from error
        if left or failures:
            self._adding = None
            why = failures[0].str() if failures else "the broker does not answer"
            raise PublishFailed(
                f"{self}: {left + len(failures)} rows of epoch {publication.epoch} may not have "
                f"been written: {why}",
                hint="check that the brokers can be reached; with at-least-once onceflow adds the "
                "rows again",
            )

    def _note(self, error: Any, _: Any) -> None:
        if error is not None:
            self._failures.append(error)

    # -------------------------------------------------------------- what is open

    def transactional_ids(self, output: str) -> list[str]:
        """The ids of all slots that the output has or may have had."""
        ledger = self._cluster.topics([self.ledger])[self.ledger]
        slots = range(ledger.partitions if ledger else 0)
        return [transactional_id(self.ledger, output, slot) for slot in slots]

    def end_transactions(self, output: str) -> list[str]:
        """End the open transactions of this output's drivers, and shut out those that still run."""
        ids = self.transactional_ids(output)
        for slot in range(len(ids)):
            Slot(self._target, output, slot).shut_out()
        return ids

    def held_back(self) -> list[dict[str, Any]]:
        """The partitions of topic and ledger in which a transaction, of anybody, is open."""
        found = []
        for topic in filter(None, self._cluster.topics([self.topic, self.ledger]).values()):
            stable, end = (
                self._cluster.ends(topic.name, range(topic.partitions), stable=s)
                for s in (True, False)
            )
            found += [
                {"topic": topic.name, "partition": p, "stable": stable[p], "end": end[p]}
                for p in sorted(end)
                if stable[p] < end[p]
            ]
        return found


def _tuple(names: str | Iterable[str] | None) -> str | tuple[str, ...] | None:
    return names if names is None or isinstance(names, str) else tuple(names)


def _task(file: Committable) -> str:
    """The beginning of the names of all files of one Spark task: `part-00003-`."""
    found = re.match(r"part-\d+-", os.path.basename(file.path))
    return found[0] if found else file.path


def _by_slot(files: Iterable[Committable]) -> dict[int, list[Committable]]:
    """Slot 0 is always among them, so that even an epoch without rows moves the ledger."""
    found: dict[int, list[Committable]] = {0: []}
    for file in files:
        slot = int(file.partition.removeprefix("slot=") or "0")
        found.setdefault(slot, []).append(file)
    return found


def _session() -> Any:
    """The Spark session that this epoch runs in, if there is one."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()
