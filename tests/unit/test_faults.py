"""Fault points: they do nothing unless they are armed, and then what was asked, once."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

import onceflow
from onceflow import faults
from onceflow.faults.points import (
    KEYED,
    POINTS,
    SERVICES,
    SNAPSHOTS,
    SOME_OPENINGS,
    TASK,
    TRIM,
    InjectedFault,
    arm,
    arm_from_environment,
    reach,
)
from onceflow.testing.processes import run_and_kill


def test_a_point_that_is_not_armed_does_nothing() -> None:
    for point in POINTS:
        reach(point)
    arm("open.led", "raise")
    reach("open.fenced")


def test_a_fault_strikes_at_the_visit_that_was_asked_for_and_only_then() -> None:
    arm("put.linked", "raise", visit=3)
    reach("put.linked")
    reach("put.linked")
    with pytest.raises(InjectedFault, match=r"put.linked"):
        reach("put.linked")
    reach("put.linked")


def test_disarmed_is_disarmed() -> None:
    arm("put.linked", "raise")
    faults.disarm()
    reach("put.linked")


@pytest.mark.kill
def test_a_kill_ends_the_process_at_once() -> None:
    run_and_kill("open.led", reach, "open.led")


def test_a_pause_lasts_until_it_is_told_to_end(tmp_path: Path) -> None:
    arm("epoch.decided", "pause", folder=str(tmp_path))
    driver = threading.Thread(target=reach, args=("epoch.decided",))
    driver.start()
    while not (tmp_path / "paused").exists():
        assert driver.is_alive()
    assert driver.is_alive()
    (tmp_path / "resume").touch()
    driver.join(30)
    assert not driver.is_alive()


def test_faults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    arm_from_environment()
    monkeypatch.setenv("ONCEFLOW_FAULT", "open.led:raise,epoch.decided:raise:2")
    arm_from_environment()
    with pytest.raises(InjectedFault):
        reach("open.led")
    reach("epoch.decided")
    with pytest.raises(InjectedFault):
        reach("epoch.decided")


def test_what_does_not_exist_cannot_be_armed() -> None:
    with pytest.raises(ValueError, match=r"no fault point is called 'epoch.dreamed'"):
        arm("epoch.dreamed", "kill")
    with pytest.raises(ValueError, match="unknown fault action 'tickle'"):
        arm("epoch.decided", "tickle")


def test_what_is_reached_is_recorded_with_its_facts_until_it_is_disarmed(tmp_path: Path) -> None:
    faults.record(tmp_path / "trace")
    reach("epoch.decided", term=3, epoch=7)
    arm("put.linked", "raise")
    with pytest.raises(InjectedFault):
        reach("put.linked")
    faults.disarm()
    reach("epoch.published", term=3, epoch=7)
    lines = (tmp_path / "trace").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"driver": os.getpid(), "point": "epoch.decided", "term": 3, "epoch": 7},
        {"driver": os.getpid(), "point": "put.linked"},
    ]


def test_a_trace_goes_on_in_the_same_file_and_its_lines_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several drivers, and threads of one, write into one file."""
    monkeypatch.setenv("ONCEFLOW_TRACE", str(tmp_path / "trace"))
    for _ in range(2):
        arm_from_environment()
        threads = [
            threading.Thread(target=lambda: [reach("put.written") for _ in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        faults.disarm()
    lines = (tmp_path / "trace").read_text().splitlines()
    assert {json.loads(line)["point"] for line in lines} == {"put.written"}
    assert len(lines) == 2 * 4 * 200


def test_every_point_is_reached_somewhere_and_every_reached_one_is_listed() -> None:
    """The crash matrix is made from the list."""
    reached, in_tasks = set(), set()
    for path in Path(onceflow.__file__).parent.rglob("*.py"):
        reached |= set(re.findall(r'\b_?reach\("([^"]+)"', path.read_text()))
        steps = re.findall(r'\breach\(f"\{self\.kind\}\.([^"]+)"', path.read_text())
        reached |= {f"{kind}.{step}" for kind in ("sqlite", "postgres") for step in steps}
        in_tasks |= set(re.findall(r'\breach_in_task\("([^"]+)"', path.read_text()))
    assert reached == {*POINTS, *SOME_OPENINGS, *TRIM, *SNAPSHOTS, *KEYED, *SERVICES}
    assert in_tasks == set(TASK)
    assert len(POINTS) == len(set(POINTS))
