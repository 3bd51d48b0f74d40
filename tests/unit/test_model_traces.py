"""Traces of drivers, held to the model: what it allows is accepted, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from model.traces import accept

Event = dict[str, Any]
OUTPUTS = ("valid", "rejected")


def opening(term: int, *, last: int = -1) -> list[Event]:
    """A driver opens a query in which epoch `last` was decided last."""
    events: list[Event] = [
        {"point": "open.led", "query": "job/query"},
        {"point": "open.fenced", "epoch": last},
        *({"point": "open.ledger-fenced", "output": output} for output in OUTPUTS),
        {"point": "open.ledgers-read"},
    ]
    if last >= 0:
        events += [published(last, output) for output in OUTPUTS]
    events += [
        {"point": f"open.{name}"} for name in ("published", "spark-agrees", "swept", "ready")
    ]
    return [{"driver": term, **event, "term": term} for event in events]


def epoch(number: int, term: int) -> list[Event]:
    events = [
        *({"point": f"epoch.{name}"} for name in ("checked", "staged", "hardened", "decided")),
        *(published(number, output) for output in OUTPUTS),
        {"point": "epoch.published"},
        {"point": "epoch.swept"},
    ]
    return [{"driver": term, **event, "epoch": number, "term": term} for event in events]


def published(number: int, output: str) -> Event:
    return {"point": "epoch.output-published", "epoch": number, "output": output}


def until(events: list[Event], point: str) -> list[Event]:
    """The driver crashed when it had got there."""
    return events[: [event["point"] for event in events].index(point) + 1]


def refusal(events: list[Event]) -> str:
    return str(accept(map(json.dumps, events)) or "")


PLAIN = [*opening(1), *epoch(0, 1), *epoch(1, 1), *epoch(2, 1)]


def test_a_life_without_faults_is_accepted() -> None:
    assert not refusal(PLAIN)


def test_points_inside_a_step_tell_nothing() -> None:
    inside = [{"driver": 1, "point": point} for point in ("put.linked", "folder.moved")]
    assert not refusal([*inside, *PLAIN, *inside])


@pytest.mark.parametrize("point", [event["point"] for event in [*opening(1), *epoch(0, 1)]])
def test_a_crash_at_any_point_and_a_second_driver(point: str) -> None:
    first = until([*opening(1), *epoch(0, 1)], point)
    decided = "epoch.decided" in {event["point"] for event in first}
    if decided:
        assert not refusal([*first, *opening(2, last=0), *epoch(1, 2)])
        assert refusal([*first, *opening(2), *epoch(0, 2)])
    else:
        assert not refusal([*first, *opening(2), *epoch(0, 2)])


def test_a_crash_in_the_put_leaves_both_possible() -> None:
    """The last line says that it was hardened; the decision may have been put since."""
    first = until([*opening(1), *epoch(0, 1)], "epoch.hardened")
    assert not refusal([*first, *opening(2), *epoch(0, 2)])
    assert not refusal([*first, *opening(2, last=0), *epoch(1, 2)])


def test_a_paused_driver_that_wakes_up_and_does_nothing_is_accepted() -> None:
    first = until([*opening(1), *epoch(0, 1)], "epoch.checked")
    late = {"driver": 1, "point": "epoch.staged", "term": 1, "epoch": 0}
    assert not refusal([*first, *opening(2), late, *epoch(0, 2)])


def test_publishing_before_deciding_is_refused() -> None:
    trace = [*opening(1), *epoch(0, 1)]
    decided = next(n for n, event in enumerate(trace) if event["point"] == "epoch.decided")
    trace[decided], trace[decided + 1] = trace[decided + 1], trace[decided]
    said = refusal(trace)
    assert said.startswith(f"line {decided + 1}: epoch.output-published")
    assert said.endswith("the model allows epoch.decided of epoch 0")


def test_a_decision_behind_a_fence_is_refused() -> None:
    first = until([*opening(1), *epoch(0, 1)], "epoch.hardened")
    late = {"driver": 1, "point": "epoch.decided", "term": 1, "epoch": 0}
    said = refusal([*first, *opening(2), late])
    assert said.startswith(f"line {len(first) + len(opening(2)) + 1}: epoch.decided (term 1")


def test_publishing_behind_the_term_in_a_ledger_is_refused() -> None:
    first = until([*opening(1), *epoch(0, 1)], "epoch.decided")
    second = until(opening(2, last=0), "open.ledgers-read")
    late = [{"driver": 1, "term": 1, **published(0, output)} for output in OUTPUTS]
    assert not refusal([*first, *second, late[0]])  # it may have been published before the fence
    assert refusal([*first, *second, *late])


def test_an_epoch_that_is_decided_twice_is_refused() -> None:
    assert refusal([*opening(1), *epoch(0, 1), *epoch(0, 1)])
    assert refusal([*opening(1), *epoch(0, 1), *opening(2, last=0), *epoch(0, 2)])


def test_every_line_that_is_missing_or_swapped_is_noticed() -> None:
    for place in range(len(PLAIN) - 1):
        if PLAIN[place]["point"] == "epoch.swept":
            continue  # the sweep runs beside Spark: a driver that goes on waits for it
        assert refusal(PLAIN[:place] + PLAIN[place + 1 :]), f"{PLAIN[place]} is missing"
        swapped = [*PLAIN[:place], PLAIN[place + 1], PLAIN[place], *PLAIN[place + 2 :]]
        assert refusal(swapped), f"{PLAIN[place]} came late"


def test_queries_of_one_job_are_followed_apart() -> None:
    """They take their terms from one lease."""
    other = [{**event, "query": "job/other"} if "query" in event else event for event in opening(2)]
    both = [*opening(1), *other, *epoch(0, 2), *epoch(0, 1), *opening(3, last=0), *epoch(1, 3)]
    assert not refusal(both)
    assert refusal([*opening(1), *other, *epoch(0, 2), *epoch(0, 2)])
