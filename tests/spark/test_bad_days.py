"""Bad days: a clear error that names the fix, nothing lost, never a wrong number."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from at_rest import wait_for_state_at_rest
from story import FILES, Story, body

from onceflow import faults
from onceflow.errors import CheckpointRefused, Damaged, DiskFull, OnceflowError, TargetBehind
from onceflow.protocol.home import JobFolder
from onceflow.spark.state_damage import find_damage
from onceflow.store.posix import seal

# ---------------------------------------------------------------- targets that were set back


@pytest.mark.parametrize("epochs_back", [1, 2])
@pytest.mark.parametrize("sinks", ["files", "sqlite"])
def test_a_target_that_was_set_back_is_noticed_and_not_published_over(
    tmp_path: Path, spark: Any, sinks: str, epochs_back: int
) -> None:
    story = Story(str(tmp_path), "stateless", sinks)
    target, copy = tmp_path / ("files" if sinks == "files" else "out.db"), tmp_path / "older"
    story.write_input(range(2))
    story.live()
    copy_of(target, copy)
    story.write_input(range(2, 2 + epochs_back))
    story.live()
    older = Story(str(tmp_path), "stateless", sinks)

    copy_of(target, tmp_path / "newest")
    copy_of(copy, target)
    before = older.published()
    story.write_input()
    for _ in range(2):  # it does not go away by trying again
        with pytest.raises(TargetBehind, match="set back"):
            story.live()
        assert story.published() == before

    copy_of(tmp_path / "newest", target)  # the fix that the error names
    story.live()
    story.check()


def test_an_emptied_target_is_noticed(tmp_path: Path, spark: Any) -> None:
    story = Story(str(tmp_path), "stateless", "both")
    story.write_input(range(1))
    story.live()
    (tmp_path / "out.db").unlink()
    story.write_input()
    with pytest.raises(TargetBehind):
        story.live()


def copy_of(target: Path, copy: Path) -> None:
    if copy.is_dir():
        shutil.rmtree(copy)
    elif copy.exists():
        copy.unlink()
    (shutil.copytree if target.is_dir() else shutil.copy)(target, copy)


# ---------------------------------------------------------------- damaged files


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [truncate, flip, empty, Path.unlink])
@pytest.mark.parametrize("which", ["decision", "commit", "manifest", "roll-up", "staged", "job"])
def test_damage_is_named_and_nothing_is_published(
    tmp_path: Path, spark: Any, harm: Callable[[Path], None], which: str
) -> None:
    story = Story(str(tmp_path), "stateless", "files")
    story.write_input(range(4))
    faults.arm("epoch.decided", "raise", visit=4)
    with pytest.raises(faults.InjectedFault):
        story.live()
    faults.disarm()
    before = story.published()
    victim = find(story, which)
    harm(victim)
    story.write_input()
    with pytest.raises(OnceflowError) as told:
        story.live()
    assert isinstance(told.value, Damaged | CheckpointRefused | TargetBehind)
    assert told.value.hint
    if which not in ("roll-up",):  # whose loss is told by the entries that it covered
        assert victim.name in str(told.value) or harm is Path.unlink
    if which not in ("manifest", "roll-up", "commit"):  # else the reader cannot read either
        assert story.published() == before


def find(story: Story, which: str) -> Path:
    log, commits = story.checkpoint / "onceflow" / "log", story.path / "files" / "_commits"
    match which:
        case "decision":  # in the middle: the newest one is the ledger's to notice
            return sorted(log.glob("0*.json"))[-2]
        case "commit":
            return sorted(commits.glob("0*.json"))[-1]
        case "manifest":
            return next(iter((commits.parent / "_manifests").iterdir()))
        case "roll-up":
            return next(iter(commits.glob("rollup-*.json")))
        case "staged":
            return next(iter(story.checkpoint.glob("onceflow/staged/*/rows/*.parquet")))
        case _:
            return story.home / "story" / "job.json"


def test_a_missing_newest_decision_is_noticed_by_what_was_published(
    tmp_path: Path, spark: Any
) -> None:
    story = Story(str(tmp_path), "stateless", "sqlite")
    story.write_input(range(2))
    story.live()
    before = story.published()
    sorted((story.checkpoint / "onceflow" / "log").glob("0*.json"))[-1].unlink()
    story.write_input()
    with pytest.raises(CheckpointRefused, match="missing"):
        story.live()
    assert story.published() == before


def test_a_home_that_was_set_back_is_refused(tmp_path: Path, spark: Any) -> None:
    story = Story(str(tmp_path), "stateful", "both")
    story.write_input(range(2))
    story.live()
    wait_for_state_at_rest(spark)
    copy_of(story.home, tmp_path / "older home")
    story.write_input(range(2, 4))
    story.live()
    wait_for_state_at_rest(spark)
    copy_of(tmp_path / "older home", story.home)
    before = story.published()
    with pytest.raises(CheckpointRefused, match="set back, or is a copy"):
        story.live()
    assert story.published() == before


def test_a_checkpoint_made_with_weaker_settings_is_refused(tmp_path: Path, spark: Any) -> None:
    story = Story(str(tmp_path), "stateful", "sqlite")
    story.write_input(range(1))
    story.live()
    lineage = JobFolder(story.home, "story").lineage()
    assert lineage is not None
    path = story.home / "story" / "lineages" / lineage / "lineage.json"
    weaker = body(path)
    weaker["settings"]["spark.sql.streaming.stateStore.checkpointFormatVersion"] = "1"
    path.write_bytes(seal("lineage", lineage, weaker))
    with pytest.raises(CheckpointRefused, match="checkpointFormatVersion was '1'"):
        story.live()


def test_a_spark_checkpoint_from_elsewhere_is_refused(tmp_path: Path, spark: Any) -> None:
    """Somebody copies the checkpoint of a plain Spark query to where ours would be."""
    story = Story(str(tmp_path), "stateless", "sqlite")
    story.write_input(range(2))
    rows = spark.readStream.name("rows").schema("id long, key string, at timestamp")
    query = rows.parquet(str(tmp_path / "in")).writeStream.format("noop")
    query = query.option("checkpointLocation", str(tmp_path / "plain")).trigger(availableNow=True)
    query.start().awaitTermination()
    story.live()
    copy_of(tmp_path / "plain", tmp_path / "mine")
    for name in ("metadata", "offsets", "commits"):
        copy_of(tmp_path / "mine" / name, story.checkpoint / name)
    with pytest.raises(CheckpointRefused, match="copied or swapped"):
        story.live()


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with very little room. Needs root, which CI has."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("query", ["stateless", "stateful"])
def test_a_full_disk_stops_the_job_and_after_space_is_made_it_goes_on(
    small_disk: Path, spark: Any, query: str
) -> None:
    story = Story(str(small_disk), query, "both")
    story.write_input(range(1))
    story.live()
    stopped = 0
    # with so little left, another of Spark's writes or ours is the first to fail each time
    for number, left in enumerate([0, 4, 8, 16, 24, 40, 64, 96, 128]):
        if number < FILES - 1:
            story.write_input(range(1 + number, 2 + number))
        ballast = fill(small_disk, left * 1024)
        try:
            story.live()
        except DiskFull:
            stopped += 1
        finally:
            ballast.unlink()
    assert stopped >= 3
    story.live()
    story.check()


def fill(disk: Path, leave: int) -> Path:
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    with open(ballast, "wb") as file:
        file.write(b"\0" * max(0, free.f_bavail * free.f_frsize - leave))
    return ballast


# ---------------------------------------------------------------- Spark's state


def test_a_damaged_file_of_sparks_state_is_named(tmp_path: Path, spark: Any) -> None:
    """Spark says only that it cannot load state, or that its stack is too small."""
    story = Story(str(tmp_path), "stateful", "files")
    story.write_input(range(3))
    story.live()
    decided = story.log_entries()[-1]
    newest = story.checkpoint.glob(f"state/*/*/{decided['epoch'] + 1}_*.changelog")
    victim = max(newest, key=lambda path: path.stat().st_size)
    whole = victim.read_bytes()
    flip(victim)
    states = spark._jvm.org.apache.spark.sql.execution.streaming.state
    getattr(states, "StateStore$").__getattr__("MODULE$").stop()  # it is loaded from the files
    story.write_input()
    with pytest.raises(Damaged) as told:
        story.live()
    assert str(victim) in told.value.message
    assert not told.value.retryable
    assert told.value.hint
    victim.write_bytes(whole)
    for table in story.checkpoint.glob("state/*/*/SSTs/*.sst"):  # may not be read at all
        flip(table)
        found = find_damage(spark, story.checkpoint, decided["epoch"], decided["state"])
        assert found is not None
        assert str(table) in found.message
        flip(table)
    assert find_damage(spark, story.checkpoint, decided["epoch"], decided["state"]) is None
    story.live()
    story.check()
