"""A Kafka topic to which rows are appended once, even if an append is repeated."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

from onceflow.harness.server_targets import QUIET, Reader, ends, kafka_admin
from onceflow.harness.targets import Away

if TYPE_CHECKING:
    import pyarrow as pa

_WITHIN = 10.0  # seconds for one call
_NEAR = 500  # offsets; the last transaction is shorter


class TopicLog:
    """Each append is one transaction of one producer. If its end is unknown, the next call starts a
    producer with the same id, which ends the open transaction, and checks whether the rows came."""

    def __init__(self, servers: str, topic: str, *, partitions: int = 2) -> None:
        self._servers, self._topic, self._partitions = servers, topic, partitions
        self._producer: Any = None
        admin = kafka_admin().AdminClient({"bootstrap.servers": servers, **QUIET})
        admin.create_topics([kafka_admin().NewTopic(topic, partitions)])[topic].result(30)

    def append(self, rows: pa.Table, *, producer: str, sequence: int) -> None:
        """Raises `Away` if the rows may be there or not. Call it again with the same rows."""
        from confluent_kafka import KafkaException

        listed = rows.to_pylist()
        try:
            if self._producer is None:
                self._producer = self._take(producer)
                if listed[0]["number"] in self._last_numbers():
                    return
            self._producer.begin_transaction()
            for row in listed:
                value = json.dumps(row | {"at": row["at"].isoformat()})
                self._producer.produce(self._topic, value, row["key"])
            self._producer.commit_transaction(_WITHIN)
        except KafkaException as error:
            self._producer = None
            raise Away(f"{self._topic}: {error}") from error
        except Away:
            self._producer = None
            raise

    def heads(self) -> list[int]:
        found = ends(self._servers, [self._topic])
        return [found[self._topic, partition] for partition in range(self._partitions)]

    def _take(self, name: str) -> Any:
        from confluent_kafka import Producer

        producer = Producer({
            "bootstrap.servers": self._servers, "transactional.id": f"{name}-{self._topic}",
            "transaction.timeout.ms": 10_000, "linger.ms": 0, **QUIET,
        })  # fmt: skip
        producer.init_transactions(_WITHIN)
        return producer

    def _last_numbers(self) -> list[int]:
        with closing(Reader(self._servers, [self._topic])) as reader:
            reader.read_all(_WITHIN, last=_NEAR)
            return [
                json.loads(value)["number"]
                for found in reader.messages.values()
                for _, value in found
            ]
