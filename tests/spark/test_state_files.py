"""The files of an epoch, found without Spark: from these alone Spark reads the same state."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from at_rest import wait_for_state_at_rest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from waiting import wait_for

import onceflow
from onceflow.errors import CheckpointRefused
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query
from onceflow.sinks import Files
from onceflow.snapshots.checkpoint_view import ReadCheckpoint
from onceflow.snapshots.cut import cut_at
from onceflow.spark.checkpoint import Checkpoint, parse_offsets
from onceflow.spark.file_source_log import SourceLog
from onceflow.spark.state_files import stores_of

EPOCHS = 7
_DELTAS = "spark.sql.streaming.stateStore.minDeltasForSnapshot"


def put(folder: Path, number: int) -> None:
    """A file of ten rows, one second apart; each key comes back in every file."""
    ids = list(range(number * 10, number * 10 + 10))
    times = [1_767_225_600_000_000 + i * 1_000_000 for i in ids]
    rows = pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "key": [f"k{i % 4}" for i in ids],
            "at": pa.array(times, pa.timestamp("us", "UTC")),
        }
    )
    folder.mkdir(exist_ok=True)
    pq.write_table(rows, folder / f".{number}")
    os.utime(folder / f".{number}", (1_700_000_000 + number,) * 2)
    (folder / f".{number}").rename(folder / f"{number}.parquet")


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    named = spark.readStream.name(folder.name).schema("id long, key string, at timestamp")
    rows = named.option("maxFilesPerTrigger", 1).parquet(str(folder))
    return rows.withWatermark("at", "5 seconds")


def aggregation(spark: SparkSession, root: Path) -> DataFrame:
    windows = stream(spark, root / "left").groupBy(F.window("at", "4 seconds"), "key").count()
    return windows.select(F.col("window.start").alias("begin"), "key", "count")


def join(spark: SparkSession, root: Path) -> DataFrame:
    left, right = stream(spark, root / "left").alias("l"), stream(spark, root / "right").alias("r")
    near = "l.id = r.id AND r.at BETWEEN l.at AND l.at + INTERVAL 2 SECONDS"
    return left.join(right, F.expr(near), "leftOuter").select("l.id", "l.key")


def deduplication(spark: SparkSession, root: Path) -> DataFrame:
    return stream(spark, root / "left").dropDuplicates(["id"]).select("id", "key")


@pytest.fixture(params=["snapshots", "changelogs only"])
def snapshots(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[bool]:
    """Do snapshots of the state come to be within seconds, or never?"""
    ageing = spark.conf.get(_DELTAS)
    if request.param == "changelogs only":
        spark.conf.set(_DELTAS, "1000")
    yield request.param == "snapshots"
    spark.conf.set(_DELTAS, ageing)


def ran(
    root: Path, spark: SparkSession, make: Callable[[SparkSession, Path], DataFrame], snaps: bool
) -> Query:
    """A query that has run some epochs, on top of a snapshot if there are to be any."""
    for side in ("left", "right"):
        put(root / side, 0)
    query = onceflow.write(
        make(spark, root), "q", to=Files(root / "out"), home=root / "home", every="0ms"
    )
    (found,) = JobFolder(root / "home", "q").queries()
    log, state = found.epoch_log(), found.folder / "state"
    number = 0
    while number < EPOCHS or (snaps and not any(state.rglob("*.zip"))):
        number += 1
        assert number < 200, "no snapshot comes to be"
        for side in ("left", "right"):
            put(root / side, number)
        before = log.read().last.epoch if log.last else -1
        wait_for(
            lambda at=before: (
                not query.isActive or (log.read().last is not None and log.last.epoch > at)
            )
        )
        assert query.isActive, query.exception()
    query.processAllAvailable()
    query.stop()
    wait_for(lambda: not query.isActive)
    wait_for_state_at_rest(spark)
    return found


def alone(query: Query, decision: Decision, folder: Path) -> Path:
    """A checkpoint that has what this epoch takes, and nothing else."""
    cut = cut_at(query, decision.epoch)
    for name, path in cut.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)
    for name, lines in cut.sources.items():
        SourceLog(folder / "sources" / name).rewrite(lines)
    made = Checkpoint(folder)
    made.set_query_id(query.spark_id)
    made.set_offsets(decision.epoch, decision.offsets)
    made.set_commit(decision.epoch, decision.watermark, decision.state)
    return folder


def read(spark: SparkSession, checkpoint: Path, epoch: int, **options: str) -> list[str]:
    reader = spark.read.format("statestore").options(batchId=str(epoch), **options)
    return sorted(str(row) for row in reader.load(str(checkpoint)).collect())


@pytest.mark.parametrize("make", [aggregation, join, deduplication], ids=lambda f: f.__name__)
def test_what_an_epoch_takes_is_found_and_is_what_spark_says(
    tmp_path: Path,
    spark: SparkSession,
    make: Callable[[SparkSession, Path], DataFrame],
    snapshots: bool,
) -> None:
    query = ran(tmp_path, spark, make, snapshots)
    checkpoint, decided = ReadCheckpoint(query.folder), query.epoch_log().read().decisions
    committed = checkpoint.committed()
    decisions = [d for d in decided if d.epoch in committed]  # the last may have been cut off
    assert len(decisions) >= max(EPOCHS, len(decided) - 1)
    assert {d.epoch for d in decided} <= set(checkpoint.planned())

    for decision in decisions:
        offsets, commit = (
            query.folder / name / str(decision.epoch) for name in ("offsets", "commits")
        )
        said = json.loads(commit.read_text().removeprefix("v2\n"))  # by Spark
        assert (said["stateUniqueIds"] or {}) == decision.state
        assert said["nextBatchWatermarkMs"] == decision.watermark
        assert parse_offsets(offsets.read_text(), str(offsets))[1] == decision.end
    assert decisions[-1].watermark > 0

    stores = stores_of(query.folder / "state" / "0" / "0")
    assert len(stores) == (4 if make is join else 1)
    taken, rows = set(), 0
    for decision in (decisions[0], *decisions[-3:]):
        files = checkpoint.state_files(decision.epoch, decision.state)
        taken |= {path.suffix for path in files}
        made = alone(query, decision, tmp_path / f"alone-{decision.epoch}")
        for side in [{"joinSide": "left"}, {"joinSide": "right"}] if make is join else [{}]:
            there = read(spark, made, decision.epoch, **side)
            assert there == read(spark, query.folder, decision.epoch, **side)
            rows += len(there)
        for file in files:  # a snapshot that is gone is made up for by the changelogs before it
            if file.suffix in (".changelog", ".sst"):
                hidden = file.with_name(file.name + ".hidden")
                file.rename(hidden)
                with pytest.raises(CheckpointRefused, match="is missing"):
                    checkpoint.state_files(decision.epoch, decision.state)
                hidden.rename(file)
    assert rows
    assert {".changelog", ".crc"} <= taken
    assert (".zip" in taken and ".sst" in taken) == snapshots


@pytest.mark.parametrize("make", [aggregation, join], ids=lambda f: f.__name__)
def test_the_log_of_a_file_source_is_had_as_of_each_epoch(
    tmp_path: Path, spark: SparkSession, make: Callable[[SparkSession, Path], DataFrame]
) -> None:
    """Beyond the first compaction of Spark's, which is due with entry 9."""
    sides = ("left", "right") if make is join else ("left",)
    for side in sides:
        for number in range(13):
            put(tmp_path / side, number)
    query = onceflow.write(
        make(spark, tmp_path), "q", to=Files(tmp_path / "out"), home=tmp_path / "home", once=True
    )
    assert query.awaitTermination(120)
    (found,) = JobFolder(tmp_path / "home", "q").queries()
    checkpoint = ReadCheckpoint(found.folder)
    assert sorted(path.name for path in (found.folder / "sources").iterdir()) == sorted(sides)
    assert list((found.folder / "sources" / "left").glob("*.compact"))
    for decision in found.epoch_log().read().decisions:
        lines = checkpoint.source_lines(decision)
        assert set(lines) == set(sides)
        for side, had in lines.items():
            names = [line.partition(".parquet")[0].rpartition("/")[2] for line in had]
            last = decision.end[side]["logOffset"]
            assert names == [str(number) for number in range(last + 1)]
