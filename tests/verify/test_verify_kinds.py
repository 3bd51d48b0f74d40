"""`onceflow verify` with kinds of faults that have places of their own: snapshots, keyed state."""

from __future__ import annotations

from pathlib import Path

import pytest
from verifying import verify


@pytest.mark.kill
@pytest.mark.timeout(900)
def test_people_go_back_and_forth_and_every_row_is_there_once(tmp_path: Path) -> None:
    code, verdict, _ = verify(
        "--jobs", "echo", "--sinks", "files,sqlite", "--fault", "snapshots", "--faults", "6",
        "--seed", "1658", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0
    assert verdict["struck"] == 6, [f for f in verdict["faults"] if not f["hit"]]
    assert {fault["kind"] for fault in verdict["faults"]} == {
        "savepoint", "rollback", "restore", "fork",
    }  # fmt: skip


@pytest.mark.kill
@pytest.mark.timeout(1800)
def test_keyed_state_is_broken_in_its_own_places_and_every_row_counts_once(tmp_path: Path) -> None:
    points = ("keyed.ran", "keyed.listed", "keyed.step-staged", "task.rows-written",
              "task.run-written", "task.merged")  # fmt: skip
    kinds = ("kill-point", "fail-task", "flip", "truncate", "rollback")
    code, verdict, _ = verify(
        "--jobs", "keyed,timers,expiring,steps", "--faults", "10", "--seed", "19",
        *(f"--at={point}" for point in points), *(f"--fault={kind}" for kind in kinds),
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 0
    assert verdict["struck"] >= 9, [f for f in verdict["faults"] if not f["hit"]]
    assert {fault["kind"] for fault in verdict["faults"] if fault["hit"]} == set(kinds)
