"""Going back, forking and moving with keyed state: it is that of the cut, and nothing is copied."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from story import Row
from test_keyed import JOB, World

from onceflow import faults
from onceflow.errors import Damaged
from onceflow.protocol.home import JobFolder
from onceflow.protocol.keyed_runner import manifest_of
from onceflow.protocol.lineage import Origin
from onceflow.sinks import Files
from onceflow.snapshots.epochs import cuts_at, restorable_decisions
from onceflow.snapshots.fork import Fork
from onceflow.snapshots.published_history import History
from onceflow.snapshots.restore import Restore
from onceflow.snapshots.savepoint import Savepoint
from onceflow.snapshots.savepoint_import import SavepointImport
from onceflow.snapshots.savepoints import Savepoints


class Snapped(World):
    """The same world with snapshots."""

    def savepoint(self, name: str) -> Savepoint:
        made = Savepoints(self.folder).create(name, {})
        made.verify()
        return made

    def go_back(self, cuts: Any, choice: str) -> None:
        restore = Restore(self.folder, cuts, {"": choice}, "back")
        restore.plan()
        restore.run({})

    def published(self, name: str = "out") -> Counter[Row]:
        """Files that were taken back are not among those that their reader sees."""
        return Counter(tuple(row) for row in Files.read(self.spark, self.root / name).collect())

    def check(self, files: int | None = None) -> None:
        super().check(files)
        newest = {k: (total, n) for k, total, n in sorted(self.truth(files))}
        found = {k: (row["total"], row["n"]) for (k,), row in self.state().items()}
        assert found == newest

    def needed(self) -> set[str]:
        """Files of the state of all epochs in the log, from the cut on that it goes on from."""
        found = set()
        log = self.query.epoch_log().read()
        origin = Origin.of(log)
        first = 0 if origin is None else origin.cut
        for decision in (d for d in log.decisions if d.epoch >= first):
            found.add(decision.keyed["sums"]["manifest"])
            found |= set(manifest_of(self.query.folder, decision, "sums").run_names())
        return found


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> Snapped:
    return Snapped(tmp_path, spark)


# ---------------------------------------------------------------- going back


@pytest.mark.parametrize(
    ("to", "choice"), [("savepoint", "rewind"), ("epoch", "rewind"), ("epoch", "skip")]
)
def test_a_keyed_job_goes_back_and_on_as_if_nothing_had_happened(
    world: Snapped, to: str, choice: str
) -> None:
    world.add(2)
    world.live()
    savepoint = world.savepoint("two")
    world.add(2)
    world.live()
    world.go_back(savepoint.cuts() if to == "savepoint" else cuts_at(world.folder, "1"), choice)
    assert world.state()[0,]["n"] == 6, "the state is not that of the cut"
    world.add()
    world.live()
    world.check()


def test_a_savepoint_is_enough_to_go_on_with_on_a_new_home(world: Snapped) -> None:
    world.add(2)
    world.live()
    savepoint = world.savepoint("two")
    world.add()
    world.live()
    shutil.copytree(savepoint.folder, world.root / "carried")
    world.home.rename(world.root / "old home")
    carried = Savepoint.at(world.root / "carried")
    carried.verify()
    SavepointImport(world.folder, carried, {"": "rewind"}).run({})
    world.add()
    world.live()
    world.check()


def test_a_fork_has_the_state_of_its_cut_and_leaves_its_parent_alone(world: Snapped) -> None:
    world.add(2)
    world.live()
    savepoint = world.savepoint("two")
    lineage, cuts = world.folder.lineage(), savepoint.cuts()
    assert lineage is not None
    targets = {query: History(world.folder, query, lineage).targets() for query in cuts}
    starts = savepoint.body["starts"]
    fork = Fork(JOB, cuts, targets, starts, JobFolder(world.home, "whatif"))
    fork.run(fork.plan(world.root / "forked", {}), "fork", {})
    world.add()
    world.live(fork="whatif")
    assert world.published("forked/result/result") == world.truth() - world.truth(2)
    world.check(files=2)
    world.live()
    world.check()


# ---------------------------------------------------------------- what it costs


def linked(savepoint: Savepoint) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path, _ in savepoint.paths()}


def test_a_savepoint_shares_its_files_with_the_job_and_with_other_savepoints(
    world: Snapped,
) -> None:
    world.add(2)
    world.live()
    one = linked(world.savepoint("one"))
    world.add()
    world.live()
    two = linked(world.savepoint("two"))
    last = {path.name: path.stat().st_ino for path in world.runs().values()}
    assert {name: inode for name, inode in two.items() if name in last} == last
    shared = {name for name in one if name.endswith(".arrow")}
    assert shared
    assert {name: one[name] for name in shared} == {name: two[name] for name in shared}


def test_retained_epochs_keep_their_state_and_older_ones_are_swept(world: Snapped) -> None:
    world.add(12)
    world.live(keep_epochs=2)
    world.live(keep_epochs=2)
    kept = restorable_decisions(world.query)
    assert 2 <= len(kept) < 12
    assert set(os.listdir(world.kept())) == world.needed()
    assert kept[0].epoch > 0
    world.go_back(cuts_at(world.folder, str(kept[0].epoch)), "rewind")
    world.add()
    world.live(keep_epochs=2)
    world.check()


def test_what_a_failed_epoch_left_is_swept_in_a_lineage_that_went_back(world: Snapped) -> None:
    world.add(3)
    world.live()
    world.go_back(cuts_at(world.folder, "1"), "rewind")
    faults.arm("keyed.listed", "raise")
    with pytest.raises(faults.InjectedFault):
        world.live()
    faults.disarm()
    world.live()
    world.check()
    assert set(os.listdir(world.kept())) == world.needed()


# ---------------------------------------------------------------- damage


def test_a_savepoint_whose_state_is_damaged_is_noticed(world: Snapped) -> None:
    world.add(2)
    world.live()
    savepoint = world.savepoint("two")
    for path in [path for path, _ in savepoint.paths()]:
        whole = path.read_bytes()
        path.unlink()  # the job has the same file
        with pytest.raises(Damaged, match=f"{path.name} is missing"):
            savepoint.verify()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(Damaged, match=f"{path.name} has changed since"):
            savepoint.verify()
        path.write_bytes(whole)
    savepoint.verify()
    world.go_back(savepoint.cuts(), "rewind")
    world.add()
    world.live()
    world.check()


def test_going_back_is_the_way_out_when_state_is_damaged(world: Snapped) -> None:
    world.add(3)
    world.live()
    lost = set(world.runs()) - set(
        manifest_of(world.query.folder, world.decisions()[-2], "sums").run_names()
    )
    for name in lost:
        (world.kept() / name).unlink()
    world.add()
    with pytest.raises(Damaged, match="is missing") as refused:
        world.live()
    assert "roll back" in refused.value.hint
    world.go_back(cuts_at(world.folder, "1"), "rewind")
    world.live()
    world.check()
