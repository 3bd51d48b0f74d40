"""Staged files that hold other rows than Spark counted are refused before anything is decided."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from story import Story

import onceflow
from onceflow import Flow, faults
from onceflow.contract.abilities import Staged
from onceflow.contract.ledger import Committable
from onceflow.errors import StagingDiffers
from onceflow.harness.cluster import can_hide, cluster
from onceflow.protocol.home import JobFolder
from onceflow.sinks import Files
from onceflow.sources import Files as Input
from onceflow.spark.running_query import RunningQuery
from onceflow.state.process import KeyedProcess
from onceflow.state.states import ReducingState

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find it

SCHEMA = "id long, key string"
ROWS = 40  # of a file


class World:
    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root, self.spark, self.home, self.files = root, spark, root / "home", 0
        (root / "in").mkdir()

    def add(self) -> None:
        ids = range(self.files * ROWS, (self.files + 1) * ROWS)
        table = pa.table({"id": pa.array(ids, pa.int64()), "key": [f"k{i % 3}" for i in ids]})
        pq.write_table(table, self.root / "in" / f".{self.files}")
        part = self.root / "in" / f".{self.files}"
        os.utime(part, (1_700_000_000 + self.files,) * 2)
        part.rename(self.root / "in" / f"{self.files}.parquet")
        self.files += 1

    def run(self, declare: Callable[[World, Flow, Any], None], **settings: Any) -> None:
        @onceflow.job("shop", every="0ms", **settings)
        def shop(flow: Flow) -> None:
            source = Input(self.root / "in", schema=SCHEMA, max_files_per_epoch=1)
            declare(self, flow, flow.read("in", source))

        onceflow.start(shop, home=self.home, spark=self.spark, once=True).wait()

    def out(self, name: str = "all", **options: Any) -> Files:
        return Files(self.root / "out" / name, **options)

    def published(self) -> Counter[int]:
        """Of all outputs, as any reader sees their files."""
        found: Counter[int] = Counter()
        for path in self.root.glob("out/**/*.*"):
            if path.suffix == ".parquet" and "/_" not in str(path):
                found.update(pq.ParquetFile(path).read(["id"])["id"].to_pylist())
            if path.suffix == ".json" and "/_" not in str(path):
                found.update(json.loads(line)["id"] for line in path.read_text().splitlines())
        return found

    def decided(self) -> int:
        folder = JobFolder(self.home, "shop")
        (lineage,) = folder.lineages()
        return len(folder.query(lineage, "ids").epoch_log().read().decisions)

    def lose_a_file(self, folder: str = "rows") -> None:
        """As if the task that wrote it had another folder of this name."""
        files = [p for p in self.home.rglob(f"*/{folder}/**/*.parquet") if p.is_file()]
        assert files, "nothing was staged"
        files[0].unlink()


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path, spark)


def one(world: World, flow: Flow, rows: Any) -> None:
    flow.write("ids", rows, to=world.out())


def less(world: World, flow: Flow, rows: Any) -> None:
    flow.write("ids", rows, to=world.out(), guarantee="at-least-once")


def in_folders(world: World, flow: Flow, rows: Any) -> None:
    flow.write("ids", rows, to=world.out(by=["key"]))


def several(world: World, flow: Flow, rows: Any) -> None:
    outputs: Any = {"k0": world.out("k0"), "k1": world.out("k1"), "k2": world.out("k2")}
    flow.write("ids", rows, to=outputs, by="key", columns={"k1": ["id"]})


def as_json(world: World, flow: Flow, rows: Any) -> None:
    flow.write("ids", rows, to=world.out(format="json"))


class Seen(KeyedProcess):
    n = ReducingState("long", "count")


def keyed(world: World, flow: Flow, rows: Any) -> None:
    flow.write("ids", flow.keyed(rows, by="id", process=Seen(), tasks=2), to=world.out())


def random_then_keyed(world: World, flow: Flow, rows: Any) -> None:
    """Its input is staged too: a column of it is another one each time."""
    keyed(world, flow, rows.withColumn("dice", F.rand()).where("dice >= 0"))


DECLARATIONS = [one, less, in_folders, several, as_json, keyed]


@pytest.mark.parametrize("epoch", [0, 1], ids=["written by tasks", "collected"])
@pytest.mark.parametrize("declare", DECLARATIONS)
def test_an_epoch_that_lost_a_staged_file_is_not_decided(
    world: World, declare: Any, epoch: int
) -> None:
    world.add()
    world.add()
    faults.arm("stage.written", lambda _: world.lose_a_file(), visit=epoch + 1)
    with pytest.raises(StagingDiffers, match=r"Spark counted \d+ rows, and the files .* hold \d+;"):
        world.run(declare)
    faults.disarm()
    assert world.decided() == epoch
    assert world.published() == Counter(range(epoch * ROWS)), "the source moved on"
    world.run(declare)
    assert world.published() == Counter(range(2 * ROWS))


def test_the_input_of_a_keyed_step_that_lost_rows_is_not_computed_on(world: World) -> None:
    world.add()
    faults.arm("stage.written", lambda _: world.lose_a_file("input"))
    with pytest.raises(StagingDiffers, match="input of keyed steps: Spark counted 40 rows"):
        world.run(random_then_keyed)
    faults.disarm()
    assert (world.decided(), world.published()) == (0, Counter())
    world.run(random_then_keyed)
    assert world.published() == Counter(range(ROWS))


@pytest.mark.parametrize("lost", ["keyed/*/*.arrow", "staged/*/keyed-0/rows/*.parquet"])
def test_a_keyed_step_whose_files_are_not_seen_here_is_refused(world: World, lost: str) -> None:
    world.add()
    faults.arm("keyed.ran", lambda _: next(world.home.rglob(f"onceflow/{lost}")).unlink())
    with pytest.raises(
        StagingDiffers, match=r"keyed step .*: its tasks wrote 4 files, and .* 1 of"
    ):
        world.run(keyed)
    faults.disarm()
    assert (world.decided(), world.published()) == (0, Counter())
    world.run(keyed)
    assert world.published() == Counter(range(ROWS))


def test_rows_are_counted_without_digests_too(world: World) -> None:
    world.add()
    faults.arm("stage.written", lambda _: world.lose_a_file())
    with pytest.raises(StagingDiffers):
        world.run(one, digests=False)
    assert (world.decided(), world.published()) == (0, Counter())


def test_a_sink_that_loses_rows_while_it_stages_them_is_refused(world: World) -> None:
    class Loses(Files):
        def stage(self, staged: Staged) -> tuple[Committable, ...]:
            return super().stage(staged)[1:]

    def loses(world: World, flow: Flow, rows: Any) -> None:
        flow.write("ids", rows, to=Loses(world.root / "out" / "all"))

    world.add()
    with pytest.raises(StagingDiffers, match=r"output 'ids': Spark counted 40 rows"):
        world.run(loses)
    assert world.decided() == 0


def test_an_epoch_whose_rows_nobody_counted_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add()
    monkeypatch.setattr(RunningQuery, "observed", lambda self, name: None)
    with pytest.raises(StagingDiffers, match="did not count its rows"):
        world.run(one)
    monkeypatch.undo()
    assert world.decided() == 0
    world.run(one)
    assert world.published() == Counter(range(ROWS))


@pytest.mark.skipif(not can_hide(), reason="a worker without the home takes the right to mount")
@pytest.mark.parametrize("query", ["stateless", "stateful"])
def test_workers_that_do_not_see_the_home_are_noticed(
    tmp_path: Path, spark: Any, query: str
) -> None:
    """On a real cluster: what its tasks stage is on a disk that the driver does not see."""
    story = Story(str(tmp_path), query, "files")
    story.write_input()
    story.home.mkdir()
    with cluster(tmp_path, hidden=[story.home]) as (master, settings):
        driver = story.spawn(settings={**settings, "spark.master": master})
        assert driver.process.wait(120) == 1
    assert "onceflow.errors.StagingDiffers" in driver.said, driver.said
    assert not any(entry["type"] == "epoch" for entry in story.log_entries())
    story.live()
    story.check()
