"""What a running job looks like from outside, in numbers with units."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceflow.start import Handle, Started


@dataclass(frozen=True)
class QueryProgress:
    """One query at one moment."""

    query: str
    epoch: int | None  # published last
    rows_in_per_s: float
    rows_out_per_s: float
    rows_out: int  # published since this driver started
    lag_s: float  # how long input has been waiting that is not published yet
    published_s_ago: float | None
    watermark: str | None
    state_rows: int | None
    epoch_ms: int | None


class ProgressMeter:
    """Looks at a handle now and then and remembers what it needs for rates."""

    def __init__(self, handle: Handle, clock: Callable[[], float] = time.time) -> None:
        self._handle = handle
        self._clock = clock
        self._seen: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._caught_up: dict[str, float] = {}
        for name, started in handle.started.items():
            last = started.epochs.opened_at
            self._seen[name] = -1 if last is None else last
            self._rows[name] = 0
            self._caught_up[name] = clock()

    def look(self) -> list[QueryProgress]:
        return [self._look(name, started) for name, started in self._handle.started.items()]

    def _look(self, name: str, started: Started) -> QueryProgress:
        decisions = started.epochs.log.decisions
        last = decisions[-1] if decisions else None
        for decision in decisions:
            if decision.epoch > self._seen[name]:
                self._seen[name] = decision.epoch
                self._rows[name] += decision.rows
        progress: dict[str, Any] = started.query.lastProgress or {}
        took = progress["batchDuration"] if progress else None
        if not started.query.status["isDataAvailable"]:
            self._caught_up[name] = self._clock()
        published = started.epochs.published_at
        event_time = progress["eventTime"] if progress else {}
        states = progress["stateOperators"] if progress else []
        return QueryProgress(
            query=name,
            epoch=last.epoch if last else None,
            rows_in_per_s=round(float(progress["processedRowsPerSecond"] if progress else 0), 1),
            rows_out_per_s=round(last.rows / (took / 1000), 1) if last and took else 0.0,
            rows_out=self._rows[name],
            lag_s=round(self._clock() - self._caught_up[name], 1),
            published_s_ago=round(self._clock() - published, 1) if published else None,
            watermark=(event_time or {}).get("watermark"),
            state_rows=sum(s["numRowsTotal"] for s in states) if states else None,
            epoch_ms=took,
        )


def as_json(progress: list[QueryProgress]) -> list[dict[str, Any]]:
    return [asdict(query) for query in progress]
