"""A job into Kafka and PostgreSQL goes back to an older savepoint: nothing is lost or repeated."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from topics import message_rows

import onceflow
from onceflow import Flow, faults, job, sinks
from onceflow.errors import JobError
from onceflow.protocol.home import JobFolder
from onceflow.snapshots.restore import Restore
from onceflow.snapshots.savepoint import Savepoint
from onceflow.snapshots.savepoints import Savepoints
from onceflow.testing.processes import is_killed
from onceflow.testing.servers import Kafka, Postgres

KEEP = {"": "rewind", "rows/topic": "skip"}


class World:
    """A job that writes rows to a topic and to a table, and sums by key to another table."""

    def __init__(self, root: Path, spark: SparkSession, kafka: Kafka, postgres: Postgres) -> None:
        self.root, self.spark, self.kafka, self.dsn = root, spark, kafka, postgres.dsn
        self.name = f"t{uuid.uuid4().hex[:12]}"
        self.folder = JobFolder(root / "home", "shop")
        self.added = 0
        (root / "in").mkdir()
        with psycopg.connect(self.dsn, autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {self.name}")

    def add(self, files: int) -> None:
        for _ in range(files):
            ids = [3 * self.added, 3 * self.added + 1, 3 * self.added + 2]
            part = self.root / "in" / f".{self.added}"
            to = ["topic" if i % 2 else "table" for i in ids]
            pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "goes": to}), part)
            part.rename(self.root / "in" / f"{self.added:04}.parquet")
            self.added += 1

    def declare(self, flow: Flow) -> None:
        def read(name: str) -> Any:
            reader = self.spark.readStream.name(name).schema("id long, goes string")
            return reader.option("maxFilesPerTrigger", 1).parquet(str(self.root / "in"))

        topic = sinks.Kafka(
            self.name, servers=self.kafka.servers, create={"partitions": 2}, key="id"
        )
        table = sinks.Postgres(self.dsn, table="rows", schema=self.name, epoch_column="epoch")
        flow.write("rows", read("rows"), to={"topic": topic, "table": table}, by="goes")
        sums = read("sums").groupBy((F.col("id") % 4).alias("key")).agg(F.sum("id").alias("sum"))
        to = sinks.Postgres(self.dsn, table="sums", schema=self.name, key="key")
        flow.write("sums", sums, to=to, mode="update")

    def live(self) -> None:
        made = job("shop")(self.declare)
        onceflow.start(made, home=self.root / "home", spark=self.spark, once=True).wait(120)

    def savepoint(self, name: str) -> Savepoint:
        return Savepoints(self.folder).create(name, {})

    def check(self) -> None:
        ids = range(3 * self.added)
        sums: Counter[int] = Counter()
        for i in ids:
            sums[i % 4] += i
        with psycopg.connect(self.dsn) as db:
            rows = db.execute(f"SELECT id FROM {self.name}.rows ORDER BY id").fetchall()
            assert [i for (i,) in rows] == [i for i in ids if i % 2 == 0]
            assert dict(db.execute(f"SELECT key, sum FROM {self.name}.sums").fetchall()) == sums
        messages = message_rows(self.kafka.servers, self.name)
        found = sorted(int(message.key or b"-1") for message in messages)
        assert found == [i for i in ids if i % 2]


@pytest.fixture
def world(
    tmp_path: Path, spark: SparkSession, kafka: Kafka, postgres: Postgres,
    monkeypatch: pytest.MonkeyPatch,
) -> World:  # fmt: skip
    # A home has no passwords: who restores says it once more.
    monkeypatch.setenv("PGPASSWORD", str(conninfo_to_dict(postgres.dsn)["password"]))
    return World(tmp_path, spark, kafka, postgres)


def test_an_older_savepoint_is_restored_on_servers(world: World) -> None:
    world.add(2)
    world.live()
    first = world.savepoint("first")
    world.add(2)
    world.live()
    second = world.savepoint("second")
    world.add(1)
    world.live()
    world.check()
    Restore(world.folder, second.cuts(), KEEP, "restore").run({})
    world.live()
    world.check()
    Restore(world.folder, first.cuts(), KEEP, "restore").run({})
    world.add(1)
    world.live()
    world.check()
    text = json.dumps(first.body)
    assert str(conninfo_to_dict(world.dsn)["password"]) not in text


def test_kafka_refuses_to_rewind_and_names_what_can_be_done(world: World) -> None:
    world.add(1)
    world.live()
    savepoint = world.savepoint("one")
    world.add(1)
    world.live()
    before = world.folder.lineage()
    with pytest.raises(JobError, match=r"output rows/topic: Kafka.* cannot take back") as refused:
        Restore(world.folder, savepoint.cuts(), {"": "rewind"}, "restore").plan()
    assert "--published rows/topic=skip" in refused.value.hint
    assert world.folder.lineage() == before
    world.live()
    world.check()


def restore_and_die(root: Path, password: str) -> None:
    os.environ["PGPASSWORD"] = password  # of a process that has nobody's environment
    faults.arm("restore.published", "kill")
    folder = JobFolder(root / "home", "shop")
    Restore(folder, Savepoints(folder).read("one").cuts(), KEEP, "restore").run({})


@pytest.mark.kill
def test_a_decided_epoch_is_published_by_the_restore_also_without_spark(world: World) -> None:
    world.add(1)
    world.live()
    savepoint = world.savepoint("one")
    world.add(1)
    faults.arm("epoch.decided", "raise", visit=1)
    with pytest.raises(Exception, match=r"epoch.decided"):
        world.live()
    faults.disarm()
    assert is_killed(restore_and_die, world.root, os.environ["PGPASSWORD"])
    Restore(world.folder, savepoint.cuts(), KEEP, "restore").run({})
    world.live()
    world.check()
