"""Kafka's clients as the sink wants them: their settings, topics, and errors in plain words."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onceflow.contract.extras import require
from onceflow.errors import (
    JobError,
    OnceflowError,
    PublishFailed,
    SetupError,
    TargetAway,
    TargetError,
)

_logger = logging.getLogger(__name__)

# What a guarantee rests on is not for settings to change.
_OURS = {
    "bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "isolation.level",
    "transaction.timeout.ms", "group.id", "enable.auto.commit", "enable.partition.eof",
    "partitioner", "delivery.report.only.error", "message.max.bytes", "logger", "error_cb",
    "max.in.flight.requests.per.connection", "allow.auto.create.topics",
}  # fmt: skip
_SECRET = re.compile(r"password|secret|token|jaas|\.pem$|oauthbearer\.config|sasl\.oauthbearer")
_ENV = "env:"
# Brokers that do not answer, or are too few for now.
_AWAY = (
    "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_MSG_TIMED_OUT",
    "REQUEST_TIMED_OUT", "NETWORK_EXCEPTION", "BROKER_NOT_AVAILABLE", "LEADER_NOT_AVAILABLE",
    "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
)  # fmt: skip
_SLACK = 10.0  # seconds after its own timeout at which a client that says nothing is given up
_PRODUCER = {
    "enable.idempotence": True,
    "acks": "all",
    "partitioner": "murmur2_random",  # as the Java client: a key goes to the partition it knows
    "compression.type": "lz4",
    "linger.ms": 20,
    "queue.buffering.max.messages": 100_000,
    "queue.buffering.max.kbytes": 64 * 1024,
    "delivery.report.only.error": True,
    "allow.auto.create.topics": False,
}


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    wrong = sorted(_OURS & set(settings))
    if wrong:
        raise JobError(
            f"settings of a Kafka sink cannot change {', '.join(wrong)}",
            hint="leave it out: servers=, timeout= and transaction_timeout= are what can be chosen",
        )
    return dict(settings)


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What may be written down. A value like `env:NAME` names a secret and is none."""
    return {
        name: value
        for name, value in settings.items()
        if not _SECRET.search(name) or str(value).startswith(_ENV)
    }


def confluent() -> Any:
    require("kafka", "the Kafka client")
    import confluent_kafka
    import confluent_kafka.admin

    return confluent_kafka


@dataclass(frozen=True)
class Topic:
    """A topic as the broker describes it."""

    name: str
    id: str
    partitions: int
    replication: int


@dataclass(frozen=True)
class Cluster:
    """Where the topic is, and how to speak to the brokers. Goes to executors as it is."""

    servers: str
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    timeout: float = 60.0

    def __reduce__(self) -> tuple[Any, ...]:
        return (Cluster, (self.servers, self.settings, self.timeout))  # clients stay here

    def client(self, **settings: Any) -> dict[str, Any]:
        resolved = {name: _resolve(name, value) for name, value in self.settings.items()}
        ours = {"bootstrap.servers": self.servers, "logger": _logger, "error_cb": _heard}
        return {**resolved, **ours, **settings}

    def producer(self, **settings: Any) -> Any:
        return self._make("Producer", {**_PRODUCER, **self.client(**settings)})

    def transactional_producer(self, id: str, **settings: Any) -> Any:
        """A producer that has shut out all others with its id and ended what they left open.

        Raises what the client raises.
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
        return self._make("Consumer", self.client(**own, **settings))

    def admin(self) -> Any:
        """For one request. librdkafka ends the process if an answer comes after its time was up,
        so nobody keeps one that could still hear it."""
        return self._make("admin.AdminClient", self.client())

    def _make(self, kind: str, settings: dict[str, Any]) -> Any:
        kafka = confluent()
        make = kafka.admin.AdminClient if kind == "admin.AdminClient" else getattr(kafka, kind)
        try:
            return make(settings)
        except kafka.KafkaException as error:
            raise JobError(
                f"settings of Kafka at {self.servers} are wrong: {error.args[0].str()}",
                hint="they are those of librdkafka, for instance sasl.mechanism",
            ) from error

    # -------------------------------------------------------------- topics

    def topics(self, names: Iterable[str]) -> dict[str, Topic | None]:
        """What the broker says of each; None for one that is not there. Never creates any."""
        kafka, names = confluent(), list(names)
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
            raise self.explain(error.args[0], f"look at topic {name}", topic=name) from error
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
        """None if we may not ask."""
        kafka = confluent()
        resource = kafka.admin.ConfigResource(kafka.admin.ResourceType.TOPIC, topic)
        admin = self.admin()
        asked = admin.describe_configs([resource], request_timeout=self.timeout)[resource]
        try:
            return str(asked.result(self.timeout + _SLACK)[name].value)
        except kafka.KafkaException as error:
            if error.args[0].code() == kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return None
            raise self.explain(error.args[0], f"look at topic {topic}", topic=topic) from error

    def ends(self, topic: str, partitions: Iterable[int], *, stable: bool) -> dict[int, int]:
        """Where each partition ends: behind its last record, or (`stable`) before the first one
        of a transaction that is still open."""
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
                # A topic that was just made or grown is not known to every broker, and one whose
                # broker just came back has no leader yet.
                if error.args[0].code() not in passing or time.monotonic() > deadline:
                    raise self.explain(error.args[0], f"read {topic}", topic=topic) from error
            time.sleep(0.05)

    # -------------------------------------------------------------- errors

    def explain(self, error: Any, doing: str, *, topic: str = "", id: str = "") -> OnceflowError:
        """Which error it is for us, with the fix; `error` is a KafkaError."""
        code, at = error.code(), f"Kafka at {self.servers}: cannot {doing}: {error.str()}"
        known = type(error)
        rights = {
            known.TOPIC_AUTHORIZATION_FAILED: "--operation Describe --operation Read --operation "
            "Write --operation Create --operation Alter --operation DescribeConfigs "
            f"--topic {topic}",
            known.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "--operation Describe --operation Write "
            f"--transactional-id {id or 'onceflow-'} --resource-pattern-type prefixed",
            known.CLUSTER_AUTHORIZATION_FAILED: "--operation IdempotentWrite --operation Create "
            "--cluster",
        }
        if code in rights:
            hint = f"kafka-acls --add --allow-principal User:NAME {rights[code]}"
            return TargetError(at, hint=hint)
        if code in (known._AUTHENTICATION, known.SASL_AUTHENTICATION_FAILED):
            return TargetError(at, hint="look at sasl.mechanism, sasl.username, sasl.password")
        if code == known.INVALID_TRANSACTION_TIMEOUT:
            return TargetError(
                at,
                hint="transaction_timeout= of the sink must not be above transaction.max.timeout.ms"
                " of the broker: lower the one or raise the other",
            )
        if code in (known.UNKNOWN_TOPIC_OR_PART, known._UNKNOWN_TOPIC, known._UNKNOWN_PARTITION):
            return TargetError(at, hint="create the topic, or look at its name")
        if code in (known.MSG_SIZE_TOO_LARGE, known.RECORD_LIST_TOO_LARGE):
            return TargetError(at, hint=f"raise max.message.bytes of topic {topic} again")
        if code in (known.INVALID_REPLICATION_FACTOR, known.POLICY_VIOLATION):
            return TargetError(at, hint="create the topic yourself, as your cluster wants it")
        kind = TargetAway if code in [getattr(known, name) for name in _AWAY] else PublishFailed
        return kind(at, hint="see that the brokers can be reached; it is tried again")


def _heard(error: Any) -> None:
    """The call that meets an error raises it. Without this the client would raise a fatal one out
    of whatever call comes next, also out of one that says that it went well: a SystemError."""
    _logger.debug("Kafka's client: %s", error)


def _resolve(name: str, value: Any) -> Any:
    if not (isinstance(value, str) and value.startswith(_ENV)):
        return value
    found = os.environ.get(value.removeprefix(_ENV))
    if found is None:
        raise SetupError(
            f"setting {name} of a Kafka sink is in ${value.removeprefix(_ENV)}, which is not set",
            hint=f"export {value.removeprefix(_ENV)}=…",
        )
    return found
