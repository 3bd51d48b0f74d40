"""Files that Spark or the source lost, tasks that fail or run twice: the rows are exact."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from story import FILES, JOB, Story

from onceflow import faults
from onceflow.harness.cluster import cluster
from onceflow.harness.drivers import Drivers

QUERIES = ["stateless", "stateful"]


def half_way(tmp_path: Path, query: str, sinks: str = "both") -> Story:
    """Three of the five files are published."""
    story = Story(str(tmp_path), query, sinks)
    story.write_input(range(3))
    story.live()
    story.check(files=3)
    return story


def finish(story: Story) -> None:
    story.live()
    story.check(files=3)
    story.write_input(range(3, FILES))
    story.live()
    story.check()


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("lost", [("commits",), ("offsets",), ("offsets", "commits")])
def test_the_newest_files_of_sparks_checkpoint_are_lost(
    tmp_path: Path, spark: Any, query: str, lost: tuple[str, ...]
) -> None:
    story = half_way(tmp_path, query)
    for folder in lost:
        story.newest(folder).unlink()
    finish(story)


@pytest.mark.parametrize("query", QUERIES)
def test_the_sources_files_of_a_decided_epoch_are_gone(
    tmp_path: Path, spark: Any, query: str
) -> None:
    """Expired, moved away, deleted: the epoch is decided and is not read again."""
    story = Story(str(tmp_path), query, "both")
    story.write_input(range(3))
    faults.arm("epoch.decided", "raise", visit=3)
    with pytest.raises(faults.InjectedFault):
        story.live()
    faults.disarm()
    shutil.rmtree(tmp_path / "in")
    (tmp_path / "in").mkdir()
    finish(story)


def test_an_undecided_epoch_is_planned_anew(tmp_path: Path, spark: Any) -> None:
    """Its offsets were written, but not decided: it may get other files."""
    story = Story(str(tmp_path), "stateless", "files")
    story.write_input(range(2))
    faults.arm("epoch.checked", "raise", visit=2)
    with pytest.raises(faults.InjectedFault):
        story.live()
    faults.disarm()
    assert story.newest("offsets").name == "1"
    (tmp_path / "in" / "1.parquet").unlink()
    story.write_input(range(1, FILES))
    story.live()
    story.check()


def test_the_no_data_epoch_that_is_due_runs_after_a_restart(tmp_path: Path, spark: Any) -> None:
    """Windows that the last rows closed do not wait for another row."""
    story = Story(str(tmp_path), "stateful", "sqlite")
    story.write_input()
    faults.arm("epoch.checked", "raise", visit=FILES + 1)
    with pytest.raises(faults.InjectedFault):
        story.live()
    faults.disarm()
    assert story.published() != story.expected()
    story.live()
    story.check()


def test_a_task_that_fails_half_way_through_staging(tmp_path: Path) -> None:
    story = Story(str(tmp_path), "flaky", "both")
    story.write_input()
    with story.watched():
        assert story.live_apart() == 0
    attempts = {name.split("-")[1] for name in os.listdir(tmp_path / "attempts")}
    assert attempts == {"0", "1"}, "no attempt failed"
    story.check()


def test_speculated_tasks_on_a_real_cluster(tmp_path: Path) -> None:
    """With workers on two loopback addresses: else nothing is speculated."""
    story = Story(str(tmp_path), "flaky", "both", files_per_epoch=3)
    story.write_input()
    (tmp_path / "attempts.slow").touch()
    eager = {
        "spark.speculation.multiplier": "1.1", "spark.speculation.quantile": "0.1",
        "spark.speculation.minTaskRuntime": "100ms", "spark.sql.files.openCostInBytes": "128m",
        # Both executors must be there before the first task is: else there is nowhere to go.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "90s",
        "spark.executorEnv.PYTHONPATH": os.path.dirname(__file__),
    }  # fmt: skip
    with cluster(tmp_path) as (master, settings), story.watched():
        drivers = Drivers(tmp_path / "drivers", master, {**settings, **eager}, job=JOB)
        with closing(drivers):
            assert story.live_apart(of=drivers) == 0
    assert {"31-1", "211-1"} <= set(os.listdir(tmp_path / "attempts")), "nothing was speculated"
    story.check()
