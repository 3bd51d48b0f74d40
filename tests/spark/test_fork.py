"""A fork: a second job from the same cut. Its parent and its parent's targets are not touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from test_restore import JOB, World

import onceflow
from onceflow import faults, job
from onceflow.errors import JobError
from onceflow.protocol.home import JobFolder
from onceflow.sinks import Files
from onceflow.snapshots.fork import Fork
from onceflow.snapshots.published_history import History
from onceflow.snapshots.savepoint import Savepoint
from onceflow.snapshots.savepoints import Savepoints
from onceflow.testing.processes import is_killed

ONLY = ("counts", "files")


class Forked(World):
    """The same world, with a fork of its job."""

    def fork(self, savepoint: Savepoint, name: str = "whatif") -> None:
        fork(self.root, savepoint.name, name)

    def live_fork(self, name: str = "whatif") -> None:
        made = job(JOB)(lambda flow: self.declare(flow, ONLY))
        home = self.root / "home"
        onceflow.start(made, home=home, spark=self.spark, once=True, fork=name).wait(120)

    def rows_of_fork(self) -> list[int]:
        rows = Files.read(self.spark, self.root / "forked" / "files" / "files")
        return sorted(value for (value,) in rows.select("value").collect())


def fork(root: Path, savepoint: str, name: str, killed_at: str = "") -> None:
    if killed_at:
        faults.arm(killed_at, "kill")
    parent = JobFolder(root / "home", JOB)
    found = Savepoints(parent).read(savepoint)
    lineage, cuts = parent.lineage(), found.cuts()
    assert lineage is not None
    targets = {query: History(parent, query, lineage).targets() for query in cuts}
    made = Fork(JOB, cuts, targets, found.body["starts"], JobFolder(root / "home", name))
    made.run(made.plan(root / "forked", {}), "fork", {})


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> Forked:
    return Forked(tmp_path, spark)


def test_a_fork_goes_on_from_the_cut_and_leaves_its_parent_alone(world: Forked) -> None:
    world.add(2)
    world.live(*ONLY)
    savepoint = world.savepoint("two")
    world.add(2)
    world.live(*ONLY)
    world.fork(savepoint)
    world.live_fork()
    world.check(*ONLY)
    assert world.rows_of_fork() == list(range(6, 12))
    world.add()
    world.live_fork()
    world.live(*ONLY)
    world.check(*ONLY)
    assert world.rows_of_fork() == list(range(6, 15))
    # Its state is that of the whole stream: the counts are the same as its parent's.
    whole = world.published("counts")
    world.root = world.root / "forked" / "counts"
    (world.root / "counts.db").rename(world.root / "out.db")
    assert world.published("counts") == whole


def test_a_fork_can_be_restored_to_where_it_began(world: Forked) -> None:
    world.add(2)
    world.live(*ONLY)
    world.fork(world.savepoint("two"))
    world.folder = JobFolder(world.root / "home", "whatif")
    with pytest.raises(JobError, match="was never started here"):
        Savepoints(world.folder).create("begun", {})
    world.live_fork()
    begun = Savepoints(world.folder).create("begun", {})
    world.add(2)
    world.live_fork()
    assert world.rows_of_fork() == list(range(6, 12))
    world.go_back(begun, "rewind")
    world.add()
    world.live_fork()
    assert world.rows_of_fork() == list(range(6, 15))


@pytest.mark.kill
@pytest.mark.parametrize("point", ["job.begun", "job.made", "job.listed"])
def test_a_fork_that_is_killed_is_there_or_can_be_made_again(world: Forked, point: str) -> None:
    world.add(2)
    world.live(*ONLY)
    savepoint = world.savepoint("two")
    assert is_killed(fork, world.root, "two", "whatif", point)
    if point == "job.listed":
        with pytest.raises(JobError, match="job whatif exists already"):
            world.fork(savepoint)
    else:
        with pytest.raises(JobError, match="there is no fork whatif of job shop"):
            world.live_fork()
        world.fork(savepoint)
    world.add(1)
    world.live_fork()
    assert world.rows_of_fork() == [6, 7, 8]
    world.live(*ONLY)
    world.check(*ONLY)


def test_a_job_is_not_run_under_another_name_without_a_fork(world: Forked) -> None:
    world.add()
    world.live(*ONLY)
    for name in ("whatif", JOB):
        with pytest.raises(JobError, match=f"there is no fork {name} of job shop"):
            world.live_fork(name)
    world.check(*ONLY)


def test_every_output_of_a_fork_needs_a_place_of_its_own(world: Forked) -> None:
    world.add()
    world.live(*ONLY)
    cuts = world.savepoint("one").cuts()
    kafka = {"kind": "kafka", "topic": "t", "servers": "127.0.0.1:1", "guarantee": "exactly-once"}
    files = {"kind": "files", "path": str(world.root / "files")}
    targets = {"files": {"files": files, "topic": kafka}}
    made = Fork(JOB, cuts, targets, {}, JobFolder(world.root / "home", "whatif"))
    refusals: list[tuple[Path | None, dict[str, str], str]] = [
        (None, {"files/topic": "u"}, "output files/files of the fork needs a target"),
        (world.root / "x", {}, "output files/topic of the fork needs a target"),
        (world.root / "x", {"files/topic": "t"}, "which belongs to its parent"),
        (None, {"files/files": files["path"], "files/topic": "u"}, "which belongs to its parent"),
        (world.root / "x", {"files/topic": "u", "a/b": "c"}, "job shop has no output a/b"),
    ]
    for outputs, named, says in refusals:
        with pytest.raises(JobError, match=says):
            made.plan(outputs, named)
    moves = made.plan(world.root / "x", {"files/topic": "u"})
    assert [move.to for move in moves] == [str(world.root / "x" / "files" / "files"), "u"]
