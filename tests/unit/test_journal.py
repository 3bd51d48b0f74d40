"""The journal of a job: what happened is there to be read, and a write that fails stops nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from onceflow.service.journal import EVENTS, PROGRESS, Journal
from onceflow.service.supervisor import Supervisor


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


def test_what_is_for_the_record_is_kept_in_order_and_nothing_else(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "home" / "shop")
    journal.starting()
    journal.event("session", spark="4.2.1")
    journal.event("started", queries={"out": {"term": 3}})
    journal.event("progress", queries=[])
    journal.event("ended", queries=[{"query": "out"}])
    found = events(tmp_path / "home" / "shop")
    assert [event["event"] for event in found] == ["starting", "started", "ended"]
    assert all(event["at"].endswith("Z") for event in found)
    assert found[0]["pid"]
    assert found[1]["queries"] == {"out": {"term": 3}}
    assert "queries" not in found[2]


def test_a_start_says_when_the_life_before_was_seen_last(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.starting()
    journal.progress([{"query": "out", "epoch": 3}])
    seen = json.loads((tmp_path / PROGRESS).read_text())
    assert seen["queries"] == [{"query": "out", "epoch": 3}]
    journal.starting()
    assert [event["seen"] for event in events(tmp_path)] == [None, seen["at"]]


def test_it_stays_small(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(1700):
        journal.event("restarting", message=str(number))
    journal.event("error", message="x" * 100_000)
    journal.starting()
    found = events(tmp_path)
    assert len(found) == 1001
    assert found[0]["message"] == "701"
    assert len(found[-2]["message"]) < 3000


@pytest.mark.parametrize("hinder", ["file", "folder"])
def test_a_write_that_fails_stops_nobody(tmp_path: Path, hinder: str) -> None:
    folder = tmp_path / "shop"
    if hinder == "file":
        folder.write_text("not a folder")
    else:
        (folder / EVENTS).mkdir(parents=True)
        (folder / PROGRESS).mkdir()
    journal = Journal(folder)
    journal.starting()
    journal.event("started", queries={"out": object()})
    journal.progress([{"query": "out"}])


def test_a_full_disk_stops_nobody(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * 200_000)
    journal = Journal(small_disk / "shop")
    for _ in range(200):
        journal.event("error", message="x" * 1900)
    journal.progress([{"query": "x" * 100_000}])


class Nobody:
    def show(self, event: dict[str, Any]) -> None: ...
    def tick(self) -> None: ...
    def close(self) -> None: ...


def test_a_supervisor_records_where_its_driver_says_that_the_job_is(tmp_path: Path) -> None:
    job = tmp_path / "it.py"
    job.write_text(
        "import os, signal, sys\n"
        "events = int(sys.argv[sys.argv.index('--events') + 1])\n"
        """os.write(events, b'{"event": "loaded", "job": "shop"}\\n')\n"""
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder = tmp_path / "home" / "shop"
    folder.mkdir(parents=True)
    run = Supervisor([str(job), f"--home={tmp_path / 'home'}"], Nobody(), first_pause=0.01)
    assert run.run() == 128 + signal.SIGKILL
    kinds = [(event["event"], event["kind"]) for event in events(folder)]
    assert kinds == [("restarting", "DriverDied")] * 4 + [("error", "DriverDied")]
