"""Sends lines to the raw logs or topics, each batch once, even if it is sent again."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Protocol

from ads.generator import Line, table
from ads.places import Places
from ads.stream import Stream
from ads.topics import committed
from ads.world import PARTITIONS, REGIONS
from onceflow.errors import JobError, ServerSilent
from onceflow.log import EmbeddedLog

Lines = dict[str, list[Line]]  # by region
_PRODUCER = "ads-generator"


class Raw(Protocol):
    def append(self, lines: Lines, batch: int) -> None:
        """Send a batch, unless it was sent before. Their numbers grow."""


def raw(places: Places) -> Raw:
    return RawLogs(places) if places.kafka is None else RawTopics(places)


class RawLogs:
    """A log remembers the number of the last batch, so each region has it once."""

    def __init__(self, places: Places) -> None:
        self._logs = {region: EmbeddedLog(places.log("raw", region)) for region in REGIONS}

    def append(self, lines: Lines, batch: int) -> None:
        for region, some in lines.items():
            self._logs[region].append(table(some), producer=_PRODUCER, sequence=batch)


class RawTopics:
    """A batch is one transaction over both regions. Each message carries the number of the batch,
    so that after a crash the next feed sees which batch was the last."""

    def __init__(self, places: Places) -> None:
        from confluent_kafka import KafkaException, Producer

        assert places.kafka is not None
        self._servers = places.kafka
        self._topics = {region: places.topic("raw", region) for region in REGIONS}
        settings = {
            "bootstrap.servers": self._servers,
            "transactional.id": _PRODUCER,
            "queue.buffering.max.messages": 1_000_000,
            "linger.ms": 5,
            "log_level": 0,  # raises if it failed
        }
        self._producer = Producer(settings)
        try:
            self._producer.init_transactions(
                60
            )  # ends a transaction that an earlier life left open
        except KafkaException as error:
            raise ServerSilent(
                f"Kafka at {self._servers} does not answer: {error}", hint="start it"
            ) from error
        self._last = self._last_batch()

    def append(self, lines: Lines, batch: int) -> None:
        if batch <= self._last:
            return
        from confluent_kafka import KafkaException

        try:
            self._send(lines, batch)
        except (KafkaException, BufferError) as error:
            raise ServerSilent(
                f"a batch can't be sent to Kafka at {self._servers}: {error}",
                hint="start the broker, then run it again with the same folder",
            ) from error
        self._last = batch

    def _send(self, lines: Lines, batch: int) -> None:
        self._producer.begin_transaction()
        headers: list[tuple[str, str | bytes | None]] = [("batch", str(batch).encode())]
        for region, some in lines.items():
            for number, line in enumerate(some):
                value = line.value.encode()
                self._producer.produce(
                    self._topics[region],
                    value,
                    partition=zlib.crc32(value) % PARTITIONS,
                    timestamp=round(line.received.timestamp() * 1000),
                    headers=headers,
                )
                if number % 1000 == 0:
                    self._producer.poll(0)
        self._producer.commit_transaction(60)

    def _last_batch(self) -> int:
        """A batch that was committed last is at the end of the partitions that it went to: nothing
        but the mark of its commit is behind it."""
        return max(
            (
                int(dict(message.headers())["batch"])
                for topic in self._topics.values()
                for message in committed(self._servers, topic, last=3)
            ),
            default=0,
        )


class Feed:
    """A stream that continues where it was, even after `kill -9`.

    1. note   in stream.json what will be sent, so that the expected result has it
    2. send   the batch; after a crash it is sent again under the same number, and counts once
    """

    def __init__(self, places: Places, stream: Stream) -> None:
        self._places, self._raw = places, raw(places)
        self.stream = Stream.load(places.folder) or stream
        same = self.stream.seed, self.stream.per_minute, self.stream.clean
        if same != (stream.seed, stream.per_minute, stream.clean):
            raise JobError(
                f"{places.folder} has another stream: seed {same[0]}, {same[1]} events a minute",
                hint="give the same options to continue it, or name a new folder",
            )
        self._generator = self.stream.generator()
        self._unsent = False
        self._send_last_again()

    def send(self, chunks: int) -> Lines:
        """The next so many chunks as one batch."""
        if self.stream.closed:
            raise JobError("the stream is closed", hint="name a new folder")
        self._note(replace(self.stream, chunks=self.stream.chunks + chunks, chunks_in_batch=chunks))
        return self._send(self._next(chunks))

    def close(self) -> Lines:
        """Send the last lines, which close everything that is open."""
        if self.stream.closed:
            return {}
        self._note(replace(self.stream, closed=True, chunks_in_batch=0))
        return self._send(self._generator.closing())

    def _note(self, stream: Stream) -> None:
        if self._unsent:
            raise JobError(
                "the last batch could not be sent, and nothing goes past it",
                hint="run it again with the same folder: it sends that batch first",
            )
        self.stream = replace(stream, batch=stream.batch + 1)
        self.stream.save(self._places.folder)

    def _send_last_again(self) -> None:
        stream = self.stream
        self._next(stream.chunks - stream.chunks_in_batch)
        lines = self._next(stream.chunks_in_batch)
        if stream.closed:
            lines = self._generator.closing()
        if stream.batch:
            self._send(lines)

    def _send(self, lines: Lines) -> Lines:
        self._unsent = True
        self._raw.append(lines, self.stream.batch)
        self._unsent = False
        return lines

    def _next(self, chunks: int) -> Lines:
        found: Lines = {region: [] for region in REGIONS}
        for _ in range(chunks):
            for region, lines in self._generator.chunk().items():
                found[region] += lines
        return found
