"""A query without a job: ordinary to hold, and only ever on the checkpoint that is its own."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from at_rest import wait_for_state_at_rest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery
from waiting import wait_for

import onceflow
from onceflow import Flow, faults, sources
from onceflow.errors import CheckpointRefused, Damaged, JobError, LeaseHeld, OnceflowError
from onceflow.sinks import Files, Sqlite

SCHEMA = "id long, key string"


class World:
    """An input folder, a home, and the output of one query called `ids`."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root = root
        self.spark = spark
        self.home = root / "home"
        (root / "in").mkdir()
        self.added = 0

    def add(self, files: int = 1) -> None:
        """Files of two rows each: numbers that count up."""
        for _ in range(files):
            ids = [self.added * 2, self.added * 2 + 1]
            part = self.root / "in" / f".{self.added}"
            keys = pa.array([f"k{i % 3}" for i in ids], pa.string())
            pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "key": keys}), part)
            os.utime(part, (1_700_000_000 + self.added,) * 2)
            part.rename(self.root / "in" / f"{self.added}.parquet")
            self.added += 1

    def rows(self) -> DataFrame:
        reader = self.spark.readStream.name("rows").schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self.root / "in"))

    def write(self, **options: Any) -> StreamingQuery:
        options = {"to": Files(self.root / "out"), "home": self.home, "every": "0ms", **options}
        return onceflow.write(self.rows(), "ids", **options)

    def count(self, **options: Any) -> StreamingQuery:
        """The same with state."""
        counts = self.rows().groupBy("key").count()
        to = Sqlite(self.root / "out.db", table="counts", key="key")
        options = {"to": to, "home": self.home, "mode": "update", **options}
        return onceflow.write(counts, "ids", **options)

    def live(self, *, state: bool = False, **options: Any) -> None:
        query = (self.count if state else self.write)(once=True, **options)
        try:
            assert query.awaitTermination(120)
        finally:
            wait_for_state_at_rest(self.spark)  # of what ends with the process in real life

    def check(self, files: int | None = None) -> None:
        """What is published is the input of so many files, each row once."""
        ids = list(range(2 * (self.added if files is None else files)))
        if (self.root / "out.db").exists():
            db = sqlite3.connect(self.root / "out.db")
            found = dict(db.execute("SELECT key, count FROM counts"))
            db.close()
            assert found == Counter(f"k{i % 3}" for i in ids)
        if (self.root / "out").exists():
            assert self.published() == ids

    def published(self) -> list[int]:
        paths = (self.root / "out").glob("*.parquet")
        columns = [pq.ParquetFile(path).read(["id"]).column(0) for path in paths]
        return sorted(i for column in columns for i in column.to_pylist())

    def wait(self) -> None:
        """Until as many rows are published as there are."""
        wait_for(lambda: len(self.published()) >= 2 * self.added)
        self.check()

    def checkpoint(self, home: Path | None = None) -> Path:
        (found,) = (home or self.home).glob("ids/lineages/*/ids")
        return found


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path, spark)


# ---------------------------------------------------------------- an ordinary query


def test_what_write_returns_is_an_ordinary_query(world: World) -> None:
    world.add(2)
    query = world.write(once=True)
    assert isinstance(query, StreamingQuery)
    assert query.name == "ids/ids"
    assert query.awaitTermination(120) is True
    assert query.exception() is None
    assert not query.isActive
    assert query.lastProgress["batchId"] == 1
    world.check()
    world.add()
    world.live()  # by its name it goes on where it stood
    world.check()
    world.live()
    world.check()


def test_a_query_in_update_mode_goes_on_with_its_state(world: World) -> None:
    for _ in range(2):
        world.add(2)
        world.live(state=True)
        world.check()


def test_a_query_that_fails_says_why(world: World) -> None:
    world.add()
    to = {"k0": Files(world.root / "k0"), "k1": Files(world.root / "k1")}
    world.live(to=to, by="key")
    world.add()
    query = world.write(to=to, by="key", once=True)
    with pytest.raises(StreamingQueryException, match="1 rows have no output: their 'key' is 'k2'"):
        query.awaitTermination(120)
    assert "'k2'" in str(query.exception())


def test_a_query_is_stopped_and_started_again_at_once(world: World) -> None:
    for _ in range(3):
        world.add()
        query = world.write()
        world.wait()
        query.stop()
        assert not query.isActive
        assert query.exception() is None
    world.live()
    world.check()


def test_one_name_is_written_by_one_query_at_a_time(world: World) -> None:
    world.add()
    query = world.write()
    with pytest.raises(LeaseHeld, match=f"job ids is led by process {os.getpid()} on "):
        world.write()
    world.wait()
    world.add()
    world.wait()
    successor = world.write(take_over=True)
    assert not query.isActive
    world.add()
    world.wait()
    successor.stop()
    world.check()


def test_a_name_or_a_home_that_cannot_be_is_refused(world: World) -> None:
    for name, home, says in (
        ("my ids", world.home, "'my ids' is not a name for a job"),
        ("ids", "hdfs://name/home", "is not a local path"),
    ):
        with pytest.raises(JobError, match=says):
            onceflow.write(world.rows(), name, to=Files(world.root / "out"), home=home)
    assert not (world.root / "out").exists()


def test_a_source_without_a_name_is_refused(world: World) -> None:
    world.add()
    reader, folder = world.spark.readStream.schema(SCHEMA), str(world.root / "in")
    with pytest.raises(PySparkException, match="All streaming sources must be named"):
        reader.parquet(folder)
    naming = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
    world.spark.conf.set(naming, "false")
    try:
        unnamed = reader.parquet(folder)
    finally:
        world.spark.conf.set(naming, "true")
    with pytest.raises((OnceflowError, PySparkException), match="name"):
        onceflow.write(
            unnamed, "ids", to=Files(world.root / "out"), home=world.home, once=True
        ).awaitTermination(120)
    world.check(files=0)


def test_the_home_may_have_any_name(world: World) -> None:
    home, out = world.root / "a b 100% größe#", world.root / "x[1]{2}*?\\"
    world.add(2)
    world.live(home=home / "[h]", to=Files(out, format="json"))
    ids = Files.read(world.spark, out).select("id").collect()
    assert sorted(i for (i,) in ids) == [0, 1, 2, 3]
    for _ in range(2):
        world.live(state=True, home=home)
        world.check()
        world.add()


# ---------------------------------------------------------------- lost

LOST: dict[str, tuple[str, bool, type[OnceflowError], str]] = {
    "the folder of the job": ("home/ids", False, CheckpointRefused, "the target remembers epoch 1"),
    "the checkpoint": ("", False, CheckpointRefused, "which this home did not decide"),
    "the id": ("metadata", False, CheckpointRefused, "was deleted"),
    "the epoch log": ("onceflow/log", False, CheckpointRefused, "it decided up to nothing"),
    "the newest decision": ("onceflow/log/000000000003.json", False, CheckpointRefused,
                            "it decided up to epoch 0"),
    "an older decision": ("onceflow/log/000000000002.json", False, Damaged,
                          "000000000002.json is missing, and later entries are there"),
    "the state": ("state", True, CheckpointRefused, "state 2_"),
    "the state of one partition": ("state/0/1", True, CheckpointRefused, "partition 1 is missing"),
    "the lineage": ("../lineage.json", False, Damaged, "lineage.json is missing"),
    "the job": ("../../../job.json", False, Damaged, "job.json is missing"),
}  # fmt: skip


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("what", LOST, ids=lambda what: what.replace(" ", "-"))
def test_a_loss_that_cannot_be_made_good_is_refused(what: str, world: World) -> None:
    name, state, error, says = LOST[what]
    world.add(2)
    world.live(state=state)
    world.add()
    remove(world.root / name if name.startswith("home") else world.checkpoint() / name)
    for _ in range(2):  # also when somebody just tries again
        with pytest.raises(error) as refused:
            world.live(state=state)
        assert says in str(refused.value)
        assert refused.value.hint
    world.check(files=2)


@pytest.mark.parametrize(
    ("names", "state"),
    [
        (["offsets", "commits"], False),
        (["offsets", "commits"], True),
        (["sources"], False),
        (["sources/rows/1"], False),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else str(value),
)
def test_a_loss_that_the_epoch_log_makes_good_is_made_good(
    names: list[str], state: bool, world: World
) -> None:
    world.add(2)
    world.live(state=state)
    for name in names:
        remove(world.checkpoint() / name)
    world.add()
    world.live(state=state)
    world.check()


# ---------------------------------------------------------------- copied and swapped


def test_a_copy_of_the_home_is_refused_once_the_original_went_on(world: World) -> None:
    world.add(2)
    world.live()
    shutil.copytree(world.home, world.root / "copy")
    world.add()
    world.live()
    with pytest.raises(CheckpointRefused, match="the target has epoch 2, which this home did not"):
        world.live(home=world.root / "copy")
    world.add()
    world.live()
    world.check()


def test_of_two_copies_that_both_go_on_only_one_publishes(world: World) -> None:
    world.add()
    world.live()
    shutil.copytree(world.home, world.root / "copy")
    world.add()
    faults.arm("epoch.decided", "raise")
    with pytest.raises(StreamingQueryException):
        world.live()
    faults.disarm()
    world.live(home=world.root / "copy")  # decides the same epoch anew, and publishes it
    with pytest.raises(CheckpointRefused, match="the home was set back, or is a copy"):
        world.live()
    world.check()


def test_another_home_does_not_write_to_the_same_target(world: World) -> None:
    world.add()
    world.live()
    with pytest.raises(CheckpointRefused, match="the home was deleted, or it is another one"):
        world.live(home=world.root / "other")
    world.live()
    world.check()


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def swap_checkpoints(one: Path, other: Path) -> None:
    """All that is Spark's, but not the epoch logs."""
    for name in os.listdir(one):
        if name != "onceflow":
            swap(one / name, other / name)


def copy_over(one: Path, other: Path) -> None:
    shutil.copytree(one, other, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("mix_up", "says"),
    [
        (swap, "belongs to pair/.*/.*, not to pair/.*: it was copied or swapped"),
        (copy_over, "belongs to pair/.*/one, not to pair/.*/two: it was copied or swapped"),
        (swap_checkpoints, "is of another query .* it was copied or swapped"),
    ],
    ids=["swapped", "copied-over", "swapped-below-the-logs"],
)
def test_the_checkpoint_of_another_query_is_refused(
    mix_up: Callable[[Path, Path], None], says: str, world: World
) -> None:
    @onceflow.job("pair", every="0ms")
    def pair(flow: Flow) -> None:
        for name in ("one", "two"):
            rows = flow.read(name, sources.Files(world.root / "in", schema=SCHEMA))
            flow.write(name, rows.where(F.lit(name == "one")), to=Files(world.root / name))

    def live() -> None:
        onceflow.start(pair, home=world.home, once=True).wait()

    world.add()
    live()
    (one,) = world.home.glob("pair/lineages/*/one")
    mix_up(one, one.with_name("two"))
    world.add()
    with pytest.raises((CheckpointRefused, Damaged), match=says):
        live()
    assert not list((world.root / "two").glob("*.parquet"))


# ---------------------------------------------------------------- moved


@pytest.mark.parametrize(
    ("state", "published"),
    [(False, True), (False, False), (True, False)],
    ids=["published", "only-decided", "only-decided-with-state"],
)
def test_a_home_is_moved_while_nothing_runs(state: bool, published: bool, world: World) -> None:
    world.add(2)
    if published:
        world.live(state=state)
    else:
        faults.arm("epoch.decided", "raise", visit=2)
        with pytest.raises(StreamingQueryException, match=r"epoch\.decided"):
            world.live(state=state)
        faults.disarm()
    world.home.rename(world.root / "elsewhere")
    world.add()
    world.live(state=state, home=world.root / "elsewhere")
    world.check()
    assert not world.home.exists()
