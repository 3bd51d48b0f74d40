"""The one client of Kafka: connections, topics, offsets, and deadlines.

If a request of librdkafka's admin client times out and the answer still arrives, an assertion can
end the whole process (librdkafka 2.16). So each admin client lives for one request, and it is used
only after a consumer has just received an answer from the broker.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from onceflow.contract.extras import require
from onceflow.errors import JobError, OnceflowError
from onceflow.kafka.errors import explain_client
from onceflow.kafka.settings import with_environment

_logger = logging.getLogger(__name__)

_SLACK = 10.0  # seconds that we wait for a client beyond its own timeout
_PRODUCER = {
    "enable.idempotence": True,
    "acks": "all",
    "partitioner": "murmur2_random",  # as in the Java client: a key keeps its partition
    "compression.type": "lz4",
    "linger.ms": 20,
    "queue.buffering.max.messages": 100_000,
    "queue.buffering.max.kbytes": 64 * 1024,
    "delivery.report.only.error": True,
    "allow.auto.create.topics": False,
}

Place = tuple[str, int]  # topic, partition
Offsets = dict[Place, int]


def confluent() -> Any:
    require("kafka", "the Kafka client")
    import confluent_kafka
    import confluent_kafka.admin

    return confluent_kafka


@dataclass(frozen=True)
class Topic:
    """A topic as the broker describes it; `id` differs from that of a later one of this name."""

    name: str
    id: str
    partitions: int
    replication: int


@dataclass(frozen=True)
class Cluster:
    """Brokers and the settings to reach them. Executors get a copy."""

    servers: str
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of librdkafka
    timeout: float = 60.0  # seconds for one request
    reads: bool = False  # does a source use it? Then errors are those of a source

    # -------------------------------------------------------------- clients

    def client(self, **settings: Any) -> dict[str, Any]:
        ours = {"bootstrap.servers": self.servers, "logger": _logger, "error_cb": _heard}
        return {**with_environment(self.settings), **ours, **settings}

    def producer(self, **settings: Any) -> Any:
        return self._make("Producer", {**_PRODUCER, **self.client(**settings)})

    def transactional_producer(self, id: str, **settings: Any) -> Any:
        """A producer that has shut out all others with its id and ended their open transactions.

        Errors of the client are not translated.
        """
        kafka = confluent()
        producer = self.producer(**{"transactional.id": id, **settings})
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                producer.init_transactions(max(1.0, deadline - time.monotonic()))
                return producer
            except kafka.KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise

    def consumer(self, **settings: Any) -> Any:
        own = {"group.id": "onceflow", "enable.auto.commit": False, "enable.partition.eof": True}
        return self._make("Consumer", self.client(**{**own, **settings}))

    def admin(self) -> Any:
        """Use it for one request only: see the docstring of this module."""
        return self._make("admin.AdminClient", self.client())

    def _make(self, kind: str, settings: dict[str, Any]) -> Any:
        kafka = confluent()
        make = kafka.admin.AdminClient if kind == "admin.AdminClient" else getattr(kafka, kind)
        try:
            return make(settings)
        except kafka.KafkaException as error:
            raise JobError(
                f"settings of Kafka at {self.servers} are wrong: {error.args[0].str()}",
                hint="they are those of librdkafka, for instance sasl.mechanism; see the sections "
                "on settings in docs/kafka.md",
            ) from None

    def explain(
        self, error: Any, doing: str, *, topic: str = "", id: str = "", heard: str = ""
    ) -> OnceflowError:
        """Our error for a KafkaError, with the fix."""
        return explain_client(
            error, doing, servers=self.servers, reads=self.reads, topic=topic, id=id, heard=heard
        )

    @contextlib.contextmanager
    def _asking(self, doing: str, *, topic: str = "", **settings: Any) -> Iterator[Any]:
        """A consumer for one request. Translated errors quote what the client last reported."""
        kafka, heard = confluent(), [""]
        consumer = self.consumer(error_cb=lambda error: heard.append(error.str()), **settings)
        try:
            yield consumer
        except kafka.KafkaException as error:
            with contextlib.suppress(kafka.KafkaException):
                consumer.poll(0)  # delivers errors of connections
            raise self.explain(error.args[0], doing, topic=topic, heard=heard[-1]) from None
        finally:
            consumer.close()  # now: it must not call back while Python destroys it

    # -------------------------------------------------------------- topics

    def topics(self, names: Iterable[str]) -> dict[str, Topic | None]:
        """Each topic as the broker describes it; None if there is none. Never creates a topic."""
        names = list(names)
        doing = f"describe topic {', '.join(names)}"
        with self._asking(doing, topic=names[0] if names else "") as consumer:
            consumer.list_topics(*names[:1], timeout=self.timeout)
        return self._described(names)

    def matching(self, pattern: re.Pattern[str]) -> dict[str, Topic]:
        """The topics whose whole names match."""
        with self._asking("list topics") as consumer:
            listed = consumer.list_topics(timeout=self.timeout).topics
        names = sorted(name for name in listed if pattern.fullmatch(name))
        return {name: topic for name, topic in self._described(names).items() if topic is not None}

    def _described(self, names: list[str]) -> dict[str, Topic | None]:
        kafka = confluent()
        if not names:
            return {}
        admin = self.admin()
        asked = admin.describe_topics(kafka.TopicCollection(names), request_timeout=self.timeout)
        return {name: self._topic(name, asked[name]) for name in names}

    def _topic(self, name: str, asked: Any) -> Topic | None:
        kafka = confluent()
        try:
            said = asked.result(self.timeout + _SLACK)
        except kafka.KafkaException as error:
            if error.args[0].code() == kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise self.explain(error.args[0], f"describe topic {name}", topic=name) from None
        if said.is_internal:
            return None
        replication = min(len(partition.replicas) for partition in said.partitions)
        return Topic(name, str(said.topic_id), len(said.partitions), replication)

    def create(
        self, name: str, partitions: int, replication: int, config: Mapping[str, str]
    ) -> None:
        kafka = confluent()
        new = kafka.admin.NewTopic(name, partitions, replication, config=dict(config))
        admin = self.admin()
        made = admin.create_topics([new], operation_timeout=self.timeout)[name]
        self._done(made, f"create topic {name}", name, kafka.KafkaError.TOPIC_ALREADY_EXISTS)

    def grow(self, name: str, partitions: int) -> None:
        kafka = confluent()
        more = [kafka.admin.NewPartitions(name, partitions)]
        admin = self.admin()
        made = admin.create_partitions(more, operation_timeout=self.timeout)[name]
        self._done(made, f"add partitions to {name}", name, kafka.KafkaError.INVALID_PARTITIONS)

    def _done(self, made: Any, doing: str, topic: str, by_another: int) -> None:
        kafka = confluent()
        try:
            made.result(self.timeout + _SLACK)
        except kafka.KafkaException as error:
            if error.args[0].code() != by_another:
                raise self.explain(error.args[0], doing, topic=topic) from error

    def topic_setting(self, topic: str, name: str) -> str | None:
        """None if this user may not read settings."""
        kafka = confluent()
        resource = kafka.admin.ConfigResource(kafka.admin.ResourceType.TOPIC, topic)
        admin = self.admin()
        asked = admin.describe_configs([resource], request_timeout=self.timeout)[resource]
        try:
            return str(asked.result(self.timeout + _SLACK)[name].value)
        except kafka.KafkaException as error:
            if error.args[0].code() == kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return None
            raise self.explain(error.args[0], f"describe topic {topic}", topic=topic) from error

    # -------------------------------------------------------------- offsets

    def ends(self, topic: str, partitions: Iterable[int], *, stable: bool) -> dict[int, int]:
        """The end of each partition: behind its last record, or (`stable`) before the first
        record of an open transaction."""
        kafka = confluent()
        level = (
            kafka.IsolationLevel.READ_COMMITTED if stable else kafka.IsolationLevel.READ_UNCOMMITTED
        )
        latest = kafka.admin.OffsetSpec.latest()
        places = {kafka.TopicPartition(topic, p): latest for p in partitions}
        known = kafka.KafkaError
        passing = (
            known.NOT_LEADER_FOR_PARTITION, known.LEADER_NOT_AVAILABLE, known.OFFSET_NOT_AVAILABLE,
            known.FENCED_LEADER_EPOCH, known.UNKNOWN_TOPIC_OR_PART, known._UNKNOWN_PARTITION,
        )  # fmt: skip
        deadline = time.monotonic() + self.timeout
        while True:
            admin = self.admin()
            asked = admin.list_offsets(places, isolation_level=level, request_timeout=self.timeout)
            try:
                found = {at: said.result(self.timeout + _SLACK) for at, said in asked.items()}
                return {at.partition: said.offset for at, said in found.items()}
            except kafka.KafkaException as error:
                # Not every broker knows a topic that was just created or grown, and a partition
                # whose broker has just started again has no leader yet.
                if error.args[0].code() not in passing or time.monotonic() > deadline:
                    raise self.explain(error.args[0], f"read {topic}", topic=topic) from error
            time.sleep(0.05)

    def ranges(self, places: Iterable[Place], isolation: str) -> dict[Place, tuple[int, int]]:
        """The earliest offset, and the one behind the last row that a reader may see."""
        ask = confluent().TopicPartition
        with self._asking("read offsets", **{"isolation.level": isolation}) as consumer:
            return {
                place: consumer.get_watermark_offsets(ask(*place), timeout=self.timeout)
                for place in places
            }

    def offsets_at(self, places: Iterable[Place], milliseconds: int, isolation: str) -> Offsets:
        """The offset of the first row with that time or a later one; the end if there is none."""
        ask = confluent().TopicPartition
        ends = self.ranges(
            places, isolation
        )  # first, so that no row that arrives meanwhile is left out
        if not ends:
            return {}
        wanted = [ask(*place, milliseconds) for place in ends]
        with self._asking("read the offsets of a time") as consumer:
            found = consumer.offsets_for_times(wanted, timeout=self.timeout)
        offsets = {(where.topic, where.partition): where.offset for where in found}
        return {p: offset if offset >= 0 else ends[p][1] for p, offset in offsets.items()}


def _heard(error: Any) -> None:
    """Only logs it: the call that fails raises its error. Without this callback the client would
    raise a fatal error from the next call, even from one that succeeds (as a SystemError)."""
    _logger.debug("Kafka's client: %s", error)
