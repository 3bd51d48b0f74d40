"""The ledger of an output in Kafka: a record for each slot, in a compacted topic.

Slot k writes to partition k of the ledger topic, with the output as key, in the same transaction
as its rows. So the last committed record of a partition says what that slot has published.

**How slots make one ledger.** Publications of an output are numbered (`number`), and a record says
how many slots the publication has (`slots`) and which publication it follows (`before`). A
publication begins when the one before it is complete, and it writes a record in each of its slots,
even in those that get no rows. So the record with the highest number is enough:

- if each of its slots has that number, the publication is complete, and it is the ledger;
- else it was interrupted between two slots: the ledger is the publication before it, and the driver
  that publishes it again skips the slots that have it.

**The record of a slot before a publication.** A slot that was part of the previous publication
names it. A slot that was not (slots were added, or the last epochs had few rows) names an older
one: it lacks nothing, since every publication is complete in its own slots. Such a slot keeps its
old record until a publication uses it again.

Every record has the term of the driver that wrote it. Term and number only grow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from onceflow.contract.ledger import Ledger, Position, Publication
from onceflow.errors import Damaged, PublishUnknown
from onceflow.kafka.client import Cluster, confluent

_logger = logging.getLogger(__name__)

_NEAR = 1000  # offsets before the end: the last record of a running job is nearly always there
# Seconds for which a transaction that has its ledger record may stay open. A driver writes the
# record last, and if it is alive it commits within a fraction of this time.
_LEFT_OPEN = 10.0
# Nothing expires; segments are small, so that reading stays quick.
LEDGER_TOPIC = {
    "cleanup.policy": "compact",
    "segment.bytes": str(8 << 20),
    "segment.ms": str(6 * 3600 * 1000),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(3600 * 1000),
}


@dataclass(frozen=True)
class Published:
    """One publication of an output."""

    lineage: str
    epoch: int
    decision: str
    slots: int

    @property
    def position(self) -> Position:
        return Position(self.lineage, self.epoch)


@dataclass(frozen=True)
class Record:
    """The ledger record of one slot."""

    term: int
    token: str
    topic: str  # id of the topic that the rows are in
    number: int = 0
    last: Published | None = None
    before: Published | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes, where: str) -> Record:
        try:
            found = json.loads(data)
            last, before = (found[n] and Published(**found[n]) for n in ("last", "before"))
            return cls(**{**found, "last": last, "before": before})
        except (ValueError, TypeError, KeyError) as error:
            raise Damaged(
                f"{where} holds a record that is not ours: {data[:80]!r}",
                hint="nobody else may write to the ledger topic of a sink",
            ) from error


@dataclass(frozen=True)
class Slots:
    """The records of all slots of an output."""

    records: Mapping[int, Record]

    @property
    def newest(self) -> Record | None:
        return max(self.records.values(), key=lambda record: record.number, default=None)

    @property
    def ledger(self) -> Ledger:
        newest, term = self.newest, max((r.term for r in self.records.values()), default=0)
        if newest is None or newest.last is None:
            return Ledger(term)
        whole = all(self._has(slot, newest.number) for slot in range(newest.last.slots))
        said = newest.last if whole else newest.before
        return Ledger(term, said.position, said.decision) if said else Ledger(term)

    def _has(self, slot: int, number: int) -> bool:
        return slot in self.records and self.records[slot].number == number

    def follow(self, publication: Publication) -> tuple[int, Published | None]:
        """The number of this publication, and the one that it follows."""
        newest = self.newest
        if newest is None or newest.last is None:
            return 1, None
        same = (publication.lineage, publication.epoch, publication.decision)
        if (newest.last.lineage, newest.last.epoch, newest.last.decision) == same:
            return newest.number, newest.before
        return newest.number + 1, newest.last


def slot_ledger(
    record: Record, slot: int, number: int, before: Published | None, publication: Publication
) -> Ledger:
    """The record of a slot as a ledger that `judge` takes."""
    joins = before is None or slot >= before.slots
    if record.number == number - 1 or (joins and record.number < number):
        return Ledger(record.term, publication.previous)
    if record.last is None:
        return Ledger(record.term)
    return Ledger(record.term, record.last.position, record.last.decision)


def transactional_id(ledger: str, output: str, slot: int) -> str:
    """The same in all drivers and lineages: the one that publishes a slot shuts out all others."""
    name = hashlib.sha256(f"{ledger}\n{output}".encode()).hexdigest()[:16]
    return f"onceflow-{name}-{slot}"


# ---------------------------------------------------------------- reading


def read_records(
    cluster: Cluster,
    ledger: str,
    output: str,
    partitions: Iterable[int],
    *,
    patience: float | None = None,
) -> dict[int, Record]:
    """The last committed record of the output in each partition that has one.

    It reads up to the end *with* uncommitted records: otherwise an open transaction, of anybody,
    would hide our records that lie behind its beginning. So this function waits until the
    transaction has ended, and ends it if another output of onceflow left it open. With `patience`
    it waits for so many seconds and then reads the records that are visible.
    """
    partitions = list(partitions)
    ends = cluster.ends(ledger, partitions, stable=False)
    if patience is not None:
        ends = _seen(cluster, ledger, ends, time.monotonic() + patience)
    reader = _Reader(cluster, ledger, output)
    try:
        found = reader.read({p: (max(0, end - _NEAR), end) for p, end in ends.items() if end})
        far = {p: (0, end) for p, end in ends.items() if end > _NEAR and p not in found}
        return found | reader.read(far)
    finally:
        reader.close()


def _seen(cluster: Cluster, ledger: str, ends: dict[int, int], deadline: float) -> dict[int, int]:
    """The end for a reader of committed records. A broker answers a commit before it writes the
    marker."""
    while True:
        stable = cluster.ends(ledger, ends, stable=True)
        if time.monotonic() >= deadline or all(stable[p] >= end for p, end in ends.items()):
            return stable
        time.sleep(0.01)


class _Reader:
    def __init__(self, cluster: Cluster, ledger: str, output: str) -> None:
        self._consumer = cluster.consumer(
            **{
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,  # we wait for the end
            }
        )
        self._cluster, self._ledger, self._key = cluster, ledger, output.encode()
        self._deadline = time.monotonic() + cluster.timeout
        self._end_others_at = time.monotonic() + _LEFT_OPEN

    def read(self, ranges: Mapping[int, tuple[int, int]]) -> dict[int, Record]:
        kafka = confluent()
        passing = (kafka.KafkaError._ALL_BROKERS_DOWN, kafka.KafkaError._TRANSPORT)
        left: set[int] = set(ranges)
        found: dict[int, Record] = {}
        if not left:
            return found
        starts = [kafka.TopicPartition(self._ledger, p, a) for p, (a, _) in ranges.items()]
        self._consumer.assign(starts)
        while left and time.monotonic() < self._deadline:
            if time.monotonic() >= self._end_others_at:
                self._end_others_at = time.monotonic() + _LEFT_OPEN
                _end_others(self._cluster, self._ledger, self._key, left)
            message = self._consumer.poll(0.1)
            if message is None:
                continue
            p, error = message.partition(), message.error()
            if error is None and message.key() == self._key:
                where = f"{self._ledger}, partition {p}, offset {message.offset()}"
                found[p] = Record.load(message.value(), where)
            elif error is not None and error.code() != kafka.KafkaError._PARTITION_EOF:
                if error.retriable() or error.code() in passing:
                    continue
                raise self._cluster.explain(error, f"read {self._ledger}", topic=self._ledger)
            if message.offset() + (error is None) >= ranges[p][1]:
                left.discard(p)
        if left:
            raise PublishUnknown(
                f"ledger {self._ledger}, partition {', '.join(map(str, sorted(left)))}: an open "
                "transaction of another program hides the records behind it, or the broker is away",
                hint="it ends by its transaction timeout; kafka-transactions.sh find-hanging and "
                "abort end it at once. If nobody else writes there: brokers 4.3.0 and 4.3.1 may "
                "lose the end of a transaction, see docs/kafka.md before you abort it",
            )
        return found

    def close(self) -> None:
        self._consumer.close()


# ---------------------------------------------------------------- transactions of other outputs


def _end_others(cluster: Cluster, ledger: str, ours: bytes, partitions: Iterable[int]) -> None:
    """End the transactions that other outputs of onceflow left open in front of our records.

    Slot k of every output writes to partition k, so the first record of an open transaction there
    names its output and with it the transactional id. If a driver of that output is still alive,
    it takes its slot again, reads its ledger, and publishes again: see `slot.py`. Transactions of
    other programs stay open.
    """
    partitions = list(partitions)
    stable = cluster.ends(ledger, partitions, stable=True)
    ends = cluster.ends(ledger, partitions, stable=False)
    for partition in partitions:
        if stable[partition] >= ends[partition]:
            continue
        key = _output_at(cluster, ledger, partition, stable[partition])
        if key in (None, ours):
            continue
        output = key.decode()
        name = transactional_id(ledger, output, partition)
        _logger.warning(
            "%s, partition %d: ending the transaction that %s left open", ledger, partition, output
        )
        try:
            cluster.transactional_producer(name)
        except confluent().KafkaException as error:  # its own driver may have been faster
            _logger.warning("%s: %s", name, error.args[0].str())


def _output_at(cluster: Cluster, ledger: str, partition: int, offset: int) -> bytes | None:
    """The output whose record, committed or not, is at this offset; None for other records."""
    kafka = confluent()
    consumer = cluster.consumer(**{"isolation.level": "read_uncommitted", "fetch.wait.max.ms": 10})
    try:
        consumer.assign([kafka.TopicPartition(ledger, partition, offset)])
        deadline = time.monotonic() + _LEFT_OPEN
        while time.monotonic() < deadline:
            message = consumer.poll(0.1)
            if message is None:
                continue
            if message.error() is not None or message.offset() != offset:
                return None
            Record.load(message.value(), ledger)
            return bytes(message.key())
    except Damaged:  # not a record of a slot
        pass
    finally:
        consumer.close()
    return None
