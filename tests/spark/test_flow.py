"""What a job declares is what its outputs hold: refused early, published exactly once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from waiting import wait_for

import onceflow
from onceflow import Flow, Handle, Job, faults, sinks, sources
from onceflow.errors import BadRows, JobError, SchemaMismatch
from onceflow.protocol.home import JobFolder

SCHEMA = "id long, key string, at timestamp"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
Declare = Callable[[Flow], None]
Row = tuple[Any, ...]


class World:
    """An input folder, a home, and the outputs of one job."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        (root / "in").mkdir()
        self._files = 0

    def add(self, ids: Iterable[int], seconds: Iterable[int] | None = None) -> list[int]:
        """One input file, complete when it appears, newer than all before."""
        ids = list(ids)
        ats = [BEGIN + timedelta(seconds=s) for s in (ids if seconds is None else seconds)]
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "key": pa.array([key_of(i) for i in ids], pa.string()),
                "at": pa.array(ats, pa.timestamp("us", "UTC")),
            }
        )
        part = self.root / "in" / f".{self._files}"
        pq.write_table(table, part)
        os.utime(part, (1_700_000_000 + self._files,) * 2)
        part.rename(self.root / "in" / f"{self._files:04}.parquet")
        self._files += 1
        return ids

    def rows(self, flow: Flow, name: str = "rows") -> DataFrame:
        source = sources.Files(self.root / "in", schema=SCHEMA, max_files_per_epoch=1)
        return flow.read(name, source)

    def job(self, declare: Declare, **settings: Any) -> Job:
        return onceflow.job("flow", **{"every": "0ms", **settings})(declare)

    def start(self, declare: Declare, **options: Any) -> Handle:
        return onceflow.start(self.job(declare), home=self.home, **options)

    def live(self, declare: Declare) -> Handle:
        """One life: until the input is used up."""
        handle = self.start(declare, once=True)
        handle.wait()
        return handle

    def decided(self, query: str) -> list[Any]:
        """The decisions in the epoch log, oldest first."""
        folder = JobFolder(self.home, "flow")
        found = [q for q in folder.queries() if q.name == query]
        return found[0].epoch_log().read().decisions if found else []

    def files(self, name: str = "out") -> list[Row]:
        """What a plain reader of the folder sees."""
        paths = sorted((self.root / name).rglob("*.parquet"))
        tables = [pq.ParquetFile(path).read() for path in paths]
        return [tuple(row.values()) for table in tables for row in table.to_pylist()]

    def table(self, name: str, columns: str = "*", db: str = "out.db") -> list[Row]:
        connection = sqlite3.connect(self.root / db)
        try:
            return connection.execute(f"SELECT {columns} FROM {name}").fetchall()
        finally:
            connection.close()

    def to_files(self, name: str = "out") -> sinks.Files:
        return sinks.Files(self.root / name)

    def to_table(self, table: str, key: str = "") -> sinks.Sqlite:
        return sinks.Sqlite(self.root / "out.db", table=table, key=key or ())


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path)


def key_of(number: int) -> str | None:
    return ("a", "b", "", None)[number % 4]


def ids_of(rows: Iterable[Row]) -> list[int]:
    return sorted(row[0] for row in rows)


# ---------------------------------------------------------------- declaring


def test_reading_gives_a_plain_streaming_dataframe(world: World, spark: SparkSession) -> None:
    rows = world.rows(Flow(spark))
    assert type(rows) is type(spark.range(1))
    assert rows.isStreaming
    assert rows.columns == ["id", "key", "at"]


DECLARATIONS: dict[str, tuple[Callable[[Flow, World], object], str]] = {
    "two sources of one name": (
        lambda f, w: (w.rows(f, "rows"), w.rows(f, "rows")),
        "two sources are called 'rows'",
    ),
    "a source name that Spark cannot take": (lambda f, w: w.rows(f, "my-rows"), "'my-rows'"),
    "a source that is none": (lambda f, w: f.read("rows", "in"), "source 'rows'"),  # type: ignore
    "a source that does not stream": (
        lambda f, w: f.read("rows", f.spark.range(3)),
        "not a streaming DataFrame",
    ),
    "two outputs of one name": (
        lambda f, w: [f.write("x", w.rows(f, n), to=w.to_files(n)) for n in "ab"],
        "two outputs are called 'x'",
    ),
    "two outputs into one folder": (
        lambda f, w: [f.write(n, w.rows(f, n), to=w.to_files()) for n in "ab"],
        "'a' and 'b' write to the same target",
    ),
    "two outputs into one table": (
        lambda f, w: [f.write(n, w.rows(f, n), to=w.to_table("t")) for n in "ab"],
        "'a' and 'b' write to the same target",
    ),
    "two routes into one folder": (
        lambda f, w: f.write(
            "x", w.rows(f), to={"a": w.to_files(), "b": sinks.Files(w.root / "." / "out")}, by="key"
        ),
        "two outputs of 'x' write to the same target",
    ),
    "an output that does not stream": (
        lambda f, w: f.write("x", f.spark.range(3), to=w.to_files()),
        "output 'x' is not a streaming DataFrame",
    ),
    "an output that is no DataFrame": (
        lambda f, w: f.write("x", None, to=w.to_files()),  # type: ignore[arg-type]
        "output 'x' is not a streaming DataFrame",
    ),
    "a mode that Spark does not have": (
        lambda f, w: f.write("x", w.rows(f), to=w.to_files(), mode="upsert"),
        "'upsert' is not an output mode",
    ),
    "a path for a sink": (
        lambda f, w: f.write("x", w.rows(f), to="out"),  # type: ignore[arg-type]
        "'out', which is not a sink",
    ),
    "a path among the sinks": (
        lambda f, w: f.write("x", w.rows(f), to={"a": w.to_files(), "b": "out"}, by="key"),  # type: ignore
        "'out', which is not a sink",
    ),
    "bad rows for an output that is not there": (
        lambda f, w: f.write("x", w.rows(f), to={"a": w.to_files()}, by="key", on_bad="rejected"),
        "on_bad='rejected' of output 'x' is neither a sink nor one of several outputs",
    ),
    "columns of an output that is not there": (
        lambda f, w: f.write("x", w.rows(f), to=w.to_files(), columns={"y": ["id"]}),
        "columns= of 'x' names output 'y', which does not exist",
    ),
    "columns that are a text": (
        lambda f, w: f.write("x", w.rows(f), to=w.to_files(), columns={"x": "id"}),
        "columns= of output 'x' is a string",
    ),
    "columns of their own, and one output for the bad rows of another": (
        lambda f, w: f.write(
            "x",
            w.rows(f),
            to={"a": w.to_files("a"), "b": w.to_files("b")},
            by="key",
            columns={"a": ["id"]},
            on_bad="b",
        ),
        "has the columns of the first",
    ),
    "no sink at all": (lambda f, w: f.write("x", w.rows(f), to={}), "{}, which is not a sink"),
    "an output name that is no folder": (
        lambda f, w: f.write("../x", w.rows(f), to=w.to_files()),
        "'../x' is not a name for a output",
    ),
}


@pytest.mark.parametrize("wrong", DECLARATIONS, ids=lambda name: name.replace(" ", "-"))
def test_a_wrong_declaration_is_refused_where_it_stands(
    wrong: str, world: World, spark: SparkSession
) -> None:
    declare, says = DECLARATIONS[wrong]
    with pytest.raises(JobError) as refused:
        declare(Flow(spark), world)
    assert says in str(refused.value)
    assert refused.value.hint
    assert not world.home.exists()


def test_settings_that_cannot_be_are_refused_where_they_stand() -> None:
    for name, settings, says in (
        ("my job", {}, "'my job' is not a name for a job"),
        ("flow", {"every": "often"}, "'often' is not a time"),
        ("flow", {"keep_epochs": 1}, "keep_epochs=1 must be at least 2"),
    ):
        with pytest.raises(JobError, match=says):
            onceflow.job(name, **settings)


def test_a_job_that_writes_nothing_is_refused(world: World) -> None:
    with pytest.raises(JobError, match="job flow writes nothing"):
        world.live(lambda flow: None)
    assert not world.home.exists()


STARTS: dict[str, tuple[Callable[[DataFrame], DataFrame], dict[str, Any], str]] = {
    "a column twice": (lambda r: r.select("id", "key", "id"), {}, "column id is there twice"),
    "a column twice, in another case": (
        lambda r: r.select("id", F.col("key").alias("ID")),
        {},
        "column ID, id is there twice",
    ),
    "a column of ours": (
        lambda r: r.select("id", F.lit(1).alias("_onceflow_route")),
        {},
        "column _onceflow_route has a name that onceflow uses",
    ),
    "a column without a type": (
        lambda r: r.select("id", F.lit(None).alias("nothing")),
        {},
        "column nothing (void)",
    ),
    "a field without a type": (
        lambda r: r.select("id", F.struct(F.lit(None).alias("deep")).alias("s")),
        {},
        "column s (struct<deep: void>)",
    ),
    "several outputs without by": (lambda r: r, {"to": "ab"}, "several outputs need by="),
    "by a column that is not there": (
        lambda r: r,
        {"to": "ab", "by": "outcome"},
        "by='outcome' must be a string column",
    ),
    "by a number": (lambda r: r, {"to": "ab", "by": "id"}, "by='id' must be a string column"),
    "columns that the rows do not have": (
        lambda r: r,
        {"columns": {"out": ["id", "amount"]}},
        "columns= of output 'out': the rows have no column amount",
    ),
    "a column for an output twice": (
        lambda r: r,
        {"columns": {"out": ["id", "id"]}},
        "columns= of output 'out' names none, or one twice",
    ),
    "files in update mode": (
        lambda r: r.groupBy("key").count(),
        {"mode": "update"},
        "does not take output mode 'update'",
    ),
    "files in complete mode": (
        lambda r: r.groupBy("key").count(),
        {"mode": "complete"},
        "does not take output mode 'complete'",
    ),
    "files by a column that is not there": (
        lambda r: r.select("id"),
        {"to": "by"},
        "there is no column key to partition by",
    ),
    "a table in update mode without a key": (
        lambda r: r.groupBy("key").count(),
        {"to": "table", "mode": "update"},
        "has no key",
    ),
    "a table by a key that is not there": (
        lambda r: r.select("id"),
        {"to": "keyed"},
        "there is no column key to use as key",
    ),
    "a table with a column of its own": (
        lambda r: r.select("id", F.lit(1).alias("_epoch")),
        {"to": "table"},
        "writes _epoch itself",
    ),
}


@pytest.mark.parametrize("wrong", STARTS, ids=lambda name: name.replace(" ", "-"))
def test_what_cannot_be_published_is_refused_before_the_start(wrong: str, world: World) -> None:
    shape, options, says = STARTS[wrong]
    to = {
        "files": world.to_files(),
        "ab": {"a": world.to_files("a"), "b": world.to_files("b")},
        "by": sinks.Files(world.root / "out", by=["key"]),
        "table": world.to_table("t"),
        "keyed": world.to_table("t", key="key"),
    }[options.get("to", "files")]
    options = {**options, "to": to}
    with pytest.raises(JobError) as refused:
        world.start(lambda flow: flow.write("out", shape(world.rows(flow)), **options))
    assert says in str(refused.value)
    assert not world.decided("out")
    assert sorted(p.name for p in world.root.iterdir()) == ["home", "in"]


def test_what_spark_refuses_leaves_a_job_that_can_be_mended(world: World) -> None:
    world.add(range(4))

    def unmended(flow: Flow) -> None:
        copy(world)(flow)
        counts = world.rows(flow, "again").groupBy("key").count()
        flow.write("counts", counts, to=world.to_table("t"))

    with pytest.raises(PySparkException, match="without watermark"):
        world.start(unmended)
    world.live(copy(world))
    assert ids_of(world.files()) == [0, 1, 2, 3]


def test_column_names_are_kept_whatever_they_are(world: World) -> None:
    world.add(range(4))
    names = ["a b", "c.d", "e`f", "größe", "Select", "x=y;{}", "order"]

    def declare(flow: Flow) -> None:
        rows = world.rows(flow)
        rows = rows.select(*(rows.id.alias(name) for name in names))
        flow.write("out", rows, to=world.to_files())
        flow.write("json", rows, to=sinks.Files(world.root / "json", format="json"))
        flow.write("db", rows, to=world.to_table("t"))

    world.live(declare)
    (path,) = (world.root / "out").glob("*.parquet")
    assert pq.ParquetFile(path).schema_arrow.names == names
    assert sorted(world.files()) == [(i,) * 7 for i in range(4)]
    assert sorted(world.table("t", '"a b", "e`f"')) == [(i, i) for i in range(4)]
    (path,) = (world.root / "json").glob("*.json")
    assert [list(json.loads(line)) for line in path.read_text().splitlines()] == [names] * 4


def test_a_field_may_be_called_like_a_type_that_cannot_be_written(world: World) -> None:
    world.add(range(2))
    deep = F.struct(F.lit(1).alias("interval"), F.lit("x").alias("avoid")).alias("deep")
    world.live(
        lambda flow: flow.write("out", world.rows(flow).select("id", deep), to=world.to_files())
    )
    assert sorted(world.files(), key=str) == [(i, {"interval": 1, "avoid": "x"}) for i in range(2)]


# ---------------------------------------------------------------- several outputs of one query


def routed(world: World, outcome: Any, *more: str) -> Declare:
    def declare(flow: Flow) -> None:
        rows = world.rows(flow)
        to = {"low": world.to_files("low"), "high": world.to_table("high")}
        to.update({name: world.to_files(name) for name in more})
        flow.write("routed", rows.withColumn("outcome", outcome), to=to, by="outcome")

    return declare


def test_every_row_is_in_exactly_its_output_with_every_value_as_it_was(world: World) -> None:
    world.add(range(20))
    world.add(range(20, 40))
    world.live(routed(world, F.when(F.col("id") < 30, "low").otherwise("high"), "unused"))
    low = world.files("low")
    assert sorted((i, key) for i, key, *_ in low) == [(i, key_of(i)) for i in range(30)]
    high = world.table("high", "id, key, outcome")
    assert sorted(high) == [(i, key_of(i), "high") for i in range(30, 40)]
    assert not world.files("unused")
    ledger = sinks.Files(world.root / "unused").published("flow/routed/unused")
    assert ledger.position is not None
    assert ledger.position.epoch == 1  # an output without rows follows the others


def test_each_output_has_its_own_columns(world: World, spark: SparkSession) -> None:
    """Whoever writes the files: the first epoch is written by Spark, the second by the driver."""

    def declare(flow: Flow) -> None:
        outcomes = F.expr("if(id < 30, array('low', 'log'), array('high'))")
        routed = world.rows(flow).select(
            "*", F.expr("id * 2").alias("doubled"), F.explode(outcomes).alias("outcome")
        )
        to = {
            "low": sinks.Files(world.root / "low", by=["key"]),
            "high": world.to_table("high", key="id"),
            "log": sinks.Log(world.root / "log", key="id", partitions=2),
        }
        columns = {"low": ["key", "id"], "high": ["at", "id"], "log": ["doubled", "id"]}
        flow.write("routed", routed, to=to, by="outcome", columns=columns)

    world.add(range(20))
    world.add(range(20, 40))
    world.live(declare)
    assert sorted(world.files("low"), key=str) == sorted(
        ((key_of(i), i) for i in range(30)), key=str
    )
    plain = spark.read.option("recursiveFileLookup", "true").parquet(str(world.root / "low"))
    assert plain.columns == ["key", "id"]
    assert sorted(i for _, i in world.table("high")) == list(range(30, 40))
    log = sources.Log(world.root / "log").read(spark)
    assert log.columns[:2] == ["doubled", "id"]
    assert sorted(map(tuple, log.select("doubled", "id").collect())) == [
        (2 * i, i) for i in range(30)
    ]


def test_rows_without_an_output_stop_the_job_and_nothing_is_decided(world: World) -> None:
    world.add(range(4))
    outcome = F.when(F.col("id") == 0, "low").when(F.col("id") == 1, "")
    with pytest.raises(BadRows) as refused:
        world.live(routed(world, outcome.when(F.col("id") == 2, "elsewhere")))
    assert "3 rows have no output: their 'outcome' is '', 'elsewhere', None" in str(refused.value)
    assert not world.decided("routed")
    assert not world.files("low")
    world.live(routed(world, F.lit("low")))
    assert ids_of(world.files("low")) == [0, 1, 2, 3]


def test_rows_that_an_output_can_never_take_go_to_the_output_for_bad_rows(world: World) -> None:
    """In the same decision, also where it is made by a driver that dies after it."""

    def declare(flow: Flow) -> None:
        rows = world.rows(flow).withColumn("outcome", F.lit("good"))
        key = F.when(F.col("id") % 7 != 0, F.col("id")).alias("number")
        text = F.when(F.col("id") % 5 == 1, F.unhex(F.lit("FF")).cast("string")).alias("text")
        to = {"good": sinks.Sqlite(world.root / "good.db", table="good", key="number")}
        to["bad"] = world.to_files("bad")
        flow.write("routed", rows.select("id", key, text, "outcome"), to=to, by="outcome",
                   on_bad="bad")  # fmt: skip

    unfit = [n for n in range(40) if n % 7 == 0 or n % 5 == 1]
    for first in (0, 20):  # the first epoch is written by Spark, the second by the driver
        world.add(range(first, first + 20))
    faults.arm("epoch.decided", "raise", visit=2)
    with pytest.raises(faults.InjectedFault):
        world.live(declare)
    world.live(declare)
    with contextlib.closing(sqlite3.connect(world.root / "good.db")) as db:
        good = [n for (n,) in db.execute("SELECT id FROM good")]
    bad = pq.read_table(world.root / "bad", columns=["id"]).column(0).to_pylist()
    assert (sorted(good), sorted(bad)) == ([n for n in range(40) if n not in unfit], unfit)


@pytest.mark.parametrize("several", [False, True], ids=["one output", "several with columns"])
def test_the_advice_for_a_row_that_a_table_cannot_take_works_on_a_job_that_runs(
    world: World, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.root)
    table = sinks.Sqlite(world.root / "good.db", table="good", key="number")

    def declare(flow: Flow, **advised: Any) -> None:
        rows = world.rows(flow).withColumn("number", F.when(F.col("id") % 7 != 6, F.col("id")))
        if several:
            outcome = F.when(F.col("id") < 100, "good").otherwise("other")
            flow.write(
                "routed", rows.withColumn("outcome", outcome), by="outcome",
                to={"good": table, "other": world.to_files("other")},
                columns={"good": ["id", "number"]}, **advised,
            )  # fmt: skip
        else:
            flow.write("routed", rows.select("id", "number"), to=table, **advised)

    world.add(range(4))
    world.live(declare)
    for first in (4, 24):  # the first epoch is written by Spark, the second by the driver
        world.add(range(first, first + 20))
    with pytest.raises(BadRows) as refused:
        world.live(declare)
    advice = re.search(r"add (on_bad)=(\S+) to flow.write\(…\)", refused.value.hint)
    assert advice is not None
    advised = {advice[1]: eval(advice[2], {"Files": sinks.Files})}
    faults.arm("epoch.decided", "raise", visit=2)
    with pytest.raises(faults.InjectedFault):
        world.live(lambda flow: declare(flow, **advised))
    world.live(lambda flow: declare(flow, **advised))
    with contextlib.closing(sqlite3.connect(world.root / "good.db")) as db:
        good = db.execute("SELECT id FROM good ORDER BY id").fetchall()
    bad = pq.read_table(world.root / "rejected")
    unfit = [n for n in range(44) if n % 7 == 6]
    assert [n for (n,) in good] == [n for n in range(44) if n not in unfit]
    assert sorted(bad["id"].to_pylist()) == unfit
    assert ("outcome" in bad.column_names) is several  # they have all columns of the rows


def test_bad_rows_have_no_sub_folders(world: World) -> None:
    world.add(range(4))

    def declare(flow: Flow) -> None:
        to = {"a": world.to_files("a"), "b": sinks.Files(world.root / "b", by=["key"])}
        rows = world.rows(flow).withColumn("outcome", F.lit("a"))
        flow.write("x", rows, to=to, by="outcome", on_bad="b")

    with pytest.raises(JobError, match=r"on_bad='b': .* puts its rows into sub-folders"):
        world.live(declare)


def test_an_output_that_is_added_later_gets_the_rows_from_then_on(world: World) -> None:
    outcome = F.when(F.col("id") % 2 == 0, "low").otherwise("high")
    world.add(range(4))
    world.live(routed(world, outcome))
    world.add(range(4, 8))
    world.live(routed(world, F.when(F.col("id") == 7, "odd").otherwise(outcome), "odd"))
    assert ids_of(world.files("low")) == [0, 2, 4, 6]
    assert ids_of(world.table("high")) == [1, 3, 5]
    assert ids_of(world.files("odd")) == [7]


def test_an_output_that_is_dropped_keeps_its_rows_and_may_come_back(world: World) -> None:
    world.add(range(2))
    world.live(routed(world, F.when(F.col("id") == 1, "gone").otherwise("low"), "gone"))
    world.add(range(2, 4))
    world.live(routed(world, F.lit("low")))
    world.add(range(4, 6))
    world.live(routed(world, F.when(F.col("id") == 5, "gone").otherwise("low"), "gone"))
    assert ids_of(world.files("low")) == [0, 2, 3, 4]
    assert ids_of(world.files("gone")) == [1, 5]


def test_an_output_is_not_dropped_before_what_is_decided_for_it_is_published(
    world: World,
) -> None:
    world.add(range(4))
    faults.arm("epoch.decided", "raise")
    with pytest.raises(faults.InjectedFault):
        world.live(routed(world, F.lit("gone"), "gone"))
    faults.disarm()
    with pytest.raises(
        JobError, match=r"no longer has output 'gone' of routed, but epoch 0 is decided for it"
    ):
        world.live(routed(world, F.lit("low")))
    world.live(routed(world, F.lit("gone"), "gone"))
    world.live(routed(world, F.lit("low")))
    assert ids_of(world.files("gone")) == [0, 1, 2, 3]
    assert not world.files("low")


# ---------------------------------------------------------------- queries and modes


def test_the_queries_of_a_job_publish_each_in_its_mode(world: World) -> None:
    ids = world.add(range(25))

    def declare(flow: Flow) -> None:
        flow.write("all", world.rows(flow, "one"), to=world.to_files("all"))
        rows = world.rows(flow, "two")
        counts = rows.na.fill("none").groupBy("key").count()
        flow.write("now", counts, to=world.to_table("now", key="key"), mode="update")
        sums = rows.groupBy("key").agg(F.sum("id").alias("sum"))
        flow.write("sums", sums, to=world.to_table("sums"), mode="complete")

    def check() -> None:
        assert ids_of(world.files("all")) == ids
        truth = Counter(key_of(i) or ("none" if key_of(i) is None else "") for i in ids)
        assert dict(world.table("now")) == truth
        sums: Counter[str | None] = Counter()
        for i in ids:
            sums[key_of(i)] += i
        assert sorted(world.table("sums"), key=str) == sorted(sums.items(), key=str)

    assert world.live(declare).status == {
        "job": "flow",
        "state": "stopped",
        "queries": {"all": 0, "now": 0, "sums": 0},
    }
    check()
    ids += world.add(range(25, 30))
    world.live(declare)
    check()


def test_a_sort_behind_the_state_is_refused(world: World) -> None:
    world.add(range(4))

    def declare(flow: Flow) -> None:
        counts = world.rows(flow).groupBy("key").count().orderBy("count")
        flow.write("sorted", counts, to=world.to_table("t"), mode="complete")

    with pytest.raises(JobError, match="shuffles rows behind its last stateful operator") as found:
        world.live(declare)
    assert "sort when reading" in str(found.value)
    assert not world.decided("sorted")


def deduplicated(rows: DataFrame, _: DataFrame) -> DataFrame:
    kept = rows.withWatermark("at", "5 seconds") if rows.isStreaming else rows
    return kept.withColumn("id", F.col("id") % 40).dropDuplicates(["id"]).select("id")


def joined(rows: DataFrame, others: DataFrame) -> DataFrame:
    others = others.select(F.col("id").alias("other"), F.col("at").alias("then"))
    if rows.isStreaming:
        rows = rows.withWatermark("at", "5 seconds")
        others = others.withWatermark("then", "5 seconds")
    near = "other = id + 1 AND then >= at AND then <= at + interval 30 seconds"
    return rows.join(others, F.expr(near)).select("id", "other")


def sessions(rows: DataFrame, _: DataFrame) -> DataFrame:
    rows = rows.na.fill("none")
    if rows.isStreaming:
        rows = rows.withWatermark("at", "5 seconds")
    counts = rows.groupBy(F.session_window("at", "10 seconds"), "key").count()
    begin = F.col("session_window.start").cast("string")
    return counts.select("key", begin.alias("begin"), "count")


def test_stateful_queries_give_what_a_batch_gives(world: World, spark: SparkSession) -> None:
    shapes = {"dedup": deduplicated, "join": joined, "sessions": sessions}

    def declare(flow: Flow) -> None:
        for name, shape in shapes.items():
            rows = world.rows(flow, name)
            others = world.rows(flow, f"{name}_other") if name == "join" else rows
            to = world.to_table(name) if name == "sessions" else world.to_files(name)
            flow.write(name, shape(rows, others), to=to)

    def at(number: int) -> int:
        return number + 40 * (number // 25)  # a pause after every 25 rows ends the sessions

    for first in (0, 50):
        world.add(range(first, first + 50), seconds=map(at, range(first, first + 50)))
        if first:
            world.add([1000], seconds=[10_000])  # closes whatever is open
        world.live(declare)

    batch = spark.read.parquet(str(world.root / "in")).where("id < 1000")
    for name, shape in shapes.items():
        truth = Counter(map(tuple, shape(batch, batch).collect()))
        rows = world.table(name, "key, begin, count") if name == "sessions" else world.files(name)
        found = Counter(row for row in rows if row != (0,))
        if name == "dedup":
            del truth[0,]  # 1000 % 40: the closing row may or may not be the first of its id
        assert found == truth, name
        assert any(d.start == d.end for d in world.decided(name)), f"{name}: no no-data epoch"


# ---------------------------------------------------------------- lives


def copy(world: World) -> Declare:
    return lambda flow: flow.write("out", world.rows(flow), to=world.to_files())


def test_the_next_life_goes_on_where_the_last_one_ended(world: World) -> None:
    world.add(range(5))
    world.add(range(5, 8))
    assert world.live(copy(world)).status["queries"] == {"out": 1}
    before = {p: p.stat().st_mtime_ns for p in (world.root / "out").glob("*.parquet")}
    assert world.live(copy(world)).status["queries"] == {"out": 1}  # nothing to do, nothing done
    world.add(range(8, 9))
    assert world.live(copy(world)).status["queries"] == {"out": 2}
    assert (
        before.items()
        <= {p: p.stat().st_mtime_ns for p in (world.root / "out").glob("*.parquet")}.items()
    )
    assert ids_of(world.files()) == list(range(9))
    assert [d.rows for d in world.decided("out")] == [5, 3, 1]


def test_an_epoch_without_rows_is_decided_and_published_too(world: World) -> None:
    for ids in (range(3), range(100, 103), range(3, 6), range(103, 106)):
        world.add(ids)
    world.live(
        lambda flow: flow.write("out", world.rows(flow).where("id < 50"), to=world.to_files())
    )
    assert [d.rows for d in world.decided("out")] == [3, 0, 3, 0]
    ledger = world.to_files().published("flow/out/out")
    assert ledger.position is not None
    assert ledger.position.epoch == 3
    assert ids_of(world.files()) == list(range(6))


@pytest.mark.parametrize("kind", ["files", "table"])
@pytest.mark.parametrize("published", [True, False], ids=["published", "only-decided"])
def test_columns_that_changed_are_named_before_anything_is_staged(
    kind: str, published: bool, world: World
) -> None:
    def declare(*columns: str) -> Declare:
        to = world.to_files() if kind == "files" else world.to_table("t")
        return lambda flow: flow.write("out", world.rows(flow).selectExpr(*columns), to=to)

    world.add(range(3))
    before = declare("id", "key", "id AS number")
    if published:
        world.live(before)
    else:
        faults.arm("epoch.decided", "raise")
        with pytest.raises(faults.InjectedFault):
            world.live(before)
        faults.disarm()
    world.add(range(3, 6))
    with pytest.raises(SchemaMismatch) as refused:
        world.live(declare("id", "string(id) AS number", "at"))
    for says in ("at (", "key (", "number is"):
        assert says in str(refused.value)
    assert len(world.decided("out")) == 1
    assert not list(world.home.glob("flow/lineages/*/out/onceflow/staged/*-1-*-*"))  # epoch 1
    world.live(before)
    rows = world.files() if kind == "files" else world.table("t", "id, key, number")
    assert sorted(rows) == [(i, key_of(i), i) for i in range(6)]


# ---------------------------------------------------------------- the handle


def test_a_running_job_is_looked_at_and_stopped_and_started_again(world: World) -> None:
    world.add(range(3))
    handle = world.start(copy(world), every="50ms")
    assert handle.wait(0) is False
    assert handle.status["state"] == "running"
    wait_for(lambda: len(world.files()) == 3)
    for part in range(3, 9, 3):
        world.add(range(part, part + 3))
    wait_for(lambda: len(world.files()) == 9)
    handle.stop()
    assert handle.wait() is True
    assert handle.status == {"job": "flow", "state": "stopped", "queries": {"out": 2}}
    assert not any(query.isActive for query in handle.queries.values())
    handle.stop()  # no harm
    world.add(range(9, 12))
    with world.start(copy(world), every="50ms"):
        wait_for(lambda: len(world.files()) == 12)
    assert ids_of(world.files()) == list(range(12))


def test_stopping_lets_the_epoch_end_and_begins_no_other(world: World) -> None:
    for part in range(3):
        world.add([part])
    inside, go_on = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        inside.set()
        assert go_on.wait(30)

    faults.arm("epoch.staged", hold, visit=2)
    handle = world.start(copy(world))
    assert inside.wait(30)
    stopper = threading.Thread(target=handle.stop)
    stopper.start()
    wait_for(lambda: handle.started["out"].epochs._stopping)
    assert handle.status["state"] == "running"
    go_on.set()
    stopper.join(30)
    assert handle.status == {"job": "flow", "state": "stopped", "queries": {"out": 1}}
    assert ids_of(world.files()) == [0, 1]
    world.live(copy(world))
    assert ids_of(world.files()) == [0, 1, 2]


def test_a_failing_function_is_the_reason_and_nothing_of_its_epoch_is_decided(
    world: World,
) -> None:
    world.add(range(3))
    world.add(range(3, 6))

    def unlucky(number):  # type: ignore[no-untyped-def] # Spark reads the annotations
        if number == 4:
            raise ValueError("four is no good")
        return number * 2

    def declare(flow: Flow) -> None:
        double = F.udf(unlucky, "long")
        flow.write("out", world.rows(flow).select(double("id")), to=world.to_files())

    handle = world.start(declare, once=True)
    with pytest.raises(PySparkException, match="four is no good"):
        handle.wait()
    assert handle.status == {"job": "flow", "state": "failed", "queries": {"out": 0}}
    assert ids_of(world.files()) == [0, 2, 4]


def test_a_query_with_state_may_fail_in_its_very_first_epoch(world: World) -> None:
    world.add(range(6))

    def declare(flow: Flow) -> None:
        counts = world.rows(flow).na.fill("none").groupBy("key").count()
        flow.write("out", counts, to=world.to_table("t", key="key"), mode="update")

    faults.arm("epoch.staged", "raise")
    with pytest.raises(faults.InjectedFault):
        world.live(declare)
    faults.disarm()
    world.live(declare)
    assert sorted(world.table("t")) == [("", 1), ("a", 2), ("b", 2), ("none", 1)]


@pytest.mark.parametrize("folder", ["offsets", "commits", "sources/rows"])
def test_spark_may_be_killed_while_it_writes_the_very_first_file(folder: str, world: World) -> None:
    world.add(range(4))
    faults.arm("epoch.checked", "raise")
    with pytest.raises(faults.InjectedFault):
        world.live(copy(world))
    faults.disarm()
    (checkpoint,) = world.home.glob("flow/lineages/*/out")
    part = checkpoint / folder / ".0.5f0d9f0c-8d3f-4f3c-9d9c-5c9b3d0c7c11.tmp"
    part.parent.mkdir(exist_ok=True)
    part.write_text("v2")  # it is renamed when it is whole; Spark refuses to begin beside one
    world.live(copy(world))
    assert ids_of(world.files()) == [0, 1, 2, 3]


def test_a_random_column_is_as_exact_as_any_other(world: World) -> None:
    world.add(range(50))
    world.add(range(50, 100))

    def declare(flow: Flow) -> None:
        rows = world.rows(flow).select("id", F.rand().alias("dice"), F.expr("uuid()").alias("u"))
        flow.write("out", rows, to=world.to_files())

    faults.arm("epoch.decided", "raise")
    with pytest.raises(faults.InjectedFault):
        world.live(declare)
    faults.disarm()
    world.live(declare)
    rows = world.files()
    assert ids_of(rows) == list(range(100))
    assert len({u for _, _, u in rows}) == 100


def test_a_failed_query_stops_the_others_of_its_job(world: World) -> None:
    world.add(range(3))

    def declare(flow: Flow) -> None:
        flow.write("good", world.rows(flow, "good"), to=world.to_files())
        nowhere = {"a": world.to_files("a"), "b": world.to_files("b")}
        flow.write("bad", world.rows(flow, "bad"), to=nowhere, by="key")

    handle = world.start(declare, every="50ms")
    with pytest.raises(BadRows):
        handle.wait(30)
    assert not any(query.isActive for query in handle.queries.values())
