"""Commit published offsets to consumer groups, for tools that show lag. Nobody reads them back."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from onceflow.kafka.client import Cluster, Offsets, confluent


class ConsumerGroups:
    """Commits offsets, best effort and without waiting for the broker."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._groups: dict[
            str, tuple[Any, Offsets]
        ] = {}  # group -> its client, and what it committed

    def commit(self, group: str, offsets: Offsets) -> None:
        with self._lock:
            known = self._groups.get(group)
            client = known[0] if known else self._cluster.consumer(**{"group.id": group})
            self._groups[group] = (client, offsets)
            _send(client, offsets)

    def settle(self, seconds: float) -> None:
        """Wait until the brokers have the committed offsets, at most for this time."""
        deadline = time.monotonic() + seconds
        with self._lock:
            groups, self._groups = self._groups, {}
        for client, offsets in groups.values():
            while not _is_committed(client, offsets, deadline) and time.monotonic() < deadline:
                _send(client, offsets)
                time.sleep(0.05)


def _send(client: Any, offsets: Offsets) -> None:
    kafka = confluent()
    wanted = [kafka.TopicPartition(*place, offset) for place, offset in offsets.items()]
    with contextlib.suppress(kafka.KafkaException):  # the next epoch commits again
        client.commit(offsets=wanted, asynchronous=True)
        client.poll(0)


def _is_committed(client: Any, offsets: Offsets, deadline: float) -> bool:
    """Also true if the broker refuses them: there is nothing to wait for."""
    kafka = confluent()
    wanted = [kafka.TopicPartition(*place) for place in offsets]
    try:
        found = client.committed(wanted, timeout=max(0.1, deadline - time.monotonic()))
    except kafka.KafkaException as error:
        return "AUTHORIZATION" in error.args[0].name()
    return {(where.topic, where.partition): where.offset for where in found} == offsets
