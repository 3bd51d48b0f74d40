"""Going back to a cut, and on from there: what is published is the truth, whatever was done."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from at_rest import wait_for_state_at_rest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from waiting import wait_for

import onceflow
from onceflow import Flow, faults, job, sources
from onceflow.errors import CheckpointRefused, Fenced, JobError, LeaseHeld, RowsDiffer
from onceflow.faults.points import InjectedFault
from onceflow.jobs.stop_request import StopResult, stop
from onceflow.log import EmbeddedLog
from onceflow.protocol.epoch import ReplayedEpoch, Stopping
from onceflow.protocol.home import JobFolder
from onceflow.sinks import Files, Log, Sink, Sqlite
from onceflow.snapshots.epochs import cuts_at
from onceflow.snapshots.restore import Restore
from onceflow.snapshots.savepoint import Savepoint
from onceflow.snapshots.savepoint_import import SavepointImport
from onceflow.snapshots.savepoints import Savepoints
from onceflow.testing.processes import is_killed

JOB = "shop"
Rows = list[tuple[Any, ...]]


class World:
    """An input folder, and a job that writes rows, counts, totals and windows of it."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root, self.spark = root, spark
        self.folder = JobFolder(root / "home", JOB)
        (root / "in").mkdir()
        self.added = 0
        self.plus: Any = F.lit(0)  # what the code of the job adds to each value

    # ............................................................ input

    def add(self, files: int = 1) -> None:
        """Files of three rows each, ten seconds apart; each is an epoch."""
        for _ in range(files):
            rows = self._rows(self.added)
            columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
            table = pa.table({
                "key": pa.array(columns[0], pa.string()), "value": pa.array(columns[1], pa.int64()),
                "time": pa.array(columns[2], pa.timestamp("us", "UTC")),
            })  # fmt: skip
            part = self.root / "in" / f".{self.added}"
            pq.write_table(table, part)
            os.utime(part, (1_700_000_000 + self.added,) * 2)  # Spark takes them in this order
            part.rename(self.root / "in" / f"{self.added:04}.parquet")
            self.added += 1

    @staticmethod
    def _rows(file: int) -> Rows:
        return [
            (f"k{(file + i) % 4}", 3 * file + i, (1_700_000_000 + 10 * file) * 10**6)
            for i in range(3)
        ]

    def input(self) -> Rows:
        return [row for file in range(self.added) for row in self._rows(file)]

    # ............................................................ the job

    def sinks(self) -> dict[str, Sink]:
        db = self.root / "out.db"
        return {
            "counts": Sqlite(db, table="counts", key="key"),
            "files": Files(self.root / "files"),
            "log": Log(self.root / "log"),
            "rows": Sqlite(db, table="rows"),
            "sums": Sqlite(self.root / "sums.db", table="sums"),
            "windows": Files(self.root / "windows", format="json"),
        }

    def declare(self, flow: Flow, only: Sequence[str] = ()) -> None:
        def read(name: str) -> Any:
            reader = self.spark.readStream.name(name).option("maxFilesPerTrigger", 1)
            rows = reader.schema("key string, value long, time timestamp")
            rows = rows.parquet(str(self.root / "in"))
            return rows.withColumn("value", F.col("value") + self.plus)

        for name, sink in self.sinks().items():
            if only and name not in only:
                continue
            rows, mode = read(f"for_{name}"), "append"
            if name == "counts":
                rows, mode = rows.groupBy("key").agg(F.sum("value").alias("sum")), "update"
            elif name == "sums":
                rows, mode = rows.groupBy("key").agg(F.sum("value").alias("sum")), "complete"
            elif name == "windows":
                late = rows.withWatermark("time", "5 seconds")
                rows = late.groupBy(F.window("time", "20 seconds")).agg(F.sum("value").alias("sum"))
                rows = rows.select(F.col("window.start").cast("long").alias("start"), "sum")
            flow.write(name, rows, to=sink, mode=mode)

    def live(self, *only: str) -> None:
        """Run the job until its input is used up."""
        made = job(JOB)(lambda flow: self.declare(flow, only))
        onceflow.start(made, home=self.root / "home", spark=self.spark, once=True).wait(120)

    # ............................................................ snapshots

    def savepoint(self, name: str) -> Savepoint:
        made = Savepoints(self.folder).create(name, {})
        made.verify()
        return made

    def restore(self, savepoint: Savepoint, choice: str | dict[str, str] = "rewind") -> Restore:
        choices = choice if isinstance(choice, dict) else {"": choice}
        return Restore(self.folder, savepoint.cuts(), choices, f"restore of {savepoint.name}")

    def go_back(self, savepoint: Savepoint, choice: str | dict[str, str] = "rewind") -> None:
        restore = self.restore(savepoint, choice)
        restore.plan()
        restore.run({})

    # ............................................................ the truth

    def check(self, *only: str) -> None:
        """What is published is what the input says, not less and not more."""
        rows = self.input()
        sums: Counter[str] = Counter()
        windows: Counter[int] = Counter()
        for key, value, time in rows:
            sums[key] += value
            windows[time // 10**6 // 20 * 20] += value
        # A window that has not closed is not published.
        end = 1_700_000_000 + 10 * (self.added - 1) - 5
        truth: dict[str, Any] = {
            "counts": sorted(sums.items()),
            "files": sorted(rows),
            "log": sorted(rows),
            "rows": sorted(rows),
            "sums": sorted(sums.items()),
            "windows": sorted(w for w in windows.items() if w[0] + 20 <= end),
        }
        for name in only or self.sinks():
            assert self.published(name) == truth[name], name

    def published(self, name: str) -> Rows:
        if name in ("files", "windows"):
            found = Files.read(self.spark, self.root / name)
            if name == "files":
                found = found.withColumn("time", F.unix_micros("time"))
            return sorted(tuple(row) for row in found.collect())
        if name == "log":
            log = EmbeddedLog(self.root / "log")
            rows = [row for batch in log.read() for row in batch.to_pylist()]
            return sorted((r["key"], r["value"], _micros(r["time"])) for r in rows)
        db = sqlite3.connect(self.root / ("sums.db" if name == "sums" else "out.db"))
        try:
            columns = "key, value, time" if name == "rows" else "key, sum"
            found = [tuple(row) for row in db.execute(f"SELECT {columns} FROM {name}")]
        finally:
            db.close()
        return (
            sorted((k, v, _sqlite_micros(t)) for k, v, t in found)
            if name == "rows"
            else sorted(found)
        )


def _micros(time: Any) -> int:
    return round(time.timestamp() * 1e6)


def _sqlite_micros(text: Any) -> int:
    from datetime import UTC, datetime

    return _micros(datetime.fromisoformat(text).replace(tzinfo=UTC))


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path, spark)


# ---------------------------------------------------------------- the trap


@pytest.mark.parametrize("choice", ["rewind", "skip"])
def test_an_older_savepoint_is_restored_and_nothing_is_lost_or_repeated(
    world: World, choice: str
) -> None:
    world.add(2)
    world.live()
    savepoint = world.savepoint("two")
    world.add(3)
    world.live()
    world.check()
    world.go_back(savepoint, choice)
    world.add()
    world.live()
    world.check()


def test_a_replay_publishes_once_more_what_came_after_the_cut(world: World) -> None:
    world.add(2)
    world.live("files")
    savepoint = world.savepoint("two")
    world.add(1)
    world.live("files")
    world.go_back(savepoint, "replay")
    world.live("files")
    rows = Counter(world.published("files"))
    assert sorted(rows) == sorted(world.input())
    assert [rows[row] for row in world.input()] == [1] * 6 + [2] * 3


def test_each_output_has_a_choice_of_its_own(world: World) -> None:
    only = ("counts", "files", "windows")
    world.add(2)
    world.live(*only)
    savepoint = world.savepoint("two")
    world.add(2)
    world.live(*only)
    world.go_back(savepoint, {"": "rewind", "windows/windows": "skip"})
    world.live(*only)
    world.check(*only)


ONLY = ("counts", "files")


def walk(world: World, seed: int) -> None:
    """Savepoints, restores and rollbacks at random, and rows in between."""
    chance = random.Random(seed)
    savepoints: list[Savepoint] = []
    world.add(2)
    world.live(*ONLY)
    for step in range(6):
        savepoints.append(world.savepoint(f"at-{step}"))
        world.add(chance.randint(0, 2))
        world.live(*ONLY)
        world.check(*ONLY)
        for _ in range(chance.randint(1, 2)):
            choice = chance.choice(["rewind", "skip"])
            to = chance.randrange(len(savepoints))
            try:
                world.go_back(savepoints[to], choice)
            except JobError as refused:
                if "the job has gone back to an earlier epoch since" not in refused.message:
                    raise
            if chance.random() < 0.5:
                world.live(*ONLY)
                world.check(*ONLY)
    world.live(*ONLY)
    world.check(*ONLY)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]
)
def test_going_back_and_on_again_and_again_is_as_if_nothing_had_happened(
    world: World, seed: int
) -> None:
    walk(world, seed)


# ---------------------------------------------------------------- killed


def restore_again(root: str, choice: str, killed_at: str = "") -> None:
    """Maybe in a process of its own."""
    if killed_at:
        faults.arm(killed_at, "kill")
    folder = JobFolder(Path(root) / "home", JOB)
    cuts = Savepoints(folder).read("two").cuts()
    Restore(folder, cuts, {"": choice}, "restore of two").run({})


@pytest.mark.kill
@pytest.mark.parametrize(
    ("point", "choice"),
    [("restore.fenced", "rewind"), ("restore.published", "skip"), ("restore.made", "rewind"),
     ("restore.placed", "skip"), ("restore.written", "rewind"),
     ("restore.ended-one", "rewind"), ("restore.ended-one", "skip"), ("put.linked", "skip")],
)  # fmt: skip
def test_a_restore_that_is_killed_is_finished_by_the_same_command(
    world: World, point: str, choice: str
) -> None:
    world.add(2)
    world.live(*ONLY)
    world.savepoint("two")
    world.add(2)
    world.live(*ONLY)
    assert is_killed(restore_again, str(world.root), choice, point)
    restore_again(str(world.root), choice)
    world.add()
    world.live(*ONLY)
    world.check(*ONLY)


@pytest.mark.kill
@pytest.mark.parametrize("point", ["restore.fenced", "restore.made", "restore.ended-one"])
def test_a_job_that_is_started_after_a_killed_restore_is_exact(world: World, point: str) -> None:
    world.add(2)
    world.live(*ONLY)
    world.savepoint("two")
    world.add(2)
    world.live(*ONLY)
    before = world.folder.lineage()
    assert is_killed(restore_again, str(world.root), "rewind", point)
    ended = point == "restore.ended-one"
    assert (world.folder.lineage() != before) is ended
    world.live(*ONLY)
    world.check(*ONLY)
    assert before is not None
    for query in world.folder.queries_of(before):
        assert (query.epoch_log().read().ended is not None) is ended, query.name


@pytest.mark.parametrize("choice", ["rewind", "skip"])
@pytest.mark.parametrize(
    ("point", "visit"),
    [("open.ledger-moved", 1), ("open.ledger-moved", 2), ("open.published", 1),
     ("epoch.decided", 2)],
)  # fmt: skip
def test_a_start_that_fails_in_the_new_lineage_is_finished_by_the_next(
    world: World, point: str, visit: int, choice: str
) -> None:
    world.add(2)
    world.live(*ONLY)
    savepoint = world.savepoint("two")
    world.add(2)
    world.live(*ONLY)
    world.go_back(savepoint, choice)
    faults.arm(point, "raise", visit=visit)
    with contextlib.suppress(InjectedFault, StreamingQueryException):  # maybe it is not visited
        world.live(*ONLY)
    faults.disarm()
    world.add()
    world.live(*ONLY)
    world.check(*ONLY)


def test_what_a_killed_driver_left_goes_when_its_lineage_has_ended(world: World) -> None:
    world.add(2)
    world.live(*ONLY)
    savepoint = world.savepoint("two")
    world.add()
    faults.arm("epoch.decided", "raise")
    with pytest.raises(InjectedFault):
        world.live(*ONLY)
    faults.disarm()
    staged = "lineages/*/*/onceflow/staged/*"
    assert list(world.folder.folder.glob(staged))
    for query in world.folder.queries():
        (query.folder / "onceflow" / "log" / ".put-of-one-who-was-killed").touch()
    world.go_back(savepoint)
    world.live(*ONLY)
    world.check(*ONLY)
    assert not list(world.folder.folder.glob(staged))
    assert not list(world.folder.folder.rglob(".put-*"))


def test_a_rollback_that_was_killed_when_it_was_done_can_be_run_again(world: World) -> None:
    world.add(4)
    world.live(*ONLY)

    def roll_back() -> None:
        Restore(world.folder, cuts_at(world.folder, "2"), {"": "rewind"}, "back").run({})

    faults.arm("restore.ended-one", "raise")
    with pytest.raises(InjectedFault):
        roll_back()
    faults.disarm()
    roll_back()
    world.live(*ONLY)
    world.check(*ONLY)
    with pytest.raises(JobError, match="epoch 1 of shop/counts is not retained"):
        cuts_at(world.folder, "1")  # the new lineage has the state of its cut, not of before


# ---------------------------------------------------------------- what is refused


def test_a_lineage_that_nobody_opened_can_be_left_for_the_old_one(world: World) -> None:
    world.add(2)
    world.live(*ONLY)
    savepoint = world.savepoint("two")
    world.add(2)
    world.live(*ONLY)
    old = world.folder.lineage()
    assert old is not None
    world.go_back(savepoint, "rewind")
    back = Restore(world.folder, cuts_at(world.folder, "3", lineage=old), {"": "rewind"}, "back")
    assert {answer.says for answer in back.plan()} == {"nothing was published after the cut"}
    back.run({})
    world.add()
    world.live(*ONLY)
    world.check(*ONLY)


def test_what_was_taken_back_cannot_be_restored(world: World) -> None:
    world.add(1)
    world.live("files")
    first = world.savepoint("first")
    world.add(1)
    world.live("files")
    second = world.savepoint("second")
    world.go_back(first)
    world.live("files")
    with pytest.raises(JobError, match=r"epoch 1 of lineage .* is not part of what shop/files"):
        world.restore(second).plan()
    world.check("files")


def test_a_job_that_runs_is_not_restored(world: World) -> None:
    world.add()
    world.live("files")
    savepoint = world.savepoint("one")
    made = job(JOB)(lambda flow: world.declare(flow, ["files"]))
    with onceflow.start(made, home=world.root / "home", spark=world.spark):
        with pytest.raises(LeaseHeld) as refused:
            world.restore(savepoint).run({})
        assert refused.value.hint == "onceflow stop shop"
    world.check("files")


def test_epochs_with_other_rows_are_not_skipped(world: World) -> None:
    world.add(1)
    world.live("files")
    savepoint = world.savepoint("one")
    world.add(2)
    world.live("files")
    world.go_back(savepoint, "skip")
    world.plus = F.lit(1)
    for _ in range(2):
        with pytest.raises(RowsDiffer, match="epoch 1 of shop/files was run again"):
            world.live("files")
    world.plus = F.lit(0)
    world.check("files")
    world.go_back(savepoint, "rewind")
    world.live("files")
    world.check("files")


def test_epochs_that_are_run_again_are_told_and_the_job_can_be_stopped_between_them(
    world: World,
) -> None:
    world.add(1)
    world.live("files", "counts")
    savepoint = world.savepoint("one")
    world.add(4)
    world.live("files", "counts")
    world.go_back(savepoint, "skip")
    told: list[tuple[str, int, int]] = []
    stopped: list[Future[StopResult]] = []

    def replaying(query: str, again: ReplayedEpoch) -> None:
        told.append((query, *again))
        if len(told) == 2:  # what somebody does at another terminal
            stopped.append(elsewhere.submit(stop, world.folder, timeout=60, tell=lambda _: None))
            wait_for(lambda: any(world.folder.folder.glob("stop/*.json")))

    made = job(JOB)(lambda flow: world.declare(flow, ["files", "counts"]))
    with ThreadPoolExecutor(1) as elsewhere, pytest.raises(Stopping):
        onceflow.start(
            made, home=world.root / "home", spark=world.spark, once=True, replaying=replaying
        )
    assert stopped[0].result().ran
    epochs = [epoch for _, epoch, _ in told]
    assert told[0] == ("counts", 1, 4)
    assert epochs == list(range(1, len(told) + 1))
    assert len(told) < 5, "it was not stopped between them"
    world.check("files", "counts")
    world.add()
    world.live("files", "counts")
    world.check("files", "counts")


def test_an_unknown_choice_or_output_is_refused(world: World) -> None:
    world.add()
    world.live("files")
    savepoint = world.savepoint("one")
    refusals: list[tuple[dict[str, str], str]] = [
        ({"": "forget"}, "'forget' is not a choice"),
        ({"": "skip", "files/other": "skip"}, "the job has no output files/other"),
        (
            {"files/other": "skip"},
            "--published does not say what happens to the rows of files/files",
        ),
    ]
    for choices, says in refusals:
        with pytest.raises(JobError, match=says):
            world.restore(savepoint, choices).plan()


def test_a_driver_of_the_old_lineage_hears_that_it_has_ended(world: World) -> None:
    world.add()
    world.live("files")
    savepoint = world.savepoint("one")
    (query,) = world.folder.queries()
    log = query.epoch_log().read()
    world.go_back(savepoint)
    with pytest.raises(Fenced, match="this lineage has ended"):
        log.fence(99, {})


def test_a_writer_does_not_take_back_what_a_reader_has_read(world: World) -> None:
    def read(flow: Flow) -> None:
        flow.write("copy", flow.read("log", sources.Log(world.root / "log")), to=copy)

    def live() -> None:
        world.live("log")
        reader = job("reader")(read)
        onceflow.start(reader, home=world.root / "home", spark=world.spark, once=True).wait(120)

    copy, readers = Files(world.root / "copy"), JobFolder(world.root / "home", "reader")
    world.add()
    live()
    savepoint, of_reader = world.savepoint("one"), Savepoints(readers).create("one", {})
    world.add()
    live()
    with pytest.raises(JobError, match=r"reader/copy/log of .* has read rows that this would take"):
        world.restore(savepoint).plan()
    Restore(readers, of_reader.cuts(), {"": "rewind"}, "back").run({})
    world.go_back(savepoint)
    live()
    world.check("log")
    rows = Files.read(world.spark, world.root / "copy").select("value").collect()
    assert sorted(value for (value,) in rows) == list(range(6))


# ---------------------------------------------------------------- a new machine


def arrive(world: World, choice: str = "rewind") -> SavepointImport:
    savepoint = Savepoint.at(world.root / "carried")
    savepoint.verify()
    return SavepointImport(world.folder, savepoint, {"": choice})


def carry(world: World, savepoint: Savepoint) -> None:
    """Copy the savepoint away, and move to a home that has nothing."""
    wait_for_state_at_rest(world.spark)
    shutil.copytree(savepoint.folder, world.root / "carried")
    (world.root / "home").rename(world.root / "old home")


@pytest.mark.parametrize("more", [0, 2])
def test_a_savepoint_is_enough_to_go_on_with_on_a_new_machine(world: World, more: int) -> None:
    world.add(2)
    world.live()
    savepoint = world.savepoint("two")
    world.add(more)
    world.live()
    carry(world, savepoint)
    arriving = arrive(world)
    arriving.plan()
    arriving.run({})
    world.add()
    world.live()
    world.check()
    # The home that was left behind is outlawed.
    wait_for_state_at_rest(world.spark)
    (world.root / "home").rename(world.root / "new home")
    (world.root / "old home").rename(world.root / "home")
    with pytest.raises((CheckpointRefused, Fenced)):
        world.live()
    world.check()


@pytest.mark.kill
@pytest.mark.parametrize("point", ["restore.fenced", "job.begun", "job.made", "job.listed"])
def test_an_arrival_that_is_killed_is_there_or_can_be_done_again(world: World, point: str) -> None:
    world.add(2)
    world.live("files")
    savepoint = world.savepoint("two")
    world.add()
    world.live("files")
    carry(world, savepoint)
    assert is_killed(arrive_and_die, world.root, point)
    if point != "job.listed":
        arrive(world).run({})
    world.live("files")
    world.check("files")


def arrive_and_die(root: Path, point: str) -> None:
    faults.arm(point, "kill")
    folder = JobFolder(root / "home", JOB)
    SavepointImport(folder, Savepoint.at(root / "carried"), {"": "rewind"}).run({})


def test_what_a_new_home_does_not_know_cannot_be_skipped(world: World) -> None:
    world.add(1)
    world.live("files")
    savepoint = world.savepoint("one")
    world.add(1)
    world.live("files")
    carry(world, savepoint)
    with pytest.raises(JobError, match="has epochs after the savepoint, up to 1"):
        arrive(world, "skip").plan()
    other = Savepoint.at(world.root / "carried")
    with pytest.raises(JobError, match="is a savepoint of job shop, not of other"):
        SavepointImport(JobFolder(world.root / "home", "other"), other, {"": "rewind"})
    shutil.rmtree(world.root / "files")
    with pytest.raises(CheckpointRefused, match="has nothing of the job"):
        arrive(world).plan()
