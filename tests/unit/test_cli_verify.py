"""`onceflow verify` before it starts anything: what it refuses, and what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from onceflow.cli import cli
from onceflow.cli.display import Plain
from onceflow.cli.verify import VerifyReport, _command
from onceflow.errors import JobError

WRONG = {
    ("--fault", "meteor"): "--fault: 'meteor' is unknown",
    ("--at", "nowhere"): "--at: 'nowhere' is unknown",
    ("--jobs", "echo,chess"): "--jobs: 'chess' is unknown",
    ("--sinks", "paper"): "--sinks: 'paper' is unknown",
    ("--jobs", "sum", "--sinks", "files"): "no job of sum writes to files",
    ("--duration", "soon"): "is not a time",
    ("--part", "5/4"): "'5/4' is not a part of",
    ("--part", "2"): "'2' is not a part of",
    ("--input", "log"): "--input needs a job file",
    ("job.py", "--jobs", "echo"): "are for the built-in jobs",
    ("job.py", "--guarantee", "at-most-once"): "are for the built-in jobs",
    ("--report", "no/such/folder/r.html"): "there is no folder for",
    ("--fault", "kill-executor"): "only with --master cluster",
    ("--fault", "snapshots", "--guarantee", "at-most-once"): "restore: only with outputs that",
}


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_wrong_options_are_refused_before_anything_starts(options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["verify", *options])
    assert isinstance(done.exception, JobError)
    assert WRONG[options] in done.exception.message
    assert done.exception.hint


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = CliRunner().invoke(cli, ["verify", "--keep", str(tmp_path)])
    assert isinstance(done.exception, JobError)
    assert "is not empty" in done.exception.message
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_command_that_replays_has_no_words_about_where_results_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["verify", "--seed", "7", "--report", "a.html", "--keep=x", "--json", "--fault", "flip",
             "--record", "there", "--no-record"]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["onceflow", *given])
    assert _command() == "onceflow verify --seed 7 --fault flip"


def test_lines_for_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Plain(VerifyReport())
    for event in STORY:
        screen.show(event)
    said = capsys.readouterr().out
    assert "left out: full-disk: a tmpfs cannot be mounted here" in said
    assert "  4.5 s      1  kill-point at epoch.decided" in said
    assert "invalid: 1 fault struck (1 kill) in 9 s, 1 violation" in said
    assert "lost: result/result: 3 rows" in said
    assert "allowed by its guarantee: duplicated: result/audit: 2 rows" in said
    assert "to repeat it: onceflow verify --seed 7" in said
    assert json.dumps(STORY), "events are JSON"


STORY: list[dict[str, Any]] = [
    {"event": "begin", "at_s": 0.0, "folder": "/f", "faults": 1, "seed": 7,
     "cases": ["echo to files"],
     "left_out": ["full-disk: a tmpfs cannot be mounted here (it needs root)"]},
    {"event": "case", "at_s": 0.1, "job": "echo", "sinks": "files", "faults": 1},
    {"event": "fault", "at_s": 4.5, "number": 0, "kind": "kill-point",
     "what": "kill-point at epoch.decided"},
    {"event": "case-ended", "at_s": 9.0, "job": "echo", "sinks": "files", "seconds": 9.0,
     "rows_in": 40, "rows_out": 37, "epochs": 4, "violations": ["lost: result/result: 3 rows"],
     "unknown": ""},
    {"event": "verdict", "at_s": 9.1, "verdict": "invalid", "struck": 1, "kills": 1,
     "seconds": 9.1, "command": "onceflow verify --seed 7", "unknown": [],
     "recovery_s": {"p50": 1.0, "p95": 1.0, "max": 1.0},
     "violations": [{"kind": "lost", "where": "result/result", "message": "3 rows"}],
     "allowed": [{"kind": "duplicated", "where": "result/audit", "message": "2 rows"}]},
]  # fmt: skip
