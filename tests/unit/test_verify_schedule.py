"""A schedule follows from its seed, and brings what it was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onceflow import faults
from onceflow.faults.points import POINTS, SERVICES
from onceflow.harness.fault_schedule import (
    KEYED,
    KILLS,
    KINDS,
    SERVERS,
    SNAPSHOTS,
    Fault,
    fits,
    plan,
    points,
)

LOCAL = [kind for kind in KINDS if kind not in ("kill-executor", *SERVERS, *SNAPSHOTS)]
CASES = [("files",), ("sqlite",), ("log",), ("files", "sqlite", "log")]
SERVER_CASES = [("kafka",), ("postgres",), ("files", "kafka", "postgres")]


def test_one_seed_one_schedule() -> None:
    first = plan(1, CASES, count=40, kinds=LOCAL)
    assert first == plan(1, CASES, count=40, kinds=LOCAL)
    assert first != plan(2, CASES, count=40, kinds=LOCAL)


def test_a_new_fault_point_changes_only_where_faults_strike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listed() -> list[Fault]:
        planned = plan(1, CASES, count=200, kinds=(*LOCAL, *SNAPSHOTS))
        return [replace(fault, point="", visit=1) for fault in planned]

    before = listed()
    monkeypatch.setattr(faults, "JOB", (*faults.JOB, "stage.new"))
    assert listed() == before
    assert any(fault.point == "stage.new" for fault in plan(1, CASES, count=200, kinds=LOCAL))


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


# ---------------------------------------------------------------- servers


def test_a_fault_of_a_server_strikes_cases_that_have_it() -> None:
    kinds = [*LOCAL, *SERVERS]
    found = plan(1, [*CASES, *SERVER_CASES], count=400, kinds=kinds)
    sinks = [*CASES, *SERVER_CASES]
    assert {fault.kind for fault in found} == set(kinds)
    assert all(fits(fault.kind, sinks[fault.case]) for fault in found)
    lost = {(fault.file, sinks[fault.case]) for fault in found if fault.kind == "lost-answer"}
    assert all(server in of for server, of in lost)


def test_a_case_without_a_kill_that_fits_has_other_faults() -> None:
    found = plan(1, [("postgres",)], count=6, kinds=["kill-broker", "lost-answer"])
    assert {fault.kind for fault in found} == {"lost-answer"}
    with pytest.raises(ValueError, match="can strike"):
        plan(1, [("postgres",)], count=1, kinds=["kill-broker"])


def test_servers_are_broken_at_any_time_and_at_every_step_of_a_publication() -> None:
    found = plan(1, [("files", "kafka", "postgres")], count=300, kinds=list(SERVERS))
    stands = {kind: {f.point for f in found if f.kind == kind} for kind in SERVERS}
    assert stands["kill-broker"] >= {"", "kafka.begun", "kafka.written"}
    assert stands["kill-postgres"] == {
        "", "postgres.copied", "postgres.begun", "postgres.written"
    }  # fmt: skip
    assert {f.back for f in found if f.point} == {True, False}
    assert not any(f.back for f in found if not f.point)


def test_the_points_of_servers_join_in_where_there_are_servers() -> None:
    found = plan(1, [("files", "sqlite"), *SERVER_CASES], count=600, kinds=["kill-point", "zombie"])
    assert {fault.point for fault in found} == {*POINTS, *SERVICES}
    asleep = {fault.point for fault in found if fault.kind == "zombie"}
    assert "kafka.fenced-one" not in asleep, "it is reached while a driver opens"
    assert {"kafka.written", "postgres.written"} <= asleep
    only = plan(1, [("postgres",)], count=9, kinds=["kill-postgres"], at=["postgres.copied"])
    assert {fault.point for fault in only} == {"postgres.copied"}


# ---------------------------------------------------------------- snapshots


def test_commands_of_people_come_between_the_faults_and_are_a_small_part_of_them() -> None:
    found = plan(1, CASES, count=40, kinds=[*LOCAL, *SNAPSHOTS])
    assert sum(fault.kind in KILLS for fault in found) == 20
    assert {fault.kind for fault in found} == {*LOCAL, *SNAPSHOTS}
    assert 4 <= sum(fault.kind in SNAPSHOTS for fault in found) <= 8


def test_commands_are_killed_at_each_of_their_steps_and_drivers_end_in_every_way() -> None:
    found = plan(1, [("files", "sqlite", "log")], count=400, kinds=SNAPSHOTS)
    reached = {fault.point for fault in found} - {""}
    of_deleting = {"savepoint.unlisted", "past.kept"}
    assert reached == {*faults.SNAPSHOTS, "drop.committed", "drop.removed-one"} - of_deleting
    back = [fault for fault in found if fault.kind in ("rollback", "restore")]
    assert {fault.file for fault in back} == {"rewind", "skip"}
    assert {fault.ends for fault in back} >= {"", "stop", "epoch.decided"}
    assert {fault.visit for fault in found} == {1, 2, 3, 4}
    assert {fault.point == "" for fault in back} == {True, False}


def test_a_topic_takes_nothing_back() -> None:
    found = plan(1, [("kafka",)], count=40, kinds=["restore"])
    assert {fault.file for fault in found} == {"skip"}
    fault = plan(1, [("kafka",)], count=1, kinds=["restore"], at=["restore.made"])[0]
    assert fault.what == "restore: skip, broken at restore.made"


# ---------------------------------------------------------------- keyed state


def test_keyed_cases_are_broken_in_their_own_places_too() -> None:
    cases = [("files",), ("sqlite", KEYED)]
    found = plan(1, cases, count=1000, kinds=[*LOCAL, *SNAPSHOTS])
    keyed = [fault for fault in found if fault.case == 1]
    assert {f.point for f in keyed} >= {*faults.KEYED, *faults.TASK}
    assert {f.file for f in keyed} >= {"manifest", "run"}
    others = {f.point for f in found if f.case == 0}
    assert not others & {*faults.KEYED, *faults.TASK}
    assert not {"manifest", "run"} & {f.file for f in found if f.case == 0}


def test_a_keyed_task_raises_or_is_killed_at_its_points_or_stumbles_over_its_rows() -> None:
    found = plan(1, [("log", KEYED)], count=60, kinds=["fail-task"])
    assert {(f.point, f.file) for f in found} == {
        ("", ""), *((point, how) for point in faults.TASK for how in ("raise", "kill")),
    }  # fmt: skip
    only = plan(1, [("log", KEYED)], count=9, kinds=["fail-task"], at=["task.merged"])
    assert {fault.point for fault in only} == {"task.merged"}


def test_keyed_state_in_front_of_a_topic_is_not_taken_back() -> None:
    found = plan(1, [("kafka", KEYED)], count=20, kinds=["rollback"])
    assert {fault.file for fault in found} == {"skip"}
