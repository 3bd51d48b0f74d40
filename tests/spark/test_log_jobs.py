"""The embedded log as source and as sink of jobs."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from waiting import wait_for

import onceflow
from onceflow import Flow, Handle, faults, sinks
from onceflow.contract.ledger import Position
from onceflow.errors import Fenced, JobError, OutOfRange, SchemaMismatch
from onceflow.log import EmbeddedLog
from onceflow.log.reader_positions import readers
from onceflow.log.retention import trim
from onceflow.log.take_back import take_back
from onceflow.sources import Log

ADS = "ad string, at timestamp, price long"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def numbers(first: int, count: int) -> pa.Table:
    return pa.table({"id": pa.array(range(first, first + count), pa.int64())})


class World:
    """A log `in`, a log `out`, and a job that copies one to the other."""

    def __init__(self, root: Path, spark: Any) -> None:
        self.root, self.spark = root, spark

    def create(self, schema: str = "id long", **facts: Any) -> EmbeddedLog:
        return EmbeddedLog.create(self.root / "in", schema, **facts)

    def start(self, source: Log | None = None, name: str = "copy", **options: Any) -> Handle:
        @onceflow.job(name, every="0ms", keep_epochs=options.pop("keep_epochs", 100))
        def copy(flow: Flow) -> None:
            rows = flow.read("rows", source or Log(self.root / "in", columns=["id"]))
            flow.write("out", rows, to=sinks.Log(self.root / "out"))

        return onceflow.start(copy, home=self.root / "home", spark=self.spark, **options)

    def live(self, source: Log | None = None, **options: Any) -> Handle:
        handle = self.start(source, once=True, **options)
        handle.wait()
        return handle

    def out(self) -> list[int]:
        found = EmbeddedLog(self.root / "out").read(columns=["id"])
        return sorted(value for batch in found for value in batch.column(0).to_pylist())


@pytest.fixture
def world(tmp_path: Path, spark: Any) -> World:
    return World(tmp_path, spark)


# ---------------------------------------------------------------- what is read


def test_rows_come_with_their_partition_offset_and_time(world: World) -> None:
    log = world.create(partitions=2)
    before = datetime.now(UTC)
    for part in range(4):
        log.append(numbers(part * 10, 10))
    rows = Log(world.root / "in").read(world.spark)
    assert rows.columns == ["id", "_partition", "_offset", "_appended_at"]
    found = rows.collect()
    assert sorted((r._partition, r._offset) for r in found) == [
        (p, o) for p in (0, 1) for o in range(20)
    ]
    assert sorted(r.id for r in found) == list(range(40))
    times = {r._appended_at.replace(tzinfo=UTC) for r in found}
    assert len(times) == 4
    assert before - timedelta(seconds=1) < min(times) <= max(times) <= datetime.now(UTC)


def test_every_type_comes_back_as_it_was_written(world: World) -> None:
    row = {
        "s": "größe 🙂", "b": b"\x00\xff", "t": True, "y": -128, "h": -32768, "i": -(2**31),
        "l": -(2**63), "f": 1.5, "d": -0.0, "day": date(1969, 12, 31),
        "at": datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        "ntz": datetime(2026, 3, 29, 2, 30), "n": Decimal("-12345678.90"), "m": {"a": 1, "b": None},
        "arr": ["x", None, ""], "st": {"p": 1, "q": [{"z": "deep"}]},
    }  # fmt: skip
    schema = (
        "s string, b binary, t boolean, y byte, h short, i int, l long, f float, d double, "
        "day date, at timestamp, ntz timestamp_ntz, n decimal(20,2), m map<string, int>, "
        "arr array<string>, st struct<p: int, q: array<struct<z: string>>>"
    )
    log = EmbeddedLog.create(world.root / "in", schema)
    nothing = dict.fromkeys(row)
    log.append(pa.Table.from_pylist([row, nothing], log.schema))

    @onceflow.job("types", every="0ms")
    def types(flow: Flow) -> None:
        rows = flow.read("rows", Log(world.root / "in", columns=list(row)))
        flow.write("out", rows, to=sinks.Log(world.root / "out"))

    for again in range(2):  # the second, small epoch is staged in another way
        if again:
            log.append(pa.Table.from_pylist([row], log.schema))
        onceflow.start(types, home=world.root / "home", spark=world.spark, once=True).wait()
    log.append(pa.Table.from_pylist([nothing, row], log.schema))
    handle = onceflow.start(types, home=world.root / "home", spark=world.spark)
    with handle:
        for count in (6, 7):
            log.append(pa.Table.from_pylist([row], log.schema))
            wait_for(lambda c=count: sum(EmbeddedLog(world.root / "out").view.next) >= c)
    back = [
        r for b in EmbeddedLog(world.root / "out").read(columns=list(row)) for r in b.to_pylist()
    ]
    for found in back:
        if found["m"] is not None:
            found.update(m=dict(found["m"]), at=found["at"].astimezone(UTC))
    assert Counter(map(repr, back)) == Counter(map(repr, [row, nothing] * 2 + [row] * 3))


def test_only_named_columns_are_read(world: World) -> None:
    log = world.create("id long, name string")
    log.append(pa.table({"id": [1], "name": ["a"]}))
    rows = Log(world.root / "in", columns=["_offset", "name"]).read(world.spark)
    assert [tuple(r) for r in rows.collect()] == [(0, "a")]
    with pytest.raises(JobError, match="no column nme"):
        Log(world.root / "in", columns=["nme"]).read(world.spark)


def test_spark_and_python_put_a_key_into_the_same_partition(world: World) -> None:
    schema = "k string, b binary, i long, d date, t boolean, y byte"
    names = ["k", "b", "i", "d", "t", "y"]
    values = [
        {"k": k, "b": k.encode() if k is not None else None, "i": i, "d": d, "t": t, "y": y}
        for k, i, d, t, y in (
            ("", 0, date(1969, 1, 1), True, -1), (None, None, None, None, None),
            ("ä🙂", -(2**63), date(9999, 12, 31), False, 127), ("x", 7, date(1, 1, 1), True, 0),
            *((f"key {n}", n * 977, date(2000, 1, 1) + timedelta(days=n), n % 2 == 0, n % 100)
              for n in range(60)),
        )
    ]  # fmt: skip
    for number, key in enumerate((["k"], ["b"], ["i"], ["d"], ["t"], ["y"], ["k", "i", "d"])):
        first, second = world.root / f"a{number}", world.root / f"b{number}"
        log = EmbeddedLog.create(first, schema, partitions=7, key=key)
        log.append(pa.Table.from_pylist(values, log.schema))

        @onceflow.job(f"keys{number}")
        def copy(flow: Flow, first: Path = first, second: Path = second, key: Any = key) -> None:
            rows = flow.read("rows", Log(first, columns=names))
            flow.write("out", rows, to=sinks.Log(second, key=key, partitions=7))

        onceflow.start(copy, home=world.root / "home", spark=world.spark, once=True).wait()
        where = [
            Counter((repr(r), r.pop("_partition")) for b in EmbeddedLog(path).read(
                columns=[*names, "_partition"]) for r in b.to_pylist())
            for path in (first, second)
        ]  # fmt: skip
        assert where[0] == where[1], f"key {key}"


# ---------------------------------------------------------------- where it begins


def test_a_job_begins_at_an_offset_or_at_a_time(world: World) -> None:
    log = world.create()
    log.append(numbers(0, 10))
    middle = datetime.now(UTC)
    log.append(numbers(10, 10))
    world.live(Log(world.root / "in", columns=["id"], start={0: 15}))
    assert world.out() == list(range(15, 20))
    shutil.rmtree(world.root / "out")
    for number, start in enumerate((middle, middle.isoformat())):
        world.live(Log(world.root / "in", columns=["id"], start=start), name=f"time{number}")
    assert world.out() == sorted(2 * list(range(10, 20)))


def test_latest_is_where_the_job_was_started_first(world: World) -> None:
    """Also if it was killed before its first epoch, and rows came meanwhile."""
    log = world.create()
    log.append(numbers(0, 10))
    source = Log(world.root / "in", columns=["id"], start="latest")
    world.live(source)
    log.append(numbers(10, 10))
    faults.arm("epoch.checked", "raise")
    with pytest.raises(faults.InjectedFault):
        world.live(source)
    faults.disarm()
    log.append(numbers(20, 10))
    world.live(source)
    assert world.out() == list(range(10, 30))


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ({0: 99}, "offset 99 of partition 0 is not there"),
        ({7: 0}, "no partition 7"),
        ("2999-01-01", "in the future"),
        ("soon", "not a place in a log"),
        (5, "not a place in a log"),
    ],
)
def test_a_beginning_that_is_not_there_is_refused(world: World, start: Any, says: str) -> None:
    world.create().append(numbers(0, 10))
    with pytest.raises((OutOfRange, JobError), match=says):
        world.live(Log(world.root / "in", columns=["id"], start=start))


# ---------------------------------------------------------------- epochs


@pytest.mark.parametrize("rows", [1, 100, 10_000])
def test_the_size_of_epochs_does_not_change_what_comes_out(world: World, rows: int) -> None:
    """Append: the same rows. Update: the same last value of each key."""
    total = 12 if rows == 1 else 900
    log = EmbeddedLog.create(world.root / "in", ADS, partitions=2, key=["ad"])
    for first in range(0, total, 60):
        events = [
            {"ad": f"ad {n % 3}", "at": BEGIN + timedelta(seconds=n), "price": n}
            for n in range(first, min(first + 60, total))
        ]
        log.append(pa.Table.from_pylist(events, log.schema))

    @onceflow.job("sizes", every="0ms")
    def sizes(flow: Flow) -> None:
        events = flow.read("events", Log(world.root / "in", max_rows_per_epoch=rows))
        plain = events.where("price % 2 = 0").selectExpr("ad", "price")
        flow.write("even", plain, to=sinks.Files(world.root / "even"))
        again = flow.read("again", Log(world.root / "in", max_rows_per_epoch=rows))
        sums = again.groupBy("ad").sum("price").withColumnRenamed("sum(price)", "spent")
        flow.write("sums", sums, to=sinks.Log(world.root / "sums", key="ad"), mode="update")

    onceflow.start(sizes, home=world.root / "home", spark=world.spark, once=True).wait()
    even = sinks.Files.read(world.spark, world.root / "even").collect()
    assert Counter((r.ad, r.price) for r in even) == Counter(
        (f"ad {n % 3}", n) for n in range(0, total, 2)
    )
    last: dict[str, int] = {}
    for batch in EmbeddedLog(world.root / "sums").read():
        last.update((r["ad"], r["spent"]) for r in batch.to_pylist())
    assert last == {f"ad {k}": sum(range(k, total, 3)) for k in range(3)}


def test_an_epoch_takes_whole_commits_unless_one_is_too_large(world: World) -> None:
    log = world.create()
    for first, count in ((0, 30), (30, 30), (60, 30), (90, 250)):
        log.append(numbers(first, count))
    handle = world.live(Log(world.root / "in", columns=["id"], max_rows_per_epoch=100))
    ends = [d.end["rows"]["next"][0] for d in handle.started["out"].epochs.log.decisions]
    assert ends == [90, 190, 290, 340]
    assert world.out() == list(range(340))


def test_several_outputs_over_every_sink_follow_one_decision(world: World) -> None:
    log = world.create("id long, kind string")
    kinds = ("files", "sqlite", "log")
    for part in range(3):
        ids = list(range(part * 30, part * 30 + 30))
        log.append(pa.table({"id": ids, "kind": [kinds[i % 3] for i in ids]}))

    @onceflow.job("several", every="0ms")
    def several(flow: Flow) -> None:
        source = Log(world.root / "in", columns=["id", "kind"], max_rows_per_epoch=30)
        to = {
            "files": sinks.Files(world.root / "files"),
            "sqlite": sinks.Sqlite(world.root / "out.db", table="t"),
            "log": sinks.Log(world.root / "out"),
        }
        flow.write("all", flow.read("rows", source), to=to, by="kind")

    def live() -> None:
        onceflow.start(several, home=world.root / "home", spark=world.spark, once=True).wait()

    for visit in (1, 2):  # between the first two publishes, then between the last two
        faults.arm("epoch.output-published", "raise", visit=visit)
        with pytest.raises(faults.InjectedFault):
            live()
        faults.disarm()
    live()
    with closing(sqlite3.connect(world.root / "out.db")) as db:
        in_sqlite = sorted(row[0] for row in db.execute("SELECT id FROM t"))
    in_files = sinks.Files.read(world.spark, world.root / "files").collect()
    assert sorted(r.id for r in in_files) == list(range(0, 90, 3))
    assert in_sqlite == list(range(1, 90, 3))
    assert world.out() == list(range(2, 90, 3))


def test_two_queries_and_a_producer_share_one_log(world: World) -> None:
    log = world.create()
    log.append(numbers(0, 100))
    shared = EmbeddedLog.create(world.root / "shared", "id long, who string")

    @onceflow.job("share", every="0ms")
    def share(flow: Flow) -> None:
        for name in ("a", "b"):
            source = Log(world.root / "in", columns=["id"], max_rows_per_epoch=10)
            rows = flow.read(name, source).selectExpr("id", f"'{name}' AS who")
            flow.write(name, rows, to=sinks.Log(world.root / "shared"))

    handle = onceflow.start(share, home=world.root / "home", spark=world.spark, once=True)
    for n in range(50):
        shared.append(pa.table({"id": [n], "who": ["producer"]}))
    handle.wait()
    rows = [r for b in EmbeddedLog(world.root / "shared").read() for r in b.to_pylist()]
    truth = [(n, w) for w in "ab" for n in range(100)] + [(n, "producer") for n in range(50)]
    assert Counter((r["id"], r["who"]) for r in rows) == Counter(truth)
    assert sorted(r["_offset"] for r in rows) == list(range(250))


# ---------------------------------------------------------------- readers and retention


def test_a_trim_stops_at_what_a_job_still_needs(world: World) -> None:
    log = world.create()
    for first in range(0, 100, 10):
        log.append(numbers(first, 10))
    source = Log(world.root / "in", columns=["id"], max_rows_per_epoch=10)
    world.live(source, keep_epochs=2)
    (reader,) = readers(world.root / "in")
    assert (reader.name, reader.home) == ("copy/out/rows", str(world.root / "home"))
    needs = reader.needs[0]
    assert 0 < needs < 100
    with pytest.raises(JobError, match="copy/out/rows"):
        trim(log, [needs + 1])
    trim(log, [needs])
    log.append(numbers(100, 10))
    world.live(source, keep_epochs=2)
    assert world.out() == list(range(110))


def test_rows_that_were_trimmed_before_they_were_read_are_named(world: World) -> None:
    log = world.create()
    log.append(numbers(0, 10))
    world.live()
    log.append(numbers(10, 10))
    log.append(numbers(20, 10))
    for path in (world.root / "in" / "_readers").iterdir():
        path.unlink()
    trim(log, [20])
    with pytest.raises(OutOfRange, match="offset 10 of partition 0 is gone, the earliest is 20"):
        world.live()
    assert world.out() == list(range(10))


def test_a_log_that_was_replaced_or_set_back_is_noticed(world: World, tmp_path: Path) -> None:
    log = world.create()
    log.append(numbers(0, 10))
    shutil.copytree(world.root / "in", tmp_path / "older")
    log.append(numbers(10, 10))
    world.live()
    shutil.rmtree(world.root / "in")
    shutil.copytree(tmp_path / "older", world.root / "in")
    with pytest.raises(OutOfRange, match="it was set back or replaced"):
        world.live()
    shutil.rmtree(world.root / "in")
    world.create().append(numbers(0, 50))
    with pytest.raises(OutOfRange, match="is not the log that the job has read"):
        world.live()
    assert world.out() == list(range(20))


def test_a_log_that_was_set_back_and_has_grown_again_is_noticed(
    world: World, tmp_path: Path
) -> None:
    log = world.create()
    log.append(numbers(0, 10))
    shutil.copytree(world.root / "in", tmp_path / "older")
    for first in range(10, 50, 10):
        log.append(numbers(first, 10))
    world.live()
    shutil.rmtree(world.root / "in")
    shutil.copytree(tmp_path / "older", world.root / "in")
    log = EmbeddedLog(world.root / "in")
    for first in range(1000, 1100, 10):
        log.append(numbers(first, 10))
    with pytest.raises(OutOfRange, match="was set back, and other rows were appended"):
        world.live()
    assert world.out() == list(range(50))


def test_a_job_goes_on_after_the_place_of_its_first_start_was_trimmed(world: World) -> None:
    log = world.create()
    for first in range(0, 100, 10):
        log.append(numbers(first, 10))
    source = Log(world.root / "in", columns=["id"], start={0: 20}, max_rows_per_epoch=10)
    world.live(source, keep_epochs=2)
    (reader,) = readers(world.root / "in")
    assert reader.needs[0] > 20
    trim(log, reader.needs)
    log.append(numbers(100, 10))
    world.live(source, keep_epochs=2)
    assert world.out() == list(range(20, 110))


def test_rows_taken_back_are_passed_by_or_named(world: World) -> None:
    """A reader that comes later never sees them; one that has read them is told."""
    log = world.create()
    log.append(numbers(0, 10))
    handle = world.live(name="writer")
    cut = Position(handle.started["out"].epochs.query.lineage, 0)
    log.append(numbers(10, 10))
    world.live(name="writer")
    EmbeddedLog(world.root / "out").append(numbers(1000, 5))

    def second(name: str) -> list[int]:
        @onceflow.job(name, every="0ms")
        def job(flow: Flow) -> None:
            rows = flow.read("rows", Log(world.root / "out", columns=["id"]))
            flow.write("out", rows, to=sinks.Log(world.root / name))

        onceflow.start(job, home=world.root / "home", spark=world.spark, once=True).wait()
        found = EmbeddedLog(world.root / name).read(columns=["id"])
        return [value for batch in found for value in batch.column(0).to_pylist()]

    assert sorted(second("early")) == [*range(20), *range(1000, 1005)]
    out = EmbeddedLog(world.root / "out")
    gone = take_back(out, "writer/out/out", cut=cut, to=Position("child", 0), term=99)
    assert gone == 10
    assert sorted(second("late")) == [*range(10), *range(1000, 1005)]
    EmbeddedLog(world.root / "out").append(numbers(2000, 5))
    with pytest.raises(OutOfRange, match="taken back"):
        second("early")
    assert sorted(second("late")) == [*range(10), *range(1000, 1005), *range(2000, 2005)]
    with pytest.raises(Fenced):
        take_back(out, "writer/out/out", cut=cut, to=Position("other", 0), term=1)


# ---------------------------------------------------------------- the session and the handle


def test_old_dates_are_the_same_in_large_and_in_small_epochs(world: World) -> None:
    """Also in a session that writes the Julian calendar for old Hive tables."""
    log = EmbeddedLog.create(world.root / "in", "day date, at timestamp")
    old = [{"day": date(1, 1, 1), "at": datetime(1500, 2, 28, 12, tzinfo=UTC)}]
    setting = "spark.sql.parquet.datetimeRebaseModeInWrite"
    before = world.spark.conf.get(setting)
    world.spark.conf.set(setting, "LEGACY")
    try:

        @onceflow.job("old", every="0ms")
        def job(flow: Flow) -> None:
            rows = flow.read("rows", Log(world.root / "in", columns=["day", "at"]))
            flow.write("out", rows, to=sinks.Log(world.root / "out"))

        with onceflow.start(job, home=world.root / "home", spark=world.spark):
            for count in (1, 2, 3):
                log.append(pa.Table.from_pylist(old, log.schema))
                wait_for(lambda c=count: _rows(world.root / "out") == c)
    finally:
        world.spark.conf.set(setting, before)
    found = [r for b in EmbeddedLog(world.root / "out").read(columns=["day", "at"])
             for r in b.to_pylist()]  # fmt: skip
    assert [{"day": r["day"], "at": r["at"].astimezone(UTC)} for r in found] == 3 * old


def _rows(path: Path) -> int:
    return sum(EmbeddedLog(path).view.next) if (path / "_commits").is_dir() else 0


def test_a_job_can_be_stopped_when_one_of_its_queries_has_ended(world: World) -> None:
    world.create().append(numbers(0, 10))

    @onceflow.job("two", every="0ms")
    def two(flow: Flow) -> None:
        for name in ("a", "b"):
            rows = flow.read(name, Log(world.root / "in", columns=["id"]))
            flow.write(name, rows, to=sinks.Log(world.root / name))

    handle = onceflow.start(two, home=world.root / "home", spark=world.spark)
    wait_for(lambda: _rows(world.root / "a") == _rows(world.root / "b") == 10)
    handle.queries["a"].stop()
    wait_for(lambda: not handle.queries["a"].isActive)
    assert not handle.wait(0.5), "the other one goes on"
    handle.stop(timeout=30)
    assert handle.status["state"] == "stopped"
    assert not handle.queries["b"].isActive


# ---------------------------------------------------------------- bad days


def test_what_does_not_fit_the_log_is_refused_before_anything_is_staged(world: World) -> None:
    world.create().append(numbers(0, 10))
    EmbeddedLog.create(world.root / "out", "id string")
    with pytest.raises(SchemaMismatch, match="id is long, the target has string"):
        world.live()
    shutil.rmtree(world.root / "out")
    with pytest.raises(JobError, match="_offset, _appended_at has a name that the log uses itself"):
        world.live(Log(world.root / "in"), name="meta")


@pytest.mark.parametrize("where", ["nowhere", "folder", "files"])
def test_a_folder_that_is_not_a_log_is_named(world: World, where: str) -> None:
    if where == "folder":
        (world.root / "in").mkdir()
    if where == "files":
        sinks.Files(world.root / "in").fence("a/b/c", term=1, token="t")
    with pytest.raises(JobError, match=r"log create|not a log"):
        world.live()


def test_a_damaged_segment_stops_the_job_and_is_named(world: World) -> None:
    from onceflow.errors import Damaged

    log = world.create()
    log.append(numbers(0, 1000))
    (segment,) = (world.root / "in").glob("partition=0/*.parquet")
    data = bytearray(segment.read_bytes())
    data[100] ^= 4
    segment.write_bytes(data)
    with pytest.raises(Damaged, match=segment.name):
        world.live()
    data[100] ^= 4
    segment.write_bytes(data)
    world.live()
    assert world.out() == list(range(1000))


def test_the_offsets_in_a_decision_say_which_log(world: World) -> None:
    log = world.create(partitions=2)
    log.append(numbers(0, 10))
    handle = world.live()
    (decision,) = handle.started["out"].epochs.log.decisions
    assert decision.end["rows"] == {
        "log": log.facts.id, "path": str(world.root / "in"), "commit": 2,
        "at": log.view.appended_at, "next": [10, 0],
    }  # fmt: skip
    assert json.dumps(decision.end)
