"""The budget service: charges committed clicks to the budgets of campaigns.

It reads the counts of both regions, as they are committed, and keeps four tables in budget.db:

    charges     one row for each pane (its record id is the key): clicks times the ad's price
    campaigns   what each has spent; since when it is paused, because its budget is spent
    progress    up to where each partition was read
    read        which logs or topics that is true of, by their own ids

Charges and progress are in one transaction. So `kill -9` at any moment loses no charge and doubles
none, and neither does a pane that is read twice. Counts that were replaced, set back or changed
under it are refused: what was charged is not right any more, and a person must look. Clicks on a
paused ad that still come are charged all the same: what is charged is always committed clicks times
price.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from ads.database import connect, rows, transaction
from ads.places import COMMAND, Places
from ads.world import ADS, BUDGETS, PARTITIONS, REGIONS
from onceflow.errors import JobError, OutOfRange, ServerSilent
from onceflow.log import EmbeddedLog

Pane = dict[str, Any]  # with the columns of COUNT
Positions = dict[tuple[str, int], int]  # place and partition -> the next offset
_MOST = 20_000  # panes in one transaction
_PATIENCE = 30.0  # seconds in which a broker says something
_BROKER = f"start the broker, and create the topics: {COMMAND} create"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS charges (record_id TEXT PRIMARY KEY, region TEXT NOT NULL,
    ad TEXT NOT NULL, campaign TEXT NOT NULL, clicks INTEGER NOT NULL, micros INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS campaigns (campaign TEXT PRIMARY KEY, budget_micros INTEGER NOT NULL,
    clicks INTEGER NOT NULL DEFAULT 0, spent_micros INTEGER NOT NULL DEFAULT 0, paused_at TEXT);
CREATE TABLE IF NOT EXISTS progress (place TEXT, partition INTEGER, next_offset INTEGER NOT NULL,
    PRIMARY KEY (place, partition));
CREATE TABLE IF NOT EXISTS read (place TEXT PRIMARY KEY, id TEXT NOT NULL);
"""
_CAMPAIGNS = (
    "SELECT campaign, clicks, spent_micros, budget_micros, paused_at FROM campaigns ORDER BY rowid"
)


@dataclass(frozen=True)
class Campaign:
    """A campaign with its charges so far."""

    campaign: str
    clicks: int
    spent_micros: int
    budget_micros: int
    paused_at: str | None

    @property
    def paused(self) -> bool:
        return self.paused_at is not None


class Budget:
    """One service on one database. A second one does no harm: both charge each pane once."""

    def __init__(self, places: Places) -> None:
        self._db = connect(budget_file(places))
        with transaction(self._db):
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.executemany(
                "INSERT INTO campaigns (campaign, budget_micros) VALUES (?, ?) "
                "ON CONFLICT DO NOTHING",
                BUDGETS.items(),
            )
        self._panes = CountLogs(places) if places.kafka is None else CountTopics(places)
        self._refuse_others(budget_file(places))

    def step(self) -> int:
        """Charge the panes that were committed since. Returns how many."""
        with transaction(self._db):
            panes, reached = self._panes.read(self._progress())
            for pane in panes:
                self._charge(pane)
            self._db.executemany(
                "INSERT INTO progress VALUES (?, ?, ?) ON CONFLICT (place, partition) "
                "DO UPDATE SET next_offset = excluded.next_offset",
                [(*place, offset) for place, offset in reached.items()],
            )
        return len(panes)

    def run(self, stop: threading.Event, *, every: float = 0.2) -> None:
        """Charge until `stop` is set."""
        while not stop.is_set():
            if self.step() == 0:
                stop.wait(every)

    def catch_up(self) -> None:
        """Charge everything that is committed by now."""
        while self.step() or not self._panes.at_end():
            pass

    def close(self) -> None:
        self._panes.close()
        self._db.close()

    def _refuse_others(self, file: Path) -> None:
        """Offsets are those of the logs or topics that were read, not of others in their place."""
        found = self._panes.ids()
        with transaction(self._db):
            self._db.executemany(
                "INSERT INTO read VALUES (?, ?) ON CONFLICT DO NOTHING", found.items()
            )
            known = dict(self._db.execute("SELECT place, id FROM read").fetchall())
        for place, id in found.items():
            if known[place] != id:
                raise JobError(
                    f"{place} is not the one that was charged from: its id is {id}, and was "
                    f"{known[place]}",
                    hint=f"bring the old one back; or move {file} away, to charge all again",
                )

    def _charge(self, pane: Pane) -> None:
        ad, clicks = ADS[pane["ad"]], int(pane["clicks"])
        micros = clicks * ad.price_micros
        new = self._db.execute(
            "INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (pane["record_id"], pane["region"], ad.name, ad.campaign, clicks, micros),
        ).rowcount
        if not new:  # charged before
            self._refuse_changed(pane["record_id"], ad.name, clicks)
            return
        self._db.execute(
            "UPDATE campaigns SET clicks = clicks + ?1, spent_micros = spent_micros + ?2, "
            "paused_at = CASE WHEN paused_at IS NULL AND spent_micros + ?2 >= budget_micros "
            "THEN ?3 ELSE paused_at END WHERE campaign = ?4",
            (clicks, micros, datetime.now(UTC).isoformat(), ad.campaign),
        )

    def _refuse_changed(self, record_id: str, ad: str, clicks: int) -> None:
        charged = self._db.execute(
            "SELECT ad, clicks FROM charges WHERE record_id = ?", (record_id,)
        ).fetchone()
        if tuple(charged) != (ad, clicks):
            raise JobError(
                f"pane {record_id} was charged as {charged[1]} clicks on {charged[0]}, and is "
                f"{clicks} clicks on {ad} now",
                hint="aggregation was taken back under this service and has counted again: move "
                "the database of charges away, to charge all again, and see what was invoiced",
            )

    def _progress(self) -> Positions:
        rows = self._db.execute("SELECT place, partition, next_offset FROM progress")
        return {(place, partition): offset for place, partition, offset in rows}


def budget_file(places: Places) -> Path:
    return places.folder / "budget.db"


def paused_ads(places: Places) -> set[str]:
    """The ads that are no longer shown, because the budget of their campaign is spent."""
    spent = {each.campaign for each in campaigns(places) if each.paused}
    return {ad.name for ad in ADS.values() if ad.campaign in spent}


def campaigns(places: Places) -> list[Campaign]:
    """The campaigns with their charges; none before the service has begun."""
    return [Campaign(**row) for row in rows(budget_file(places), _CAMPAIGNS)]


# ---------------------------------------------------------------- where counts are read from


class Panes(Protocol):
    def read(self, start: Positions) -> tuple[list[Pane], Positions]:
        """Some of the panes that are committed after `start`, and where they end."""

    def ids(self) -> dict[str, str]:
        """Place -> the identity of the log or topic there."""

    def at_end(self) -> bool:
        """Was everything read that was committed then?"""

    def close(self) -> None: ...


class CountLogs:
    """Panes in the logs. A log shows whole commits only."""

    def __init__(self, places: Places) -> None:
        self._logs = [EmbeddedLog(places.log("counts", region)) for region in REGIONS]
        self._names = [f"counts/{region}" for region in REGIONS]

    def read(self, start: Positions) -> tuple[list[Pane], Positions]:
        panes: list[Pane] = []
        reached: Positions = {}
        for name, log in zip(self._names, self._logs, strict=True):
            log.refresh()
            first = [start.get((name, p), 0) for p in range(log.facts.partitions)]
            if any(at > head for head, at in zip(log.view.next, first, strict=True)):
                raise OutOfRange(
                    f"{log.path} was set back: it ends at {log.view.next}, and was read up to "
                    f"{first}",
                    hint="bring back what it held; or move budget.db away, to charge all again",
                )
            end = [min(head, at + _MOST) for head, at in zip(log.view.next, first, strict=True)]
            if first != end:
                for batch in log.read(first, end):
                    panes += batch.to_pylist()
                reached |= {(name, p): offset for p, offset in enumerate(end)}
        return panes, reached

    def ids(self) -> dict[str, str]:
        found = zip(self._names, self._logs, strict=True)
        return {name: log.refresh().facts.id for name, log in found}

    def at_end(self) -> bool:
        return True  # available panes are read at once

    def close(self) -> None:
        """Nothing to close."""


class CountTopics:
    """Panes in the topics, those of committed transactions only. Offsets are ours, not Kafka's."""

    def __init__(self, places: Places) -> None:
        from confluent_kafka import Consumer

        assert places.kafka is not None
        self._servers = places.kafka
        self._topics = [places.topic("counts", region) for region in REGIONS]
        self._assigned: Positions | None = None
        self._ended: set[tuple[str, int]] = set()  # partitions that were read to their end
        self._heard = time.monotonic()
        self._consumer = Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "ads-budget",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
            }
        )

    def read(self, start: Positions) -> tuple[list[Pane], Positions]:
        if start != self._assigned:  # at the beginning, or another service has charged
            self._assign(start)
        self._assigned = None  # if this fails, the same panes are read again
        panes: list[Pane] = []
        reached = dict(start)
        for message in self._messages():
            place = message.topic(), message.partition()
            if message.error():
                self._ended.add(place)
                continue
            self._ended.discard(place)
            panes.append(json.loads(message.value()))
            reached[place] = message.offset() + 1
        self._assigned = reached
        return panes, reached

    def _assign(self, start: Positions) -> None:
        from confluent_kafka import TopicPartition

        self._ended.clear()
        self._consumer.assign(
            [
                TopicPartition(topic, partition, start.get((topic, partition), 0))
                for topic in self._topics
                for partition in range(PARTITIONS)
            ]
        )

    def _messages(self) -> Iterable[Any]:
        """And, once for each time, that a partition has been read to its end."""
        from confluent_kafka import KafkaError, KafkaException

        try:
            found = self._consumer.consume(num_messages=_MOST, timeout=0.1)
            for message in found:
                if message.error() and message.error().code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(message.error())
        except KafkaException as error:
            raise ServerSilent(
                f"the counts can't be read from Kafka at {self._servers}: {error}", hint=_BROKER
            ) from error
        self._heard = time.monotonic() if found else self._heard
        return found

    def ids(self) -> dict[str, str]:
        from confluent_kafka import KafkaException, TopicCollection
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self._servers})
        asked = admin.describe_topics(TopicCollection(self._topics), request_timeout=_PATIENCE)
        try:
            return {topic: str(future.result().topic_id) for topic, future in asked.items()}
        except KafkaException as error:
            raise ServerSilent(
                f"Kafka at {self._servers} does not tell of the topics of counts: {error}",
                hint=_BROKER,
            ) from error

    def at_end(self) -> bool:
        if time.monotonic() - self._heard > _PATIENCE:
            raise ServerSilent(f"Kafka at {self._servers} does not answer", hint=_BROKER)
        return len(self._ended) == PARTITIONS * len(self._topics)

    def close(self) -> None:
        self._consumer.close()
