"""Time in keyed steps: late rows, watermarks, timers and expiry do not depend on epochs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from pyspark import SparkContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession
from story import Row, read_files
from test_keyed import JOB, World
from waiting import wait_for

import onceflow
from onceflow import Flow, faults, job, sources
from onceflow.cli import cli
from onceflow.log import EmbeddedLog
from onceflow.protocol import compute as epoch_rows
from onceflow.protocol.home import JobFolder
from onceflow.protocol.keyed_spec import Keyed
from onceflow.sinks import Files
from onceflow.state.process import KeyedProcess
from onceflow.state.ready.join_last import JoinLast
from onceflow.state.ready.sessions import Sessions
from onceflow.state.states import ReducingState, Timer
from onceflow.state.vectors import TIMESTAMP

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find it

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
DELAY = 10  # seconds
Event = tuple[str, str, int]  # key, kind, seconds


@pytest.fixture(params=[1, 2], ids=["one core", "two cores"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one core nothing is shuffled; which rows are late does not depend on that either."""
    monkeypatch.setattr(SparkContext, "defaultParallelism", request.param)


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


# ---------------------------------------------------------------- a log of two partitions


class Stream:
    """Numbered events in a log: of two partitions in turn, since each is a commit of its own."""

    def __init__(self, root: Path, spark: SparkSession, events: list[Event]) -> None:
        self.root, self.spark = root, spark
        self.events: list[Event] = []
        self.log = EmbeddedLog.create(
            root / "in", "id long, k string, kind string, at timestamp", partitions=2
        )
        self.add(*events)

    def add(self, *events: Event) -> None:
        for key, kind, seconds in events:
            rows = {"id": [len(self.events)], "k": [key], "kind": [kind], "at": [at(seconds)]}
            self.log.append(pa.table(rows, schema=self.log.schema))
            self.events.append((key, kind, seconds))

    def start(
        self, processes: dict[str, KeyedProcess], size: int, *, once: bool = True, **options: Any
    ) -> Any:
        """A query for each process. What it writes lies in a folder of that size."""

        @job(JOB, every="100ms")
        def shop(flow: Flow) -> None:
            for name, process in processes.items():
                log = sources.Log(self.root / "in", max_rows_per_epoch=size)
                step = flow.keyed(
                    flow.read(name, log), by="k", process=process, name=name, event_time="at",
                    watermark=f"{DELAY} seconds", late=Files(self.out(size, f"{name}-late")),
                    **options,
                )  # fmt: skip
                flow.write(name, step, to=Files(self.out(size, name)))

        home = self.out(size, "home")
        return onceflow.start(shop, home=home, spark=self.spark, once=once)

    def out(self, size: int, name: str) -> Path:
        return self.root / str(size) / name

    def published(self, size: int, name: str) -> Counter[Row]:
        return read_files(self.out(size, name))

    def late(self) -> list[int]:
        """The truth: by what stood before a row in its own partition."""
        latest, found = [-1, -1], []
        for number, (_, _, seconds) in enumerate(self.events):
            if seconds < latest[number % 2] - DELAY and latest[number % 2] >= 0:
                found.append(number)
            latest[number % 2] = max(latest[number % 2], seconds)
        return found

    @property
    def watermark(self) -> int:
        return min(max(s for *_, s in self.events[p::2]) for p in (0, 1)) - DELAY


class Each(KeyedProcess):
    """Every row as it came."""

    output = "id long, k string"
    n = ReducingState("long", "count")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        return rows.select(["id", "k"]), self.folded()


FAST = (200, 210, 205, 230, 215, 220, 231)
SLOW = (100, 120, 105, 115, 112, 130, 119)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(("cores", "size"), [(2, 1), (1, 7), (2, 1000)], indirect=["cores"])
def test_which_rows_are_late_does_not_depend_on_the_size_of_epochs(
    tmp_path: Path, spark: SparkSession, size: int
) -> None:
    """One partition is far ahead of the other."""
    both = [time for pair in zip(FAST, SLOW, strict=True) for time in pair]
    stream = Stream(tmp_path, spark, [(f"k{n % 3}", "", time) for n, time in enumerate(both)])
    stream.start({"each": Each()}, size).wait(240)
    late = [row[0] for row in stream.published(size, "each-late").elements()]
    kept = [row[0] for row in stream.published(size, "each").elements()]
    assert sorted(late) == stream.late() == [5, 8, 13]
    assert sorted(kept + late) == list(range(len(both)))
    (query,) = JobFolder(stream.out(size, "home"), JOB).queries()
    decisions = query.epoch_log().read().decisions
    stood = [decision.keyed["each"] for decision in decisions]
    assert sum(step["rows"] for step in stood) == len(both)
    assert sum(step["late"] for step in stood) == len(late)


def micros(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def in_turn(*events: Event) -> list[Event]:
    """Both partitions go on: each event, and one of nobody at the same time in the other."""
    return [e for event in events for e in (event, ("nobody", "", event[2]))]


EVENTS = in_turn(
    ("a", "click", 0), ("b", "order", 5), ("a", "order", 12), ("a", "impression", 8),
    ("b", "click", 4), ("a", "click", 11), ("c", "impression", 15), ("a", "order", 48),
    ("c", "order", 40), ("c", "order", 50), ("b", "order", 41), ("a", "order", 70),
    ("a", "click", 66), ("b", "click", 90), ("c", "click", 150),
)  # fmt: skip
GAP, WITHIN = 20, 30


def sessions_truth(stream: Stream) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for key in {key for key, *_ in stream.events}:
        times = sorted(seconds for k, _, seconds in stream.events if k == key)
        begins = [0, *(n for n in range(1, len(times)) if times[n] >= times[n - 1] + GAP)]
        for begin, end in zip(begins, [*begins[1:], len(times)], strict=True):
            if times[end - 1] + GAP <= stream.watermark:
                found[key, at(times[begin]), at(times[end - 1]), end - begin] += 1
    return found


def joins_truth(stream: Stream) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for number, (key, kind, seconds) in enumerate(stream.events):
        if kind != "order" or seconds >= stream.watermark:
            continue
        answer: Row = (None, None)
        for other in ("impression", "click"):
            times = [s for k, o, s in stream.events
                     if (k, o) == (key, other) and seconds - WITHIN <= s <= seconds]  # fmt: skip
            answer = (other, at(max(times))) if times else answer
        found[number, key, *answer] += 1
    return found


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(("cores", "size"), [(1, 5), (2, 1000)], indirect=["cores"])
def test_sessions_and_joins_are_the_same_in_epochs_of_any_size(
    tmp_path: Path, spark: SparkSession, size: int
) -> None:
    stream = Stream(tmp_path, spark, EVENTS)
    assert not stream.late()
    last = JoinLast("order", to=["click", "impression"], within=f"{WITHIN} seconds")
    sessions = Sessions(f"{GAP} seconds", {"n": "count"})
    stream.start({"sessions": sessions, "joins": last}, size).wait(240)
    assert stream.published(size, "sessions") == sessions_truth(stream)
    joined = [(row[0], row[1], *row[-2:]) for row in stream.published(size, "joins").elements()]
    assert Counter(joined) == joins_truth(stream)


# ---------------------------------------------------------------- watermarks


SCHEMA = "k string, at timestamp"


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path, spark, SCHEMA)


def add(world: World, **times: float) -> None:
    """One epoch with a row for each key."""
    world.add_rows({"k": list(times), "at": [at(seconds) for seconds in times.values()]})


def timed(process: KeyedProcess, **options: Any) -> Callable[[Flow, DataFrame], Keyed]:
    return lambda flow, rows: flow.keyed(
        rows, by="k", process=process, event_time="at", watermark=f"{DELAY} seconds", **options
    )


class Counts(KeyedProcess):
    n = ReducingState("long", "count")


def test_a_watermark_never_goes_back_and_what_is_late_is_counted(world: World) -> None:
    for times in ({"a": 100}, {"b": 0, "c": 95}, {"c": 50}, {"d": 200}):
        add(world, **times)
        world.live(timed(Counts()))
    stood = [decision.keyed["counts"] for decision in world.decisions()]
    assert [step["watermark"] for step in stood] == [micros(at(s)) for s in (90, 90, 90, 190)]
    assert [(step["rows"], step["late"]) for step in stood] == [(1, 0), (2, 1), (1, 1), (1, 0)]
    assert world.published() == Counter([("a", 1), ("c", 1), ("d", 1)])
    asked = ["epoch", "show", JOB, "1", "--home", str(world.home)]
    told = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).stdout)[0]["keyed"][0]
    assert (told["step"], told["rows"], told["late"], told["fired"]) == ("counts", 2, 1, 0)
    assert "counts      2 rows   1 row" in CliRunner().invoke(cli, asked).stdout


class Reminder(KeyedProcess):
    """Reminds of a key thirty seconds after its last row."""

    output = "k string, due timestamp"
    remind = Timer("event")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        later = pc.add(self.max(rows["at"]), pa.scalar(timedelta(seconds=30)))
        return None, {"remind": later}

    def on_timer(self, keys: pa.Table) -> Any:
        return {"k": keys["k"], "due": keys["remind"]}, None


@pytest.mark.parametrize("point", ["", "epoch.checked", "keyed.listed", "epoch.decided"])
def test_event_timers_fire_once_when_no_row_follows(world: World, point: str) -> None:
    """The third epoch has no rows: it is there because the second one moved the watermark."""
    add(world, a=0, b=5)
    add(world, b=12, c=100)
    if point:
        faults.arm(point, "raise", visit=3)
        with pytest.raises(faults.InjectedFault):
            world.live(timed(Reminder()))
        faults.disarm()
        assert not world.published()
    reminded = Counter([("a", at(30)), ("b", at(42))])
    for _ in range(2):
        world.live(timed(Reminder()))
        assert world.published() == reminded
    add(world, a=200)
    world.live(timed(Reminder()))
    assert world.published() == reminded + Counter([("c", at(130))])
    assert sum(decision.keyed["reminder"]["fired"] for decision in world.decisions()) == 3


class Alarm(KeyedProcess):
    """Rings a moment after a key's last row, on the clock on the wall."""

    output = "k string, due long, now long"
    ring = Timer("processing")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        return None, {"ring": pa.array([self.time.now + 300_000] * len(keys), TIMESTAMP)}

    def on_timer(self, keys: pa.Table) -> Any:
        now = pa.array([self.time.now] * len(keys))
        return {"k": keys["k"], "due": keys["ring"].cast(pa.int64()), "now": now}, None


def test_processing_timers_fire_once_when_no_rows_come(world: World) -> None:
    def make(flow: Flow, rows: DataFrame) -> Keyed:
        return flow.keyed(rows, by="k", process=Alarm())

    def rung() -> Counter[str]:
        return Counter(key for key, *_ in world.published().elements())

    add(world, a=0, b=0)
    with onceflow.start(world.job(make), home=world.home, spark=world.spark):
        wait_for(lambda: rung() == Counter("ab"), 60)
        add(world, b=1)
        wait_for(lambda: rung() == Counter("abb"), 60)
    assert all(now >= due for _, due, now in world.published())
    world.live(make)
    assert rung() == Counter("abb")
    assert not world.state("alarm")


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_partition_that_is_idle_holds_the_watermark_back_no_more(
    tmp_path: Path, spark: SparkSession, goes_on: bool
) -> None:
    """`goes_on`: rows come in the other partition; or in none of them."""
    stream = Stream(tmp_path, spark, [("a", "", 0), ("b", "", 0), ("c", "", 100), ("d", "", 1)])
    reminded = Counter([("a", at(30)), ("b", at(30)), ("d", at(31))])
    with stream.start({"reminder": Reminder()}, 1000, once=False, idle="1 second"):
        if goes_on:
            wait_for(stream.out(1000, "reminder").exists, 60)
            stream.add(("c", "", 110))
        wait_for(lambda: stream.published(1000, "reminder") == reminded, 60)
    assert not stream.published(1000, "reminder-late")


# ---------------------------------------------------------------- expiry, and clocks


class Fading(KeyedProcess):
    n = ReducingState("long", "count", ttl="50 seconds")


def test_a_value_that_is_not_written_for_its_ttl_of_event_time_is_gone(world: World) -> None:
    for times in ({"a": 0, "b": 0}, {"a": 45}, {"z": 80}, {"a": 85, "b": 86}, {"z": 500}):
        add(world, **times)
    world.live(timed(Fading()))
    add(world, a=501, z=501)
    world.live(timed(Fading()))
    counts = {"a": [1, 2, 3, 1], "b": [1, 1], "z": [1, 2, 3]}
    assert world.published() == Counter((key, n) for key, all_ in counts.items() for n in all_)


def test_a_clock_that_goes_back_takes_no_time_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time=lambda: clock.seconds)
    monkeypatch.setattr(epoch_rows, "time", clock)

    def make(flow: Flow, rows: DataFrame) -> Keyed:
        return flow.keyed(rows, by="k", process=Fading())

    for seconds in (1000, 1030, 400, 1075, 1200):
        clock.seconds = seconds
        add(world, a=seconds)
        world.live(make)
    told = [decision.now // 10**6 for decision in world.decisions()]
    assert told == [1000, 1030, 1030, 1075, 1200]
    assert world.published() == Counter([("a", n) for n in (1, 2, 3, 4, 1)])


@pytest.mark.usefixtures("cores")
def test_timers_of_a_second_step_fire_also_where_nothing_comes_to_it(world: World) -> None:
    """Spark knows before it runs anything that a filter leaves no row of the few there are."""

    def steps(flow: Flow, rows: DataFrame) -> Keyed:
        options: dict[str, Any] = {"by": "k", "event_time": "at"}
        first = flow.keyed(rows, process=Passed(), watermark=f"{DELAY} seconds", **options)
        some = first.then(lambda df: df.where("k = 'a'"))
        return flow.keyed(some, process=Clocked(), **options)

    add(world, a=0)
    world.live(steps)
    for seconds in (100, 200):
        add(world, b=seconds)
        world.live(steps)
    assert world.published() == Counter([("a", 1)])
    assert [d.keyed["clocked"]["fired"] for d in world.decisions()].count(1) == 1


class Passed(KeyedProcess):
    """Rows as they come."""

    output = "k string, at timestamp"
    seen = ReducingState("long", "count")

    def process(self, keys: Any, rows: Any) -> Any:
        return rows.select(["k", "at"]), {"seen": self.fold("seen")}


class Clocked(KeyedProcess):
    """Emits a key once, as soon as the clock has come on."""

    output = "k string, n long"
    n = ReducingState("long", "count")
    soon = Timer("processing")

    def process(self, keys: Any, rows: Any) -> Any:
        later = pa.array([self.time.now + 1] * len(keys)).cast(TIMESTAMP)
        return None, {"n": self.fold("n"), "soon": later}

    def on_timer(self, keys: Any) -> Any:
        return keys.select(["k", "n"]), None
