"""Break the driver at every fault point, start it again, and compare with the expected rows.

The matrix is every fault point x {Files, Sqlite, both, Log} x {stateless, stateful} x {kill,
raise}, and for the points around publishing also all three sinks as outputs of one query. Where a
log is among the outputs, the input is a log too.
Without ONCEFLOW_TEST_ALL=1 each day has one case for each point, half of them with a real
`kill -9`. They cover every sink and both kinds of query, and within some days the whole matrix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from story import Story

import rotation
from onceflow import faults

POINTS = faults.POINTS + faults.SOME_OPENINGS
SINKS = ("files", "sqlite", "both", "log", "all")
# where it matters that an epoch has several outputs
PUBLISHING = (*faults.FOLDER, *faults.SQLITE, "epoch.decided", "epoch.output-published",
              "epoch.published", "open.ledger-fenced", "open.published")  # fmt: skip
pytestmark = pytest.mark.daily
QUERIES = ("stateless", "stateful")
STRIDE = 3  # in the cases of a point, from one point to the next


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
        for point in POINTS
        for sinks in SINKS
        for query in QUERIES
        for action in ("kill", "raise")
        if not (point in faults.FOLDER and sinks == "sqlite")
        and not (point in faults.SQLITE and sinks in ("files", "log"))
        and not (point not in PUBLISHING and sinks == "all")
        and not (point == "open.no-data-planned" and query == "stateless")
    ]


def cases_of(day: int) -> list[Case]:
    """One case for each point: killed on one day and raised on the next, each time another one."""
    chosen = []
    for number, point in enumerate(POINTS):
        turn, raises = divmod(day + number, 2)
        action = "raise" if raises else "kill"
        fitting = [case for case in matrix() if case.point == point and case.action == action]
        chosen.append(fitting[(turn + STRIDE * number) % len(fitting)])
    return sorted(chosen, key=lambda c: (c.action, c.point))


DAY = rotation.today()
CASES = matrix() if rotation.runs_all() else cases_of(DAY)


def test_every_day_kills_on_every_sink_in_both_queries_and_with_several_outputs() -> None:
    for day in range(DAY, DAY + 40):
        cases = cases_of(day)
        assert [c.point for c in sorted(cases)] == sorted(POINTS)
        kills = [c for c in cases if c.action == "kill"]
        outputs = [Story("", c.query, c.sinks).outputs for c in kills]
        assert {sink for several in outputs for sink in several} == {"files", "sqlite", "log"}
        assert any(len(several) > 1 for several in outputs)
        assert {c.query for c in kills} == set(QUERIES)
        assert len(kills) * 2 >= len(cases) - 1


def test_the_whole_matrix_comes_within_twenty_days() -> None:
    days = {case for day in range(DAY, DAY + 20) for case in cases_of(day)}
    assert days == set(matrix())


def visit_of(point: str) -> int:
    """Not at the very first visit, so that there is something to lose."""
    if point.startswith(("open.", "rollup.")):
        return 1
    return 9 if point.startswith("put.") else 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_driver_broken_at_any_point_loses_and_doubles_nothing(
    case: Case, tmp_path: Path, request: Any
) -> None:
    story = Story(str(tmp_path), case.query, case.sinks)
    story.write_input()
    request.getfixturevalue("spark")
    with story.watched():
        if case.point.startswith("open.") and case.point != "open.checkpoint-cleared":
            # the opening that matters is the one that finds a decided, unpublished epoch
            broken(story, "epoch.decided", 2, "raise")
        broken(story, case.point, visit_of(case.point), case.action)
        story.live()
    story.check()
    story.check_trace()


def test_every_life_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Killed three times in a row, then left alone."""
    story = Story(str(tmp_path), "stateful", "all")
    story.write_input()
    with story.watched():
        for point in ("epoch.decided", "open.published", "folder.moved-one"):
            broken(story, point, visit_of(point), "kill")
        assert story.live_apart() == 0
    story.check()
    story.check_trace()
    drivers = {json.loads(line)["driver"] for line in story.trace.read_text().splitlines()}
    assert len(drivers) == 4


@pytest.mark.parametrize("point", ["epoch.checked", "epoch.staged", "epoch.decided"])
@pytest.mark.parametrize("query", QUERIES)
def test_a_driver_broken_in_its_very_first_epoch_can_start_again(
    tmp_path: Path, spark: Any, point: str, query: str
) -> None:
    """Spark refuses to begin beside state that no commit names."""
    story = Story(str(tmp_path), query, "both")
    story.write_input()
    for _ in range(2):
        broken(story, point, 1, "raise")
        if point == "epoch.decided":
            break  # the second life continues after it
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
