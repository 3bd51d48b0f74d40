"""Every row of every file that appears is read exactly once, or named as one that cannot be."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from waiting import wait_for

import onceflow
from onceflow import Flow, Handle, sinks
from onceflow.errors import BadInput, CheckpointRefused, JobError
from onceflow.protocol.home import JobFolder
from onceflow.sources import Files

SCHEMA = "id long, name string"
NAMES = ["plain", "größe", "日本語", "🙂 smile", "comma, and space", "semi;colon", "'single'"]
Declare = Callable[[Flow], None]
Row = tuple[Any, ...]


class World:
    """An input folder, a home, and one folder for each output."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "in"
        self.folder.mkdir()
        self._files = 0

    def add(self, lines: Iterable[str] | bytes, name: str = "", newline: str = "\n") -> Path:
        """One text file, complete when it appears, newer than all before."""
        data = lines
        if not isinstance(data, bytes):
            data = "".join(line + newline for line in lines).encode()
        self._files += 1
        path = self.folder / (name or f"{self._files:04}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}")
        part.write_bytes(data)
        os.utime(part, (1_700_000_000 + self._files,) * 2)
        return part.rename(path)

    def add_parquet(self, rows: list[Row], name: str = "") -> Path:
        columns = zip(*rows, strict=True) if rows else [(), ()]
        ids, names = (list(column) for column in columns)
        buffer = pa.BufferOutputStream()
        table = {"id": pa.array(ids, pa.int64()), "name": pa.array(names, pa.string())}
        pq.write_table(pa.table(table), buffer)
        return self.add(buffer.getvalue().to_pybytes(), name or f"{self._files:04}.parquet")

    def to(self, name: str = "out") -> sinks.Files:
        return sinks.Files(self.root / name)

    def copy(self, source: Files | None = None, **options: Any) -> Declare:
        """A job that writes the rows of the folder as they are."""
        source = source or Files(self.folder, **{"schema": SCHEMA, **options})
        return lambda flow: flow.write("out", flow.read("lines", source), to=self.to())

    def start(self, declare: Declare, *, keep_epochs: int = 100, **options: Any) -> Handle:
        job = onceflow.job("read", every="0ms", keep_epochs=keep_epochs)(declare)
        return onceflow.start(job, home=self.root / "home", **options)

    def live(self, declare: Declare, **options: Any) -> None:
        self.start(declare, once=True, **options).wait()

    def rows(self, name: str = "out") -> list[Row]:
        paths = sorted((self.root / name).rglob("*.parquet"))
        tables = [pq.ParquetFile(path).read() for path in paths]
        return sorted((tuple(r.values()) for t in tables for r in t.to_pylist()), key=str)

    def rejected(self) -> list[tuple[str, str]]:
        """(name of the file, record) of every row that was rejected."""
        return [(unquote(file).rpartition("/")[2], record) for file, record in self.rows("bad")]

    def decided(self, query: str = "out") -> list[Any]:
        queries = JobFolder(self.root / "home", "read").queries()
        return [d for q in queries if q.name == query for d in q.epoch_log().read().decisions]

    def source_log(self) -> Path:
        (found,) = self.root.glob("home/read/lineages/*/out/sources/lines")
        return found


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path)


def as_json(number: int, name: str | None = None) -> str:
    return json.dumps({"id": number, "name": name}, ensure_ascii=False)


# ---------------------------------------------------------------- declaring


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "orc"}, "does not read 'orc'"),
        ({"format": "json"}, "json needs a schema"),
        ({"format": "csv"}, "csv needs a schema"),
        ({"format": "json", "schema": SCHEMA, "on_bad": "skip"}, "on_bad='skip'"),
        ({"on_bad": sinks.Files("bad")}, "has no rows to reject"),
        ({"format": "json", "schema": SCHEMA, "header": True}, "header= is for CSV"),
        ({"max_files_per_epoch": 0}, "max_files_per_epoch=0"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.replace(" ", "-"),
)
def test_a_source_that_cannot_work_is_refused_when_it_is_made(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobError) as refused:
        Files("in", **options)
    assert says in str(refused.value)


def test_a_folder_and_columns_must_be_there(world: World, spark: SparkSession) -> None:
    for source, says in (
        (Files(world.folder), "is empty, so its columns are not known"),
        (Files(world.root / "nowhere", schema=SCHEMA), "there is no such folder"),
        (Files(world.root / "nowhere", format="csv", schema=SCHEMA), "there is no such folder"),
        (Files(world.folder, schema="id lung"), "schema 'id lung' cannot be read"),
        (Files(world.folder, format="json", schema="long"), "the schema must name columns"),
        # Spark reads 200 as -56 there, and says nothing
        (Files(world.folder, format="json", schema="a array<byte>"), "use short"),
    ):
        with pytest.raises(JobError) as refused:
            Flow(spark).read("lines", source)
        assert says in str(refused.value)


# ---------------------------------------------------------------- good rows


def test_rows_of_every_format_are_read_once(world: World) -> None:
    rows = list(enumerate(NAMES))
    world.add_parquet(rows[:4], "parquet/0.parquet")
    world.add_parquet([], "parquet/1.parquet")
    world.add_parquet(rows[4:], "parquet/2.parquet")
    for folder, newline in (("json", "\n"), ("crlf", "\r\n")):
        lines = [as_json(*row) for row in rows]
        world.add(["", *lines[:4], "   ", ""], f"{folder}/0", newline)
        world.add(b"", f"{folder}/1")
        world.add("\n".join(lines[4:]).encode(), f"{folder}/2")  # no end of line at the end
    for folder, header, newline in (("bare", [], "\n"), ("headed", ["id,name"], "\r\n")):
        lines = [
            f'{number},"{name}"' if "," in name else f"{number},{name}" for number, name in rows
        ]
        world.add([*header, *lines[:4], ""], f"{folder}/0", newline)
        world.add([*header], f"{folder}/1", newline)
        world.add([*header, *lines[4:]], f"{folder}/2", newline)
    files = {
        "parquet": Files(world.folder / "parquet", schema=SCHEMA),
        "inferred": Files(world.folder / "parquet"),
        "json": Files(world.folder / "json", format="json", schema=SCHEMA),
        "crlf": Files(world.folder / "crlf", format="json", schema=SCHEMA),
        "bare": Files(world.folder / "bare", format="csv", schema=SCHEMA),
        "headed": Files(world.folder / "headed", format="csv", schema=SCHEMA, header=True),
    }

    def declare(flow: Flow) -> None:
        for name, source in files.items():
            flow.write(name, flow.read(name, source), to=world.to(name))

    world.live(declare)
    for name in files:
        assert world.rows(name) == sorted(rows, key=str), name


def test_no_more_files_an_epoch_than_asked_for(world: World) -> None:
    for number in range(5):
        world.add_parquet([(number, "x")])
    world.live(world.copy(max_files_per_epoch=2))
    assert [d.rows for d in world.decided()] == [2, 2, 1]
    assert [number for number, _ in world.rows()] == list(range(5))


ODD = ["a b", "100%", "50%25", "größe-日本🙂", "a#b?c", "a+b;c=d&e", "q'uo\"te", "~$(x)!@^|",
       "x[1]{2}*"]  # fmt: skip


def test_a_file_may_have_any_name(world: World) -> None:
    for number, name in enumerate(ODD):
        world.add([as_json(number, name)], f"{name}.json")
    world.add(gzip.compress(as_json(99, "packed").encode()), "packed.json.gz")
    world.add([as_json(100)], "_not_yet.json")  # Spark leaves these to whoever writes them
    world.live(world.copy(format="json"))
    assert world.rows() == sorted([*enumerate(ODD), (99, "packed")], key=str)


def test_a_backslash_in_a_name_doubles_no_other_file(world: World) -> None:
    """Spark takes it for a slash, and would read the whole folder in its place."""
    world.add([as_json(0, "plain")], "plain.json")
    world.add([as_json(1, "odd")], "back\\.json")
    world.live(world.copy(format="json"))
    assert world.rows() == [(0, "plain"), (1, "odd")]


def test_files_in_sub_folders_are_read_too(world: World) -> None:
    for number, name in enumerate(["top", "a/one", "a/b/two", "land=NL/three"]):
        world.add([as_json(number, name)], f"json/{name}.json")
        world.add_parquet([(number, name)], f"parquet/{name}.parquet")

    def declare(flow: Flow) -> None:
        for name in ("json", "parquet"):
            source = Files(world.folder / name, format=name, schema=SCHEMA)
            flow.write(name, flow.read(name, source), to=world.to(name))

    world.live(declare)
    for name in ("json", "parquet"):
        assert [number for number, _ in world.rows(name)] == [0, 1, 2, 3], name


def test_the_folder_may_have_any_name(world: World) -> None:
    names = ["a b 100% größe#", "c:d;e=f"]
    for number, name in enumerate(names):
        world.add([as_json(number, name)], f"{name}/0.json")

    def declare(flow: Flow) -> None:
        for number, name in enumerate(names):
            source = Files(world.folder / name, format="json", schema=SCHEMA)
            flow.write(f"o{number}", flow.read(f"o{number}", source), to=world.to(f"out {name}"))

    world.live(declare)
    found = {name: world.rows(f"out {name}") for name in names}
    assert found == {name: [(number, name)] for number, name in enumerate(names)}


@pytest.mark.parametrize("name", ["x[1]", "x{2}", "x*", "x?", "x\\y"])
def test_a_folder_whose_name_is_a_pattern_is_refused(
    world: World, spark: SparkSession, name: str
) -> None:
    (world.folder / name).mkdir()
    with pytest.raises(JobError, match="rename the folder"):
        Flow(spark).read("lines", Files(world.folder / name, schema=SCHEMA))


def test_a_file_that_is_older_than_those_before_is_read_too(world: World) -> None:
    new, old = world.add_parquet([(1, "new")], "new.parquet"), time.time() - 400 * 24 * 3600
    os.utime(new)
    world.live(world.copy())
    late = world.add_parquet([(2, "old")], ".old.parquet")
    os.utime(late, (old, old))
    late.rename(world.folder / "old.parquet")  # a move keeps the time of the file
    world.live(world.copy())
    assert world.rows() == [(1, "new"), (2, "old")]


# ---------------------------------------------------------------- bad rows

LONG = "x" * 3_000_000
GOOD_JSON = {
    as_json(1, "plain"): (1, "plain"),
    as_json(2, LONG): (2, LONG),
    '  {"name": "reversed", "id": 3}  ': (3, "reversed"),
    '\t{"id": 4, "name": "behind a tab"}': (4, "behind a tab"),
    '{"id": 5, "name": "more", "extra": [1, {"a": 2}]}': (5, "more"),
    '{"id": 6}': (6, None),
    '{"name": null}': (None, None),
    "{}": (None, None),
    '{"id": 9223372036854775807, "name": ""}': (9223372036854775807, ""),
    '{"id": 7, "name": "a\\n\\u00e9\\"b"}': (7, 'a\né"b'),
    '{"id": 10, "name": "a } b {"}': (10, "a } b {"),
}
BAD_JSON = [
    '[{"id": 1}, {"id": 2}]',
    "[]",
    "null",
    "1",
    '"text"',
    "not json",
    '{"id": 1, "name": "trunca',
    '{"id": 1',
    '{"id": "seven"}',
    '{"id": "7"}',
    '{"id": 1.5}',
    '{"id": true}',
    '{"id": {"deep": 1}}',
    '{"id": 9223372036854775808}',
    '{"id": 1, "name": "no comma" "x": 1}',
    '{"id": "' + LONG + '"}',
    *(
        f"{whole}{behind}"
        for whole in ('{"id": 1}', '{"id": 1, "name": "}"}', '{"id": 1, "more": {}}')
        for behind in (whole, " x", ",5", ',"x"', "]", "}", '],["x"', "\u2028", "\x0c")
    ),
]


def test_bad_rows_go_to_their_output_and_good_rows_to_theirs(world: World) -> None:
    source = Files(world.folder, format="json", schema=SCHEMA, on_bad=world.to("bad"))
    world.add([*GOOD_JSON, *BAD_JSON], "first.json")
    world.live(world.copy(source))
    world.add(["", "broken", as_json(8, "last")], "second one.json")
    world.live(world.copy(source))
    assert world.rows() == sorted([*GOOD_JSON.values(), (8, "last")], key=str)
    bad = [*(("first.json", record) for record in BAD_JSON), ("second one.json", "broken")]
    assert sorted(world.rejected()) == sorted(bad)


def test_bad_rows_of_a_stateful_query_go_to_their_output_once(world: World) -> None:
    source = Files(world.folder, format="csv", schema=SCHEMA, on_bad=world.to("bad"))

    def declare(flow: Flow) -> None:
        counts = flow.read("lines", source).groupBy("name").count()
        db = sinks.Sqlite(world.root / "out.db", table="counts", key="name")
        flow.write("out", counts, to=db, mode="update")

    for number in range(2):
        world.add(["1,a", "2,b", f"bad {number}", "x,a", "3,a"])
        world.live(declare)
    db = sqlite3.connect(world.root / "out.db")
    assert sorted(db.execute("SELECT name, count FROM counts")) == [("a", 4), ("b", 2)]
    db.close()
    assert sorted(record for _, record in world.rejected()) == ["bad 0", "bad 1", "x,a", "x,a"]


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [("json", as_json, '{"id": "x"}'), ("csv", lambda i, n: f"{i},{n}", "x,y")],
    ids=["json", "csv"],
)
def test_a_bad_row_stops_the_job_with_file_and_line(
    format: str, good: Callable[[int, str], str], bad: str, world: World
) -> None:
    job = world.copy(format=format, max_files_per_epoch=1)
    world.add([good(1, "a")])
    path = world.add([good(2, "b"), "", good(3, "c"), bad, good(4, "d")], f"not 100% gööd.{format}")
    with pytest.raises(BadInput) as stopped:
        world.live(job)
    assert f"{path}, line 4 cannot be parsed: {bad}" in str(stopped.value)
    assert len(world.decided()) == 1
    assert world.rows() == [(1, "a")]
    path.unlink()
    world.add([good(2, "b"), good(3, "c"), good(4, "d")], "mended")
    world.live(job)
    assert world.rows() == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]


@pytest.mark.parametrize(
    ("format", "shape"),
    [("json", "one column"), ("json", "a filter"), ("json", "nothing of the row"),
     ("json", "a count"), ("csv", "a filter")],
)  # fmt: skip
def test_a_bad_row_is_noticed_by_a_query_that_does_not_look_at_it(
    format: str, shape: str, world: World
) -> None:
    good, bad = ('{"id": 1, "name": "a"}', '{"id": "x", "name": "b"}')
    world.add([good, bad] if format == "json" else ["1,a", "x,b"])

    def declare(flow: Flow) -> None:
        rows = flow.read("lines", Files(world.folder, format=format, schema=SCHEMA))
        match shape:
            case "one column":
                flow.write("out", rows.select("name"), to=world.to())
            case "a filter":
                flow.write("out", rows.where("name = 'a' AND id IS NOT NULL"), to=world.to())
            case "nothing of the row":
                flow.write("out", rows.selectExpr("1 AS one"), to=world.to())
            case "a count":
                db = sinks.Sqlite(world.root / "out.db", table="counts")
                flow.write("out", rows.groupBy().count(), to=db, mode="complete")

    with pytest.raises(BadInput, match="line 2 cannot be parsed"):
        world.live(declare)
    assert not world.decided()


def rejecting(world: World, lines: list[str], schema: str, **options: Any) -> None:
    world.add(lines)
    world.live(world.copy(Files(world.folder, schema=schema, on_bad=world.to("bad"), **options)))


def test_what_follows_an_object_on_its_line_is_not_lost(world: World) -> None:
    bad = ['{"id": 1}{"id": 2}', '{"id": 1} {"id": 2}', '{"id": 1}, {"id": 2}', '{"id": 1} x',
           '{"id": 1}]', '{"id": 1}, "x": {"id": 2}', '{"id": 1}, "r": {"id": 2}',
           '{"id": 1}}']  # fmt: skip
    rejecting(world, [*bad, '{"id": 3} '], "id long", format="json")
    assert world.rows() == [(3,)]
    assert sorted(record for _, record in world.rejected()) == sorted(bad)


def test_a_value_that_does_not_fit_its_type_is_bad_and_never_another_value(world: World) -> None:
    bad = ['{"s": 40000}', '{"i": 3000000000}', '{"c": 123456.7}', '{"d": "20260101"}',
           '{"d": "2026-02-30"}', '{"t": "2026-01-01T25:00:00Z"}', '{"n": {"x": 40000}}',
           '{"l": [1, 40000]}']  # fmt: skip
    schema = "s short, i int, c decimal(5, 2), d date, t timestamp, n struct<x: short>, "
    rejecting(world, [*bad, '{"s": 127}'], schema + "l array<short>", format="json")
    assert [row[0] for row in world.rows()] == [127]
    assert sorted(record for _, record in world.rejected()) == sorted(bad)


def test_csv_is_read_as_other_programs_write_it(world: World) -> None:
    texts = ["plain", "a, b", 'say "hi"', '"', 'a "b", c', "C:\\", "back\\slash", "\\n", " x "]
    path = world.folder / ".part"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(enumerate(texts))
    path.rename(world.folder / "written by python.csv")
    world.live(world.copy(format="csv"))
    assert world.rows() == list(enumerate(texts))


def test_a_csv_record_that_is_torn_or_too_long_is_bad(world: World) -> None:
    bad = ['1,"unclosed', "1", "1,a,b", "1.5,a", "x,a", "9223372036854775808,a", '2,"two', 'lines"']
    rejecting(world, [*bad, '3,"closed"'], SCHEMA, format="csv")
    assert world.rows() == [(3, "closed")]
    assert sorted(record for _, record in world.rejected()) == sorted(bad)


def test_only_the_first_line_of_a_file_is_its_header(world: World) -> None:
    world.add(["word,language", "one,en", "word,language", "mot,fr"])
    world.add(["word,language", "wort,de"])
    schema = "word string, language string"
    world.live(world.copy(format="csv", header=True, schema=schema))
    rows = [("mot", "fr"), ("one", "en"), ("word", "language"), ("wort", "de")]
    assert world.rows() == rows


@pytest.mark.parametrize("header", ["language,word", "one,en"])
def test_a_header_that_names_other_columns_stops_the_job(header: str, world: World) -> None:
    path = world.add([header, "two,en"])
    with pytest.raises(BadInput) as stopped:
        world.live(world.copy(format="csv", header=True, schema="word string, language string"))
    assert str(path) in str(stopped.value)
    assert not world.decided()


def test_a_damaged_file_stops_the_job_and_nothing_is_decided(world: World) -> None:
    path = world.add_parquet([(1, "a")])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Exception, match=path.name):
        world.live(world.copy())
    assert not world.decided()
    path.write_bytes(whole)
    world.live(world.copy())
    assert world.rows() == [(1, "a")]


# ---------------------------------------------------------------- streams of one's own


def test_a_stream_of_ones_own_is_read_once(world: World, spark: SparkSession) -> None:
    def declare(flow: Flow) -> None:
        rate = spark.readStream.name("mine").format("rate").option("rowsPerSecond", 200).load()
        flow.write("out", flow.read("mine", rate).select("value"), to=world.to())

    for least in (50, 150):
        with world.start(declare):
            wait_for(lambda: len(world.rows()) > least)  # noqa: B023
    values = sorted(value for (value,) in world.rows())
    assert values == list(range(len(values)))


def test_a_stream_of_files_of_ones_own_is_read_once(world: World, spark: SparkSession) -> None:
    def declare(flow: Flow) -> None:
        mine = spark.readStream.name("mine").schema(SCHEMA).parquet(str(world.folder))
        flow.write("out", flow.read("mine", mine), to=world.to())

    for number in range(2):
        world.add_parquet([(number, "x")])
        world.live(declare)
    assert world.rows() == [(0, "x"), (1, "x")]


def test_a_file_named_like_a_pattern_doubles_no_other(world: World, spark: SparkSession) -> None:
    """Spark 4.2 reads all other files of the epoch twice, unless it looks into sub-folders."""
    world.add_parquet([(1, "first")], "first.parquet")
    odd = world.add_parquet([(2, "second")], "second [1].parquet")

    def declare(flow: Flow) -> None:
        mine = spark.readStream.name("mine").schema(SCHEMA).parquet(str(world.folder))
        flow.write("out", mine, to=world.to())

    with pytest.raises(BadInput) as stopped:
        world.live(declare)
    assert str(odd) in str(stopped.value)
    assert not world.decided()
    odd.rename(world.folder / "second.parquet")
    world.live(declare)
    assert world.rows() == [(1, "first"), (2, "second")]


# ---------------------------------------------------------------- Spark's log of the files it saw


def test_a_lost_entry_of_the_source_log_loses_and_doubles_nothing(world: World) -> None:
    """Every tenth entry holds all before it: 29 is such a one, 30 is not."""
    job = world.copy(max_files_per_epoch=1)
    number = 0

    def live(files: int) -> None:
        nonlocal number
        for _ in range(files):
            world.add_parquet([(number, "x")])
            number += 1
        world.live(job, keep_epochs=2)
        assert sorted(i for i, _ in world.rows()) == list(range(number))

    live(30)
    (world.source_log() / "29.compact").unlink()
    live(1)
    assert (world.source_log() / "29.compact").exists()
    (world.source_log() / "30").unlink()
    live(1)
    shutil.rmtree(world.folder)  # what was read is not needed any more
    world.folder.mkdir()
    live(1)


@pytest.mark.parametrize("lost", ["lines of a compact entry", "an old entry", "all"])
def test_a_source_log_that_forgot_what_was_read_is_refused(
    lost: str, world: World, spark: SparkSession
) -> None:
    """The epoch log keeps the newest entries only: what they don't cover can't be made good."""
    interval = "spark.sql.streaming.fileSource.log.compactInterval"
    spark.conf.set(interval, "5")
    try:
        for number in range(7):
            world.add_parquet([(number, "x")])
        job = world.copy(max_files_per_epoch=1)
        world.live(job, keep_epochs=2)
        log = world.source_log()
        if lost == "lines of a compact entry":
            lines = (log / "4.compact").read_text().splitlines()
            (log / "4.compact").write_text("\n".join(lines[:2] + lines[3:]))
        else:
            shutil.rmtree(log) if lost == "all" else (log / "4.compact").unlink()
            for number in range(4):
                (log / str(number)).unlink(missing_ok=True)
        world.add_parquet([(7, "x")])
        with pytest.raises(CheckpointRefused) as refused:
            world.live(job, keep_epochs=2)
        assert str(log) in str(refused.value)
        assert [number for number, _ in world.rows()] == list(range(7))
    finally:
        spark.conf.unset(interval)
