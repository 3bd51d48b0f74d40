"""Into PostgreSQL exactly once, against what people write by hand, which is at-least-once.

    python bench/postgres.py [--only append,upsert,memory,guarantees] [--turns 7] [--rows 2000000]

- append: against `foreachBatch` with Spark's JDBC writer (batches of 10,000, rewritten inserts)
- upsert: against `INSERT ... ON CONFLICT` over psycopg in `foreachPartition`; half as many
  rows, and the second epoch changes half of what the first inserted
- memory: of Python, while an epoch of a million rows is published
- guarantees: the time of a tiny epoch with each
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import psycopg
from guarantees import guarantees
from measure import Side, alternate, peak_memory, progress, ratio, spread
from psycopg.conninfo import conninfo_to_dict

import onceflow
from onceflow import sinks
from onceflow.spark import jars
from onceflow.testing.servers import Postgres

_ALL = "append,upsert,memory,guarantees"
_COLUMNS = {
    "id": "bigint", "name": "text", "kind": "text", "ratio": "double precision",
    "amount": "numeric(20,4)", "at": "timestamp with time zone",
}  # fmt: skip
_ROW = "id long, name string, kind string, ratio double, amount decimal(20,4), at timestamp"
_BATCH = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=_ALL)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rows", type=int, default=2_000_000)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
    try:
        with Postgres(folder / "postgres") as server:
            spark = onceflow.get_session("local[2]", {"spark.jars": str(jdbc_driver())})
            bench = Bench(spark, folder, server.dsn)
            for name in options.only.split(","):
                if name == "append":
                    append(bench, options.rows, options.turns)
                elif name == "upsert":
                    upsert(bench, options.rows // 2, options.turns)
                elif name == "memory":
                    memory(bench)
                elif name == "guarantees":
                    guarantees(spark, folder, options.turns, bench.sink)
                else:
                    parser.error(f"there is no {name}; there are {_ALL}")
            spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def jdbc_driver() -> Path:
    """Got by Maven once, then kept beside the jars of the project."""
    folder = jars.cache() / "jdbc"
    if not list(folder.glob("*.jar")):
        pom = Path(__file__).with_name("jdbc.xml")
        to = f"-DoutputDirectory={folder}"
        command = ["mvn", "-B", "-q", "-f", str(pom), "dependency:copy-dependencies", to]
        subprocess.run(command, check=True)
    return next(folder.glob("*.jar"))


class Bench:
    """A session, a database, and queries from files into tables."""

    def __init__(self, spark: Any, folder: Path, dsn: str) -> None:
        self.spark, self.folder, self.dsn = spark, folder, dsn

    def run(self, sql: str) -> Any:
        with psycopg.connect(self.dsn, autocommit=True) as db:
            cursor = db.execute(sql)
            return cursor.fetchall() if cursor.description else None

    def table(self, *, key: bool = False) -> str:
        name = f"rows_{uuid.uuid4().hex[:8]}"
        body = ", ".join(f"{column} {kind}" for column, kind in _COLUMNS.items())
        self.run(f"CREATE TABLE {name} ({body}{', PRIMARY KEY (id)' if key else ''})")
        return name

    def sink(self, table: str, **options: Any) -> sinks.Postgres:
        return sinks.Postgres(self.dsn, table=table.replace("-", "_"), **options)

    def write_source(self, name: str, rows: int, *, again: int = 0) -> Path:
        """Two epochs of two files; the second has `again` ids of the first."""
        source = self.folder / name
        progress(f"writing {rows:,} rows")
        half = rows // 2
        for epoch, first in enumerate((0, half - again)):
            made = self.spark.range(first, first + half, 1, 2).selectExpr(
                "id", "concat('name-', id) AS name",
                "element_at(array('view', 'click', 'buy'), int(id % 3) + 1) AS kind",
                "id % 997 / 8 AS ratio", "cast(id % 100000 / 100 AS decimal(20, 4)) AS amount",
                f"timestamp_micros(1700000000000000 + id + {epoch}) AS at",
            )  # fmt: skip
            made.write.mode("append").parquet(str(source))
        return source

    def read(self, source: Path, files: int = 2) -> Any:
        stream = self.spark.readStream.name("rows").schema(_ROW)
        return stream.option("maxFilesPerTrigger", files).parquet(str(source))

    def home(self) -> Path:
        return self.folder / f"home-{uuid.uuid4().hex[:8]}"

    def ours(self, source: Path, table: str, files: int = 2, **options: Any) -> None:
        query = onceflow.write(
            self.read(source, files), table, to=self.sink(table, **options), home=self.home(),
            once=True,
        )  # fmt: skip
        query.awaitTermination()

    def theirs(self, source: Path, each: Callable[[Any, int], None]) -> None:
        writer = self.read(source).writeStream.foreachBatch(each).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self.home())).start().awaitTermination()


def append(bench: Bench, rows: int, turns: int) -> None:
    source, tables = bench.write_source("append", rows), list[str]()
    where = {k: str(v) for k, v in conninfo_to_dict(bench.dsn).items()}
    options = {
        "url": f"jdbc:postgresql://{where['host']}:{where['port']}/{where['dbname']}"
        "?reWriteBatchedInserts=true",
        "user": where["user"], "password": where["password"], "driver": "org.postgresql.Driver",
        "batchsize": str(_BATCH),
    }  # fmt: skip

    def ours() -> None:
        tables.append(bench.table())
        bench.ours(source, tables[-1])

    def theirs() -> None:
        table = bench.table()
        tables.append(table)

        def each(batch: Any, _: int) -> None:
            batch.write.format("jdbc").options(**options, dbtable=table).mode("append").save()

        bench.theirs(source, each)

    sides = alternate(
        {"jdbc": theirs, "onceflow": ours}, turns, lambda: check(bench, tables.pop(), rows)
    )
    say("append", "jdbc", rows, sides)
    shutil.rmtree(source)


def upsert(bench: Bench, rows: int, turns: int) -> None:
    again = rows // 4
    source, tables = bench.write_source("upsert", rows, again=again), list[str]()

    def ours() -> None:
        tables.append(bench.table(key=True))
        bench.ours(source, tables[-1], key="id")

    def theirs() -> None:
        tables.append(bench.table(key=True))
        write = Upsert(bench.dsn, tables[-1])
        bench.theirs(source, lambda batch, _: batch.foreachPartition(write))

    sides = alternate(
        {"psycopg": theirs, "onceflow": ours},
        turns,
        lambda: check(bench, tables.pop(), rows - again),
    )
    say("upsert", "psycopg", rows, sides)
    shutil.rmtree(source)


class Upsert:
    """Rows of a partition into a table, in one transaction, pipelined by psycopg."""

    def __init__(self, dsn: str, table: str) -> None:
        set_all = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS if name != "id")
        values = ", ".join(["%s"] * len(_COLUMNS))
        self.sql = f"INSERT INTO {table} VALUES ({values}) ON CONFLICT (id) DO UPDATE SET {set_all}"
        self.dsn = dsn

    def __call__(self, rows: Iterable[Any]) -> None:
        left = iter(rows)
        with psycopg.connect(self.dsn) as db, db.cursor() as cursor:
            while batch := [tuple(row) for row in islice(left, _BATCH)]:
                cursor.executemany(self.sql, batch)


def check(bench: Bench, table: str, rows: int) -> None:
    ((found, ids),) = bench.run(f"SELECT count(*), count(DISTINCT id) FROM {table}")
    assert (found, ids) == (rows, rows), f"{table} has {found} rows of {ids} ids, not {rows}"
    bench.run(f"DROP TABLE {table}")


def say(what: str, other: str, rows: int, sides: dict[str, Side]) -> None:
    print(f"\n{what}: {rows:,} rows of six columns in 2 epochs")
    for side in sides.values():
        speed = [rows / wall / 1000 for wall in side.wall]
        print(f"  {side}, {spread(speed, 'k rows/s')}")
    wall = 1 / ratio(sides["onceflow"].wall, sides[other].wall)
    cpu = 1 / ratio(sides["onceflow"].cpu, sides[other].cpu)
    print(f"  onceflow / {other}: {wall:.2f} by wall time, {cpu:.2f} by cpu, which is that of the "
          "server too (goal: at least 1.0)")  # fmt: skip


def memory(bench: Bench) -> None:
    """An epoch that is twenty times as large must not take more."""
    print("\nmemory of Python at most, while an epoch is published (70 bytes a row)")
    sizes = {rows: bench.write_source(f"of-{rows}", rows) for rows in (50_000, 1_000_000)}
    for what, options in (("append", {}), ("upsert", {"key": "id"})):
        for rows, source in sizes.items():
            table = bench.table(key=bool(options))
            with peak_memory() as peak:
                bench.ours(source, table, files=4, **options)
            check(bench, table, rows)
            print(f"  {what}, {rows:,} rows: driver {peak['driver']:.0f} MB, largest worker "
                  f"{peak['worker']:.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
