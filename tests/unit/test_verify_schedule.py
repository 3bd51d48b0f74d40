"""A schedule follows from its seed, and brings what it was asked for."""

from __future__ import annotations

import pytest

from onceflow.testing.faults import POINTS
from onceflow.verify.schedule import KILLS, KINDS, Fault, plan, points

LOCAL = [kind for kind in KINDS if kind != "kill-executor"]
CASES = [("files",), ("sqlite",), ("log",), ("files", "sqlite", "log")]


def test_one_seed_one_schedule() -> None:
    first = plan(1, CASES, count=40, kinds=LOCAL)
    assert first == plan(1, CASES, count=40, kinds=LOCAL)
    assert first != plan(2, CASES, count=40, kinds=LOCAL)


def test_half_of_the_faults_are_kills_and_no_kind_is_left_out() -> None:
    found = plan(1, CASES, count=40, kinds=LOCAL)
    assert sum(fault.kind in KILLS for fault in found) == 20
    assert {fault.kind for fault in found} == set(LOCAL)
    assert [fault.case for fault in found] == sorted(fault.case for fault in found)
    assert {fault.case for fault in found} == set(range(len(CASES)))


@pytest.mark.parametrize("sinks", CASES)
def test_a_point_is_one_that_the_job_can_reach(sinks: tuple[str, ...]) -> None:
    kinds = ["kill-point", "raise-point", "zombie"]
    found = plan(3, [sinks], count=200, kinds=kinds)
    assert {fault.point for fault in found} <= set(points(sinks)) <= set(POINTS)
    asleep = {fault.point for fault in found if fault.kind == "zombie"}
    assert not asleep & {"sqlite.begun", "sqlite.written"}, "its successor would wait for the lock"
    assert not any(point.startswith("open.") for point in asleep)


def test_all_points_come_before_one_comes_often() -> None:
    found = plan(1, [("files", "sqlite")], count=200, kinds=["kill-point"])
    assert {fault.point for fault in found} == set(POINTS)


def test_only_what_was_asked_for() -> None:
    found = plan(1, CASES, count=7, kinds=["kill-point"], at=["epoch.decided"])
    assert {(fault.kind, fault.point) for fault in found} == {("kill-point", "epoch.decided")}
    assert {fault.kind for fault in plan(1, CASES, count=7, kinds=["flip"])} == {"flip"}


def test_what_is_written_down_says_what_will_be_done() -> None:
    fault = Fault(3, 1, "zombie", "epoch.decided", 2, 0.5)
    assert fault.what == "zombie at epoch.decided"
    assert fault.as_json() == {
        "number": 3, "case": 1, "kind": "zombie", "point": "epoch.decided", "visit": 2,
        "after": 0.5,
    }  # fmt: skip
