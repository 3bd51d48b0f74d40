"""The reference application, whole and broken: every output equals the expected result of its
generator, and charges are what committed clicks cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mutants import environment

pytestmark = pytest.mark.slow  # minutes, with five Sparks at once

ROOT = Path(__file__).parents[2]


def verify(*options: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Exit code and verdict."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.ads", "verify", *options, "--json"],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines()]
    verdict = next((event for event in events if event["event"] == "verdict"), {})
    for problem in (*verdict.get("violations", ()), *verdict.get("unknown", ()), done.stderr):
        print(problem)
    return done.returncode, verdict


@pytest.mark.kill
@pytest.mark.timeout(1800)
def test_all_three_jobs_and_both_services_are_broken_and_every_number_is_right(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.html"
    code, verdict = verify("--seed", "3", "--faults", "9", "--report", str(report))
    assert code == 0
    assert verdict["struck"] >= 8, [f for f in verdict["faults"] if not f["hit"]]
    assert {fault["job"] for fault in verdict["faults"]} == {"aggregation", "attribution", "load"}
    assert {"kill-budget", "kill-orders"} <= {fault["kind"] for fault in verdict["faults"]}
    assert {case["job"] for case in verdict["cases"]} == {
        "aggregation", "attribution", "load", "budget",
    }  # fmt: skip
    assert all(case["rows_out"] for case in verdict["cases"])
    assert "kill-budget" in report.read_text()


@pytest.mark.kill
@pytest.mark.timeout(900)
def test_it_bites() -> None:
    """The aggregation publishes an epoch twice: its events and panes are there twice."""
    code, verdict = verify(
        "--faults", "1", "--fault", "raise-point", "--at", "epoch.output-published",
        **environment("skip-the-ledger"),
    )  # fmt: skip
    assert code == 1
    assert "duplicated" in {violation["kind"] for violation in verdict["violations"]}
