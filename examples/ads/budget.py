"""The budget service: charges committed clicks to the budgets of campaigns.

It reads the counts of both regions, as they are committed, and keeps three tables in budget.db:

    charges     one row for each pane (its record id is the key): clicks times the ad's price
    campaigns   what each has spent; since when it is paused, because its budget is spent
    progress    up to where each partition was read

Charges and progress are in one transaction. So `kill -9` at any moment loses no charge and doubles
none, and neither does a pane that is read twice. Clicks on a paused ad that still come are charged
all the same: what is charged is always committed clicks times price.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from ads.database import connect, rows, transaction
from ads.places import Places
from ads.world import ADS, BUDGETS, PARTITIONS, REGIONS
from onceflow.errors import ServerSilent
from onceflow.log import EmbeddedLog

Pane = dict[str, Any]  # with the columns of COUNT
Positions = dict[tuple[str, int], int]  # place and partition -> the next offset
_MOST = 20_000  # panes in one transaction
_SCHEMA = """
CREATE TABLE IF NOT EXISTS charges (record_id TEXT PRIMARY KEY, region TEXT NOT NULL,
    ad TEXT NOT NULL, campaign TEXT NOT NULL, clicks INTEGER NOT NULL, micros INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS campaigns (campaign TEXT PRIMARY KEY, budget_micros INTEGER NOT NULL,
    clicks INTEGER NOT NULL DEFAULT 0, spent_micros INTEGER NOT NULL DEFAULT 0, paused_at TEXT);
CREATE TABLE IF NOT EXISTS progress (place TEXT, partition INTEGER, next_offset INTEGER NOT NULL,
    PRIMARY KEY (place, partition));
"""
_CAMPAIGNS = (
    "SELECT campaign, clicks, spent_micros, budget_micros, paused_at FROM campaigns ORDER BY rowid"
)


@dataclass(frozen=True)
class Campaign:
    """What was charged to a campaign so far."""

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

    def step(self) -> int:
        """Charge what was committed since; how many panes that were."""
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
        """Until `stop` is set."""
        while not stop.is_set():
            if self.step() == 0:
                stop.wait(every)

    def close(self) -> None:
        self._panes.close()
        self._db.close()

    def _charge(self, pane: Pane) -> None:
        ad, clicks = ADS[pane["ad"]], int(pane["clicks"])
        micros = clicks * ad.price_micros
        new = self._db.execute(
            "INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (pane["record_id"], pane["region"], ad.name, ad.campaign, clicks, micros),
        ).rowcount
        if not new:  # it was charged before
            return
        self._db.execute(
            "UPDATE campaigns SET clicks = clicks + ?1, spent_micros = spent_micros + ?2, "
            "paused_at = CASE WHEN paused_at IS NULL AND spent_micros + ?2 >= budget_micros "
            "THEN ?3 ELSE paused_at END WHERE campaign = ?4",
            (clicks, micros, datetime.now(UTC).isoformat(), ad.campaign),
        )

    def _progress(self) -> Positions:
        rows = self._db.execute("SELECT place, partition, next_offset FROM progress")
        return {(place, partition): offset for place, partition, offset in rows}


def budget_file(places: Places) -> Path:
    return places.folder / "budget.db"


def paused_ads(places: Places) -> set[str]:
    """The ads that are not shown any more, because their campaign's budget is spent."""
    spent = {each.campaign for each in campaigns(places) if each.paused}
    return {ad.name for ad in ADS.values() if ad.campaign in spent}


def campaigns(places: Places) -> list[Campaign]:
    """What is charged by now, for anybody to look at; nothing before the service has begun."""
    return [Campaign(**row) for row in rows(budget_file(places), _CAMPAIGNS)]


# ---------------------------------------------------------------- where counts are read from


class Panes(Protocol):
    def read(self, start: Positions) -> tuple[list[Pane], Positions]:
        """Some of the panes that are committed behind `start`, and where they end."""

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
            end = [min(head, at + _MOST) for head, at in zip(log.view.next, first, strict=True)]
            if first != end:
                for batch in log.read(first, end):
                    panes += batch.to_pylist()
                reached |= {(name, p): offset for p, offset in enumerate(end)}
        return panes, reached

    def close(self) -> None:
        """Nothing is open."""


class CountTopics:
    """Panes in the topics, those of committed transactions only. Offsets are ours, not Kafka's."""

    def __init__(self, places: Places) -> None:
        from confluent_kafka import Consumer

        assert places.kafka is not None
        self._servers = places.kafka
        self._topics = [places.topic("counts", region) for region in REGIONS]
        self._assigned: Positions | None = None
        self._consumer = Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "ads-budget",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
            }
        )

    def read(self, start: Positions) -> tuple[list[Pane], Positions]:
        if start != self._assigned:  # at the beginning, or another service has charged
            self._assign(start)
        panes: list[Pane] = []
        reached = dict(start)
        for message in self._messages():
            panes.append(json.loads(message.value()))
            reached[message.topic(), message.partition()] = message.offset() + 1
        self._assigned = reached
        return panes, reached

    def _assign(self, start: Positions) -> None:
        from confluent_kafka import TopicPartition

        self._consumer.assign(
            [
                TopicPartition(topic, partition, start.get((topic, partition), 0))
                for topic in self._topics
                for partition in range(PARTITIONS)
            ]
        )

    def _messages(self) -> Iterable[Any]:
        from confluent_kafka import KafkaException

        try:
            found = self._consumer.consume(num_messages=_MOST, timeout=0.1)
            for message in found:
                if message.error():
                    raise KafkaException(message.error())
        except KafkaException as error:
            raise ServerSilent(
                f"the counts can't be read from Kafka at {self._servers}: {error}",
                hint="start the broker, and create the topics: python -m examples.ads create",
            ) from error
        return found

    def close(self) -> None:
        self._consumer.close()
