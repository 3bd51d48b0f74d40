"""`onceflow verify` itself: CI size over the whole matrix, jobs of a user's own, a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ONCEFLOW = [sys.executable, "-c", "from onceflow.cli import main; main()", "verify"]
JOB = """
from datetime import UTC, datetime, timedelta

from pyspark.sql import functions as F

from onceflow import Flow, job
from onceflow.sinks import Files, Sqlite
from onceflow.sources import Log


def line(number, random):
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)
    return {"value": " ".join(random.choices("to be or not".split(), k=3)), "event_time": at}


@job("words", every="0ms", keep_epochs=3, workload=line)
def words(flow: Flow) -> None:
    lines = flow.read("lines", Log("data/lines"))
    words = lines.select("event_time", F.explode(F.split("value", " ")).alias("word"))
    windows = (
        words.withWatermark("event_time", "5 seconds")
        .groupBy(F.window("event_time", "20 seconds"), "word").count()
        .select(F.col("window.start").alias("begin"), "word", "count")
    )
    flow.write("windows", windows, to=Files("out/windows"))
    sums = words.groupBy("word").count()
    flow.write("sums", sums, to=Sqlite("out/sums.db", table="sums", key="word"), mode="update")
"""


def verify(
    *options: str, cwd: Path, **environment: str
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Exit code, the verdict, all events."""
    done = subprocess.run(
        [*ONCEFLOW, *options, "--json"], cwd=cwd, env={**os.environ, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines()]
    verdict = next((event for event in events if event["event"] == "verdict"), {})
    for problem in (*verdict.get("violations", ()), *verdict.get("unknown", ()), done.stderr):
        print(problem)
    return done.returncode, verdict, [*events, *map(json.loads, done.stderr.splitlines()[-1:])]


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
    schedule = json.loads((tmp_path / "kept" / "schedule.json").read_text())
    planned = [fault["kind"] for fault in schedule["faults"]]
    assert planned == [fault["kind"] for fault in verdict["faults"]], "carried out as written down"
    assert "valid" in report.read_text()


@pytest.mark.kill
@pytest.mark.timeout(900)
def test_a_job_of_ones_own_against_its_undisturbed_run(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    kinds = ("--fault", "kill-driver", "--fault", "raise-point")
    code, verdict, _ = verify("job.py", "--faults", "2", *kinds, cwd=tmp_path)
    assert code == 0
    assert verdict["struck"] == 2
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"job.py", ".onceflow"}, "it ran elsewhere"
    assert [path.name for path in (tmp_path / ".onceflow").iterdir()] == ["_verify"]
    (recorded,) = (tmp_path / ".onceflow" / "_verify").iterdir()
    assert {path.name for path in recorded.iterdir()} == {
        "events.jsonl", "result.json", "report.html",
    }  # fmt: skip


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


REFUSED = {
    "no workload": ("workload=line", "workload=None", "names no workload"),
    "a place of its own": ('Log("data/lines")', 'Log("/nowhere/lines")', "a folder of its own"),
    "no log": (
        'flow.read("lines", Log("data/lines"))',
        'flow.read("lines", flow.spark.readStream.name("lines").format("rate").load())'
        '.selectExpr("timestamp event_time", "string(value) value")',
        "cannot be fed and replayed here",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("why", REFUSED)
def test_a_job_that_cannot_be_verified_is_refused_with_the_reason(tmp_path: Path, why: str) -> None:
    before, after, says = REFUSED[why]
    assert before in JOB
    (tmp_path / "job.py").write_text(JOB.replace(before, after))
    code, verdict, events = verify("job.py", cwd=tmp_path)
    assert (code, verdict) == (2, {})
    assert says in events[-1]["message"]
    assert events[-1]["hint"]


@pytest.mark.kill
@pytest.mark.timeout(300)
def test_an_interrupted_run_leaves_nothing_running(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [*ONCEFLOW, "--jobs", "echo", "--keep", "kept", "--json"], cwd=tmp_path,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    with run.stdout:
        for line in run.stdout:
            if json.loads(line)["event"] == "fault":
                run.send_signal(signal.SIGINT)
                break
        last = [json.loads(line) for line in run.stdout]
    assert run.wait() == 130
    assert last[-1]["verdict"] == "unknown"
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(tmp_path) in _command(pid)]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text() + (process / "environ").read_text()
    except OSError:
        return ""
