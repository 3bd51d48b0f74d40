"""`onceflow demo` as people start it: killed for real, exact, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from commands import ONCEFLOW, SECONDS, environment, onceflow, patiently, running

pytestmark = pytest.mark.timeout(900)  # three Sparks on two cores

JOBS = ["aggregation", "attribution", "load"]
SMALL = ["--rate", "300", "--seconds", "1", "--port", "0"]
Event = dict[str, Any]


def demo(folder: Path, *more: str) -> subprocess.Popen[str]:
    """In a session of its own, as behind a terminal."""
    return subprocess.Popen(
        [*ONCEFLOW, "demo", "--folder", folder.name, *SMALL, *more, "--json"],
        cwd=folder.parent,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def heard(process: subprocess.Popen[str]) -> Iterator[Event]:
    assert process.stdout is not None
    return map(json.loads, process.stdout)


def working_in(folder: Path) -> list[int]:
    """The processes whose working directory is there: all that a demo starts."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            where = os.readlink(path / "cwd")
        except OSError:
            continue
        if Path(where).is_relative_to(folder):
            found.append(int(path.name))
    return running(found)


def check_exact(verdict: Event) -> None:
    assert verdict["differences"] == []
    assert (verdict["exact"], verdict["lost"], verdict["duplicated"]) == (True, 0, 0)
    assert verdict["compared"] > 1000
    for line in verdict["campaigns"]:
        assert line["clicks"] == line["serving"] == line["warehouse"] > 0
        assert line["spend_micros"] == line["charged_micros"] > 0
    assert all(line["truth"] == line["found"] > 0 for line in verdict["others"])


@pytest.mark.kill
def test_a_demo_is_killed_for_real_shown_on_a_page_and_exact(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    events: dict[str, list[Event]] = {}
    seen: list[Event] = []
    with demo(folder) as process:
        for event in heard(process):
            events.setdefault(event["event"], []).append(event)
            if event["event"] == "killed" and not seen:
                with urlopen(f"{events['page'][0]['url']}api/jobs", timeout=30) as answer:
                    seen = json.load(answer)
        errors = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 0, errors
    assert [job["job"] for job in seen] == JOBS

    killed, budget = events["killed"]
    assert (killed["part"], budget["part"]) == ("aggregation", "budget")
    what = [ended["what"] for ended in killed["processes"]]
    assert what[:2] == ["onceflow run", "driver"]
    assert "JVM" in what
    how = {ended["what"]: ended["how"] for ended in killed["processes"]}
    for one in ("onceflow run", "driver", "JVM"):
        assert how[one] == "was ended by SIGKILL"
    assert not running(ended["pid"] for ended in killed["processes"])
    first, second = [e for e in events["starting"] if e["part"] == "aggregation"]
    assert first["command"] == second["command"]
    lives = [e for e in events["started"] if e["part"] == "aggregation"]
    assert lives[-2]["driver"] == killed["processes"][1]["pid"]
    after = lives[-1]["resumes_after"][killed["query"]]
    assert (after if after is not None else -1) == killed["epoch"] - (not killed["decided"])

    check_exact(events["verdict"][0])
    written = (folder / "home" / "_boards" / "ads.jsonl").read_text()
    board = [json.loads(line) for line in written.splitlines()]
    marks = [line for line in board if "mark" in line]
    assert [line["mark"] for line in marks] == ["kill", "start", "kill", "start", "verdict"]
    assert marks[-1]["exact"] is True
    last = [line for line in board if "totals" in line][-1]["totals"]
    assert last["clicks"] == last["truth_clicks"] > 0
    assert last["spend_micros"] == last["truth_spend_micros"] > 0
    assert working_in(folder) == []
    assert not (folder / "scratch").exists()

    # What it says to try next can be typed as it stands.
    commands = [c["command"] for c in events["next"][0]["commands"]]
    assert commands[-1].startswith("onceflow run ads/load.py")
    os.mkdir(tmp_path / "bin")
    called = " ".join(map(shlex.quote, ONCEFLOW))
    (tmp_path / "bin" / "onceflow").write_text(f'#!/bin/sh\nexec {called} "$@"\n')
    (tmp_path / "bin" / "onceflow").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    typed = [c for c in commands if not c.startswith("onceflow serve")]
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -e", *typed[:-1], typed[-1] + " --once"])],
        env=environment(PATH=path), cwd=tmp_path, check=False, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact" in done.stdout
    assert "counts: 0 rows published in" in done.stdout

    # It is not begun again over a job file that was changed since.
    (folder / "ads" / "load.py").write_text("")
    refused = onceflow("demo", "--folder", folder, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.match(r"error: \S+load.py was changed", refused.stderr)


@pytest.mark.slow
@pytest.mark.kill
def test_chaos_kills_this_and_that_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with demo(folder, "--chaos", "--no-page", "--seconds", "20", "--seed", "3") as process:
        events = list(heard(process))
        errors = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 0, errors
    killed = [event for event in events if event["event"] == "killed"]
    assert len(killed) >= 3
    assert not [event for event in events if event["event"] == "page"]
    check_exact(next(event for event in events if event["event"] == "verdict"))
    assert working_in(folder) == []


@pytest.mark.kill
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_however_a_demo_is_ended_all_that_it_has_started_ends(
    number: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "demo"
    with demo(folder) as process:
        assert any(event["event"] == "started" for event in heard(process))
        # three supervisors with their drivers, two services and at least one JVM
        patiently(lambda: len(working_in(folder)) >= 9)
        process.send_signal(number)
        process.communicate(timeout=SECONDS)
    if number == signal.SIGKILL:
        assert process.returncode == -number
        patiently(lambda: working_in(folder) == [])
    else:
        assert process.returncode == 128 + number
        assert working_in(folder) == []
        assert not (folder / "scratch").exists()
