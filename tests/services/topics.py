"""Topics as anybody finds them: read by confluent-kafka, not by onceflow."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec


@dataclass(frozen=True)
class Message:
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


@cache
def admin(servers: str) -> Any:
    return AdminClient({"bootstrap.servers": servers, "log_level": 0})


def make_topic(servers: str, name: str, partitions: int = 1, **config: str) -> str:
    wanted = {key.replace("_", "."): value for key, value in config.items()}
    made = admin(servers).create_topics([NewTopic(name, partitions, 1, config=wanted)])
    made[name].result(30)
    while not topic_exists(servers, name):  # the broker hears of it from the controller
        time.sleep(0.02)
    return name


def topic_exists(servers: str, name: str) -> bool:
    return name in admin(servers).list_topics(timeout=30).topics


def partitions(servers: str, topic: str) -> int:
    said = admin(servers).describe_topics(TopicCollection([topic]))[topic].result(30)
    return len(said.partitions)


def topic_id(servers: str, topic: str) -> str:
    said = admin(servers).describe_topics(TopicCollection([topic]))[topic].result(30)
    return str(said.topic_id)


def ends(servers: str, topic: str, *, stable: bool) -> dict[int, int]:
    """Where each partition ends: for everybody, or for those who read committed."""
    level = IsolationLevel.READ_COMMITTED if stable else IsolationLevel.READ_UNCOMMITTED
    asked = admin(servers).list_offsets(
        {TopicPartition(topic, p): OffsetSpec.latest() for p in range(partitions(servers, topic))},
        isolation_level=level,
    )
    return {at.partition: said.result(30).offset for at, said in asked.items()}


def wait_for_markers(servers: str, topic: str, seconds: float) -> dict[int, int]:
    """A commit is answered before its markers are in all partitions. Not for ever: a transaction
    may be open."""
    deadline = time.monotonic() + seconds
    while True:
        stable = ends(servers, topic, stable=True)
        if stable == ends(servers, topic, stable=False) or time.monotonic() > deadline:
            return stable
        time.sleep(0.02)


def message_rows(servers: str, topic: str, *, committed: bool = True) -> list[Message]:
    """All messages that a consumer sees now, partition by partition."""
    if not topic_exists(servers, topic):
        return []
    aside = threading.current_thread() is not threading.main_thread()  # looks at this very moment
    until = ends(servers, topic, stable=False)
    if committed:
        until = wait_for_markers(servers, topic, 0 if aside else 30)
    consumer = Consumer({
        "bootstrap.servers": servers, "group.id": "test", "enable.auto.commit": False,
        "isolation.level": "read_committed" if committed else "read_uncommitted",
        "enable.partition.eof": True, "fetch.wait.max.ms": 10,
    })  # fmt: skip
    found: list[Message] = []
    left = {p for p, end in until.items() if end}
    consumer.assign([TopicPartition(topic, p, 0) for p in left])
    try:
        while left:
            message = consumer.poll(1.0)
            if message is None:
                continue
            error, at = message.error(), message.partition()
            assert error is None or error.code() == KafkaError._PARTITION_EOF, error
            if error is not None:
                if message.offset() >= until[at]:
                    left.discard(at)
            elif message.offset() < until[at]:
                found.append(Message(at, message.offset(), message.key(), message.value(),
                                     message.headers() or []))  # fmt: skip
    finally:
        consumer.close()
    return sorted(found, key=lambda message: (message.partition, message.offset))
