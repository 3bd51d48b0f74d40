"""What the driver itself asks a Kafka broker, each time within a deadline.

Rows come through Spark's connector. This is for what it does not say, or says too late: is there
such a topic, is it still the same one, which offsets does it have.

An admin client of librdkafka whose request has timed out can abort the whole process when the
broker comes back (an assertion; librdkafka 2.16). So questions go through a consumer where it has
an answer, and the admin client lives for one question, asked after the broker has just answered.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onceflow.contract.extras import require
from onceflow.errors import JobError, OnceflowError, ServerSilent

_DEADLINE = 10.0  # seconds for one question

Place = tuple[str, int]  # topic, partition
Offsets = dict[Place, int]


@dataclass(frozen=True)
class Topic:
    """`id` tells a topic from another one that got its name later."""

    id: str
    partitions: int


class Broker:
    """The topics behind `servers`, as a client with these settings sees them."""

    def __init__(self, servers: str, settings: Mapping[str, str], isolation: str) -> None:
        self.servers = servers
        self._settings = dict(settings)
        self._isolation = isolation
        self._said = ""  # the last that was heard of a connection
        self._lock = threading.Lock()
        self._groups: dict[str, tuple[Any, Offsets]] = {}  # a client each, and what it committed

    # .............................................................. topics and offsets

    def topics(self, wanted: list[str] | re.Pattern[str]) -> dict[str, Topic]:
        """Those of the names, all of which must be there; or all that match, which may be none."""
        found = self.present(wanted)
        missing = [n for n in wanted if n not in found] if isinstance(wanted, list) else []
        if missing:
            raise JobError(
                f"{self.servers} has no topic {', '.join(missing)}",
                hint="create it, or mend the name",
            )
        return found

    def present(self, wanted: list[str] | re.Pattern[str]) -> dict[str, Topic]:
        """Those of the names, or that match, that are there."""
        from confluent_kafka import TopicCollection
        from confluent_kafka.admin import AdminClient

        with self._asking("its topics") as consumer:
            one = wanted[0] if isinstance(wanted, list) else None  # all may be many
            listed = consumer.list_topics(one, timeout=_DEADLINE).topics
        if isinstance(wanted, list):
            names = wanted
        else:
            names = sorted(name for name in listed if wanted.fullmatch(name))
        if not names:
            return {}
        admin = AdminClient(self._config())
        asked = admin.describe_topics(TopicCollection(names), request_timeout=_DEADLINE)
        found = {name: self._described(name, future) for name, future in asked.items()}
        return {name: topic for name, topic in found.items() if topic is not None}

    def _described(self, name: str, future: Any) -> Topic | None:
        from confluent_kafka import KafkaError, KafkaException

        try:
            said = future.result(timeout=2 * _DEADLINE)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise self._explained(error.args[0], f"topic {name}") from None
        return None if said.is_internal else Topic(str(said.topic_id), len(said.partitions))

    def ranges(self, places: Iterable[Place]) -> dict[Place, tuple[int, int]]:
        """The earliest offset, and the one behind the last row that a reader may see."""
        from confluent_kafka import TopicPartition

        with self._asking("offsets") as consumer:
            return {
                place: consumer.get_watermark_offsets(TopicPartition(*place), timeout=_DEADLINE)
                for place in places
            }

    def at(self, places: Iterable[Place], milliseconds: int) -> Offsets:
        """Of the first row with that time or a later one; behind the last if there is none."""
        from confluent_kafka import TopicPartition

        ends = self.ranges(places)  # first: a row that comes between the two is not passed over
        if not ends:
            return {}
        wanted = [TopicPartition(*place, milliseconds) for place in ends]
        with self._asking("offsets of a time") as consumer:
            found = consumer.offsets_for_times(wanted, timeout=_DEADLINE)
        offsets = {(where.topic, where.partition): where.offset for where in found}
        return {p: offset if offset >= 0 else ends[p][1] for p, offset in offsets.items()}

    # .............................................................. consumer groups

    def commit(self, group: str, offsets: Offsets) -> None:
        """Best effort, and later: it does not wait for the broker."""
        with self._lock:
            client = self._groups[group][0] if group in self._groups else self._consumer(group)
            self._groups[group] = (client, offsets)
            self._send(client, offsets)

    def settle(self, seconds: float) -> None:
        """Wait until what was committed is there, but not longer."""
        deadline = time.monotonic() + seconds
        with self._lock:
            groups, self._groups = self._groups, {}
        for client, offsets in groups.values():
            while not self._done(client, offsets, deadline) and time.monotonic() < deadline:
                self._send(client, offsets)
                time.sleep(0.05)

    @staticmethod
    def _send(client: Any, offsets: Offsets) -> None:
        from confluent_kafka import KafkaException, TopicPartition

        wanted = [TopicPartition(*place, offset) for place, offset in offsets.items()]
        with contextlib.suppress(KafkaException):  # the next epoch tells it again
            client.commit(offsets=wanted, asynchronous=True)
            client.poll(0)

    @staticmethod
    def _done(client: Any, offsets: Offsets, deadline: float) -> bool:
        """The broker has them, or does not want them."""
        from confluent_kafka import KafkaException, TopicPartition

        wanted = [TopicPartition(*place) for place in offsets]
        try:
            found = client.committed(wanted, timeout=max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            return "AUTHORIZATION" in error.args[0].name()
        return {(where.topic, where.partition): where.offset for where in found} == offsets

    # .............................................................. clients

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[Any]:
        consumer, self._said = self._consumer("onceflow", error_cb=self._hear), ""
        from confluent_kafka import KafkaException

        try:
            yield consumer
        except KafkaException as error:
            with contextlib.suppress(KafkaException):
                consumer.poll(0)  # hears what was said of connections
            raise self._explained(error.args[0], what) from None
        finally:
            consumer.close()  # at once: it may not be called back when it is half gone

    def _consumer(self, group: str, **more: Any) -> Any:
        require("kafka", "the Kafka client")
        from confluent_kafka import Consumer, KafkaException

        ours = {"group.id": group, "isolation.level": self._isolation, "enable.auto.commit": False}
        try:
            return Consumer({**self._config(), **ours, **more})
        except KafkaException as error:
            raise JobError(
                f"Kafka's client refuses the settings: {error.args[0].str()}",
                hint="see the section on settings in docs/kafka.md",
            ) from None

    def _config(self) -> dict[str, Any]:
        # Its log is quiet: what is heard of connections is told by us.
        return {**self._settings, "bootstrap.servers": self.servers, "log_level": 2}

    def _hear(self, error: Any) -> None:
        self._said = error.str()

    def _explained(self, error: Any, what: str) -> OnceflowError:
        """An error of the client by our names."""
        said = self._said or error.str()
        if "AUTHORIZATION" in error.name():
            return JobError(
                f"{self.servers} denies access to {what} ({error.name()})",
                hint="give this user the rights Describe and Read on it (kafka-acls --add "
                "--allow-principal User:… --operation Describe --operation Read --topic …)",
            )
        if "AUTHENTICATION" in error.name() or "authentication" in said.lower():
            return JobError(
                f"{self.servers} does not accept this user: {said}",
                hint="mend sasl.username, sasl.password and security.protocol in settings=",
            )
        return ServerSilent(
            f"no answer from Kafka at {self.servers} about {what}: {said}",
            hint="start the broker, or mend servers= and the network; the job then goes on",
        )
