"""What every sink must do: the same stories for each of them, with real targets."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from targets import (
    LINEAGE,
    OUTPUT,
    SCHEMA,
    FilesTarget,
    LogTarget,
    SqliteTarget,
    Target,
    publication,
    rows_of,
    schema,
    table,
)

from onceflow import faults
from onceflow.contract.abilities import clean_up_of
from onceflow.contract.quantities import parse_bytes
from onceflow.errors import (
    Damaged,
    DiskFull,
    Fenced,
    JobError,
    OnceflowError,
    PublishUnknown,
    SchemaMismatch,
    TargetBehind,
    TargetForeign,
)
from onceflow.log import EmbeddedLog
from onceflow.sinks import (
    Files,
    Ledger,
    Log,
    Outcome,
    Position,
    Publication,
    Sink,
    Sqlite,
    open_target,
)
from onceflow.sqlite.connection import Database
from onceflow.store.posix import LocalStore
from onceflow.testing.processes import child, run_and_kill

FOLDERS = (FilesTarget, LogTarget)


@pytest.fixture(params=[*FOLDERS, SqliteTarget], ids=["files", "log", "sqlite"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    made: Target = request.param(tmp_path)
    return made


@pytest.fixture(params=[FilesTarget, SqliteTarget], ids=["files", "sqlite"])
def owned(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """A target that one output has to itself. A log may have any number of them."""
    made: Target = request.param(tmp_path)
    return made


def fenced(target: Target, term: int = 1, **settings: Any) -> Sink:
    sink = target.sink(**settings)
    sink.fence(OUTPUT, term=term, token=f"token {term}")
    return sink


def publish(target: Target, sink: Sink, *epochs: int, term: int = 1) -> None:
    for epoch in epochs:
        found = sink.publish(publication(target.root, epoch, term=term))
        assert found is Outcome.PUBLISHED
        clean_up_of(sink).tidy()


def all_rows(*epochs: int) -> list[int]:
    return sorted(itertools.chain.from_iterable(map(rows_of, epochs)))


# ---------------------------------------------------------------- publish once


def test_an_epoch_is_published(target: Target) -> None:
    sink = fenced(target)
    publish(target, sink, 0)
    assert target.rows() == rows_of(0)
    assert sink.published(OUTPUT) == Ledger(1, Position(LINEAGE, 0), "decision 0")


def test_an_epoch_that_is_published_again_is_already_published(target: Target) -> None:
    sink, first = fenced(target), publication(target.root, 0)
    outcomes = [sink.publish(first) for _ in range(3)]
    assert outcomes == [Outcome.PUBLISHED, *[Outcome.ALREADY_PUBLISHED] * 2]
    assert target.sink().publish(first) is Outcome.ALREADY_PUBLISHED
    assert target.rows() == rows_of(0)


def test_epochs_follow_each_other(target: Target) -> None:
    sink = fenced(target)
    publish(target, sink, 0, 1, 2, 3)
    assert target.rows() == all_rows(0, 1, 2, 3)


def test_an_older_epoch_is_already_published(target: Target) -> None:
    sink, first = fenced(target), publication(target.root, 0)
    sink.publish(first)
    publish(target, sink, 1)
    assert sink.publish(first) is Outcome.ALREADY_PUBLISHED
    assert sink.published(OUTPUT).position == Position(LINEAGE, 1)


def test_an_epoch_without_rows_is_published_too(target: Target) -> None:
    sink = fenced(target)
    publish(target, sink, 0)
    empty = publication(target.root, 1, files=())
    assert sink.publish(empty) is Outcome.PUBLISHED
    assert sink.publish(empty) is Outcome.ALREADY_PUBLISHED
    publish(target, sink, 2)
    assert target.rows() == all_rows(0, 2)


def test_the_first_epoch_may_be_empty(target: Target) -> None:
    sink = fenced(target)
    assert sink.publish(publication(target.root, 0, files=())) is Outcome.PUBLISHED
    assert sink.published(OUTPUT).position == Position(LINEAGE, 0)
    assert target.rows() == []


def test_the_ledger_survives_a_new_driver(target: Target) -> None:
    publish(target, fenced(target), 0, 1)
    again = target.sink()
    assert again.published(OUTPUT) == Ledger(1, Position(LINEAGE, 1), "decision 1")
    found = again.fence(OUTPUT, term=5, token="token 5")
    assert found == Ledger(5, Position(LINEAGE, 1), "decision 1")
    publish(target, again, 2, term=5)
    assert target.rows() == all_rows(0, 1, 2)


def test_an_epoch_of_another_decision_is_not_taken_for_ours(target: Target) -> None:
    """A copy of the home works too: it decided another epoch 0."""
    sink = fenced(target)
    publish(target, sink, 0)
    other = replace(publication(target.root / "copy", 0), decision="another decision")
    with pytest.raises(Fenced, match="another decision"):
        sink.publish(other)
    assert target.rows() == rows_of(0)


# ---------------------------------------------------------------- fencing


def test_an_older_term_publishes_nothing(target: Target) -> None:
    older = fenced(target, term=1)
    publish(target, older, 0)
    fenced(target, term=2)
    with pytest.raises(Fenced, match="has seen term 2, this driver has term 1"):
        older.publish(publication(target.root, 1, term=1))
    assert target.rows() == rows_of(0)
    assert all(os.path.exists(file.path) for file in publication(target.root, 1, term=1).files)


def test_the_new_leader_publishes_what_the_older_term_decided(target: Target) -> None:
    fenced(target, term=1)
    newer = fenced(target, term=2)
    decided = publication(target.root, 0, term=1)
    assert newer.publish(replace(decided, term=2)) is Outcome.PUBLISHED
    assert target.rows() == rows_of(0)


@pytest.mark.parametrize("term", [1, 2, 3])
def test_a_term_that_is_not_above_the_ledgers_cannot_fence(target: Target, term: int) -> None:
    fenced(target, term=3)
    with pytest.raises(Fenced, match=f"has seen term 3, this driver has term {term}"):
        target.sink().fence(OUTPUT, term=term, token="another driver")
    assert target.sink().published(OUTPUT).term == 3


def test_a_fence_whose_answer_got_lost_can_be_asked_for_again(target: Target) -> None:
    fenced(target, term=3)
    assert fenced(target, term=3).published(OUTPUT).term == 3


def test_a_fenced_driver_is_told_so_before_its_files_are_touched(target: Target) -> None:
    older, decided = fenced(target, term=1), publication(target.root, 0)
    fenced(target, term=2)
    with pytest.raises(Fenced):
        older.publish(decided)
    assert all(os.path.exists(file.path) for file in decided.files)


# ---------------------------------------------------------------- targets that were set back


def test_a_target_that_was_set_back_is_noticed(target: Target) -> None:
    sink = fenced(target)
    publish(target, sink, 0)
    target.copy(target.root / "older copy")
    publish(target, sink, 1)
    target.bring_back(target.root / "older copy")

    with pytest.raises(TargetBehind, match="was set back, replaced or emptied"):
        target.sink().publish(publication(target.root, 2))
    assert target.rows() == rows_of(0)


@pytest.mark.parametrize("looked", [False, True], ids=["", "it looked before"])
def test_a_target_that_was_set_back_is_noticed_by_the_driver_that_runs(
    target: Target, looked: bool
) -> None:
    sink = fenced(target)
    publish(target, sink, 0)
    target.copy(target.root / "older copy")
    publish(target, sink, 1)
    if looked:  # as opening a query does
        assert sink.published(OUTPUT).position == Position(LINEAGE, 1)
    target.bring_back(target.root / "older copy")

    with pytest.raises(TargetBehind, match="was set back, replaced or emptied"):
        sink.publish(publication(target.root, 2))
    assert target.rows() == rows_of(0)


@pytest.mark.parametrize("looked", [False, True], ids=["", "it looked before"])
def test_a_target_that_was_removed_is_noticed_by_the_driver_that_runs(
    target: Target, looked: bool
) -> None:
    sink = fenced(target)
    publish(target, sink, 0, 1)
    if looked:
        assert sink.published(OUTPUT).position == Position(LINEAGE, 1)
    target.remove()
    with pytest.raises(TargetBehind):
        sink.publish(publication(target.root, 2))


def test_an_epoch_whose_staged_files_are_gone_is_not_published(target: Target) -> None:
    sink, decided = fenced(target), publication(target.root, 0)
    for file in decided.files:
        os.remove(file.path)
    with pytest.raises(TargetBehind, match=r"staged file .*part-00000.parquet is gone"):
        sink.publish(decided)
    assert target.rows() == []
    assert sink.published(OUTPUT).position is None


def test_an_epoch_with_one_staged_file_gone_is_not_published_in_part(target: Target) -> None:
    sink, decided = fenced(target), publication(target.root, 0)
    os.remove(decided.files[1].path)
    with pytest.raises(TargetBehind, match=r"part-00001.parquet is gone"):
        sink.publish(decided)
    assert target.rows() == []
    assert sink.published(OUTPUT).position is None


def test_the_ledger_of_a_target_that_lost_its_fence_is_not_left_out(target: Target) -> None:
    """An older copy, from before this output was ever fenced, came back under the driver."""
    fenced(target)
    if isinstance(target, SqliteTarget):
        other = Sqlite(target.path, table="others")
        target.remove()
        other.fence("job/query/others", term=1, token="t")
    else:
        target.remove()
    first = publication(target.root, 0)
    try:
        target.sink().publish(first)
    except OnceflowError:
        assert target.rows() == []
    else:
        assert target.sink().published(OUTPUT).position == Position(LINEAGE, 0)
        assert target.rows() == rows_of(0)


@pytest.mark.parametrize("kind", FOLDERS)
def test_commits_that_were_swapped_are_damage(tmp_path: Path, kind: type[FilesTarget]) -> None:
    """Also those without files, which nothing else tells apart."""
    target = kind(tmp_path)
    sink = fenced(target)
    for epoch in range(3):
        sink.publish(publication(tmp_path, epoch, files=()))
    first, second, *_ = sorted((target.path / "_commits").glob("0*"), reverse=True)
    was = first.read_bytes(), second.read_bytes()
    for path, data in zip((first, second), reversed(was), strict=True):
        path.write_bytes(data)
    with pytest.raises(Damaged, match=f"{second.name} is not what belongs there"):
        target.sink().published(OUTPUT)


# ---------------------------------------------------------------- what does not change a target


def test_asking_what_is_published_never_makes_the_target(target: Target) -> None:
    sink = target.sink()
    assert sink.published(OUTPUT) == Ledger()
    sink.prepare(OUTPUT, SCHEMA, "append")
    assert os.listdir(target.root) == []


def test_the_target_may_lie_in_a_folder_that_is_not_there_yet(target: Target) -> None:
    deep = type(target)(target.root / "a" / "b")
    publish(deep, fenced(deep), 0)
    assert deep.rows() == rows_of(0)


# ---------------------------------------------------------------- other owners, other schemas


def test_a_target_of_another_output_is_refused(owned: Target) -> None:
    publish(owned, fenced(owned), 0)
    stranger = "job/query/other"
    with pytest.raises(TargetForeign, match=f"{OUTPUT}, not to {stranger}"):
        owned.sink().prepare(stranger, SCHEMA, "append")
    with pytest.raises(TargetForeign, match=OUTPUT):
        owned.sink().fence(stranger, term=9, token="x")
    assert owned.sink().published(OUTPUT).term == 1


def test_a_target_of_another_output_is_refused_however_it_is_spelled(owned: Target) -> None:
    publish(owned, fenced(owned), 0)
    with pytest.raises(TargetForeign, match=OUTPUT):
        owned.other().fence("job/query/other", term=9, token="x")


def test_a_target_with_other_columns_is_refused_and_every_difference_named(target: Target) -> None:
    publish(target, fenced(target), 0)
    with pytest.raises(SchemaMismatch) as caught:
        target.sink().prepare(OUTPUT, schema(id="string", extra="long"), "append")
    told = caught.value.message
    assert "extra" in told
    assert "is not in the target" in told
    assert "name" in told
    assert "is in the target only" in told
    assert "id is " in told


def test_the_same_columns_are_accepted_again(target: Target) -> None:
    publish(target, fenced(target), 0)
    target.sink().prepare(OUTPUT, SCHEMA, "append")


def test_a_mode_that_a_sink_does_not_have_is_refused(target: Target) -> None:
    with pytest.raises(JobError, match="does not take output mode 'sideways'"):
        target.sink().prepare(OUTPUT, SCHEMA, "sideways")


def test_a_sink_is_found_again_from_what_a_fence_says_of_it(target: Target) -> None:
    sink = fenced(target)
    found = open_target(sink.describe())
    assert type(found) is type(sink)
    assert found.describe() == sink.describe()
    assert found.published(OUTPUT).term == 1


# ---------------------------------------------------------------- crashes

CRASHES = [
    *((kind, point, 1) for kind in FOLDERS for point in (*faults.FOLDER, *faults.PUT)),
    *((kind, "folder.moved-one", 2) for kind in FOLDERS),
    *((SqliteTarget, point, 1) for point in faults.SQLITE),
]


def publish_in_a_child(target: Target, decided: Publication) -> None:
    target.sink().publish(decided)


@pytest.mark.kill
@pytest.mark.parametrize(("kind", "point", "visit"), CRASHES)
def test_a_publish_that_was_killed_is_finished_by_the_next_driver(
    tmp_path: Path, kind: type[Target], point: str, visit: int
) -> None:
    target = kind(tmp_path)
    publish(target, fenced(target), 0)
    decided = publication(tmp_path, 1)

    run_and_kill(point, publish_in_a_child, target, decided, visit=visit)

    assert target.rows() in (rows_of(0), all_rows(0, 1))
    successor = target.sink()
    ledger = successor.fence(OUTPUT, term=2, token="token 2")
    was_visible = ledger.position == Position(LINEAGE, 1)
    assert target.rows() == (all_rows(0, 1) if was_visible else rows_of(0))
    outcome = successor.publish(replace(decided, term=2))
    assert outcome is (Outcome.ALREADY_PUBLISHED if was_visible else Outcome.PUBLISHED)
    clean_up_of(successor).sweep(below_term=2)
    clean_up_of(successor).settled(OUTPUT)
    publish(target, successor, 2, term=2)
    assert target.rows() == all_rows(0, 1, 2)


@pytest.mark.parametrize(("kind", "point", "visit"), CRASHES)
def test_a_publish_that_failed_half_way_can_be_tried_again_by_the_same_driver(
    tmp_path: Path, kind: type[Target], point: str, visit: int
) -> None:
    target = kind(tmp_path)
    sink, decided = fenced(target), publication(tmp_path, 0)
    faults.arm(point, "raise", visit=visit)
    with pytest.raises(faults.InjectedFault):
        sink.publish(decided)
    faults.disarm()
    sink.publish(decided)
    publish(target, sink, 1)
    assert target.rows() == all_rows(0, 1)


@pytest.mark.parametrize(("kind", "point", "visit"), CRASHES)
def test_a_reader_sees_whole_epochs_at_every_moment_of_a_publish(
    tmp_path: Path, kind: type[Target], point: str, visit: int
) -> None:
    target = kind(tmp_path)
    sink = fenced(target)
    publish(target, sink, 0)
    seen: list[list[int]] = []
    faults.arm(point, lambda _: seen.append(target.rows()), visit=visit)
    publish(target, sink, 1)
    committed = point in ("folder.committed", "sqlite.committed", "put.linked")
    assert seen == [all_rows(0, 1) if committed else rows_of(0)]


def poll(pipe: Connection, target: Target, moments: int) -> None:
    """Read what is published, over and over, until it was seen to grow so many times."""
    seen: set[int] = set()
    torn = []
    while len(seen) < moments:
        rows = target.rows()
        epochs = len(rows) // 5
        if rows != all_rows(*range(epochs)):
            torn.append(rows)
        seen.add(epochs)
    pipe.send(torn)


def test_a_reader_in_another_process_sees_whole_epochs_only(target: Target) -> None:
    sink = fenced(target)
    publish(target, sink, 0)
    with child(poll, target, 10) as reader:
        epochs = itertools.count(1)
        while not reader.pipe.poll():
            publish(target, sink, next(epochs))
        assert reader.hear() == []


# ---------------------------------------------------------------- zombies


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("point", ["folder.moved-one", "folder.moved", "put.written"])
def test_a_driver_that_wakes_up_in_the_middle_of_a_publish_adds_nothing(
    tmp_path: Path, kind: type[Target], point: str
) -> None:
    """The successor publishes the epoch and the next one while the older driver stands there."""
    target = kind(tmp_path)
    older, decided = fenced(target, term=1), publication(tmp_path, 0)

    def take_over(_: str) -> None:
        newer = fenced(target, term=2)
        assert newer.publish(replace(decided, term=2)) is Outcome.PUBLISHED
        clean_up_of(newer).sweep(below_term=2)
        publish(target, newer, 1, term=2)

    faults.arm(point, take_over)
    with pytest.raises(Fenced):
        older.publish(decided)
    assert target.rows() == all_rows(0, 1)
    clean_up_of(target.sink()).settled(OUTPUT)


@pytest.mark.parametrize("point", ["sqlite.begun", "sqlite.written"])
def test_a_driver_inside_its_transaction_keeps_the_successor_out_until_it_ends(
    tmp_path: Path, point: str
) -> None:
    target = SqliteTarget(tmp_path)
    older, decided = fenced(target, term=1), publication(tmp_path, 0)
    refused: list[OnceflowError] = []

    def take_over(_: str) -> None:
        try:
            target.sink(timeout=0.05).fence(OUTPUT, term=2, token="token 2")
        except OnceflowError as error:
            refused.append(error)

    faults.arm(point, take_over)
    assert older.publish(decided) is Outcome.PUBLISHED
    assert [error.retryable for error in refused] == [True]
    found = target.sink().fence(OUTPUT, term=2, token="token 2")
    assert found.position == Position(LINEAGE, 0)
    assert target.rows() == rows_of(0)


# ---------------------------------------------------------------- lost answers


class LosesAnswers(LocalStore):
    """Puts land, but the answer says that somebody else was first."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        super().put_if_absent(name, data)
        return False


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_commit_entry_whose_answer_got_lost_is_known_by_its_nonce(
    tmp_path: Path, kind: type[FilesTarget]
) -> None:
    target = kind(tmp_path)
    if kind is LogTarget:
        EmbeddedLog.create(target.path, SCHEMA)
    sink = target.sink()
    assert isinstance(sink, Files | Log)
    sink._commit_log.numbered.store = LosesAnswers(target.path)
    sink.fence(OUTPUT, term=1, token="token 1")
    publish(target, sink, 0, 1, 2)
    assert target.rows() == all_rows(0, 1, 2)
    assert sink.published(OUTPUT) == Ledger(1, Position(LINEAGE, 2), "decision 2")


class LosesCommits(Database):
    """Transactions are committed, but the answer to COMMIT is an error."""

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        with super()._connect() as db:
            yield _Losing(db)  # type: ignore[misc]


class _Losing:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def execute(self, sql: str, *args: Any) -> Any:
        found = self._db.execute(sql, *args)
        if sql == "COMMIT":
            lost = sqlite3.OperationalError("disk I/O error")
            lost.sqlite_errorname = "SQLITE_IOERR"
            raise lost
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_a_commit_without_an_answer_is_unknown_and_the_ledger_knows(tmp_path: Path) -> None:
    target = SqliteTarget(tmp_path)
    fenced(target)
    decided = publication(tmp_path, 0)
    sink = Sqlite(target.path, table="counts")
    sink._database = LosesCommits(target.path, "Sqlite", timeout=5)
    with pytest.raises(PublishUnknown, match="no answer to COMMIT"):
        sink.publish(decided)
    assert target.sink().published(OUTPUT).position == Position(LINEAGE, 0)
    assert target.sink().publish(decided) is Outcome.ALREADY_PUBLISHED
    assert target.rows() == rows_of(0)


# ---------------------------------------------------------------- a full disk


def fill(disk: Path, *, left: int) -> Path:
    """Take all the space there is, and give some of it back."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    os.truncate(filler, max(filler.stat().st_size - left, 0))
    return filler


@pytest.mark.parametrize(
    ("kind", "left"),
    [(FilesTarget, 0), (LogTarget, 0), (SqliteTarget, 0), (SqliteTarget, 64 * 1024)],
)
def test_an_epoch_that_found_no_space_is_published_once_there_is_some(
    tmp_path: Path, small_disk: Path, kind: type[Target], left: int
) -> None:
    target = kind(small_disk)
    sink = fenced(target)
    publish(target, sink, 0)
    # A sink stages on the target's own file system, or reads what is staged in the home.
    staged_in = small_disk if kind in FOLDERS else tmp_path
    decided = publication(staged_in, 1, table(range(10, 1010)))
    filler = fill(small_disk, left=left)

    with pytest.raises(DiskFull, match="no space left"):
        sink.publish(decided)

    filler.unlink()
    assert target.rows() == rows_of(0)
    assert sink.publish(decided) is Outcome.PUBLISHED
    assert target.rows() == sorted([*rows_of(0), *range(10, 1010)])


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("1 B", 1), ("256 MB", 256 * 10**6), ("1.5kb", 1500), ("2 GiB", 2**31), (" 1 kib ", 1024)],
)
def test_sizes_are_written_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "256", "MB", "-1 MB", "1 parsec", "1,5 MB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not a size"):
        parse_bytes(text)


def test_what_a_sink_cannot_do_is_refused_when_it_is_declared(tmp_path: Path) -> None:
    refusals: list[Callable[[], Sink]] = [
        lambda: Files(tmp_path, roll="large"),
        lambda: Files(tmp_path, format="csv"),
        lambda: Files(tmp_path, by=["a/b"]),
        lambda: Log(tmp_path, roll="large"),
        lambda: Sqlite(tmp_path / "db", table="a b"),
        lambda: Sqlite(tmp_path / "db", table="_onceflow_ledger"),
        lambda: Sqlite(tmp_path / "db", table='x"; DROP TABLE y'),
    ]
    for declare in refusals:
        with pytest.raises(JobError):
            declare()
    assert os.listdir(tmp_path) == []
