"""Break the driver at every fault point, start it again, and compare with the truth.

The matrix is every fault point x {Files, Sqlite, both, Log} x {stateless, stateful} x {kill,
raise}, and for the points around publishing also all three sinks as outputs of one query. Where a
log is among the outputs, the input is a log too.
Without ONCEFLOW_TEST_ALL=1 a seeded sample runs that covers every point, every sink and both
kinds of query, half of it with a real `kill -9`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from story import Poller, Story

from onceflow import faults

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "20261115"))
SINKS = ("files", "sqlite", "both", "log", "all")
# where it matters that an epoch has several outputs
PUBLISHING = (*faults.FOLDER, *faults.SQLITE, "epoch.decided", "epoch.output-published",
              "epoch.published", "open.ledger-fenced", "open.published")  # fmt: skip
QUERIES = ("stateless", "stateful")


class Case(NamedTuple):
    point: str
    sinks: str
    query: str
    action: str

    def __str__(self) -> str:
        return "-".join(self)


def matrix() -> list[Case]:
    return [
        Case(point, sinks, query, action)
        for point in faults.POINTS
        for sinks in SINKS
        for query in QUERIES
        for action in ("kill", "raise")
        if not (point in faults.FOLDER and sinks == "sqlite")
        and not (point in faults.SQLITE and sinks in ("files", "log"))
        and not (point not in PUBLISHING and sinks == "all")
    ]


def sample(seed: int) -> list[Case]:
    """One case for each point; sinks, queries and actions take turns in a seeded order."""
    dice = random.Random(seed)
    chosen, count = [], {}
    points = list(faults.POINTS)
    dice.shuffle(points)
    for number, point in enumerate(points):
        fitting = [
            c for c in matrix() if c.point == point and c.action == ("kill", "raise")[number % 2]
        ]
        dice.shuffle(fitting)
        best = min(fitting, key=lambda c: count.get(c.sinks, 0) + count.get(c.query, 0))
        for part in (best.sinks, best.query):
            count[part] = count.get(part, 0) + 1
        chosen.append(best)
    return sorted(chosen, key=lambda c: (c.action, c.point))


CASES = matrix() if os.environ.get("ONCEFLOW_TEST_ALL") == "1" else sample(SEED)


def test_the_sample_covers_every_point_every_sink_and_both_queries() -> None:
    cases = sample(SEED)
    assert {c.point for c in cases} == set(faults.POINTS)
    assert {c.sinks for c in cases} == set(SINKS)
    assert {c.query for c in cases} == set(QUERIES)
    assert sum(c.action == "kill" for c in cases) * 2 >= len(cases)


def visit_of(point: str) -> int:
    """Not at the very first visit, so that there is something to lose."""
    if point.startswith(("open.", "rollup.")):
        return 1
    return 9 if point.startswith("put.") else 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_driver_broken_at_any_point_loses_and_doubles_nothing(
    case: Case, tmp_path: Path, request: Any
) -> None:
    print(f"seed {SEED}, case {case}")
    story = Story(str(tmp_path), case.query, case.sinks)
    story.write_input()
    request.getfixturevalue("spark")
    with Poller(story):
        if case.point.startswith("open."):
            # the opening that matters is the one that finds a decided, unpublished epoch
            broken(story, "epoch.decided", 2, "raise")
        broken(story, case.point, visit_of(case.point), case.action)
        story.live()
    story.check()
    story.check_trace()


def test_every_life_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As a person does it: killed three times in a row, then left alone."""
    story = Story(str(tmp_path), "stateful", "all")
    story.write_input()
    with Poller(story):
        for point in ("epoch.decided", "open.published", "folder.moved-one"):
            broken(story, point, visit_of(point), "kill")
        assert story.live_apart() == 0
    story.check()
    story.check_trace()


@pytest.mark.parametrize("point", ["epoch.checked", "epoch.staged", "epoch.decided"])
@pytest.mark.parametrize("query", QUERIES)
def test_a_driver_broken_in_its_very_first_epoch_can_start_again(
    tmp_path: Path, spark: Any, point: str, query: str
) -> None:
    """Spark refuses to begin beside the state of nobody."""
    story = Story(str(tmp_path), query, "both")
    story.write_input()
    for _ in range(2):
        broken(story, point, 1, "raise")
        if point == "epoch.decided":
            break  # the second life goes on behind it
    story.live()
    story.check()


def broken(story: Story, point: str, visit: int, action: str) -> None:
    """One life that ends at the point."""
    if action == "kill":
        assert story.live_apart(f"{point}:kill:{visit}") == -9, "the fault did not hit"
        return
    faults.arm(point, "raise", visit=visit)
    with pytest.raises(faults.InjectedFault):
        story.live()
    faults.disarm()
