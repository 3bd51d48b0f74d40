"""`onceflow stop`: from another process, at an epoch's end, and only the start that is meant."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import Run, onceflow, patiently
from story import Story, read_files
from test_cli import story_file, write
from waiting import wait_for

import onceflow as library
from onceflow import Flow, faults, sources
from onceflow.jobs.handle import Handle
from onceflow.protocol.home import JobFolder
from onceflow.sinks import Files


def stands(folder: JobFolder) -> dict[str, int]:
    """Query -> its last epoch, which is decided, published and committed by Spark."""
    found = {}
    for query in folder.queries():
        last = query.epoch_log().read().last
        assert last is not None
        commits = [int(p.name) for p in (query.folder / "commits").iterdir() if p.name.isdigit()]
        assert max(commits) == last.epoch
        found[query.name] = last.epoch
    for row in ledger(folder):
        assert row["published"] == row["decided"] == found[row["query"]]
    return found


def ledger(folder: JobFolder) -> list[dict[str, Any]]:
    home = folder.home
    done = onceflow("ledger", folder.name, "--home", home, "--json", cwd=home)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_run_is_stopped_from_another_process_and_its_next_start_is_not(tmp_path: Path) -> None:
    story = Story(str(tmp_path), "stateful", "files")
    story.write_input(range(2))
    write(tmp_path / "it.py", story_file(story))
    folder = JobFolder(story.home, "story")
    stop = ["stop", "story", "--home", story.home]

    with Run("it.py", "--home", story.home, cwd=tmp_path) as run:
        run.reach(epoch=1)
        told = onceflow(*stop, "--savepoint", "before", "--json", cwd=tmp_path)
        assert told.returncode == 0, told.stderr
        answer = json.loads(told.stdout)
        assert run.ended() == 0
        assert [e["event"] for e in run.said if e["event"] != "progress"][-2:] == [
            "stopping", "ended",
        ]  # fmt: skip
        assert not run.of("restarting")
        assert answer["process"]["pid"] == run.driver()
    assert (answer["was_running"], told.stderr) == (True, "")
    assert answer["queries"] == stands(folder)
    assert story.published() == story.expected(2)
    shown = json.loads(onceflow("savepoint", "list", "story", "--home", story.home, "--json",
                                cwd=tmp_path).stdout)  # fmt: skip
    made = [(s["name"], s["epochs"]) for s in shown["savepoints"]]
    assert made == [("before", answer["queries"])]

    again = onceflow(*stop, "--savepoint", "before", cwd=tmp_path)
    assert again.returncode == 2
    assert "savepoint 'before' exists already" in again.stderr
    again = onceflow(*stop, cwd=tmp_path)
    assert again.returncode == 0
    assert again.stdout.startswith("story was not running: result after epoch ")

    story.write_input(range(2, 4))
    with Run("it.py", "--home", story.home, cwd=tmp_path) as run:
        patiently(lambda: story.published() == story.expected(4))
        told = onceflow(*stop, cwd=tmp_path, ONCEFLOW_HOST="elsewhere")  # a machine that shares it
        assert told.returncode == 0, told.stderr
        assert f"asked process {run.driver()} on " in told.stderr
        assert run.ended() == 0
    (epoch,) = stands(folder).values()
    assert told.stdout.startswith(f"story stopped: result after epoch {epoch} (")
    assert len(list(folder.folder.glob("stop/*"))) == 1  # the last answer; the next start takes it


class Notebook:
    """Two queries of a job that `onceflow.start` runs in this process."""

    def __init__(self, root: Path, spark: Any) -> None:
        self.root, self.spark, self.home = root, spark, root / "home"
        (root / "in").mkdir()
        self.files = 0

    def add(self) -> None:
        part = write(self.root / "in" / f".{self.files}", f'{{"id": {self.files}}}\n')
        part.rename(self.root / "in" / f"{self.files}.json")
        self.files += 1

    def start(self) -> Handle:
        @library.job("notes", every="0ms")
        def notes(flow: Flow) -> None:
            source = sources.Files(self.root / "in", format="json", schema="id long")
            rows = flow.read("rows", source)
            flow.write("ones", rows, to=Files(self.root / "ones"))
            flow.write("twos", rows.select((rows.id * 2).alias("id")), to=Files(self.root / "twos"))

        return library.start(notes, home=self.home, spark=self.spark)

    def stop(self, *arguments: object) -> Any:
        return onceflow("stop", "notes", "--home", self.home, *arguments, cwd=self.root)

    def published(self) -> bool:
        ones = Counter((i,) for i in range(self.files))
        return all(
            (self.root / name / "_commits").is_dir() and read_files(self.root / name) == rows
            for name, rows in (("ones", ones), ("twos", Counter({(i * 2,): 1 for (i,) in ones})))
        )


@pytest.fixture
def notebook(tmp_path: Path, spark: Any) -> Notebook:
    return Notebook(tmp_path, spark)


def test_all_queries_of_a_notebooks_job_stop_with_a_savepoint(notebook: Notebook) -> None:
    notebook.add()
    with notebook.start() as handle:
        wait_for(notebook.published)
        done = onceflow("savepoint", "create", "notes", "--stop", "--home", notebook.home, "--json",
                        cwd=notebook.root)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert handle.wait(30)
        assert handle.status == {
            "job": "notes", "state": "stopped", "queries": json.loads(done.stdout)["queries"],
        }  # fmt: skip
    epochs = stands(handle.folder)
    assert set(epochs) == {"ones", "twos"}
    name = json.loads(done.stdout)["savepoint"]["name"]
    found = json.loads(onceflow("savepoint", "list", "notes", "--home", notebook.home, "--json",
                                cwd=notebook.root).stdout)  # fmt: skip
    (shown,) = found["savepoints"]
    assert (shown["name"], shown["epochs"]) == (name, epochs)

    notebook.add()
    with notebook.start() as handle:  # what stopped the other is no word to this one
        wait_for(notebook.published)
        assert handle.status["state"] == "running"


def test_an_epoch_that_hangs_is_told_after_the_timeout_and_stops_when_it_ends(
    notebook: Notebook, tmp_path: Path
) -> None:
    faults.arm("epoch.staged", "pause", folder=str(tmp_path))
    try:
        notebook.add()
        handle = notebook.start()
        wait_for((tmp_path / "paused").exists)
        done = notebook.stop("--timeout", 1)
        assert done.returncode == 75
        asked, error, fix = done.stderr.splitlines()
        assert asked.startswith("asked process ")
        assert "has not stopped within 1 s; it will when its epoch ends" in error
        assert "onceflow stop notes --timeout 600; or end it at once, which loses nothing" in fix
        assert handle.status["state"] == "running"
        (tmp_path / "resume").touch()
        assert handle.wait(60)
    finally:
        (tmp_path / "resume").touch()
        faults.disarm()
    assert not list(handle.folder.folder.glob("stop/*[!e].json"))
    with notebook.start():
        wait_for(notebook.published)
