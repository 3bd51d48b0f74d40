"""The embedded log: trimming it, what it retains, who reads it, and rows that are taken back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from logs import (
    TIME,
    Clock,
    commit_names,
    ids,
    make,
    manifest_names,
    named_manifests,
    placed,
    rows,
    segment_files,
    unused_files,
)
from targets import LINEAGE, SCHEMA, publication, stage, table
from turns import seeds

from onceflow.contract.ledger import Ledger, Position
from onceflow.errors import Fenced, JobError, OutOfRange, TargetBehind
from onceflow.log import EmbeddedLog
from onceflow.log.commits import segments_of
from onceflow.log.reader_positions import Reader, forget, hold, hold_offsets, readers
from onceflow.log.retention import Trimmed, expired, trim
from onceflow.log.take_back import take_back
from onceflow.sinks import Log, Outcome, Staged
from onceflow.testing.processes import run_and_kill

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def log(tmp_path: Path) -> EmbeddedLog:
    return make(tmp_path / "log")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many roll-ups, and manifests of several levels."""
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 4)
    monkeypatch.setattr("onceflow.folders.commit_log._FAN_OUT", 3)


def append(log: EmbeddedLog, *counts: int) -> None:
    """Commits with so many rows each; ids go on."""
    for count in counts:
        first = sum(log.refresh().view.next)
        log.append(rows(range(first, first + count)))


def reader(name: str, needs: list[int]) -> Reader:
    return Reader(name, LINEAGE, "home", needs, "2026-11-15T10:00:00.000+00:00")


# ---------------------------------------------------------------- trimming


def test_a_trim_takes_rows_away_and_offsets_stay(log: EmbeddedLog) -> None:
    append(log, *[3] * 10)
    sizes = {f: (log.path / f).stat().st_size for f in segment_files(log.path)}
    done = trim(log, [12])
    assert (done.low, done.rows, done.files) == ([12], 12, 4)
    left = segment_files(log.path)
    assert done.bytes == sum(size for file, size in sizes.items() if file not in left)
    for view in (log, EmbeddedLog(log.path)):
        assert placed(view) == {(0, n): n for n in range(12, 30)}
        with pytest.raises(
            OutOfRange, match="offset 11 of partition 0 is gone, the earliest is 12"
        ):
            ids(view, [11], [20])
    append(log, 3)
    assert placed(log) == {(0, n): n for n in range(12, 33)}


def test_a_segment_stays_while_one_of_its_rows_does(log: EmbeddedLog) -> None:
    append(log, 10)
    for below in (3, 7, 9):
        assert trim(log, [below]).files == 0
        assert ids(log) == list(range(below, 10))
    assert trim(log, [10]).files == 1
    assert ids(log) == []
    assert segment_files(log.path) == set()
    append(log, 1)
    assert placed(log) == {(0, 10): 10}


def test_a_trim_that_was_done_is_nothing_to_do(log: EmbeddedLog) -> None:
    append(log, *[3] * 5)
    trim(log, [6])
    names = commit_names(log.path)
    assert trim(log, [6]) == Trimmed([6], 0, 0, 0)
    assert trim(log, [0]) == Trimmed([6], 0, 0, 0)
    assert commit_names(log.path) == names


def test_a_trim_to_where_the_log_is_not_is_refused(log: EmbeddedLog) -> None:
    append(log, 3)
    with pytest.raises(OutOfRange, match="ends at 0:3; it cannot be trimmed to 0:4"):
        trim(log, [4])
    for wrong in ([], [1, 1]):
        with pytest.raises(JobError, match="has 1 partition"):
            trim(log, wrong)
    assert ids(log) == [0, 1, 2]


def test_what_a_trim_would_take_can_be_asked(log: EmbeddedLog) -> None:
    append(log, *[3] * 5)
    asked = trim(log, [8], dry_run=True)
    assert ids(EmbeddedLog(log.path)) == list(range(15))
    assert trim(log, [8]) == asked == Trimmed([8], 8, 2, asked.bytes)


@pytest.mark.kill
@pytest.mark.parametrize(
    ("point", "visit"), [("trim.committed", 1), ("trim.removed-one", 1), ("trim.removed-one", 3)]
)
def test_a_trim_that_was_killed_is_finished_by_the_next(
    log: EmbeddedLog, point: str, visit: int
) -> None:
    append(log, *[2] * 6)
    run_and_kill(point, trim_in_a_child, log.path, [9], visit=visit)
    for view in (log.refresh(), EmbeddedLog(log.path)):
        assert ids(view) == [9, 10, 11]
        with pytest.raises(OutOfRange):
            ids(view, [8], [12])
    append(log, 2)
    trim(log, [9])
    assert len(segment_files(log.path)) == 3
    assert unused_files(log) == set()
    trim(log, [11])
    assert len(segment_files(log.path)) == 2
    assert ids(EmbeddedLog(log.path)) == [11, 12, 13]


def trim_in_a_child(path: Path, below: list[int]) -> None:
    trim(EmbeddedLog(path), below)


def test_manifests_of_rows_that_are_gone_are_removed(log: EmbeddedLog) -> None:
    append(log, *[1] * 60)
    before = manifest_names(log.path)
    trim(log, [58])
    append(log, *[1] * 8)
    trim(log, [59])  # and sweeps
    left = manifest_names(log.path)
    assert len(left) < len(before) / 2
    fresh = EmbeddedLog(log.path)
    assert named_manifests(fresh) == set(left)
    for view in (log, fresh):
        assert ids(view.refresh()) == list(range(59, 68))
        assert list(view.commit_log.published()), "nothing that is named is missing"
        with pytest.raises(OutOfRange, match="were trimmed"):
            view.offsets_at(0)


def test_a_reader_that_follows_for_ever_does_not_grow(log: EmbeddedLog) -> None:
    follower = EmbeddedLog(log.path)
    for _ in range(50):
        append(log, 1)
        assert len(follower.refresh().view.recent) <= 12
    assert ids(follower) == list(range(50))


# ---------------------------------------------------------------- who reads while it is trimmed


@pytest.mark.parametrize("rolled_up", [False, True], ids=["", "rolled up"])
def test_a_reader_with_an_old_view_is_told_that_rows_are_gone(
    log: EmbeddedLog, rolled_up: bool
) -> None:
    append(log, *[2] * 20)
    old = [EmbeddedLog(log.path) for _ in range(4)]
    begun = old[3].read([0], [40])
    next(begun)
    planned = old[2].slices([0], [40])
    trim(log, [36])
    if rolled_up:  # then the manifests are gone too
        append(log, *[2] * 8)
        trim(log, [37])
    with pytest.raises(OutOfRange, match="gone, the earliest" if rolled_up else "in the meantime"):
        ids(old[0])
    assert ids(old[0]) == list(range(log.view.low[0], log.view.next[0])), "now it knows"
    assert ids(old[1], [38], [40]) == [38, 39], "what it wants is there"
    with pytest.raises(OutOfRange, match=r"offset 0.* were trimmed or taken back in the"):
        old[2].refuse_gone(planned[0])
    old[2].refuse_gone(planned[-1])
    with pytest.raises(OutOfRange, match="were trimmed or taken back in the meantime"):
        list(begun)


def test_a_reader_that_stands_between_two_steps_of_a_trim_gets_rows_or_is_told(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, *[2] * 20)
    told: list[Any] = []

    def look(_: str) -> None:
        for view in (EmbeddedLog(log.path), old):
            try:
                told.append(ids(view, [5], [12]))
            except OutOfRange:
                told.append("gone")

    old = EmbeddedLog(log.path)
    monkeypatch.setattr("onceflow.log.retention.reach", look)
    trim(log, [11])
    assert set(map(str, told)) == {"gone", str(list(range(5, 12)))}
    assert told[0] == "gone", "who opens the log sees the commit"


# ---------------------------------------------------------------- times


def test_a_time_whose_rows_were_trimmed_is_refused(log: EmbeddedLog, clock: Clock) -> None:
    times = []
    for _ in range(20):
        times.append(clock.tick())
        append(log, 2)
    old = EmbeddedLog(log.path)
    trim(log, [11])  # in the middle of the sixth commit
    for view in (log, EmbeddedLog(log.path)):
        for n, at in enumerate(times):
            if n <= 5:
                with pytest.raises(OutOfRange, match=r"rows since .* were trimmed"):
                    view.offsets_at(at)
            else:
                assert view.offsets_at(at) == view.offsets_at(times[n - 1] + 1) == [2 * n]
    for n, at in enumerate(times):  # it has not looked since
        assert old.offsets_at(at) == [2 * n]
    with pytest.raises(OutOfRange):
        ids(old, old.offsets_at(times[3]), [40])
    trim(log, [40])
    append(log, *[2] * 8)
    trim(log, [48])
    with pytest.raises(OutOfRange, match="were trimmed"):  # the manifests are gone, too
        EmbeddedLog(log.path).offsets_at(times[19])
    clock.tick()
    assert log.offsets_at(clock.now) == [56]


# ---------------------------------------------------------------- readers


def test_a_trim_that_takes_what_a_reader_needs_is_refused_and_the_reader_named(
    log: EmbeddedLog,
) -> None:
    append(log, *[2] * 10)
    hold(log.path, reader("counts/q/lines", [7]))
    hold(log.path, reader("other/q/lines", [15]))
    with pytest.raises(JobError, match=r"reader counts/q/lines .*needs .* from 0:7") as caught:
        trim(log, [8])
    assert "--forget counts/q/lines" in caught.value.hint
    assert trim(log, [7]).low == [7]
    hold(log.path, reader("counts/q/lines", [20]))
    with pytest.raises(JobError, match="other/q/lines"):
        trim(log, [20])
    assert [r.name for r in forget(log.path, "other")] == ["other/q/lines"]
    assert [r.name for r in readers(log.path)] == ["counts/q/lines"]
    trim(log, [20])
    with pytest.raises(JobError, match="no reader is called other"):
        forget(log.path, "other")


def test_a_reader_of_another_log_that_was_here_is_named(tmp_path: Path) -> None:
    log = make(tmp_path / "log", retain_bytes=1)
    hold(log.path, reader("counts/q/lines", [1, 1]))
    append(log, *[2] * 10)  # housekeeping fails, not the append
    assert ids(log) == list(range(20))
    with pytest.raises(JobError, match=r"counts/q/lines .*read an older log .*with 2 partitions"):
        trim(log, [8])
    forget(log.path, "counts")
    trim(log, [8])


def test_a_query_says_what_it_may_still_go_back_to(log: EmbeddedLog) -> None:
    append(log, 9)
    at = {"log": log.facts.id, "path": str(log.path), "commit": 2}
    where = {"query": "counts/q", "lineage": LINEAGE, "home": "home", "at": "now"}
    hold_offsets({"lines": {**at, "next": [9]}, "files": {"logOffset": 3}}, {}, **where)
    assert [(r.name, r.needs) for r in readers(log.path)] == [("counts/q/lines", [0])]
    hold_offsets({"lines": {**at, "next": [9]}}, {"lines": {**at, "next": [4]}}, **where)
    assert [(r.name, r.needs) for r in readers(log.path)] == [("counts/q/lines", [4])]


# ---------------------------------------------------------------- retention


def test_rows_of_a_certain_age_go_by_themselves(tmp_path: Path, clock: Clock) -> None:
    log = make(tmp_path / "log", retain_ms=10_000)
    for _ in range(60):
        clock.tick()
        append(log, 2)
        low, at = log.view.low[0], clock.now
        oldest = (at - TIME) // 1_000_000 - low // 2  # in seconds, of the oldest row
        assert oldest <= 10 + 4, "and what is due goes with the next roll-up"
        assert low == 0 or oldest >= 10, "nothing goes too early"
    assert ids(EmbeddedLog(log.path)) == list(range(log.view.low[0], 120))
    assert len(segment_files(log.path)) < 20


def test_a_log_keeps_about_so_many_bytes(tmp_path: Path) -> None:
    log = make(tmp_path / "log", retain_bytes=10_000)
    for _ in range(60):
        append(log, 2)
    left = sum((log.path / file).stat().st_size for file in segment_files(log.path))
    one = left // len(segment_files(log.path))
    assert 10_000 <= left <= 10_000 + 8 * one
    assert ids(log)[-1] == 119


def test_retention_stops_at_what_a_reader_needs(tmp_path: Path, clock: Clock) -> None:
    log = make(tmp_path / "log", partitions=2, retain_ms=1000, retain_bytes=1)
    hold(log.path, reader("a/q/lines", [4, 5]))
    hold(log.path, reader("b/q/lines", [6, 3]))
    for _ in range(30):
        clock.tick()
        append(log, 2)
    assert log.view.low == [4, 3]
    forget(log.path, "a")
    append(log, *[2] * 8)
    assert log.view.low == [6, 3]
    forget(log.path, "b")
    append(log, *[2] * 8)
    assert min(log.view.low) > 20


def test_a_log_that_only_a_job_writes_to_is_kept_short_too(tmp_path: Path) -> None:
    EmbeddedLog.create(tmp_path / "log", SCHEMA, retain_bytes=1)
    sink = output(tmp_path, "a")
    for epoch in range(30):
        sink.publish(epoch)
    assert sink.log().view.low[0] > 100
    assert len(segment_files(tmp_path / "log")) < 20


def test_retention_and_a_reader_with_damaged_needs(tmp_path: Path) -> None:
    """What is needed is not known, so nothing goes."""
    log = make(tmp_path / "log", retain_bytes=1)
    hold(log.path, reader("a/q/lines", [0]))
    (file,) = (log.path / "_readers").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    append(log, *[2] * 20)
    assert log.view.low == [0]
    assert ids(EmbeddedLog(log.path)) == list(range(40))


# ---------------------------------------------------------------- against a plain list


@dataclass
class Piece:
    """A segment of the model."""

    path: str
    partition: int
    first: int
    end: int
    bytes: int
    at: int
    owner: tuple[str, int] | None  # output, epoch
    dropped: bool = False


class Model:
    """A log whose segments have no files, beside the list that it must come to."""

    def __init__(self, path: Path, seed: int, clock: Clock) -> None:
        self.random, self.clock = random.Random(seed), clock
        self.partitions = self.random.choice((1, 2, 5))
        self.log = make(path, partitions=self.partitions)
        self.follower = EmbeddedLog(path)
        self.pieces: list[Piece] = []
        self.low, self.next = [0] * self.partitions, [0] * self.partitions
        self.at = clock.now
        self.trimmed_at = 0
        self.epochs = {"job/q/a": -1, "job/q/b": -1}
        self.lineages = {"job/q/a": 0, "job/q/b": 0}
        self.numbers = itertools.count()

    # ---------------------------------------------------------- what happens

    def step(self) -> None:
        chances = {self.append: 90, self.publish: 30, self.trim: 5, self.take_back: 3,
                   self.expire: 3, self.roll_up: 5, self.sweep: 1}  # fmt: skip
        self.random.choices(list(chances), list(chances.values()))[0]()

    def files(self) -> list[dict[str, Any]]:
        count = self.random.choice((1, 1, 1, 2, 4))
        return [
            {"path": f"segment {next(self.numbers)}", "rows": self.random.randint(1, 5),
             "partition": self.random.randrange(self.partitions), "crc32": 0,
             "bytes": self.random.randint(1, 100)}
            for _ in range(count)
        ]  # fmt: skip

    def commit(self, kind: str, owner: tuple[str, int] | None, **facts: Any) -> None:
        self.clock.now += self.random.choice((0, 1, 10, 1000, -500))
        self.at = max(self.at, self.clock.now)
        files = self.files()
        self.log.commit_log.append(lambda: {"type": kind, **facts, **self.log.commit_of(files)})
        for file in files:
            p, first = file["partition"], self.next[file["partition"]]
            self.next[p] += file["rows"]
            self.pieces.append(
                Piece(file["path"], p, first, self.next[p], file["bytes"], self.at, owner)
            )
        if self.random.random() < 0.3:
            self.log.roll_up()

    def append(self) -> None:
        self.commit("append", None)

    def publish(self) -> None:
        output = self.random.choice(list(self.epochs))
        self.epochs[output] += 1
        self.commit(
            "epoch", (output, self.epochs[output]), output=output, term=1, decision="",
            lineage=f"lineage {self.lineages[output]}", epoch=self.epochs[output],
        )  # fmt: skip

    def trim(self) -> None:
        ranges = zip(self.low, self.next, strict=True)
        below = [self.random.randint(a, self.random.randint(a, b)) for a, b in ranges]
        trim(self.log, below)
        self.trimmed(below)

    def trimmed(self, below: list[int]) -> None:
        for piece in self.pieces:
            first = max(piece.first, self.low[piece.partition])
            if not piece.dropped and first < min(piece.end, below[piece.partition]):
                self.trimmed_at = max(self.trimmed_at, piece.at)
        self.low = [max(pair) for pair in zip(self.low, below, strict=True)]

    def take_back(self) -> None:
        output = self.random.choice(list(self.epochs))
        cut = self.random.randint(-1, self.epochs[output])
        lineage = self.lineages[output]
        self.lineages[output] += 1
        gone = [p for p in self.pieces if p.owner and p.owner[0] == output and p.owner[1] > cut
                and not p.dropped and p.end > self.low[p.partition]]  # fmt: skip
        take_back(
            self.log, output, cut=Position(f"lineage {lineage}", cut),
            to=Position(f"lineage {lineage + 1}", cut), term=1,
        )  # fmt: skip
        for piece in gone:
            piece.dropped = True
        self.epochs[output] = cut
        # Epochs below the cut are of older lineages, and stay whatever comes.
        for piece in self.pieces:
            if piece.owner and piece.owner[0] == output:
                piece.owner = (output, -1)
        self.epochs[output] = cut

    def expire(self) -> None:
        before = self.clock.now - self.random.randint(0, 100_000)
        keep = self.random.choice((None, self.random.randint(1, 20_000)))
        total = sum(piece.bytes for piece in self.pieces)
        wanted = list(self.low)
        by_commit: dict[int, list[Piece]] = {}
        known = {piece.path: piece for piece in self.pieces}
        for commit in self.log.refresh().commit_log.published():
            by_commit[commit["commit"]] = [known[s.path] for s in segments_of(commit)]
        seen = {piece.path for pieces in by_commit.values() for piece in pieces}
        up_to = sum(piece.bytes for piece in self.pieces if piece.path not in seen)
        for pieces in by_commit.values():
            up_to += sum(piece.bytes for piece in pieces)
            if not (pieces[0].at < before or (keep is not None and total - up_to >= keep)):
                break
            for piece in pieces:
                wanted[piece.partition] = max(wanted[piece.partition], piece.end)
        assert expired(self.log, before=before, keep_bytes=keep) == wanted
        if self.random.random() < 0.3:
            trim(self.log, wanted)
            self.trimmed(wanted)

    def roll_up(self) -> None:
        self.log.refresh().roll_up()

    def sweep(self) -> None:
        self.log.commit_log.sweep()

    # ---------------------------------------------------------- what must be

    def check(self) -> None:
        if self.random.random() < 0.5:
            self.follower.refresh()
        for view in (self.log.refresh(), EmbeddedLog(self.log.path), self.follower.refresh()):
            assert (view.view.low, view.view.next) == (self.low, self.next)
            self.check_ranges(view)
            self.check_times(view)

    def check_ranges(self, view: EmbeddedLog) -> None:
        for _ in range(3):
            ends = [sorted(self.random.choices(range(a, b + 1), k=2))
                    for a, b in zip(self.low, self.next, strict=True)]  # fmt: skip
            start, end = [e[0] for e in ends], [e[1] for e in ends]
            wanted = [
                (p.path, max(p.first, start[p.partition]), min(p.end, end[p.partition]))
                for p in self.pieces
                if p.first < end[p.partition] and p.end > start[p.partition] and not p.dropped
            ]
            found = [
                (s.segment.path, s.segment.first + s.skip, s.segment.first + s.skip + s.take)
                for s in view.slices(start, end)
            ]
            assert [f for f in found if f[1] < f[2]] == [w for w in wanted if w[1] < w[2]]

    def check_times(self, view: EmbeddedLog) -> None:
        times = [piece.at for piece in self.pieces[-200:]] or [self.at]
        for _ in range(3):
            time = self.random.choice(times) + self.random.choice((-1, 0, 1))
            if time > max(self.at, self.clock.now):
                continue
            if self.trimmed_at and time <= self.trimmed_at:
                with pytest.raises(OutOfRange):
                    view.offsets_at(time)
                continue
            wanted = list(self.next)
            for piece in reversed(self.pieces):
                if piece.at >= time:
                    wanted[piece.partition] = piece.first
            wanted = [max(pair) for pair in zip(wanted, self.low, strict=True)]
            assert view.offsets_at(time) == wanted


def test_a_log_of_thousands_of_commits_is_what_a_plain_list_says(
    tmp_path: Path, clock: Clock
) -> None:
    for seed in seeds(3):
        model = Model(tmp_path / str(seed), seed, clock)
        for n in range(1000):
            model.step()
            if n % 20 == 0:
                model.check()
        model.check()
        assert len(model.log.view.manifests) < 30
        assert len(commit_names(model.log.path)) < 20


# ---------------------------------------------------------------- taking back


@dataclass
class Output:
    """An output of a job, with epochs of five rows each."""

    root: Path
    name: str
    sink: Log
    lineage: str = LINEAGE
    last: Position | None = None
    term: int = 1

    @property
    def id(self) -> str:
        return f"job/query/{self.name}"

    @property
    def number(self) -> int:
        return ord(self.name) * 100_000

    def ids(self, *epochs: int) -> list[int]:
        return [self.number + epoch * 10 + n for epoch in epochs for n in range(5)]

    def publish(self, *epochs: int, add: int = 0) -> None:
        for epoch in epochs:
            given = self.ids(epoch)
            folder = self.root / "staged" / self.name / f"{self.lineage[:8]}-{epoch}-1-aaaa"
            files = stage(folder, *(table([id + add for id in part])
                                    for part in (given[:2], given[2:])))  # fmt: skip
            decided = replace(
                publication(self.root, epoch, files=files), output=self.id, previous=self.last,
                lineage=self.lineage, decision=f"{self.lineage} {epoch}", term=self.term,
            )  # fmt: skip
            assert self.sink.publish(decided) is Outcome.PUBLISHED
            self.sink.tidy()
            self.last = decided.position

    def log(self) -> EmbeddedLog:
        return EmbeddedLog(self.sink.path)

    def take_back(self, cut: int, lineage: str, *, term: int = 2) -> int:
        to, decision = Position(lineage, cut), f"{self.lineage} {cut}"
        gone = take_back(
            self.log(), self.id, cut=Position(self.lineage, cut), to=to, term=term,
            decision=decision,
        )  # fmt: skip
        self.lineage, self.last, self.term = lineage, to, term
        return gone


def output(root: Path, name: str, lineage: str = LINEAGE) -> Output:
    sink = Log(root / "log")
    made = Output(root, name, sink, lineage)
    sink.prepare(made.id, SCHEMA, "append")
    sink.fence(made.id, term=1, token=name)
    return made


CHILD = "1c8fad5b-d9cb-469f-a165-70867728950e"


def test_outputs_that_are_staged_together_may_share_a_log(tmp_path: Path) -> None:
    """Spark gives their files the same names."""
    a, b = output(tmp_path, "a"), output(tmp_path, "b")
    for epoch in range(3):
        a.publish(epoch)
        b.publish(epoch)
    assert sorted(ids(a.log())) == sorted([*a.ids(0, 1, 2), *b.ids(0, 1, 2)])


def mixed(root: Path) -> tuple[Output, Output, list[int]]:
    """Two outputs and a producer, in turns, with six epochs each."""
    a, b = output(root, "a"), output(root, "b")
    plain = []
    for epoch in range(6):
        a.publish(epoch)
        plain.append(epoch)
        a.log().append(table([epoch]))
        b.publish(epoch)
    return a, b, plain


def test_one_output_takes_its_rows_back_and_nobody_elses(tmp_path: Path) -> None:
    a, b, plain = mixed(tmp_path)
    before = placed(a.log())
    assert a.take_back(2, CHILD) == 15
    gone = set(a.ids(3, 4, 5))
    kept = {place: id for place, id in before.items() if id not in gone}
    for view in (a.log(), EmbeddedLog(tmp_path / "log")):
        assert placed(view) == kept, "all others are where they were"
    assert sorted(kept.values()) == sorted([*a.ids(0, 1, 2), *b.ids(*range(6)), *plain])
    assert a.sink.published(a.id) == Ledger(2, Position(CHILD, 2), f"{LINEAGE} 2")
    assert b.sink.published(b.id) == Ledger(1, Position(LINEAGE, 5), f"{LINEAGE} 5")
    assert len(segment_files(tmp_path / "log")) == len(kept_files(a.log()))
    a.publish(3, 4, add=7)
    b.publish(6)
    found = placed(a.log())
    assert found.items() >= kept.items()
    assert min(o for (_, o) in found.keys() - kept.keys()) > max(o for (_, o) in before)
    assert sorted(found.values()) == sorted(
        [*kept.values(), *(id + 7 for id in a.ids(3, 4)), *b.ids(6)]
    )


def kept_files(log: EmbeddedLog) -> set[str]:
    return {s.path for s in log.segments(log.view.low, log.view.next)}


def test_rows_can_be_taken_back_to_before_the_first_epoch(tmp_path: Path) -> None:
    a, b, plain = mixed(tmp_path)
    assert a.take_back(-1, CHILD) == 30
    assert sorted(ids_of(a)) == sorted([*b.ids(*range(6)), *plain])


def ids_of(a: Output) -> list[int]:
    return list(placed(a.log()).values())


@pytest.mark.kill
@pytest.mark.parametrize(
    ("point", "visit"), [("drop.committed", 1), ("drop.removed-one", 1), ("drop.removed-one", 4)]
)
@pytest.mark.parametrize("finished_by", ["itself", "opening", "a trim"])
def test_a_taking_back_that_was_killed_is_finished(
    tmp_path: Path, point: str, visit: int, finished_by: str
) -> None:
    a, b, plain = mixed(tmp_path)
    run_and_kill(point, take_back_in_a_child, tmp_path / "log", a.id, visit=visit)
    wanted = sorted([*a.ids(0, 1, 2), *b.ids(*range(6)), *plain])
    assert sorted(ids_of(a)) == wanted
    assert a.sink.published(a.id).position == Position(CHILD, 2)
    match finished_by:
        case "itself":
            assert a.take_back(2, CHILD) == 0
        case "opening":
            again = output(tmp_path, "b")
            again.sink.fence(b.id, term=5, token="again")
            again.sink.sweep(below_term=5)
        case "a trim":
            log = a.log()
            trim(log, log.view.next)
            assert segment_files(log.path) == set()
            return
    assert sorted(ids_of(a)) == wanted
    assert segment_files(tmp_path / "log") == kept_files(a.log())


def take_back_in_a_child(path: Path, output: str) -> None:
    cut, to = Position(LINEAGE, 2), Position(CHILD, 2)
    take_back(EmbeddedLog(path), output, cut=cut, to=to, term=2)


def test_a_taking_back_that_is_asked_for_again_later_does_not_set_the_ledger_back(
    tmp_path: Path,
) -> None:
    """As every opening of the child would: it has published since."""
    a, b, plain = mixed(tmp_path)
    a.take_back(2, CHILD)
    a.publish(3, 4, add=7)
    cut, to = Position(LINEAGE, 2), Position(CHILD, 2)
    assert take_back(a.log(), a.id, cut=cut, to=to, term=9) == 0
    assert a.sink.published(a.id).position == Position(CHILD, 4)
    mine = [*a.ids(0, 1, 2), *(id + 7 for id in a.ids(3, 4))]
    assert sorted(ids_of(a)) == sorted([*mine, *b.ids(*range(6)), *plain])


def test_an_older_cut_takes_back_what_later_lineages_published_too(tmp_path: Path) -> None:
    a = output(tmp_path, "a")
    a.publish(0, 1, 2, 3)
    a.take_back(2, CHILD)
    a.publish(3, 4, add=7)
    grandchild = "2c8fad5b-d9cb-469f-a165-70867728950e"
    cut, to = Position(LINEAGE, 1), Position(grandchild, 1)
    assert take_back(a.log(), a.id, cut=cut, to=to, term=3) == 15
    assert sorted(ids_of(a)) == a.ids(0, 1)
    a.lineage, a.last, a.term = grandchild, to, 3
    a.publish(2, add=9)
    assert a.take_back(1, "3c8fad5b-d9cb-469f-a165-70867728950e", term=4) == 5
    assert sorted(ids_of(a)) == a.ids(0, 1), "what came before the lineage of the cut stays"


def test_a_log_that_is_behind_the_cut_is_refused(tmp_path: Path) -> None:
    """Moving its ledger there would lose the epochs in between."""
    a = output(tmp_path, "a")
    with pytest.raises(TargetBehind, match="has published nothing"):
        a.take_back(0, CHILD)
    a.lineage = LINEAGE
    a.publish(0, 1)
    with pytest.raises(TargetBehind, match=r"up to epoch 1 .*cannot go back to epoch 2"):
        a.take_back(2, CHILD)
    assert a.sink.published(a.id).position == Position(LINEAGE, 1)
    assert ids_of(a) == a.ids(0, 1)


def test_a_driver_that_was_fenced_takes_nothing_back(tmp_path: Path) -> None:
    a, *_ = mixed(tmp_path)
    before = placed(a.log())
    a.sink.fence(a.id, term=7, token="newer")
    with pytest.raises(Fenced, match="has seen term 7, this driver has term 2"):
        a.take_back(2, CHILD)
    assert placed(a.log()) == before


def test_what_was_taken_back_is_few_words_however_much_it_was(tmp_path: Path) -> None:
    a = output(tmp_path, "a")
    a.publish(*range(12))
    a.log().append(table([1]))
    a.publish(*range(12, 20))
    a.take_back(4, CHILD)
    assert [(d.first, d.end) for d in a.log().view.dropped] == [(25, 60), (61, 101)]
    a.publish(*range(5, 15))  # through roll-ups
    assert sorted(ids_of(a)) == sorted([1, *a.ids(*range(15))])
    log = a.log()
    trim(log, [101])
    assert log.view.dropped == []


def test_a_reader_with_an_old_view_is_told_that_rows_were_taken_back(tmp_path: Path) -> None:
    a, *_ = mixed(tmp_path)
    old = a.log()
    a.take_back(2, CHILD)
    with pytest.raises(OutOfRange, match="were trimmed or taken back in the meantime"):
        placed(old)
    assert placed(old.refresh()) == placed(a.log())


# ---------------------------------------------------------------- several jobs, one log


def test_what_other_jobs_staged_beside_a_log_is_not_swept(
    tmp_path: Path, disk_of: Callable[[str, str], Path]
) -> None:
    """Terms of different jobs say nothing about each other."""
    disk = disk_of("disk", "2m")
    first = output(disk, "a")
    tag = f"{LINEAGE[:8]}-0-1-aaaa"
    staged = {}
    for name in "ab":
        folder = tmp_path / "staged" / name / tag
        made = first if name == "a" else output(disk, "b", CHILD)
        found = stage(folder, table(made.ids(0)))
        staged[name] = made, made.sink.stage(Staged(found, folder, folder, tag, SCHEMA, list))
    other = output(disk, "c")
    other.sink.fence(other.id, term=50, token="x")
    other.sink.sweep(below_term=50)
    for made, files in staged.values():
        decided = replace(publication(disk, 0, files=files), output=made.id, lineage=made.lineage)
        assert made.sink.publish(decided) is Outcome.PUBLISHED
    wanted = [*staged["a"][0].ids(0), *staged["b"][0].ids(0)]
    assert sorted(ids_of(first)) == wanted
    left = [p for p in (disk / "log" / "_staged").rglob("*") if p.is_file()]
    assert left == []


def test_jobs_and_producers_in_one_log_know_only_their_own_ledger(tmp_path: Path) -> None:
    a, b, _ = mixed(tmp_path)
    a.log().append(table([77]), producer="import", sequence=3)
    for _ in range(20):
        a.log().append(table([78]))
    fresh = output(tmp_path, "c")
    assert fresh.sink.published(fresh.id).position is None
    assert a.sink.published(a.id).position == b.sink.published(b.id).position == a.last
    assert a.log().append(table([77]), producer="import", sequence=3).already
