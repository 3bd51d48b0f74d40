"""The time of a keyed step: which rows are late, the watermark, and the times of the next timers.

The decision of an epoch holds all of it, so that any driver can run the next epoch from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onceflow.contract.schema import columns, quoted
from onceflow.protocol.keyed_spec import KeyedStep
from onceflow.state.task import LATE, PART


def lateness(step: KeyedStep, previous: Mapping[str, Any]) -> list[Any]:
    """The columns PART and LATE.

    A row is late by comparison with the rows before it in its own partition, in the order of
    offsets; so it does not depend on how rows are divided into epochs. Without offsets it is
    compared with the watermark.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    assert step.event_time is not None
    assert step.delay is not None
    at = F.unix_micros(F.col(quoted(step.event_time)).cast("timestamp"))
    watermark = previous.get("watermark")
    floor = F.lit(watermark).cast("long")
    if not step.order:
        part = F.lit("")
    else:
        *parts, offset = step.order
        named = [F.coalesce(F.col(quoted(p)).cast("string"), F.lit("")) for p in parts]
        part = F.to_json(F.array(*named)) if len(named) > 1 else named[0]
        ordered = Window.partitionBy(part).orderBy(quoted(offset))
        # Rows with the same offset (of an explode, for example) are not compared with each other.
        numbered = columns(step.rows)[offset] in ("byte", "short", "integer", "long")
        between = ordered.rangeBetween if numbered else ordered.rowsBetween
        before = between(Window.unboundedPreceding, -1)
        seen = F.max(at).over(before)
        known = {part: latest for part, (latest, _) in known_partitions(step, previous).items()}
        if known:
            pairs = [F.lit(x) for name, latest in known.items() for x in (name, latest)]
            seen = F.greatest(seen, F.try_element_at(F.create_map(*pairs), part))
        own = seen - F.lit(step.delay)
        # The watermark may be ahead of a partition that has not been read yet; its rows are not
        # late for that. With `idle` they are: timers did not wait for the idle partition.
        floor = own if step.idle is None else F.greatest(floor, own)
    return [part.alias(PART), F.coalesce(at < floor, F.lit(False)).alias(LATE)]


def known_partitions(step: KeyedStep, previous: Mapping[str, Any]) -> Mapping[str, list[int]]:
    """The partitions as `partitions_seen` returned them. None of them if other columns name the
    partitions now: those with old names would hold the watermark back forever."""
    same = previous.get("order", list(step.order)) == list(step.order)
    found: Mapping[str, list[int]] = previous.get("seen", {}) if same else {}
    return found


def partitions_seen(
    before: Mapping[str, list[int]], reports: list[dict[str, Any]], now: int
) -> dict[str, list[int]]:
    """Partition -> its latest event time, and the time when its last rows came."""
    found = {part: list(pair) for part, pair in before.items()}
    for report in reports:
        for part, latest in report["seen"].items():
            old = found.get(part, [latest, now])[0]
            found[part] = [max(old, latest), now]
    return found


def next_watermark(
    step: KeyedStep, seen: Mapping[str, list[int]], before: int | None, now: int
) -> int | None:
    """The event time that every partition has reached, minus the delay. Idle partitions do not
    count unless all are idle; then the furthest one does. The watermark never goes back."""
    if step.delay is None or not seen:
        return before
    awake = [latest for latest, at in seen.values() if step.idle is None or now - at < step.idle]
    found = min(awake or [max(latest for latest, _ in seen.values())]) - step.delay
    return found if before is None else max(before, found)


def idle_at(step: KeyedStep, seen: Mapping[str, list[int]], now: int) -> int | None:
    """The time at which the next partition that holds the watermark back will count as idle."""
    if step.idle is None:
        return None
    furthest = max((latest for latest, _ in seen.values()), default=0)
    return min(
        (
            at + step.idle
            for latest, at in seen.values()
            if now - at < step.idle and latest < furthest
        ),
        default=None,
    )


def wake(step: KeyedStep, previous: Mapping[str, Any] | None) -> int | None:
    """The time of the next epoch that this step needs: at once if an event timer is behind the
    watermark."""
    if previous is None:  # the initial state may have timers that are due
        return 0 if step.initial is not None and step.clocks else None
    times = [previous.get("idle_at")]
    for timer, at in previous.get("next", {}).items():
        if step.clocks.get(timer) == "processing":
            times.append(at)
        elif at is not None and previous["watermark"] is not None and at <= previous["watermark"]:
            times.append(0)
    return min((time for time in times if time is not None), default=None)


def next_due(reports: list[dict[str, Any]]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for report in reports:
        for timer, at in report["next"].items():
            times = [time for time in (found.get(timer), at) if time is not None]
            found[timer] = min(times, default=None)
    return found
