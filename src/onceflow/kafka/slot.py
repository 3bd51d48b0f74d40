"""Publish one slot: rows and ledger record in one transaction, by the only producer that may.

The driver that was last to call `init_transactions` with a slot's transactional id shuts out all
others and ends their open transactions. So nobody else writes between that call and a commit, and
reading the ledger in between makes the commit a compare-and-set. The last caller wins, not the
highest term: an older driver that wakes up can shut out the leader. So a driver that was shut out
reads the ledger: a term above its own is `Fenced`; else it takes the slot again, reads again, and
continues.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from onceflow.contract.ledger import (
    Committable,
    Publication,
    Verdict,
    judge,
    refuse_older,
    staged_file_gone,
)
from onceflow.contract.schema import columns
from onceflow.errors import (
    Fenced,
    PublishFailed,
    PublishUnknown,
    TargetAway,
    TargetBehind,
)
from onceflow.faults.points import reach
from onceflow.kafka.client import Cluster, confluent
from onceflow.kafka.ledger import Published, Record, read_records, slot_ledger, transactional_id
from onceflow.kafka.sink_rows import Layout, Messages

_TAKES = 5  # how often a driver takes a slot again from an older one, before it gives up


@dataclass(frozen=True)
class Target:
    """The topic, its ledger, and the layout of messages. Executors get a copy."""

    cluster: Cluster
    topic: str
    ledger: str
    layout: Layout
    transaction_timeout: float
    largest: int = 1_000_000  # bytes: the largest message that the topic accepts

    def __str__(self) -> str:
        return f"Kafka({self.topic!r}, servers={self.cluster.servers!r})"


@dataclass(frozen=True)
class Part:
    """The part of a publication that one slot writes."""

    slot: int
    files: tuple[Committable, ...]
    publication: Publication
    number: int
    slots: int
    before: Published | None
    token: str


class _ShutOut(Exception):
    """Another producer took the slot, or the broker gave up on this one."""


class Slot:
    """The producer of one slot, and the slot's record, valid while nobody else takes the slot."""

    def __init__(self, target: Target, output: str, number: int) -> None:
        self._target, self._output, self.number = target, output, number
        self._producer: Any = None
        self._record: Record | None = None

    @property
    def name(self) -> str:
        return f"{self._target}, slot {self.number}"

    # -------------------------------------------------------------- taking

    def fence(self, *, term: int, token: str, topic_id: str) -> Record:
        """Write the term into the slot's ledger: older terms can no longer publish."""
        why = ""
        for _ in range(_TAKES):
            try:
                self.take()
                record = self._record or Record(term, token, topic_id)
                if record.last is None:
                    record = replace(record, topic=topic_id)
                is_ours = record.token == token
                refuse_older(record.term, term, self.name, is_ours=is_ours)
                self._write(iter(()), replace(record, term=term, token=token))
                reach("kafka.fenced-one")
                assert self._record is not None
                return self._record
            except _ShutOut as error:
                why = str(error)
        raise self._disputed(why)

    def publish(self, part: Part) -> Record:
        """Publish the part unless the slot has it. Returns the slot's record after that."""
        why = ""
        for _ in range(_TAKES):
            kept = self._producer is not None
            try:
                record = self._held(part)
                before, publication = part.before, part.publication
                said = slot_ledger(record, self.number, part.number, before, publication)
                if judge(said, publication, self.name) is Verdict.PUBLISH:
                    self._write(self._rows(part), self._next(record, part))
            except _ShutOut as error:
                why = str(error)
                self._refuse_newer_term(part)
                continue
            except (Fenced, TargetBehind):
                if not kept:
                    raise
                self.close()  # our record is old: another process of this driver had the slot since
                continue
            assert self._record is not None
            return self._record
        raise self._disputed(why)

    def _held(self, part: Part) -> Record:
        """The slot's record, which the driver of this term must have written last."""
        if self._producer is None:
            self.take()
        record = self._record
        if record is None or record.term < part.publication.term:
            raise TargetBehind(
                f"{self.name}: the ledger does not have term {part.publication.term}, which this "
                "driver wrote when it started: it was set back, replaced or emptied",
                hint="bring back the ledger topic as it was",
            )
        if record.term == part.publication.term and part.token not in ("", record.token):
            raise Fenced(
                f"{self.name} has term {record.term} of another driver",
                hint="only one home may publish to a target",
            )
        return record

    def _refuse_newer_term(self, part: Part) -> None:
        """Read without taking the slot: a driver that must stop does not disturb the leader."""
        said = self._read()
        if said is not None:
            refuse_older(said.term, part.publication.term, self.name)

    def _next(self, record: Record, part: Part) -> Record:
        p = part.publication
        last = Published(p.lineage, p.epoch, p.decision, part.slots)
        return replace(
            record, number=part.number, last=last, before=part.before, columns=columns(p.schema)
        )

    def shut_out(self) -> None:
        """Shut out all others and end their transactions. Does not read the ledger."""
        why = ""
        for _ in range(_TAKES):
            try:
                return self._begin()
            except _ShutOut as error:
                why = str(error)
        raise self._disputed(why)

    def take(self) -> None:
        """Shut out all others, unless that is done, and read what they have published."""
        if self._producer is None:
            self._begin()
        try:
            self._record = self._read()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        target, kafka = self._target, confluent()
        self.close()
        name = transactional_id(target.ledger, self._output, self.number)
        try:
            self._producer = target.cluster.transactional_producer(
                name,
                **{
                    "transaction.timeout.ms": int(target.transaction_timeout * 1000),
                    "message.max.bytes": max(1000, target.largest),
                },
            )
        except kafka.KafkaException as error:
            said = error.args[0]
            if said.code() == kafka.KafkaError._FENCED:
                raise _ShutOut(said.str()) from error
            raise target.cluster.explain(said, f"begin as {name}", id=name) from error

    def _read(self) -> Record | None:
        target, slot = self._target, self.number
        return read_records(target.cluster, target.ledger, self._output, [slot]).get(slot)

    def _disputed(self, why: str) -> PublishFailed:
        return PublishFailed(
            f"{self.name}: taken {_TAKES} times, and lost again each time: {why}",
            hint="stop all other drivers of this job, then start it again",
        )

    # -------------------------------------------------------------- the transaction

    def _write(self, rows: Iterator[Messages], record: Record) -> None:
        kafka, target = confluent(), self._target
        producer, began = self._producer, time.monotonic()
        try:
            producer.begin_transaction()
            reach("kafka.begun")
            for messages in rows:
                produce(producer, target, messages)
            producer.produce(
                target.ledger, record.dump(), self._output.encode(), partition=self.number
            )
            producer.flush(target.cluster.timeout)
            reach("kafka.written")
            self._commit(producer)
        except kafka.KafkaException as error:
            raise self._failed(self._cause(error.args[0]), began) from error
        except BaseException:
            self._give_up()
            raise
        self._record = record
        reach("kafka.committed-one")

    def _commit(self, producer: Any) -> None:
        """If the reply to a commit is lost, the same commit may be sent again."""
        kafka = confluent()
        deadline = time.monotonic() + self._target.cluster.timeout
        while True:
            try:
                producer.commit_transaction(max(1.0, deadline - time.monotonic()))
                return
            except kafka.KafkaException as error:
                said = error.args[0]
                if said.fatal() or said.txn_requires_abort() or not said.retriable():
                    raise
                if time.monotonic() > deadline:
                    self.close()
                    raise PublishUnknown(
                        f"{self.name}: no answer to the commit: {said.str()}",
                        hint="check that the brokers can be reached, then start the job again",
                    ) from error

    def _cause(self, error: Any) -> Any:
        """The client refuses further rows of a failed transaction without the reason. It tells the
        reason when another transaction begins, and that commits nothing."""
        kafka = confluent()
        if error.code() == kafka.KafkaError._STATE:
            try:
                self._producer.begin_transaction()
            except kafka.KafkaException as told:
                return told.args[0]
        return error

    def _failed(self, error: Any, began: float) -> Exception:
        kafka = confluent().KafkaError
        target = self._target
        shut_out = error.fatal() or error.code() in (
            kafka._FENCED, kafka._FATAL, kafka.PRODUCER_FENCED, kafka.INVALID_PRODUCER_EPOCH,
            kafka.INVALID_PRODUCER_ID_MAPPING, kafka.UNKNOWN_PRODUCER_ID, kafka._STATE,
            kafka.INVALID_TXN_STATE,
        )  # fmt: skip
        self._give_up()
        seconds = time.monotonic() - began
        if seconds > target.transaction_timeout:
            return PublishFailed(
                f"{self.name}: the rows took {seconds:.0f} s, the broker ended the transaction "
                f"after {target.transaction_timeout:g} s: {error.str()}",
                hint="raise transaction_timeout= of the sink (transaction.timeout.ms, at most "
                "transaction.max.timeout.ms of the broker), or make epochs smaller",
            )
        if shut_out:
            return _ShutOut(error.str())
        return target.cluster.explain(error, f"write to {target.topic}", topic=target.topic)

    def _give_up(self) -> None:
        """Abort the transaction, so that none of its rows becomes visible. If this fails, the next
        `take` does it."""
        producer = self._producer
        if producer is not None:
            with contextlib.suppress(confluent().KafkaException):
                producer.purge()
                producer.abort_transaction(min(10.0, self._target.cluster.timeout))
        self.close()

    def _rows(self, part: Part) -> Iterator[Messages]:
        for file in part.files:
            if not os.path.exists(file.path):
                raise staged_file_gone(str(self._target), file.path, part.publication.epoch)
            count = 0
            for messages in self._target.layout.read(file.path):
                count += len(messages[1])
                yield messages
            if count != file.rows:
                raise PublishFailed(
                    f"{file.path} has {count} rows, but {file.rows} were decided",
                    hint="the staged files were changed; put them back from a backup",
                )

    def close(self) -> None:
        self._producer = self._record = None


def produce(producer: Any, target: Target, messages: Messages) -> None:
    """Hand rows to the client, in their order. It sends them in the background, and holds at most
    `queue.buffering.max` of them."""
    keys, values, headers = messages
    send, topic = producer.produce, target.topic
    for n, (key, value) in enumerate(zip(keys, values, strict=True)):
        extra = {} if headers is None else {"headers": headers[n]}
        while True:
            try:
                send(topic, value, key, **extra)
                break
            except BufferError:
                _wait_for_room(producer, target)
    producer.poll(0)


def _wait_for_room(producer: Any, target: Target) -> None:
    """Wait as long as the broker accepts rows, however slowly."""
    full, since = len(producer), time.monotonic()
    while len(producer) >= full:
        producer.poll(0.02)
        if time.monotonic() - since > target.cluster.timeout:
            raise TargetAway(
                f"{target}: the broker accepted no row for {target.cluster.timeout:g} s",
                hint="check that the brokers can be reached; onceflow tries again",
            )
