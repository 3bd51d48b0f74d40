"""What is known of the partitions of a source, from epoch to epoch."""

from __future__ import annotations

from typing import Any

from onceflow.protocol.keyed_spec import KeyedStep
from onceflow.protocol.keyed_time import known_partitions, next_watermark, partitions_seen, wake


def step(*order: str, **options: Any) -> KeyedStep:
    return KeyedStep("s", None, ("k",), "", "", delay=10, order=order, **options)  # type: ignore[arg-type]


def test_the_partition_that_is_furthest_behind_holds_the_watermark() -> None:
    seen = partitions_seen({"0": [100, 1]}, [{"seen": {"1": 50}}, {"seen": {"0": 90}}], 2)
    assert seen == {"0": [100, 2], "1": [50, 2]}
    assert next_watermark(step("p", "o"), seen, None, 2) == 40
    assert next_watermark(step("p", "o"), seen, 60, 2) == 60  # it never goes back
    assert next_watermark(step("p", "o", idle=5), {**seen, "1": [50, -4]}, 60, 2) == 90


def test_partitions_that_had_other_names_hold_nothing_back() -> None:
    stood = {"seen": {"": [100, 1]}, "order": [], "watermark": 90}
    now = step("p", "o")
    assert known_partitions(step(), stood) == {"": [100, 1]}
    assert known_partitions(now, stood) == {}
    seen = partitions_seen(known_partitions(now, stood), [{"seen": {"0": 5000}}], 2)
    assert next_watermark(now, seen, stood["watermark"], 2) == 4990


def test_a_step_that_begins_with_timers_begins_at_once() -> None:
    assert wake(step(clocks={"t": "event"}, initial="history"), None) == 0
    assert wake(step(clocks={"t": "event"}), None) is None
    assert wake(step(initial="history"), None) is None
