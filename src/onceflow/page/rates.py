"""Timestamps, rates and percentiles."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from onceflow.page.shapes import Percentiles

BUCKETS, BUCKET = 60, 2.0  # of a sparkline; seconds
_WINDOW = 10.0  # seconds over which a rate is taken, at least
_TICK = 0.001  # seconds: two epochs may have the same time
_SPREAD = 10.0  # seconds: rows of an epoch arrived within this time before it, at most

Published = tuple[float, int]  # timestamp, rows


def timestamp(at: Any) -> float | None:
    """Seconds since 1970 of a time in a file; None if it is not a time."""
    try:
        found = datetime.fromisoformat(at)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def iso(at: float) -> str:
    found = datetime.fromtimestamp(at, UTC)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_since(at: Any, now: float | None = None) -> float | None:
    """Never below zero, because clocks differ."""
    then = timestamp(at)
    return None if then is None else round(max(0.0, (now or time.time()) - then), 1)


def rate(published: Sequence[Published], now: float) -> float:
    """Rows a second over the last ten seconds, or over two epochs if that is longer."""
    if not published:
        return 0.0
    window = _WINDOW
    if len(published) > 2:
        window = max(window, 2 * (published[-1][0] - published[-2][0]))
    window = min(window, 600.0)
    rows = sum(rows for at, rows in published if at > now - window)
    return round(rows / window, 1)


def sparkline(published: Iterable[Sequence[Published]], now: float) -> list[float]:
    """Rows a second in each of the last buckets, oldest first, summed over queries. The rows of an
    epoch are spread over the time since the epoch before it."""
    begin = now - BUCKETS * BUCKET
    found = [0.0] * BUCKETS
    for one in published:
        before = -math.inf
        for at, rows in one:
            first, before = min(max(before, at - _SPREAD), at - _TICK), at
            if at < begin or not rows:
                continue
            share = rows / (at - first)
            low = max(0, int((first - begin) / BUCKET))
            for bucket in range(low, min(BUCKETS - 1, int((at - begin) / BUCKET)) + 1):
                left = begin + bucket * BUCKET
                inside = min(at, left + BUCKET) - max(first, left)
                found[bucket] += share * max(0.0, inside) / BUCKET
    return [round(value, 1) for value in found]


def percentiles(values: Iterable[float]) -> Percentiles:
    """By the nearest rank; None if there are no values."""
    ranked = sorted(values)

    def at(share: float) -> float | None:
        return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else None

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "epochs": len(ranked)}
