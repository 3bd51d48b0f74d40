"""Moments and rates: small sums over times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

BUCKETS, BUCKET = 60, 2.0  # of a sparkline; seconds
_WINDOW = 10.0  # seconds over which rates are taken, at least
_TICK = 0.001  # seconds: two epochs may have the same time
_SPREAD = 10.0  # the rows of an epoch came within so many seconds before it, at most

Published = tuple[float, int]  # when, how many rows


def seconds(at: Any) -> float | None:
    """A time as files have it."""
    try:
        found = datetime.fromisoformat(at)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def iso(at: float) -> str:
    found = datetime.fromtimestamp(at, UTC)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ago(at: Any, now: float | None = None) -> float | None:
    """Seconds since a time; never below zero, for clocks differ."""
    then = seconds(at)
    return None if then is None else round(max(0.0, (now or time.time()) - then), 1)


def rate(published: Sequence[Published], now: float) -> float:
    """Rows a second of late: over ten seconds, or two epochs if that is longer."""
    if not published:
        return 0.0
    window = _WINDOW
    if len(published) > 2:
        window = max(window, 2 * (published[-1][0] - published[-2][0]))
    window = min(window, 600.0)
    rows = sum(rows for at, rows in published if at > now - window)
    return round(rows / window, 1)


def sparkline(published: Iterable[Sequence[Published]], now: float) -> list[float]:
    """Rows a second in each of the last buckets, oldest first; the rows of an epoch are spread over
    the time since the one before. Of several queries: together."""
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


def percentiles(values: Iterable[float]) -> dict[str, Any]:
    """By the nearest rank; None where there are no values."""
    ranked = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        **{
            name: ranked[max(0, math.ceil(q * len(ranked)) - 1)] if ranked else None
            for name, q in at.items()
        },
        "epochs": len(ranked),
    }
