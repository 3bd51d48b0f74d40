"""Keyed steps on Spark: running totals that are the truth, whatever changes between two starts."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import onceflow as command
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from story import Row, read_files

import onceflow
from onceflow import Flow, job, sources
from onceflow.contract.schema import arrow_schema, parse_schema
from onceflow.errors import BadRows, Damaged, JobError, ProcessFailed
from onceflow.jobs.job import Job
from onceflow.jobs.rerun import rerun
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.keyed_runner import manifest_of
from onceflow.protocol.keyed_spec import Keyed
from onceflow.sinks import Files, Sink
from onceflow.state.process import KeyedProcess
from onceflow.state.runs import StoreSchema
from onceflow.state.states import ReducingState, ValueState
from onceflow.state.store import Reader

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find it

JOB = "shop"
KEYS = 7
ROWS = 20  # of one file
Make = Callable[[Flow, DataFrame], Any]


class Sums(KeyedProcess):
    total = ReducingState("long", "sum", of="v")
    n = ReducingState("long", "count")


def sums(flow: Flow, rows: DataFrame) -> Keyed:
    return flow.keyed(rows, by="k", process=Sums())


class World:
    """A folder of numbered rows, a file an epoch, and a job that keys them."""

    def __init__(self, root: Path, spark: SparkSession, schema: str = "k long, v long") -> None:
        self.root, self.spark, self.schema = root, spark, schema
        self.home = root / "home"
        self.folder = JobFolder(self.home, JOB)
        self.added = 0
        (root / "in").mkdir(parents=True, exist_ok=True)

    # ............................................................ input and truth

    def add(self, files: int = 1) -> None:
        for _ in range(files):
            ids = range(self.added * ROWS, (self.added + 1) * ROWS)
            self.add_rows({"k": [i % KEYS for i in ids], "v": list(ids)})

    def add_rows(self, columns: dict[str, list[Any]]) -> None:
        """One more file, and so one more epoch."""
        part = self.root / "in" / f".{self.added}"
        pq.write_table(pa.table(columns, schema=arrow_schema(parse_schema(self.schema))), part)
        os.utime(part, (1_700_000_000 + self.added,) * 2)
        part.rename(self.root / "in" / f"{self.added:04}.parquet")
        self.added += 1

    def truth(self, files: int | None = None) -> Counter[Row]:
        """What running totals emit: each key of each epoch, with what it came to until then."""
        totals: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        found: Counter[Row] = Counter()
        for file in range(self.added if files is None else files):
            ids = range(file * ROWS, (file + 1) * ROWS)
            for i in ids:
                totals[i % KEYS][0] += i
                totals[i % KEYS][1] += 1
            found.update((k, *totals[k]) for k in {i % KEYS for i in ids})
        return found

    # ............................................................ the job

    def job(self, make: Make = sums, *, keep_epochs: int = 100, **written: Any) -> Job:
        @job(JOB, every="0ms", keep_epochs=keep_epochs)
        def shop(flow: Flow) -> None:
            source = sources.Files(self.root / "in", schema=self.schema, max_files_per_epoch=1)
            to: Sink | dict[str, Sink] = written.pop("to", None) or Files(self.root / "out")
            flow.write("result", make(flow, flow.read("rows", source)), to=to, **written)

        return shop

    def live(self, make: Make = sums, **written: Any) -> None:
        """Until the input is used up."""
        options = {o: written.pop(o) for o in ("take_over", "fork") if o in written}
        made = self.job(make, **written)
        onceflow.start(made, home=self.home, spark=self.spark, once=True, **options).wait(120)

    # ............................................................ what came of it

    def published(self, name: str = "out") -> Counter[Row]:
        """Without a reader of ours."""
        return read_files(self.root / name)

    def check(self, files: int | None = None) -> None:
        found, truth = self.published(), self.truth(files)
        assert not truth - found, f"lost: {sorted(truth - found)[:5]}"
        assert not found - truth, f"doubled or wrong: {sorted(found - truth)[:5]}"

    @property
    def query(self) -> Query:
        (found,) = self.folder.queries()
        return found

    def decisions(self) -> list[Decision]:
        return self.query.epoch_log().read().decisions

    def runs(self, step: str = "sums") -> dict[str, Path]:
        """The runs that the state of the last epoch is made of."""
        manifest = manifest_of(self.query.folder, self.decisions()[-1], step)
        return {name: self.kept(step) / name for name in sorted(manifest.run_names())}

    def kept(self, step: str = "sums") -> Path:
        return self.query.folder / "onceflow" / "keyed" / step

    def state(self, step: str = "sums") -> dict[Any, dict[str, Any]]:
        """Key -> what is kept for it after the last epoch."""
        last = self.decisions()[-1]
        keys, values = (arrow_schema(last.keyed[step]["schema"][p]) for p in ("keys", "values"))
        manifest = manifest_of(self.query.folder, last, step)
        found = {}
        for _, some, kept in Reader(self.kept(step), manifest, StoreSchema(keys, values)).scan():
            for key, row in zip(some.to_pylist(), kept.to_pylist(), strict=True):
                found[tuple(key.values())] = row
        return found


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path, spark)


# ---------------------------------------------------------------- totals


def test_running_totals_of_every_epoch_are_the_truth(world: World) -> None:
    for files in (3, 1):
        world.add(files)
        world.live()
        world.check()
    world.live()  # nothing new
    world.check()
    last = {(k,): {"total": t, "n": n} for k, t, n in sorted(world.truth())}
    assert world.state() == last


TYPES: dict[str, tuple[str, list[Any]]] = {
    "long": ("long", [0, -1, 2**63 - 1, -(2**63), None]),
    "int": ("int", [0, -1, 2**31 - 1, None]),
    "string": ("string", ["", "a", "é ß 漢", "a" * 5000, None]),
    "binary": ("binary", [b"", b"\x00", b"\x00\x00", b"\xff", None]),
    "date": ("date", [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31), None]),
    "cents": ("decimal(9,2)", [Decimal("0.00"), Decimal("-1.10"), Decimal("1.10"), None]),
    "wide": ("decimal(38,10)", [Decimal("1.5"), Decimal(-(10**27)), Decimal(10**27), None]),
    "at": ("timestamp", [datetime(1970, 1, 1, tzinfo=UTC),
                         datetime(2026, 1, 1, 1, 2, 3, 4, UTC), None]),
    "truth": ("boolean", [True, False, None]),
}  # fmt: skip
BY = [*([name] for name in TYPES), ["string", "long"], ["truth", "cents", "at"]]


def test_keys_are_of_every_type_and_null_is_one_of_them(
    tmp_path: Path, spark: SparkSession
) -> None:
    schema = ", ".join(f"`{name}` {kind}" for name, (kind, _) in TYPES.items())
    world = World(tmp_path, spark, f"{schema}, v long")
    rows = [
        {**{name: values[(i * 7 + i // 5) % len(values)] for name, (_, values) in TYPES.items()},
         "v": i}
        for i in range(60)
    ]  # fmt: skip
    for part in (rows[:35], rows[35:]):
        world.add_rows({name: [row[name] for row in part] for name in rows[0]})

    @job(JOB, every="0ms")
    def typed(flow: Flow) -> None:
        for by in BY:
            name = "_".join(by)
            files = sources.Files(tmp_path / "in", schema=world.schema, max_files_per_epoch=1)
            counted = flow.keyed(flow.read(name, files), by=by, process=Sums())
            flow.write(name, counted, to=Files(tmp_path / name))

    onceflow.start(typed, home=world.home, spark=spark, once=True).wait(240)
    for by in BY:
        truth: dict[Row, list[int]] = defaultdict(lambda: [0, 0])
        for row in rows:
            key = tuple(row[name] for name in by)
            truth[key][0] += row["v"]
            truth[key][1] += 1
        found = world.published("_".join(by))
        last = {row[:-2]: list(row[-2:]) for row in sorted(found, key=lambda row: row[-1])}
        assert last == truth, by


def test_null_keys_can_be_refused(world: World) -> None:
    def refusing(flow: Flow, rows: DataFrame) -> Keyed:
        return flow.keyed(rows, by="k", process=Sums(), null_keys="refuse")

    world.add()
    world.add_rows({"k": [1, None, None], "v": [0, 0, 0]})
    with pytest.raises(
        BadRows, match=r"sums, key groups \d+ to \d+: 2 rows of epoch 1 have no 'k'"
    ):
        world.live(refusing)
    world.check(files=1)


def test_a_key_with_very_many_rows_in_one_epoch(world: World) -> None:
    """More than a task works on at a time, and more than Python is given at a time."""
    many = 300_000
    world.add_rows({"k": [*([1] * many), *range(2, 1000)], "v": [*range(many), *range(2, 1000)]})
    world.live()
    assert world.state()[1,] == {"total": sum(range(many)), "n": many}
    assert world.state()[999,] == {"total": 999, "n": 1}
    assert len(world.published()) == 999


# ---------------------------------------------------------------- between steps, and after


class Halves(KeyedProcess):
    """Counts what the step before emitted."""

    seen = ReducingState("long", "count")
    most = ReducingState("long", "max", of="total")


def in_two_steps(flow: Flow, rows: DataFrame) -> Keyed:
    first = flow.keyed(rows, by="k", process=Sums())
    halved = first.then(lambda df: df.where("k != 0").select((df.k % 2).alias("half"), "total"))
    last = flow.keyed(halved, by="half", process=Halves(), tasks=1)
    return last.then(lambda df: df.withColumn("twice", df.seen * 2)).then(
        lambda df: df.drop("most")
    )


def two_step_truth(epochs: int) -> Counter[Row]:
    """Each epoch has all keys, and so three of each half."""
    seen = [3 * (epoch + 1) for epoch in range(epochs)]
    return Counter((half, n, n * 2) for n in seen for half in (0, 1))


def test_two_keyed_steps_in_a_row_with_dataframe_code_between_and_behind(world: World) -> None:
    world.add(2)
    world.live(in_two_steps)
    world.add()
    world.live(in_two_steps)
    assert world.published() == two_step_truth(world.added)
    largest = max(total for k, total, _ in world.truth() if k % 2)
    assert world.state("halves")[1,] == {"seen": 9, "most": largest}
    assert set(world.state("sums")) == {(k,) for k in range(KEYS)}


def test_what_a_step_emits_goes_to_several_outputs(world: World) -> None:
    def routed(flow: Flow, rows: DataFrame) -> Keyed:
        even = F.when(F.col("k") % 2 == 0, "even").otherwise("odd")
        return sums(flow, rows).then(lambda df: df.withColumn("kind", even))

    to: dict[str, Sink] = {kind: Files(world.root / kind) for kind in ("even", "odd")}
    world.add(2)
    world.live(routed, to=to, by="kind")
    for kind, rest in (("even", 0), ("odd", 1)):
        truth = {(*row, kind): n for row, n in world.truth().items() if row[0] % 2 == rest}
        assert world.published(kind) == truth


# ---------------------------------------------------------------- one key at a time


class SumsByKey(KeyedProcess):
    output = "k long, total long, n long"
    total = ValueState("long")
    n = ValueState("long")

    def process_key(self, key: int, rows: list[dict[str, Any]], state: Any) -> Any:
        state.total = (state.total or 0) + sum(row["v"] for row in rows)
        state.n = (state.n or 0) + len(rows)
        yield key, state.total, state.n


def test_one_key_at_a_time_has_the_same_state_and_may_be_swapped_for_slices(world: World) -> None:
    def by_key(flow: Flow, rows: DataFrame) -> Keyed:
        return flow.keyed(rows, by="k", process=SumsByKey, name="sums")

    for make in (by_key, sums, by_key):
        world.add()
        world.live(make)
    world.check()


# ---------------------------------------------------------------- what is wrong with a job

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no process": ({"process": "sum"}, "process='sum' is not a KeyedProcess"),
    "no column": ({"by": "nope"}, "'sums': the rows have no column nope"),
    "no key": ({"by": []}, r"'sums': the rows have no column \(no by=\)"),
    "a key twice": ({"by": ["k", "k"]}, "by= names a column twice"),
    "a fraction": ({"by": "d"}, "column d is double, which cannot be part of a key"),
    "a name": ({"name": "a b"}, "'a b' is not a name for a keyed step"),
    "a time": ({"event_time": "v"}, "event_time='v' is long"),
    "no time": ({"watermark": "1 second"}, "'sums' has a watermark and no event_time="),
    "a delay": ({"event_time": "at", "watermark": "soon"}, "'soon' is not a time"),
    "no watermark": ({"late": Files("late")}, "late= needs a watermark"),
    "late": ({"event_time": "at", "watermark": "1 s", "late": "late"}, "'late' .* is not a sink"),
    "nulls": ({"null_keys": "drop"}, "null_keys='drop' of keyed step 'sums'"),
    "no groups": ({"groups": 0}, "groups=0 of 'sums'"),
    "many groups": ({"groups": 32769}, "groups=32769 of 'sums'"),
    "no tasks": ({"tasks": 0}, "tasks=0 of 'sums'"),
    "many tasks": ({"groups": 4, "tasks": 5}, "tasks=5 of 'sums'"),
    "order": ({"order": ("k", "nope")}, "the rows have no column nope"),
}


@pytest.mark.parametrize("what", WRONG, ids=lambda what: what.replace(" ", "-"))
def test_a_step_that_cannot_work_is_refused_where_it_is_declared(what: str, spark: Any) -> None:
    options, says = WRONG[what]
    rows = stream(spark)
    with pytest.raises(JobError, match=says) as refused:
        Flow(spark).keyed(rows, **{"by": "k", "process": Sums(), **options})
    assert refused.value.hint


def stream(spark: SparkSession) -> DataFrame:
    rate = spark.readStream.name("rate").format("rate").load()
    return rate.selectExpr("value AS k", "value AS v", "timestamp AS at", "value / 2 AS d")


def test_only_a_stream_without_state_of_spark_can_be_keyed(spark: SparkSession) -> None:
    rows, flow = stream(spark), Flow(spark)
    counted = rows.groupBy("k").count().withColumn("v", F.lit(1))
    watermarked = rows.withWatermark("at", "1 second")
    for wrong, says in (
        (spark.range(3).selectExpr("id AS k", "id AS v"), "needs a streaming DataFrame"),
        (counted, r"for which Spark keeps state \(Aggregate\)"),
        (watermarked.dropDuplicates(["k"]), r"for which Spark keeps state \(Deduplicate\)"),
        (watermarked.join(stream(spark).select("k"), "k"), r"Spark keeps state \(Join\)"),
    ):
        with pytest.raises(JobError, match=says):
            flow.keyed(wrong, by="k", process=Sums())
    static = spark.range(3).withColumnRenamed("id", "k")
    flow.keyed(rows.join(static, "k"), by="k", process=Sums())


def test_what_keyed_returns_is_no_dataframe_and_says_so(spark: SparkSession) -> None:
    flow = Flow(spark)
    step = flow.keyed(stream(spark), by="k", process=Sums)
    assert step.columns == ["k", "total", "n"]
    with pytest.raises(AttributeError, match=r"Change its rows with \.then\(lambda df: df\.where"):
        step.where("k = 1")
    for change in (lambda _: None, lambda _: stream(spark)):
        with pytest.raises(JobError, match=r"then\(<lambda>\) returns .* not a DataFrame"):
            step.then(change)
    with pytest.raises(JobError, match="two keyed steps are called 'sums'"):
        flow.keyed(step.then(lambda df: df.withColumn("v", df.n)), by="k", process=Sums())


def test_two_outputs_of_late_rows_or_others_have_names_of_their_own(
    tmp_path: Path, spark: Any
) -> None:
    flow = Flow(spark)
    late = flow.keyed(stream(spark), by="k", process=Sums(), event_time="at", watermark="1 second",
                      late=Files(tmp_path / "late"))  # fmt: skip
    to = {"sums.late": Files(tmp_path / "a"), "b": Files(tmp_path / "b")}
    with pytest.raises(JobError, match=r"two outputs of 'result' are called 'sums\.late'"):
        flow.write("result", late, to=to, by="k")


# ---------------------------------------------------------------- a process that fails


class Fearful(Sums):
    output = "k long, total long, n long"

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        if 27 in rows["v"].to_pylist():
            raise ValueError("not twenty-seven!")
        new = self.folded()
        return {"k": keys["k"], **new}, new


def named_sums(process: KeyedProcess, **options: Any) -> Make:
    return lambda flow, rows: flow.keyed(rows, by="k", process=process, name="sums", **options)


def test_a_process_that_raises_is_named_and_its_epoch_is_not_decided(world: World) -> None:
    world.add(3)
    for _ in range(2):  # also when somebody just tries again
        with pytest.raises(ProcessFailed) as failed:
            world.live(named_sums(Fearful()))
        assert "sums, key groups " in failed.value.message
        assert "Fearful.process failed in epoch 1, key" in failed.value.message
        assert "ValueError: not twenty-seven!" in failed.value.message
        assert "nothing of the epoch was decided" in failed.value.hint
        assert [decision.epoch for decision in world.decisions()] == [0]
        world.check(files=1)
    world.live()
    world.check()


class Returns(KeyedProcess):
    output = "k long, total long, n long"
    total = ReducingState("long", "sum", of="v")
    n = ReducingState("long", "count")

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        new = self.folded()
        out = {"k": keys["k"], **new}
        match self.wrong:
            case "text":
                out["total"] = out["total"].cast(pa.string())
            case "fewer":
                new = {"total": new["total"].slice(1)}
            case "others":
                new = {"k": pa.array([-1] * len(keys)), **new}
            case "missing":
                del out["n"]
        return out, new


def test_what_does_not_fit_is_refused_by_name(world: World) -> None:
    world.add()
    for wrong, says in (
        ("text", "column total of out is of string, declared is int64"),
        ("fewer", r"column total of new_state has \d rows for \d keys"),
        ("others", "new_state is for other keys than were given: column k differs"),
        ("missing", "out lacks n"),
    ):
        with pytest.raises(ProcessFailed, match=says):
            world.live(named_sums(Returns(wrong)))
    assert not world.decisions()
    world.live(named_sums(Returns("nothing")))
    world.check()


# ---------------------------------------------------------------- other tasks, other states


def test_the_number_of_tasks_changes_and_no_run_is_written_again(world: World) -> None:
    written: dict[str, tuple[int, bytes]] = {}
    for tasks in (1, 3, 2):
        world.add()
        world.live(named_sums(Sums(), tasks=tasks))
        world.check()
        files = {p.name: (p.stat().st_ino, p.read_bytes()) for p in world.kept().glob("*.arrow")}
        assert written.items() <= files.items()
        if tasks == 3:  # the run of the one task serves all three
            assert written.keys() < world.runs().keys()
        written = files


class Narrow(KeyedProcess):
    output = "k long, total long, n long"
    total = ReducingState("int", "sum", of="v")
    n = ReducingState("long", "count")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        new = self.folded()
        return {"k": keys["k"], "total": new["total"], "n": new["n"]}, new


class Wider(KeyedProcess):
    """`total` is wider, `n` was dropped, `most` and `of_late` were added."""

    output = "k long, total long, n long"
    total = ReducingState("long", "sum", of="v")
    most = ReducingState("long", "max", of="v")
    of_late = ReducingState("long", "count")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        new = self.folded()
        return {"k": keys["k"], "total": new["total"], "n": new["of_late"]}, new


class Text(KeyedProcess):
    output = "k long, total long, n long"
    total = ValueState("string")
    n = ReducingState("int", "sum", of="v")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        return None


def test_states_are_added_dropped_and_widened_between_two_starts(world: World) -> None:
    world.add()
    world.live(named_sums(Narrow()))
    world.add()
    world.live(named_sums(Wider()))
    before, after = world.truth(1), world.truth(2) - world.truth(1)
    known = {k: n for k, _, n in before}
    assert world.published() == before + Counter({(k, t, n - known[k]): 1 for k, t, n in after})
    kept = {"total": sum(range(3, 40, 7)), "most": 38, "of_late": 3}
    assert kept.items() <= world.state()[3,].items()


def test_state_that_does_not_fit_is_refused_before_anything_runs(world: World) -> None:
    def other_key(flow: Flow, rows: DataFrame) -> Keyed:
        return flow.keyed(rows, by=["k", "v"], process=Sums()).then(lambda df: df.drop("v"))

    world.add()
    world.live()
    world.add()
    for make, says in (
        (named_sums(Text()), "total was int64, now it is string\n  - n was int64, now it is int32"),
        (named_sums(Sums(), groups=64), "has state in 128 key groups, and the job says 64"),
        (lambda f, r: f.keyed(r, by="k", process=Sums(), name="totals"),
         "result has state of keyed step sums, and the job no longer has a step of that name"),
        (other_key, "the key was k, now it is k, v"),
    ):  # fmt: skip
        with pytest.raises(JobError, match=says) as refused:
            world.live(make)
        assert refused.value.hint
        assert len(world.decisions()) == 1
    world.live()
    world.check()


# ---------------------------------------------------------------- damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("what", ["run", "manifest"])
def test_damaged_state_is_named_and_nothing_is_computed_from_it(world: World, what: str) -> None:
    world.add(2)
    world.live()
    world.add()
    last = world.decisions()[-1].keyed["sums"]
    run = max(world.runs())  # of the last epoch: it has the newest state of all keys
    path = world.kept() / (last["manifest"] if what == "manifest" else run)
    whole = path.read_bytes()
    for damage in (flip, truncate, Path.unlink):
        damage(path)
        with pytest.raises(Damaged) as refused:
            world.live()
        assert path.name in refused.value.message
        assert "restore a savepoint" in refused.value.hint
        world.check(files=2)
        path.write_bytes(whole)
    world.live()
    world.check()


# ---------------------------------------------------------------- again, and from a file


def test_an_epoch_of_a_keyed_job_is_run_again_and_compared(world: World) -> None:
    world.add(3)
    world.live()
    for epoch in (0, 2):
        found = rerun(world.job(), world.folder, epoch, query="result", spark=world.spark)
        assert (found["same"], found["compared_by"]) == (True, "digest")
    other = world.job(lambda flow, rows: sums(flow, rows.withColumn("v", rows.v + 1)))
    found = rerun(other, world.folder, 2, query="result", spark=world.spark)
    assert (found["same"], found["columns"]) == (False, [])
    world.add()
    world.live()
    world.check()


def test_a_process_in_a_job_file_travels_to_the_workers(world: World) -> None:
    world.add(2)
    (world.root / "shop.py").write_text(
        "from onceflow import Flow, job, sources\nfrom onceflow.sinks import Files\n"
        "from onceflow.state.process import KeyedProcess\n"
        "from onceflow.state.states import ReducingState\n\n\n"
        "class Sums(KeyedProcess):\n"
        '    total = ReducingState("long", "sum", of="v")\n'
        '    n = ReducingState("long", "count")\n\n\n'
        f'@job("{JOB}", every="0ms")\ndef shop(flow: Flow) -> None:\n'
        f'    files = sources.Files("in", schema="{world.schema}", max_files_per_epoch=1)\n'
        '    rows = flow.read("rows", files)\n'
        '    flow.write("result", flow.keyed(rows, by="k", process=Sums()), to=Files("out"))\n'
    )
    ran = command("run", "shop.py", "--home", "home", "--once", "--master", "local[2]",
                  cwd=world.root)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    world.check()
    world.add()
    world.live()  # the class is another one, the state is the same
    world.check()
