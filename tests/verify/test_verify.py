"""`onceflow verify` itself: CI size over the whole matrix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from verifying import verify


@pytest.mark.slow  # minutes; a day has the crash matrix, and a few faults of verify
@pytest.mark.kill
@pytest.mark.timeout(1800)
def test_forty_faults_over_the_matrix_and_every_row_is_there_once(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    code, verdict, _ = verify(
        "--faults", "42", "--report", str(report), "--keep", "kept", cwd=tmp_path
    )
    assert code == 0
    assert verdict["struck"] >= 40, [f for f in verdict["faults"] if not f["hit"]]
    assert verdict["kills"] >= 20
    assert {case["job"] for case in verdict["cases"]} == {
        "echo", "sum", "windows", "distinct", "join", "several", "dice", "keyed", "timers",
        "expiring", "steps",
    }  # fmt: skip
    schedule = json.loads((tmp_path / "kept" / "fault_schedule.json").read_text())
    planned = [fault["kind"] for fault in schedule["faults"]]
    assert planned == [fault["kind"] for fault in verdict["faults"]], "carried out as written down"
    assert "valid" in report.read_text()
