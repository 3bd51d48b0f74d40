"""What is in an output folder, for every reader of it."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import onceflow
from onceflow import Flow, Handle, faults, sources
from onceflow.contract.staged_files import NULL_FOLDER
from onceflow.errors import BadRows, Damaged, JobError, TargetForeign
from onceflow.protocol.home import JobFolder
from onceflow.protocol.staging import Stager
from onceflow.sinks import Files

SCHEMA = "id long, land string"
Row = tuple[Any, ...]


class World:
    """An input folder, a home, and one output folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = root / "out"
        (root / "in").mkdir()
        self._files = 0

    def add(self, rows: list[tuple[int, str | None]]) -> None:
        ids, lands = zip(*rows, strict=True)
        part = self.root / "in" / f".{self._files}"
        table = {"id": pa.array(ids, pa.int64()), "land": pa.array(lands, pa.string())}
        pq.write_table(pa.table(table), part)
        os.utime(part, (1_700_000_000 + self._files,) * 2)
        part.rename(self.root / "in" / f"{self._files}.parquet")
        self._files += 1

    def start(self, to: Files, shape: Any = None, **options: Any) -> Handle:
        @onceflow.job("files", every="0ms")
        def job(flow: Flow) -> None:
            source = sources.Files(self.root / "in", schema=SCHEMA, max_files_per_epoch=1)
            rows = flow.read("rows", source)
            flow.write("out", shape(rows) if shape else rows, to=to)

        return onceflow.start(job, home=self.root / "home", **{"once": True, **options})

    def live(self, to: Files | None = None, shape: Any = None) -> None:
        self.start(to or Files(self.out), shape).wait()

    def decided(self) -> int:
        queries = JobFolder(self.root / "home", "files").queries()
        return sum(len(query.epoch_log().read().decisions) for query in queries)


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path)


@pytest.fixture
def other_disk(disk_of: Callable[[str, str], Path]) -> Path:
    return disk_of("disk", "16m")


def rows_of(df: DataFrame) -> list[Row]:
    return sorted((tuple(row) for row in df.collect()), key=str)


def duck(path: Path, *options: str) -> list[Row]:
    where = ", ".join([f"'{path}/**/*.parquet'", *options])
    return sorted(duckdb.sql(f"SELECT id, land FROM read_parquet({where})").fetchall(), key=str)


def data_files(folder: Path) -> dict[Path, tuple[int, int, bytes]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and not {"_commits", "_manifests"} & set(path.parts)
    }


# ---------------------------------------------------------------- readers


def test_every_reader_sees_the_same_rows_when_nothing_runs(
    world: World, spark: SparkSession
) -> None:
    rows = [(i, ("NL", "Côte d'Ivoire", "日本 🙂")[i % 3]) for i in range(30)]
    world.add(rows[:12])
    world.add(rows[12:])
    world.live(Files(world.out, by=["land"]))
    world.live(Files(world.out, by="land"))
    expected = sorted(rows, key=str)
    assert rows_of(Files.read(spark, world.out)) == expected
    assert rows_of(spark.read.parquet(str(world.out)).select("id", "land")) == expected
    assert duck(world.out, "hive_partitioning = true") == expected
    assert duck(world.out, "hive_partitioning = false") == expected
    assert {p.name for p in world.out.iterdir()} >= {"land=NL", "_commits"}


def test_read_sees_whole_epochs_only(world: World, spark: SparkSession) -> None:
    first, second = [(i, "a") for i in range(5)], [(i, "b") for i in range(5, 9)]
    world.add(first)
    world.add(second)
    inside, go_on = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        inside.set()
        assert go_on.wait(60)

    faults.arm("folder.moved", hold, visit=2)
    handle = world.start(Files(world.out))
    assert inside.wait(60)
    assert rows_of(Files.read(spark, world.out)) == first
    assert duck(world.out) == first + second  # of a decided epoch: it will be published
    go_on.set()
    handle.wait()
    assert rows_of(Files.read(spark, world.out)) == first + second


ODD = ["", None, "/", "a/b", "=", "a=b", " ", "a b", "..", "%2F", "100%", "größe", "日本🙂", "#",
       "[x]{y}*?", "c:\\d", "'q'", '"q"', "+", "line\nbreak", "__HIVE_DEFAULT_PARTITION__", "1",
       "01"]  # fmt: skip


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_values_that_make_folders_come_back_as_they_were(
    format: str, world: World, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = []

    def collect(*args: Any, collect: Callable[..., None] = Stager._collect) -> None:
        collected.append(collect(*args))

    monkeypatch.setattr(Stager, "_collect", collect)
    rows = list(enumerate(ODD * 2))
    world.add(rows[: len(ODD)])  # an epoch that Spark writes
    world.add(rows[len(ODD) :])  # and one that is collected

    def twice(rows: DataFrame) -> DataFrame:
        return rows.withColumn("even", F.col("id") % 2 == 0)

    world.live(Files(world.out, format=format, by=["land", "even"]), twice)
    expected = [(i, value, i % 2 == 0) for i, value in rows]
    assert rows_of(Files.read(spark, world.out)) == sorted(expected, key=str)
    assert (world.decided(), len(collected)) == (2, 1)
    files = Counter(p.relative_to(world.out).parts[0] for p in data_files(world.out))
    assert all(count == 2 for land, count in files.items() if land != f"land={NULL_FOLDER}"), files
    folders = {p.relative_to(world.out).parts[:2] for p in data_files(world.out)}
    assert ("land=a%2Fb", "even=false") in folders
    assert ("land=01", "even=true") in folders


def test_outputs_of_one_query_have_folders_of_their_own(world: World, spark: SparkSession) -> None:
    @onceflow.job("files", every="0ms")
    def job(flow: Flow) -> None:
        rows = flow.read("rows", sources.Files(world.root / "in", schema=SCHEMA))
        to = {
            "flat": Files(world.root / "flat"),
            "one": Files(world.root / "one", by="land"),
            "two": Files(world.root / "two", by=["route", "land"], format="json"),
        }
        route = F.element_at(F.array(*map(F.lit, to)), (F.col("id") % 3 + 1).cast("int"))
        flow.write("out", rows.withColumn("route", route), to=to, by="route")

    rows = [(i, (None, "", "x", "y")[i % 4]) for i in range(24)]
    world.add(rows)
    onceflow.start(job, home=world.root / "home", once=True).wait()
    for number, name in enumerate(("flat", "one", "two")):
        found = Files.read(spark, world.root / name)
        expected = [(i, land, name) for i, land in rows if i % 3 == number]
        assert rows_of(found) == sorted(expected, key=str)
    assert (world.root / "two" / "route=two" / "land=x").is_dir()
    assert (world.root / "one" / "land=x").is_dir()


@pytest.mark.parametrize(
    ("column", "length", "size"),
    [
        ("land", 250, 264),  # it cannot be staged
        ("the_land_in_which_they_live", 240, 268),  # it is staged, and cannot be published
    ],
)
@pytest.mark.parametrize("before", [0, 1], ids=["written", "collected"])
def test_a_value_that_no_folder_can_be_called_by_is_refused_before_the_decision(
    world: World, spark: SparkSession, *, column: str, length: int, size: int, before: int
) -> None:
    for _ in range(before):  # the first epoch of a driver is written by Spark
        world.add([(0, "x")])
    world.add([(1, "x"), (2, "y" * length)])
    out = Files(world.out, by=column)
    with pytest.raises(BadRows, match=f"column {column} would make .* {size} bytes") as caught:
        world.live(out, lambda rows: rows.withColumnRenamed("land", column))
    assert f"shorten {column}" in caught.value.hint
    assert world.decided() == before
    world.live(out, lambda rows: rows.select("id", F.substring("land", 1, 200).alias(column)))
    expected = [(0, "x")] * before + [(1, "x"), (2, "y" * 200)]
    assert rows_of(Files.read(spark, world.out)) == expected


def test_a_null_character_is_refused_before_the_decision(world: World) -> None:
    world.add([(0, "x")])
    world.add([(1, "a\0b")])
    with pytest.raises(BadRows, match="null character"):
        world.live(Files(world.out, by="land"))
    assert world.decided() == 1


def test_a_long_value_is_told_of_the_output_that_it_is_for(world: World) -> None:
    @onceflow.job("files", every="0ms")
    def job(flow: Flow) -> None:
        rows = flow.read("rows", sources.Files(world.root / "in", schema=SCHEMA))
        to = {"1": Files(world.root / "one", by="id"), "2": Files(world.root / "two", by="land")}
        flow.write("out", rows.withColumn("to", rows.id.cast("string")), to=to, by="to")

    world.add([(1, "y" * 300), (2, "y" * 300)])
    with pytest.raises(BadRows, match=r"two'\): a value of column land .* 314 bytes"):
        onceflow.start(job, home=world.root / "home", once=True).wait()


def test_the_folder_may_have_any_name(world: World, spark: SparkSession) -> None:
    world.add([(1, "x")])
    folder = world.root / "out 100% [größe]" / "{a,b}*?"
    world.live(Files(folder, by="land"))
    assert rows_of(Files.read(spark, folder)) == [(1, "x")]


def test_a_folder_without_rows_is_read_as_what_it_is(world: World, spark: SparkSession) -> None:
    with pytest.raises(TargetForeign, match="is not an output folder"):
        Files.read(spark, world.root / "in")
    world.live()
    with pytest.raises(TargetForeign, match="has no published epoch yet"):
        Files.read(spark, world.out)
    world.add([(1, "x")])
    world.live(shape=lambda rows: rows.where("id > 1"))
    empty = Files.read(spark, world.out)
    assert empty.columns == ["id", "land"]
    assert empty.count() == 0


# ---------------------------------------------------------------- values

TYPES = """
    id long, flag boolean, b byte, s short, i int, f float, d double, c decimal(38, 18), t string,
    x binary, day date, at timestamp, wall timestamp_ntz, n struct<a: int, b: struct<c: string>>,
    l array<double>, deep array<struct<k: string, v: array<int>>>, m map<string, long>
"""
FULL: list[Row] = [
    (1, True, -128, -32768, -(2**31), 1.5, 0.1, Decimal("12345678901234567890.123456789012345678"),
     "größe 日本語 🙂\u2028 \u0085 \t \r\n \\ \" ' { } \u0001", b"\x00\xff\n", date(2026, 2, 28),
     datetime(2026, 1, 1, 12, 30, 59, 123456, UTC), datetime(2026, 3, 29, 2, 30, 0, 1),
     (1, ("x",)), [1.0, None, float("nan"), float("inf")], [("k", [1, None]), ("", [])],
     {"a": 1, "": 2, "ü": None}),
    (2, False, 127, 32767, 2**31 - 1, float("nan"), float("-inf"), Decimal("-0.000000000000000001"),
     "", b"", date(1, 1, 1), datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
     datetime(1, 1, 1), (None, None), [], [], {}),
    (3, None, 0, 0, 0, float("-inf"), float("nan"), Decimal(0), "null", b"null", date(9999, 12, 31),
     datetime(9999, 12, 31, 23, 59, 59, 999999, UTC), datetime(9999, 12, 31, 23, 59, 59, 999999),
     (None, (None,)), [float("-inf"), -0.0, 5e-324, 1.7976931348623157e308], [(None, None)],
     {"NaN": -(2**63)}),
    (4, *[None] * 16),
    (5, True, 1, 1, 1, 3.4028234663852886e38, 1e-300, Decimal("1.5"), "x" * 2_000_000, b"y" * 999,
     date(1970, 1, 1), datetime(1582, 10, 14, 0, 0, 0, 7, UTC), datetime(1900, 1, 1, 0, 0, 0, 10),
     (2**31 - 1, ("",)), None, None, None),
]  # fmt: skip


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_values_of_every_type_come_back_as_they_were(
    format: str, world: World, spark: SparkSession
) -> None:
    rows = spark.createDataFrame(FULL, TYPES).coalesce(1)
    rows.write.parquet(str(world.root / "typed"))

    @onceflow.job("files", every="0ms")
    def job(flow: Flow) -> None:
        typed = flow.read("rows", sources.Files(world.root / "typed", schema=TYPES))
        flow.write("out", typed, to=Files(world.out, format=format))

    onceflow.start(job, home=world.root / "home", once=True).wait()
    found = Files.read(spark, world.out)
    assert found.schema == rows.schema
    for row, expected in zip(rows_of(found), rows_of(rows), strict=True):
        for column, is_now, was in zip(rows.columns, row, expected, strict=True):
            assert repr(is_now) == repr(was), f"{column} of row {row[0]}"


def test_json_lines_are_plain_json(world: World) -> None:
    world.add([(1, "größe"), (2, None), (3, "a\nb")])
    world.live(Files(world.out, format="json", by="land"))
    lines = [line for p in world.out.rglob("*.json") if "_commits" not in p.parts
             for line in p.read_text().splitlines()]  # fmt: skip
    found = [json.loads(line) for line in lines]
    assert sorted((row["id"], row.get("land")) for row in found) == [
        (1, "größe"), (2, None), (3, "a\nb"),
    ]  # fmt: skip


def test_what_json_cannot_hold_is_refused_before_the_start(world: World) -> None:
    world.add([(1, "x")])
    with pytest.raises(JobError, match="by_id"):
        world.start(
            Files(world.out, format="json"),
            lambda rows: rows.select("id", F.create_map("id", "land").alias("by_id")),
        ).wait()
    assert not world.decided()


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_a_file_that_grows_too_large_is_rolled(
    format: str, world: World, spark: SparkSession
) -> None:
    rows = [(i, f"{i * 7919 % 10007:032x}{i * 104729:032x}") for i in range(4000)]
    world.add(rows[:2000])
    world.add(rows[2000:])
    world.live(Files(world.out, format=format, roll="20 KB"))
    sizes = [len(data) for _, _, data in data_files(world.out).values()]
    assert len(sizes) > 3
    assert max(sizes) < 80_000
    assert rows_of(Files.read(spark, world.out)) == sorted(rows, key=str)


def test_files_never_change(world: World, spark: SparkSession) -> None:
    class Rolling(Files):
        roll_up_every = 2

    seen: dict[Path, tuple[int, int, bytes]] = {}
    for number in range(3):
        world.add([(number, "x"), (number, "y")])
        world.live(Rolling(world.out, by="land"))
        now = data_files(world.out)
        assert seen.items() <= now.items()
        assert len(now) == len(seen) + 2
        seen = now
    assert list(world.out.glob("_commits/rollup-*"))
    assert Counter(rows_of(Files.read(spark, world.out))) == Counter(
        (i, land) for i in range(3) for land in "xy"
    )


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_a_published_file_that_was_cut_short_is_not_read(
    format: str, world: World, spark: SparkSession
) -> None:
    world.add([(i, "x") for i in range(10)])
    world.live(Files(world.out, format=format))
    ((path, (_, _, whole)),) = data_files(world.out).items()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))  # whole lines, but not all
    with pytest.raises(Damaged, match=path.name):
        Files.read(spark, world.out).collect()
    path.unlink()
    with pytest.raises(Damaged, match=path.name):
        Files.read(spark, world.out).collect()


@pytest.mark.parametrize(
    ("format", "by"), [("parquet", ("land",)), ("json", ())], ids=["parquet-by", "json"]
)
def test_the_folder_may_be_on_another_file_system(
    format: str, by: tuple[str, ...], world: World, spark: SparkSession, other_disk: Path
) -> None:
    assert os.stat(other_disk).st_dev != os.stat(world.root).st_dev
    out = Files(other_disk / "out", format=format, by=by)
    rows = [(i, "abc"[i % 3]) for i in range(12)]
    for part in range(0, 12, 4):
        world.add(rows[part : part + 4])
    faults.arm("epoch.decided", "raise", visit=2)
    with pytest.raises(faults.InjectedFault):
        world.live(out)
    faults.disarm()
    assert rows_of(Files.read(spark, out.path)) == sorted(rows[:4], key=str)
    world.live(Files(out.path, format=format, by=by))
    assert rows_of(Files.read(spark, out.path)) == sorted(rows, key=str)
    assert not list((out.path / "_staged").iterdir())


# ---------------------------------------------------------------- whose folder it is


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "csv"}, "does not write 'csv'"),
        ({"roll": "big"}, "'big' is not a size"),
        ({"by": ["a/b"]}, "'a/b' cannot name a folder"),
    ],
    ids=["format", "roll", "by"],
)
def test_a_sink_that_cannot_work_is_refused_when_it_is_made(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobError, match=says):
        Files("out", **options)


def test_a_folder_that_something_else_wrote_is_refused(world: World) -> None:
    world.add([(1, "x")])
    world.out.mkdir()
    (world.out / "part-0.parquet").write_bytes(b"somebody's")
    with pytest.raises(TargetForeign, match=r"no output of onceflow wrote: part-0\.parquet"):
        world.live()
    with pytest.raises(TargetForeign, match="is not a folder"):
        world.live(Files(world.out / "part-0.parquet"))
    assert (world.out / "part-0.parquet").read_bytes() == b"somebody's"
    assert not world.decided()


def test_a_file_that_somebody_dropped_in_is_named_at_the_next_start(
    world: World, spark: SparkSession
) -> None:
    world.add([(1, "x")])
    world.live(Files(world.out, by="land"))
    world.add([(2, "x")])
    for name in ("land=x/strange.parquet", "other/strange.parquet"):
        foreign = world.out / name
        foreign.parent.mkdir(exist_ok=True)
        foreign.write_bytes(b"")
        with pytest.raises(TargetForeign) as refused:
            world.live(Files(world.out, by="land"))
        assert f"something else wrote into {world.out}: {name}" in str(refused.value)
        foreign.unlink()
    assert world.decided() == 1
    world.live(Files(world.out, by="land"))
    assert rows_of(Files.read(spark, world.out)) == [(1, "x"), (2, "x")]


def test_a_folder_keeps_its_owner_and_its_layout(world: World) -> None:
    world.add([(1, "x")])
    world.live()
    for other in (Files(world.out, format="json"), Files(world.out, by="land")):
        with pytest.raises(TargetForeign, match="was written with parquet, now it is"):
            world.live(other)

    @onceflow.job("another", every="0ms")
    def job(flow: Flow) -> None:
        rows = flow.read("rows", sources.Files(world.root / "in", schema=SCHEMA))
        flow.write("out", rows, to=Files(world.out))

    with pytest.raises(TargetForeign, match="belongs to output files/out/out, not to another/out"):
        onceflow.start(job, home=world.root / "home", once=True)
