"""Reads the committed messages of topics, up to their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from ads.places import COMMAND
from ads.world import PARTITIONS
from onceflow.errors import ServerSilent

_PATIENCE = 30.0  # seconds


def committed(servers: str, topic: str, *, last: int | None = None) -> Iterator[Any]:
    """The messages of all partitions; of the `last` so many offsets of each, if that is given."""
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

    settings = {
        "bootstrap.servers": servers,
        "group.id": "ads-reader",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    places = [TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)]
    try:
        with closing(Consumer(settings)) as consumer:
            if last is not None:
                for place in places:
                    low, high = consumer.get_watermark_offsets(place, timeout=_PATIENCE)
                    place.offset = max(low, high - last)
            consumer.assign(places)
            ended: set[int] = set()
            while len(ended) < PARTITIONS:
                message = consumer.poll(_PATIENCE)
                if message is None:
                    raise ServerSilent(f"Kafka at {servers} does not answer", hint="start it")
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(message.partition() or 0)
                else:
                    raise KafkaException(error)
    except KafkaException as failure:
        raise ServerSilent(
            f"{topic} can't be read from Kafka at {servers}: {failure}",
            hint=f"start it, and create the topics: {COMMAND} create",
        ) from failure
