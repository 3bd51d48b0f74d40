"""Savepoints of running jobs: taken under Spark's maintenance, moved, and gone back to."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from at_rest import wait_for_state_at_rest
from pyspark.sql import SparkSession
from waiting import wait_for

import onceflow
from onceflow import Flow, sinks, sources
from onceflow.log import EmbeddedLog
from onceflow.log.reader_positions import readers
from onceflow.protocol.home import JobFolder
from onceflow.protocol.retained_decisions import RetainedDecisions
from onceflow.snapshots.restore import Restore
from onceflow.snapshots.savepoint import Savepoint
from onceflow.snapshots.savepoints import Savepoints
from onceflow.spark import session

_RETAIN = "spark.sql.streaming.minBatchesToRetain"
KEYS = 7


class Shop:
    """Numbered rows in files, or in a log; counted by key in a table, and copied into files."""

    def __init__(self, root: Path, spark: SparkSession, *, keep_epochs: int = 100) -> None:
        self.root, self.spark, self.keep_epochs = root, spark, keep_epochs
        self.home, self.added, self.from_log = root / "home", 0, False
        self.per_epoch = 1  # files
        self.folder = JobFolder(self.home, "shop")
        self.savepoints = Savepoints(self.folder)
        (root / "in").mkdir()

    def add(self, files: int = 1) -> None:
        for _ in range(files):
            ids = list(range(self.added * 10, self.added * 10 + 10))
            rows = pa.table({"id": pa.array(ids, pa.int64()), "key": [f"k{i % KEYS}" for i in ids]})
            if self.from_log:
                EmbeddedLog.create(
                    self.root / "log", "id long, key string", partitions=1, exist_ok=True
                ).append(rows)
            else:
                part = self.root / "in" / f".{self.added}"
                pq.write_table(rows, part)
                os.utime(part, (1_700_000_000 + self.added,) * 2)
                part.rename(self.root / "in" / f"{self.added}.parquet")
            self.added += 1

    def job(self) -> onceflow.Job:
        @onceflow.job("shop", every="0ms", keep_epochs=self.keep_epochs)
        def shop(flow: Flow) -> None:
            rows = flow.read(
                "rows",
                sources.Log(self.root / "log", columns=["id", "key"], max_rows_per_epoch=10)
                if self.from_log
                else sources.Files(
                    self.root / "in",
                    schema="id long, key string",
                    max_files_per_epoch=self.per_epoch,
                ),
            )
            table = sinks.Sqlite(self.root / "out.db", table="counts", key="key")
            flow.write("counts", rows.groupBy("key").count(), to=table, mode="update")
            flow.write("copies", rows.dropDuplicates(["id"]), to=sinks.Files(self.root / "copies"))

        return shop

    def start(self, **options: Any) -> onceflow.Handle:
        return onceflow.start(self.job(), home=self.home, spark=self.spark, **options)

    def live(self) -> None:
        self.start(once=True).wait()

    def check(self) -> None:
        ids = list(range(self.added * 10))
        with sqlite3.connect(self.root / "out.db") as db:
            assert dict(db.execute("SELECT key, count FROM counts")) == Counter(
                f"k{i % KEYS}" for i in ids
            )
        db.close()
        assert self.copies() == ids

    def copies(self) -> list[int]:
        paths = (self.root / "copies").glob("*.parquet")
        columns = [pq.ParquetFile(path).read(["id"]).column(0) for path in paths]
        return sorted(i for column in columns for i in column.to_pylist())

    def restore(self, savepoint: Savepoint, choice: str = "rewind") -> str:
        savepoint.verify()
        why = f"restore of {savepoint.name}"
        restore = Restore(self.folder, savepoint.cuts(), {"": choice}, why)
        restore.plan()
        return restore.run({"savepoint": savepoint.identity})


@pytest.fixture
def forgetful(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Spark keeps a few epochs only, which no job may ask for: much is removed all the time."""
    monkeypatch.setattr(session, "_LEAST_RETAINED", 3)
    before = spark.conf.get(_RETAIN)
    spark.conf.set(_RETAIN, "3")
    yield
    spark.conf.set(_RETAIN, before)


def test_savepoints_of_a_running_job_are_whole_and_can_be_gone_back_to(
    tmp_path: Path, spark: SparkSession, forgetful: None
) -> None:
    shop = Shop(tmp_path, spark, keep_epochs=3)
    shop.add(2)
    with shop.start() as running:
        wait_for(lambda: all(e is not None for e in running.status["queries"].values()))
        state = shop.folder.folder / "lineages"
        first = {p for p in state.rglob("*") if p.suffix in (".zip", ".changelog", ".sst")}
        while shop.added < 120 and not (shop.added > 25 and _gone(first, state)):
            shop.add()
            made = shop.savepoints.create(None, {})
            made.verify()
            assert made.bytes
        assert _gone(first, state), "Spark has removed nothing meanwhile"
    names = shop.savepoints.names()
    assert len(names) >= 20
    shop.live()
    shop.check()
    for savepoint in map(shop.savepoints.read, names):
        savepoint.verify()  # also now that all the files of the job have gone
    shop.per_epoch = 100  # the epochs after a rewind need not be those before
    for name in (names[-1], names[len(names) // 2], names[0]):
        shop.restore(shop.savepoints.read(name))
        shop.add()
        shop.live()
        shop.check()


def _gone(first: set[Path], state: Path) -> bool:
    return bool(first) and not all(path.exists() for path in first)


def test_a_savepoint_is_restored_from_where_it_was_moved_to(
    tmp_path: Path, spark: SparkSession
) -> None:
    shop = Shop(tmp_path, spark)
    shop.add(3)
    shop.live()
    made = shop.savepoints.create("a", {})
    shop.add(2)
    shop.live()
    shutil.move(made.folder, tmp_path / "elsewhere")
    assert shop.savepoints.names() == []
    wait_for_state_at_rest(spark)
    shutil.move(shop.home, tmp_path / "new-home")  # with the job: to another place
    shop.home = tmp_path / "new-home"
    shop.folder = JobFolder(shop.home, "shop")
    moved = Savepoints(shop.folder).find(str(tmp_path / "elsewhere"))
    assert moved.body["code"] == _leader(shop)["code"] is not None
    assert moved.body["spark"] == spark.version
    shop.restore(moved)
    shop.add()
    shop.live()
    shop.check()


def _leader(shop: Shop) -> dict[str, Any]:
    leader = shop.folder.queries()[0].epoch_log().read().leader
    assert leader is not None
    return leader


def test_what_skip_needs_is_kept_as_long_as_the_savepoint(
    tmp_path: Path, spark: SparkSession
) -> None:
    """Decisions that the epoch log has freed, and rows of the log that is read."""
    shop = Shop(tmp_path, spark, keep_epochs=2)
    shop.from_log = True
    shop.add(3)
    shop.live()
    made = shop.savepoints.create("a", {})
    shop.add(7)
    shop.live()
    shop.check()
    (cut,) = {held["epoch"] for held in made.body["queries"].values()}
    for query in shop.folder.queries():
        decided = query.epoch_log().read().decisions
        kept = RetainedDecisions(query).after(cut)
        assert decided[0].epoch > cut + 1  # the log has freed them
        assert [d.epoch for d in kept][: len(kept)] == list(range(cut + 1, kept[-1].epoch + 1))
        assert kept[-1].epoch + 1 >= decided[0].epoch
    cuts = [held["decisions"][-1]["end"]["rows"] for held in made.body["queries"].values()]
    needs = {reader.name: reader.needs for reader in readers(shop.root / "log")}
    assert len(needs) == 2
    assert all(need <= cut["next"] for need in needs.values() for cut in cuts)

    shop.restore(made, "skip")
    shop.add()
    shop.live()
    shop.check()

    shop.savepoints.delete("a")
    shop.add(6)
    shop.live()
    for query in shop.folder.queries():
        assert RetainedDecisions(query).after(-1) == []
    lineage = shop.folder.lineage()
    now = {r.name: r.needs for r in readers(shop.root / "log") if r.lineage == lineage}
    assert all(now[name] > cuts[0]["next"] for name in now)
    shop.check()
