"""The input of the built-in jobs: numbered rows that follow from a seed and their number.

Rows come in cycles. A cycle has a fixed, seeded pattern of keys (some are frequent) and of rows
that repeat an earlier row of the same cycle. So key, sequence and repetition of any row can be
computed without the rows before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = "number long, id long, key string, sequence long, again boolean, at timestamp, value long"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
STEP = timedelta(milliseconds=100)  # of event time, from row to row
LATE = timedelta(seconds=2)  # a row is at most this much older than its place
DELAY = timedelta(seconds=10)  # of the watermark: above LATE and what a repetition adds
WINDOW = timedelta(seconds=10)
KEYS = 12
CLOSING = BEGIN + timedelta(days=3650)  # later than any input
CLOSERS = ("closing", "end")  # keys, one of each of two partitions

_CYCLE = 97
_AGAIN = 0.1  # of the rows repeat an earlier one
_WITHIN = 20  # rows


@dataclass(frozen=True)
class Row:
    """`number` is its place. A repetition has all else of the first row."""

    number: int
    id: int
    key: str
    sequence: int  # of the key, without repetitions
    again: bool
    at: datetime
    value: int


class Workload:
    """Rows 0, 1, 2 …; `row(n)` is the same at every call."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def row(self, number: int) -> Row:
        cycle, place = divmod(number, _CYCLE)
        key, sequence, first = self._cycle[place]
        id = number - place + first
        rng = random.Random(f"{self.seed}/{id}")
        return Row(
            number=number,
            id=id,
            key=f"key-{key:02d}",
            sequence=cycle * self._originals[key] + sequence,
            again=first != place,
            at=BEGIN + STEP * id - LATE * rng.random(),
            value=rng.randrange(1000),
        )

    def closing(self, number: int) -> list[Row]:
        """One row for each partition of the log, numbered from here, so far ahead that all earlier
        windows close. Their own windows stay open."""
        return [
            Row(number + n, number + n, key, 0, False, CLOSING, 0) for n, key in enumerate(CLOSERS)
        ]

    @cached_property
    def _cycle(self) -> list[tuple[int, int, int]]:
        """For each place: key, how many of the key came before, and the place that it repeats."""
        rng = random.Random(f"{self.seed}/cycle")
        seen: dict[int, int] = {}
        places: list[tuple[int, int, int]] = []
        for place in range(_CYCLE):
            if place and rng.random() < _AGAIN:
                near = range(max(0, place - _WITHIN), place)
                places.append(places[rng.choice([p for p in near if places[p][2] == p])])
                continue
            key = int(KEYS * rng.random() ** 3)
            places.append((key, seen.get(key, 0), place))
            seen[key] = seen.get(key, 0) + 1
        return places

    @cached_property
    def _originals(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for place, (key, _, first) in enumerate(self._cycle):
            found[key] = found.get(key, 0) + (first == place)
        return found


def table(rows: Iterable[Row]) -> pa.Table:
    import pyarrow as pa

    listed = list(rows)
    kinds = {
        "number": pa.int64(), "id": pa.int64(), "key": pa.string(), "sequence": pa.int64(),
        "again": pa.bool_(), "at": pa.timestamp("us", "UTC"), "value": pa.int64(),
    }  # fmt: skip
    return pa.table(
        {name: pa.array([getattr(r, name) for r in listed], kind) for name, kind in kinds.items()}
    )
