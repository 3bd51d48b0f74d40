"""`onceflow verify` with the faults of snapshots and of keyed state."""

from __future__ import annotations

from pathlib import Path

import pytest
from baits import first_seed
from verifying import verify

from onceflow.harness.fault_schedule import KEYED, SNAPSHOTS, Fault


@pytest.mark.kill
@pytest.mark.timeout(900)
def test_people_go_back_and_forth_and_every_row_is_there_once(tmp_path: Path) -> None:
    def fits(faults: list[Fault]) -> bool:
        """What a command goes back to is there, and most commands are broken on their way."""
        return (
            [fault.kind for fault in faults]
            == ["rollback", "savepoint", "restore", "rollback", "fork", "restore"]
            and sum(fault.point != "" for fault in faults) >= 4
            and {fault.file for fault in faults} >= {"rewind", "skip"}
        )

    seed = first_seed(fits, [("files",), ("sqlite",)], count=6, kinds=SNAPSHOTS)
    code, verdict, _ = verify(
        "--jobs", "echo", "--sinks", "files,sqlite", "--fault", "snapshots", "--faults", "6",
        "--seed", str(seed), cwd=tmp_path,
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

    def fits(faults: list[Fault]) -> bool:
        damaged = {fault.file for fault in faults if fault.kind in ("flip", "truncate")}
        failed = {fault.file for fault in faults if fault.kind == "fail-task"}
        return (
            {fault.kind for fault in faults} == set(kinds)
            and damaged == {"manifest", "run"}
            and failed == {"raise", "kill"}
            and all(fault.visit == 1 for fault in faults)
        )

    cases = [("sqlite", KEYED), ("sqlite", KEYED), ("log", KEYED), ("sqlite", KEYED)]
    seed = first_seed(fits, cases, count=10, kinds=kinds, at=points)
    code, verdict, _ = verify(
        "--jobs", "keyed,timers,expiring,steps", "--faults", "10", "--seed", str(seed),
        *(f"--at={point}" for point in points), *(f"--fault={kind}" for kind in kinds),
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 0
    assert verdict["struck"] >= 9, [f for f in verdict["faults"] if not f["hit"]]
    assert {fault["kind"] for fault in verdict["faults"] if fault["hit"]} == set(kinds)
