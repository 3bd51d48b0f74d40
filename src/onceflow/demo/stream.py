"""The demo's input, and what a perfect job makes of it.

All of it follows from a seed: no clock, no Spark. Each event has a time, and arrives up to
`LATEST` after it; some arrive again, and between them come lines that cannot be parsed.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

BEGIN = datetime(2026, 1, 1, 12, tzinfo=UTC)
SPAN = timedelta(minutes=4)
ADS = [f"ad-{number:02d}" for number in range(1, 21)]
KINDS = ("impression", "click")
DELAY = timedelta(seconds=30)  # the watermark's, in ads.py
LATEST = timedelta(seconds=20)  # from an event's time to its last arrival; below the delay
COMMITS = 120

_CLICKS = 0.12
_AGAIN = 0.05  # of the events arrive a second time, and so many of these a third time
_MALFORMED = 0.01  # for each event
_LATE = 0.1  # of the arrivals take up to LATEST, the others up to a tenth of it

Cell = tuple[str, str, str]  # ad, kind, minute


@dataclass(frozen=True)
class Event:
    """Something that happened. It counts once, however often it arrives."""

    id: str
    ad: str
    kind: str
    time: datetime

    @property
    def cell(self) -> Cell:
        """Where it counts."""
        return self.ad, self.kind, f"{self.time:%Y-%m-%d %H:%M}"

    def text(self) -> str:
        return json.dumps({"id": self.id, "ad": self.ad, "kind": self.kind})


@dataclass(frozen=True)
class Row:
    """A row of the log, in the order of arrival. `event` is None if it is malformed."""

    value: str
    event_time: datetime
    event: Event | None


@dataclass(frozen=True)
class Truth:
    """What the targets must hold in the end."""

    counts: Counter[Cell]
    rejected: Counter[str]


class Stream:
    """So many events in the order of their arrival, with all that goes wrong on the way."""

    def __init__(self, *, seed: int, events: int) -> None:
        self.seed, self.events = seed, events
        self.rows = _rows(random.Random(seed), events)
        times = [row.event_time for row in self.rows]
        # Far enough ahead to close every window before it. Its own stays open, so it counts
        # nowhere.
        end = Event("end", ADS[0], KINDS[0], max(times) + timedelta(hours=1))
        self.closing = Row(end.text(), end.time, end)

    @property
    def again(self) -> int:
        """Rows that bring an event that had arrived before."""
        return sum(row.event is not None for row in self.rows) - self.events

    @property
    def malformed(self) -> int:
        return sum(row.event is None for row in self.rows)

    def commits(self) -> list[list[Row]]:
        """The rows as they are appended, in parts of about the same size."""
        bounds = [len(self.rows) * number // COMMITS for number in range(COMMITS + 1)]
        return [self.rows[a:b] for a, b in pairwise(bounds)]

    def truth(self) -> Truth:
        events = {row.event.id: row.event for row in self.rows if row.event is not None}
        return Truth(
            counts=Counter(event.cell for event in events.values()),
            rejected=Counter(row.value for row in self.rows if row.event is None),
        )


def table(rows: list[Row]) -> pa.Table:
    """Rows as a log with the default columns takes them."""
    import pyarrow as pa

    return pa.table(
        {
            "value": pa.array([row.value for row in rows], pa.string()),
            "event_time": pa.array([row.event_time for row in rows], pa.timestamp("us", "UTC")),
        }
    )


def _rows(rng: random.Random, events: int) -> list[Row]:
    arrivals: list[tuple[datetime, int, Row]] = []

    def arrive(row: Row, after: timedelta) -> None:
        arrivals.append((row.event_time + after, len(arrivals), row))

    popular = [1 / (1 + number) for number in range(len(ADS))]
    for number in range(events):
        kind = KINDS[rng.random() < _CLICKS]
        ad = rng.choices(ADS, popular)[0]
        event = Event(f"e{number}", ad, kind, BEGIN + SPAN * (number / events))
        row = Row(event.text(), event.time, event)
        takes = _takes(rng)
        arrive(row, takes)
        while rng.random() < _AGAIN:  # sent again, because no answer came
            takes += (LATEST - takes) * rng.random()
            arrive(row, takes)
        if rng.random() < _MALFORMED:
            arrive(Row(rng.choice(_BREAKS)(rng, event), event.time, None), _takes(rng))
    return [row for _, _, row in sorted(arrivals, key=lambda arrival: arrival[:2])]


def _takes(rng: random.Random) -> timedelta:
    return LATEST * rng.random() * (1 if rng.random() < _LATE else 0.1)


# ---------------------------------------------------------------- what goes wrong with a line


def _cut_off(rng: random.Random, event: Event) -> str:
    text = event.text()
    return text[: rng.randrange(len(text))]


def _without_a_field(rng: random.Random, event: Event) -> str:
    fields: dict[str, Any] = json.loads(event.text())
    del fields[rng.choice(list(fields))]
    return json.dumps(fields)


def _with_a_null(rng: random.Random, event: Event) -> str:
    fields: dict[str, Any] = json.loads(event.text())
    fields[rng.choice(list(fields))] = None
    return json.dumps(fields)


def _something_else(rng: random.Random, event: Event) -> str:
    return rng.choice(["[]", "null", "<html>", f"{event.kind} of {event.ad}", "{id: e1}"])


_BREAKS: list[Callable[[random.Random, Event], str]] = [
    _cut_off, _without_a_field, _with_a_null, _something_else,
]  # fmt: skip
