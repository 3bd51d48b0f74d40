"""The embedded log with many at once: producers in any order, killed, paused, and readers."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from logs import (
    committed_files,
    ids,
    make,
    manifest_names,
    named_manifests,
    placed,
    rows,
    segment_files,
    unused_files,
)
from overtaken import WHEN, Overtaken
from targets import OUTPUT, publication, stage
from targets import SCHEMA as SINK_SCHEMA
from turns import Killed, Stepped, Truth, Turns, seeds

from onceflow import faults
from onceflow.contract.staged_files import BY, describe
from onceflow.errors import Fenced, OutOfRange, PublishUnknown
from onceflow.log import EmbeddedLog
from onceflow.log.retention import trim
from onceflow.log.segments import split_by_key
from onceflow.sinks import Log, Publication
from onceflow.store.posix import LocalStore
from onceflow.testing.processes import Child, child, run_and_kill

pytestmark = pytest.mark.usefixtures("no_fsync")
EVERY = 4  # commits are rolled up: commit 1 is the creation, 4 the first roll-up


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", EVERY)


@pytest.fixture
def log(tmp_path: Path) -> EmbeddedLog:
    return make(tmp_path / "log")


def append_many(path: Path, numbers: range) -> None:
    log = EmbeddedLog(path)
    for n in numbers:
        log.append(rows([n]))


# ---------------------------------------------------------------- a put that others overtake


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("more", [1, 2, 3, 14])
@pytest.mark.parametrize("named", [False, True], ids=["", "named"])
def test_an_append_is_done_once_though_others_roll_it_up_before_it_looks(
    log: EmbeddedLog, when: str, more: int, named: bool
) -> None:
    others = lambda: append_many(log.path, range(100, 100 + more))  # noqa: E731
    log.commit_log.numbered.store = Overtaken(log.path, others, when)
    done = log.append(rows([1, 2]), **({"producer": "a", "sequence": 1} if named else {}))
    assert (done.rows, done.already) == (2, False)
    mine = [1, 2] if when != "before" else []
    theirs = list(range(100, 100 + more))
    assert ids(EmbeddedLog(log.path)) == [*mine, *theirs, *([] if mine else [1, 2])]
    assert done.commit == (2 if mine else more + 2)
    assert ids(log) == ids(EmbeddedLog(log.path))
    assert unused_files(log) == set()


def test_an_append_that_was_trimmed_before_it_looked_is_not_guessed_at(log: EmbeddedLog) -> None:
    """Its commit may have been there or not: nothing is left that says so."""

    def others() -> None:
        append_many(log.path, range(100, 110))
        trim(EmbeddedLog(log.path), [10])
        append_many(log.path, range(110, 120))  # rolls up, and forgets what was trimmed

    log.commit_log.numbered.store = Overtaken(log.path, others, "after")
    with pytest.raises(PublishUnknown, match="cannot be known whether the rows were appended"):
        log.append(rows([1, 2]))
    assert ids(EmbeddedLog(log.path)) == list(range(108, 120))
    assert unused_files(log.refresh()) == set()


@pytest.mark.parametrize("more", [0, 10])
def test_a_producer_that_was_trimmed_before_it_looked_knows(log: EmbeddedLog, more: int) -> None:
    def others() -> None:
        append_many(log.path, range(100, 110))
        trim(EmbeddedLog(log.path), [10])
        append_many(log.path, range(110, 110 + more))

    log.commit_log.numbered.store = Overtaken(log.path, others, "after")
    log.append(rows([1, 2]), producer="a", sequence=1)
    assert log.append(rows([1, 2]), producer="a", sequence=1).already
    assert ids(log) == list(range(108, 110 + more))


def test_what_was_trimmed_before_the_first_put_makes_nobody_doubt(log: EmbeddedLog) -> None:
    def slow() -> Iterator[Any]:
        yield rows([1])
        append_many(log.path, range(100, 110))
        trim(EmbeddedLog(log.path), [10])
        append_many(log.path, range(110, 120))
        yield rows([2])

    others = lambda: append_many(log.path, range(120, 121))  # noqa: E731
    log.commit_log.numbered.store = Overtaken(log.path, others, "before")
    log.append(slow())
    assert ids(log) == [*range(110, 121), 1, 2]


@pytest.mark.parametrize("same", [False, True], ids=["other rows", "the same rows"])
def test_of_two_producers_with_one_name_at_once_one_appends(log: EmbeddedLog, same: bool) -> None:
    def other() -> None:
        EmbeddedLog(log.path).append(rows([1] if same else [2]), producer="a", sequence=1)

    log.commit_log.numbered.store = Overtaken(log.path, other, "before")
    if same:  # a retry whose first try was still under way
        assert log.append(rows([1]), producer="a", sequence=1).already
    else:
        with pytest.raises(Fenced, match="with other rows: two producers use one name"):
            log.append(rows([1]), producer="a", sequence=1)
    assert ids(EmbeddedLog(log.path)) == ([1] if same else [2])
    assert unused_files(log.refresh()) == set()


# ---------------------------------------------------------------- roll-ups at once


class Paused(LocalStore):
    """Stops before a put whose name begins with `prefix`, and lets others go on."""

    def __init__(self, root: Path, prefix: str, others: Callable[[], None]) -> None:
        super().__init__(root)
        self._prefix, self._others = prefix, others

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if name.startswith(self._prefix):
            self._prefix, others = "nothing", self._others
            others()
        return super().put_if_absent(name, data)


@pytest.mark.parametrize("stopped_at", ["_manifests/0", "_manifests/1", "_commits/rollup"])
@pytest.mark.parametrize("more", [1, 4, 16])
def test_a_roll_up_that_others_overtake_makes_no_difference(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch, stopped_at: str, more: int
) -> None:
    """They append, roll up, and sweep what seems to be left over."""
    monkeypatch.setattr("onceflow.folders.commit_log._FAN_OUT", 2)
    append_many(log.path, range(6))
    follower = EmbeddedLog(log.path)

    def others() -> None:
        append_many(log.path, range(7, 7 + more))
        other = EmbeddedLog(log.path)
        other.roll_up()
        other.commit_log.sweep()

    log.refresh().commit_log.numbered.store = Paused(log.path, stopped_at, others)
    log.append(rows([6]))  # commit 8
    wanted = list(range(7 + more))
    for reader in (log, follower.refresh(), EmbeddedLog(log.path)):
        assert ids(reader.refresh()) == wanted
    EmbeddedLog(log.path).commit_log.sweep()
    for reader in (log, follower, EmbeddedLog(log.path)):
        assert ids(reader.refresh()) == wanted
    append_many(log.path, range(7 + more, 20 + more))
    for reader in (log, follower, EmbeddedLog(log.path)):
        assert ids(reader.refresh()) == list(range(20 + more))


class Postponed(LocalStore):
    """A put comes very late: its driver stands still until `land`."""

    put: tuple[str, bytes]

    def __init__(self, root: Path, prefix: str) -> None:
        super().__init__(root)
        self._prefix = prefix

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if name.startswith(self._prefix):
            self.put = (name, data)
            raise OSError("not yet")
        return super().put_if_absent(name, data)

    def land(self) -> None:
        super().put_if_absent(*self.put)


def test_a_roll_up_that_lands_long_after_others_changes_nothing(log: EmbeddedLog) -> None:
    """It lands, and somebody sweeps, while a third one is between what it has read and its put."""
    append_many(log.path, range(2))
    late = EmbeddedLog(log.path)
    late.commit_log.numbered.store = store = Postponed(log.path, "_commits/rollup")
    late.append(rows([2]))
    append_many(log.path, range(3, 10))

    def meanwhile() -> None:
        store.land()
        EmbeddedLog(log.path).commit_log.sweep()

    log.commit_log.numbered.store = Paused(log.path, "_commits/rollup", meanwhile)
    log.append(rows([10]))
    for reader in (log, late, EmbeddedLog(log.path)):
        assert ids(reader.refresh()) == list(range(11))
    append_many(log.path, range(11, 20))
    log.refresh().commit_log.sweep()
    assert ids(EmbeddedLog(log.path)) == list(range(20))


def test_puts_that_land_on_names_that_were_freed_are_not_taken_for_damage(
    log: EmbeddedLog,
) -> None:
    """Two of them, behind each other, in front of a reader who has not seen the roll-up yet."""
    reader = EmbeddedLog(log.path)
    late = []
    for n in (0, 1):
        paused = EmbeddedLog(log.path)
        paused.commit_log.numbered.store = store = Postponed(log.path, "_commits/0")
        with pytest.raises(OSError, match="not yet"):
            paused.append(rows(range(n * 100, n * 100 + 5)))
        late.append(store)
        append_many(log.path, range(n, n + 1))

    class Slow(LocalStore):
        looked = False

        def read(self, name: str) -> bytes | None:
            if name == "_commits/000000000002.json" and not self.looked:
                self.looked = True
                append_many(log.path, range(2, 10))
                for store in late:
                    store.land()
            return super().read(name)

    reader.commit_log.numbered.store = Slow(log.path)
    assert ids(reader.refresh()) == list(range(10))


def test_a_put_that_lands_on_the_last_name_that_was_freed_is_not_taken_for_damage(
    log: EmbeddedLog,
) -> None:
    """The commit behind it is a good one, and follows another one than the reader has read."""
    append_many(log.path, range(2))
    reader, paused = EmbeddedLog(log.path), EmbeddedLog(log.path)
    paused.commit_log.numbered.store = late = Postponed(log.path, "_commits/0")
    with pytest.raises(OSError, match="not yet"):
        paused.append(rows(range(100, 105)))

    class Slow(LocalStore):
        looked = False

        def read(self, name: str) -> bytes | None:
            if name == "_commits/000000000004.json" and not self.looked:
                self.looked = True
                append_many(log.path, range(2, 4))
                late.land()
            return super().read(name)

    reader.commit_log.numbered.store = Slow(log.path)
    assert ids(reader.refresh()) == list(range(4))


def test_who_loses_a_roll_up_goes_on_with_what_was_written(log: EmbeddedLog) -> None:
    logs = [log, EmbeddedLog(log.path), EmbeddedLog(log.path)]
    for n in range(50):
        logs[n % 3].append(rows([n]))
        for other in logs:
            other.refresh().roll_up()
    for other in logs:
        other.commit_log.sweep()
    assert all(ids(other.refresh()) == list(range(50)) for other in logs)
    assert ids(EmbeddedLog(log.path)) == list(range(50))


# ---------------------------------------------------------------- any order


class Committed(Truth):
    """Knows the rows of every commit from the moment it was put."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.places: list[dict[tuple[int, int], int]] = []  # of each commit
        create = "_commits/000000000001.json"
        self.won(create, (path / create).read_bytes())

    def won(self, name: str, data: bytes) -> None:
        super().won(name, data)
        for entry in self.entries[len(self.places) :]:
            found = {}
            for file in entry.get("files", ()):
                known = pq.ParquetFile(self._path / file["path"]).read(["id"]).column(0)
                for n, id in enumerate(known.to_pylist()):
                    found[file["partition"], file["first"] + n] = id
            self.places.append(found)

    def up_to(self, position: int, low: list[int]) -> dict[tuple[int, int], int]:
        return {
            place: id
            for commit in self.places[:position]
            for place, id in commit.items()
            if place[1] >= low[place[0]]
        }


class Still:
    """Turns as a reader has them: nobody kills it."""

    def __init__(self, turns: Turns) -> None:
        self.random, self.step = turns.random, turns.wait


class Calm:
    """Turns of one who is alone."""

    random = random.Random(0)

    def step(self) -> None:
        pass


class Story:
    """Producers with and without a name, drivers of a job that lead one after the other, some who
    trim, and readers, on one log."""

    def __init__(self, root: Path, seed: int, *, kill: float, lose: float) -> None:
        self.path = root / "log"
        make(self.path, partitions=2, key=["id"])
        self.turns, self.truth = Turns(seed, kill=kill), Committed(self.path)
        self.lose = lose
        self.batches = itertools.count()
        self.done: set[int] = set()  # batches whose producer was told so
        self.leader = 0
        self.decided: list[Publication] = []
        self.producing = 5

    def open(self, turns: Any = None) -> EmbeddedLog:
        log = EmbeddedLog(self.path)
        store = LocalStore(self.path)
        lose = self.lose if turns is None else 0.0
        log.commit_log.numbered.store = Stepped(store, turns or self.turns, self.truth, lose=lose)
        return log

    def rows(self, batch: int) -> Any:
        return rows(range(batch * 10, batch * 10 + 1 + batch % 7))

    def alive(self, work: Callable[[EmbeddedLog], None]) -> None:
        """Started again whenever it was killed."""
        while True:
            with contextlib.suppress(Killed):
                work(self.open())
                return

    def produce(self) -> None:
        left = [next(self.batches) for _ in range(8)]

        def work(log: EmbeddedLog) -> None:
            while left:
                batch = left.pop()  # whatever happens, it is not tried again
                with contextlib.suppress(PublishUnknown):
                    log.append(self.rows(batch))
                    self.done.add(batch)

        self.alive(work)
        self.producing -= 1

    def produce_by_name(self) -> None:
        left = [next(self.batches) for _ in range(8)]

        def work(log: EmbeddedLog) -> None:
            while left:
                log.append(self.rows(left[-1]), producer="a", sequence=-len(left))
                self.done.add(left.pop())

        self.alive(work)
        self.producing -= 1

    def drive(self) -> None:
        while len(self.decided) < 5 and self.leader < 12:
            with contextlib.suppress(Fenced, Killed):
                self.lead()
        self.producing -= 1

    def lead(self) -> None:
        self.leader += 1
        term, sink = self.leader, self.sink()
        assert sink._log is not None
        store = LocalStore(self.path)
        sink._log.commit_log.numbered.store = Stepped(store, self.turns, self.truth, lose=self.lose)
        sink.fence(OUTPUT, term=term, token=f"token {term}")
        if self.decided:
            sink.publish(replace(self.decided[-1], term=term))
            sink.tidy()
        sink.sweep(below_term=term)
        while self.leader == term and len(self.decided) < 5:
            self.decide(term)
            sink.publish(replace(self.decided[-1], term=term))
            sink.tidy()

    def sink(self) -> Log:
        sink = Log(self.path)
        sink.prepare(OUTPUT, SINK_SCHEMA, "append")
        return sink

    def decide(self, term: int) -> None:
        """Only the newest leader decides, and a decision is there for everybody."""
        epoch = len(self.decided)
        staged = self.path.parent / "staged" / str(epoch)
        given = rows(range(50_000 + epoch * 10, 50_000 + epoch * 10 + 4))
        for partition, part in split_by_key(given, ["id"], 2).items():
            stage(staged / f"{BY}0={partition}", part)
        files = describe(staged, ("partition",))
        self.decided.append(publication(self.path.parent, epoch, term=term, files=files))

    def trim(self) -> None:
        def work(log: EmbeddedLog) -> None:
            while self.producing:
                self.turns.step()
                log.refresh()
                ranges = zip(log.view.low, log.view.next, strict=True)
                trim(log, [self.turns.random.randint(a, min(a + 5, b)) for a, b in ranges])

        self.alive(work)

    def watch(self) -> None:
        follower = self.open(Still(self.turns))
        while self.producing:
            self.turns.wait()
            for log in (follower.refresh(), self.open(Still(self.turns))):
                position, low = log.view.position, list(log.view.low)
                with contextlib.suppress(OutOfRange):  # trimmed while we read
                    assert placed(log, low, list(log.view.next)) == self.truth.up_to(position, low)

    def play(self, *, trims: bool) -> None:
        who = [self.produce, self.produce, self.produce_by_name, self.drive, self.drive, self.watch]
        self.turns.run(*who, *([self.trim, self.trim] if trims else []))
        self.recover()
        log = EmbeddedLog(self.path)
        log.append(rows([10_000]))  # and what dead producers left is removed
        trim(log, log.view.low)
        trim(log, [n - 1 for n in log.view.next])  # what killed trims left, too
        found = sorted(id for commit in self.truth.places for id in commit.values())
        assert len(found) == len(set(found)), "no row is there twice"
        wanted = {id for batch in self.done for id in self.rows(batch).column("id").to_pylist()}
        assert wanted <= set(found), "who was told so has appended"
        decided = sorted(id for id in found if id >= 50_000)
        epochs = range(50_000, 50_000 + 10 * len(self.decided), 10)
        assert decided == [first + n for first in epochs for n in range(4)]
        low, next = log.view.low, log.view.next
        last = {p: o for p, o in enumerate(low) if o < next[p]}
        assert placed(log).keys() == set(last.items())
        assert unused_files(log) == set()
        log.commit_log.sweep()
        assert set(manifest_names(self.path)) == named_manifests(log)

    def recover(self) -> None:
        """A last driver, whom nobody disturbs."""
        sink, truth = self.sink(), self.truth
        assert sink._log is not None
        calm = Stepped(LocalStore(self.path), Calm(), truth)  # type: ignore[arg-type]
        sink._log.commit_log.numbered.store = calm
        sink.fence(OUTPUT, term=1000, token="the last")
        for decided in self.decided[-1:]:
            sink.publish(replace(decided, term=1000))
        sink.sweep(below_term=1000)


@pytest.fixture
def very_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 3)
    monkeypatch.setattr("onceflow.folders.commit_log._FAN_OUT", 2)


@pytest.mark.usefixtures("very_often")
@pytest.mark.parametrize("trims", [False, True], ids=["", "trims"])
@pytest.mark.parametrize(("kill", "lose"), [(0.0, 0.0), (0.01, 0.0), (0.005, 0.1)], ids=str)
def test_in_any_order_every_append_is_there_once_and_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kill: float, lose: float, trims: bool
) -> None:
    for seed in seeds(3):
        Story(tmp_path / str(seed), seed, kill=kill, lose=lose).play(trims=trims)
        assert "housekeeping failed" not in caplog.text


# ---------------------------------------------------------------- threads and processes


def batch_of(who: int, n: int) -> list[int]:
    first = who * 100_000 + n * 100
    return list(range(first, first + 1 + n % 5))


def whole_batches(found: list[int]) -> bool:
    heads = {id - id % 100 for id in found}
    wanted = {id for head in heads for id in batch_of(head // 100_000, head % 100_000 // 100)}
    return len(found) == len(set(found)) and set(found) == wanted


def produce(path: Path, who: int, count: int) -> None:
    log = EmbeddedLog(path)
    for n in range(count):
        log.append(rows(batch_of(who, n)))


def produce_in_a_child(pipe: Connection, path: Path, who: int, count: int) -> None:
    EmbeddedLog.roll_up_every = EVERY
    produce(path, who, count)
    pipe.send("done")


def read_until(path: Path, ended: Callable[[], bool]) -> None:
    """Whole commits only, and every offset holds what it held, by a view that follows and by a
    new one."""
    follower, seen = EmbeddedLog(path), dict[tuple[int, int], int]()
    last = False
    while not last:
        last = ended()
        for log in (follower.refresh(), EmbeddedLog(path)):
            found = placed(log)
            assert whole_batches(list(found.values()))
            assert found.items() >= seen.items()
            assert len(found) == sum(log.view.next), "no offset is left out"
            seen = found


def test_threads_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    log = make(tmp_path / "log", partitions=2, key=["id"])
    threads = [threading.Thread(target=produce, args=(log.path, who, 15)) for who in range(4)]
    for thread in threads:
        thread.start()
    read_until(log.path, lambda: not any(thread.is_alive() for thread in threads))
    wanted = sorted(id for who in range(4) for n in range(15) for id in batch_of(who, n))
    assert sorted(ids(log.refresh())) == wanted
    assert unused_files(log) == set()


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    log = make(tmp_path / "log", partitions=2, key=["id"])
    with contextlib.ExitStack() as stack:
        many = [
            stack.enter_context(child(produce_in_a_child, log.path, who, 12)) for who in range(3)
        ]
        read_until(log.path, lambda: all(process.pipe.poll() for process in many))
        assert [process.hear() for process in many] == ["done"] * 3
    wanted = sorted(id for who in range(3) for n in range(12) for id in batch_of(who, n))
    assert sorted(ids(log.refresh())) == wanted
    assert unused_files(log) == set()


# ---------------------------------------------------------------- killed


def append_in_a_child(path: Path, numbers: list[int]) -> None:
    EmbeddedLog.roll_up_every = EVERY
    EmbeddedLog(path).append(rows([n]) for n in numbers)


KILLED = [
    *(("put.written", visit) for visit in (1, 2, 3)),  # the commit, the manifest, the roll-up
    *(("put.linked", visit) for visit in (1, 2, 3)),
    ("rollup.written", 1),
    ("rollup.pruned-one", 1),
    ("rollup.pruned-one", 3),
]


@pytest.mark.kill
@pytest.mark.parametrize(("point", "visit"), KILLED)
def test_a_producer_that_was_killed_leaves_all_or_nothing(
    log: EmbeddedLog, point: str, visit: int
) -> None:
    append_many(log.path, range(2))
    run_and_kill(point, append_in_a_child, log.path, [100, 101, 102], visit=visit)
    there = [] if (point, visit) == ("put.written", 1) else [100, 101, 102]
    known = [*range(2), *there]
    assert ids(log.refresh()) == ids(EmbeddedLog(log.path)) == known
    EmbeddedLog(log.path).append(rows([200]))
    assert segment_files(log.path) == committed_files(log.refresh()), "no orphans are left"
    append_many(log.path, range(300, 310))
    assert ids(EmbeddedLog(log.path)) == [*known, 200, *range(300, 310)]
    assert unused_files(log.refresh()) == set()
    log.commit_log.sweep()
    assert set(manifest_names(log.path)) == named_manifests(log)


def die_while_writing(path: Path) -> None:
    def tables() -> Iterator[Any]:
        yield rows([100])
        yield rows([101])
        faults.reach("put.written")

    EmbeddedLog(path).append(tables())


@pytest.mark.kill
def test_segments_of_a_producer_that_was_killed_while_it_wrote_them_are_removed(
    log: EmbeddedLog,
) -> None:
    log.append(rows([1]))
    run_and_kill("put.written", die_while_writing, log.path)
    assert len(segment_files(log.path)) == 3
    assert ids(EmbeddedLog(log.path)) == [1]
    log.append(rows([2]))
    assert unused_files(log) == set()
    assert ids(log) == [1, 2]


# ---------------------------------------------------------------- paused


def stop_at(pipe: Connection, path: Path, point: str, visit: int, named: bool) -> None:
    """Append, standing still (SIGSTOP) at a fault point until somebody says SIGCONT."""

    def stop(_: str) -> None:
        pipe.send("here")
        os.kill(os.getpid(), signal.SIGSTOP)

    def tables() -> Iterator[Any]:
        yield rows([100, 101])
        if point == "writing":
            stop("")
        yield rows([102])

    if point != "writing":
        faults.arm(point, stop, visit=visit)
    EmbeddedLog.roll_up_every = EVERY
    log = EmbeddedLog(path)
    facts: dict[str, Any] = {"producer": "a", "sequence": 1} if named else {}
    done = log.append(tables(), **facts)
    pipe.send((done.rows, done.already, ids(log.refresh())))


def stopped(process: Child) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("named", [False, True], ids=["", "named"])
@pytest.mark.parametrize(
    ("point", "visit"),
    [("writing", 1), *(point for point in KILLED if point[1] < 3 and "pruned" not in point[0])],
)
def test_a_producer_that_was_paused_goes_on_however_much_happened_since(
    log: EmbeddedLog, point: str, visit: int, named: bool
) -> None:
    append_many(log.path, range(2))
    with child(stop_at, log.path, point, visit, named) as paused:
        assert paused.hear() == "here"
        while not stopped(paused):
            time.sleep(0.002)
        held = segment_files(log.path)
        append_many(log.path, range(200, 215))
        log.refresh().commit_log.sweep()
        assert segment_files(log.path) >= held, "a paused producer's segments stay"
        before = ids(EmbeddedLog(log.path))
        assert before in (
            [*range(2), *range(200, 215)],
            [*range(2), 100, 101, 102, *range(200, 215)],
        )
        os.kill(paused.pid, signal.SIGCONT)
        count, already, seen = paused.hear()
    assert (count, already) == (3, False)
    later = [] if 100 in before else [100, 101, 102]
    assert ids(EmbeddedLog(log.path)) == seen == [*before, *later]
    log.append(rows([300]))
    assert unused_files(log.refresh()) == set()
    if named:
        with pytest.raises(Fenced):
            log.append(rows([1]), producer="a", sequence=1)
