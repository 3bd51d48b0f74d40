"""`onceflow demo` as people start it: killed for real, exact, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ONCEFLOW, SECONDS, environment, onceflow, patiently, running

EVENTS = 3000


def demo(folder: Path, *more: str) -> subprocess.Popen[str]:
    """In a session of its own, as behind a terminal."""
    return subprocess.Popen(
        [*ONCEFLOW, "demo", "--folder", folder.name, "--events", str(EVENTS), *more],
        cwd=folder.parent,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


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


@pytest.mark.kill
def test_a_demo_is_killed_for_real_and_exact(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with demo(folder, "--json") as process:
        said, errors = process.communicate(timeout=2 * SECONDS)
    assert process.returncode == 0, said + errors
    events: dict[str, list[dict[str, Any]]] = {}
    for line in said.splitlines():
        events.setdefault(json.loads(line)["event"], []).append(json.loads(line))

    (killed,) = events["killed"]
    what = [ended["what"] for ended in killed["processes"]]
    assert what[:2] == ["onceflow run", "driver"]
    assert "JVM" in what
    how = {ended["what"]: ended["how"] for ended in killed["processes"]}
    for one in ("onceflow run", "driver", "JVM"):
        assert how[one] == "was ended by SIGKILL"
    assert not running(ended["pid"] for ended in killed["processes"])
    first, second = events["starting"]
    assert first["command"] == second["command"]
    before = [e for e in events["started"] if e["seconds"] <= killed["seconds"]]
    after = [e for e in events["started"] if e["seconds"] > killed["seconds"]]
    assert before[-1]["driver"] == killed["processes"][1]["pid"]
    assert after[0]["resumes_after"] == killed["epoch"] - (not killed["decided"])

    (verdict,) = events["verdict"]
    assert (verdict["exact"], verdict["lost"], verdict["duplicated"]) == (True, 0, 0)
    assert verdict["differences"] == []
    counts = [line for line in verdict["table"] if line["kind"] != "rejected"]
    for name in ("truth", "files", "sqlite"):
        assert sum(line[name] for line in counts) == EVENTS
    assert working_in(folder) == []
    assert not (folder / "scratch").exists()

    # What it says to try next can be typed as it stands.
    commands = [c["command"] for c in events["next"][0]["commands"]]
    assert commands[-1].startswith("onceflow run ads.py")
    os.mkdir(tmp_path / "bin")
    called = " ".join(map(shlex.quote, ONCEFLOW))
    (tmp_path / "bin" / "onceflow").write_text(f'#!/bin/sh\nexec {called} "$@"\n')
    (tmp_path / "bin" / "onceflow").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    typed = "\n".join(["set -e", *commands[:-1], commands[-1] + " --once"])
    done = subprocess.run(
        ["bash", "-c", typed], env=environment(PATH=path), cwd=tmp_path, check=False,
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ads: stopped" in done.stdout
    assert done.stdout.count("all that is decided is published") == 3
    assert "counts: 0 rows published in" in done.stdout

    # It is not begun again over a job file that was changed since.
    (folder / "ads.py").write_text("")
    refused = onceflow("demo", "--folder", folder, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.match(r"error: \S+ads.py was changed", refused.stderr)


@pytest.mark.kill
@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGINT, "running"), (signal.SIGTERM, "starting")], ids=str
)
def test_a_signal_ends_all_that_a_demo_has_started(
    number: signal.Signals, when: str, tmp_path: Path
) -> None:
    folder = tmp_path / "demo"
    with demo(folder, "--json") as process:
        assert process.stdout is not None
        heard = map(json.loads, process.stdout)
        assert any(event.get("doing") == when for event in heard)
        # the supervisor, the driver and what becomes the JVM
        patiently(lambda: len(working_in(folder)) >= 3)
        process.send_signal(number)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number
    assert working_in(folder) == []
    assert not (folder / "scratch").exists()
