"""Each kind of violation is found in a folder that was made by hand."""

from __future__ import annotations

import fcntl
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onceflow.harness.builtin_catalog import Expected
from onceflow.harness.checker import check
from onceflow.harness.observer import Observer
from onceflow.harness.targets import Target
from onceflow.store.posix import seal

ROWS = [(number, f"key-{number % 3}") for number in range(12)]
TRUE = Expected(Counter(ROWS))


class Folder:
    """A job of one query with one output, as its files say."""

    def __init__(self, root: Path, kind: str = "files") -> None:
        self.home, self.kind = root / "home", kind
        self.out = root / ("out.db" if kind == "sqlite" else "out")
        self.query = self.home / "echo" / "lineages" / "l" / "result"
        table = "result" if kind == "sqlite" else ""
        self.target = Target("result/result", kind, str(self.out), table)
        self.observer = Observer(self.home, "echo", [self.target])
        self.epochs, self.commits, self.lineage = 0, 0, "l"
        self.rows = 0
        self.files: dict[int, dict[str, Any]] = {}  # by epoch
        (self.home / "echo").mkdir(parents=True)
        (self.home / "echo" / "job.json").write_bytes(seal("job", "echo", {"lineage": "l"}))

    def decide(self, rows: int) -> None:
        self.epochs += 1
        entry = {
            "type": "epoch", "epoch": self.epochs - 1, "term": 1, "end": {}, "watermark": 0,
            "state": {}, "outputs": {"result": {"files": [{"rows": rows}]}},
        }  # fmt: skip
        number = len(list(self.query.glob("onceflow/log/*.json"))) + 1
        self._put(self.query / "onceflow" / "log", number, "epoch log", entry)

    def restore(self, cut: int) -> None:
        """A lineage `m` goes on from that epoch."""
        ended = {"type": "end", "term": 2, "to": "m"}
        self._put(self.query / "onceflow" / "log", self.epochs + 1, "epoch log", ended)
        self.query, self.lineage, self.epochs = (
            self.home / "echo" / "lineages" / "m" / "result", "m", cut + 1,
        )  # fmt: skip
        begun = {"type": "begin", "term": 0, "origin": {"parent": "l", "cut": cut}}
        self._put(self.query / "onceflow" / "log", 1, "epoch log", begun)

    def take_back(self, cut: int, *, rows: bool = True) -> None:
        """As the next opening does; or it leaves the rows."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.out)) as db, db:
                db.execute(f"UPDATE _onceflow_ledger SET lineage = 'm', epoch = {cut}")
                db.execute(f"DELETE FROM result WHERE _epoch > {cut if rows else 99}")
            return
        entry = {"type": "drop", "output": "echo/result/result", "lineage": "m", "epoch": cut}
        if self.kind == "log":
            gone = [file for epoch, file in self.files.items() if epoch > cut]
            entry |= {"drop": [[0, f["first"], f["first"] + f["rows"]] for f in gone] * rows}
        else:
            entry |= {"above": cut if rows else 99}
        self.commits += 1
        self._put(self.out / "_commits", self.commits, "commit", entry)

    def publish(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """As the epoch that was decided last."""
        listed, epoch = list(rows), self.epochs - 1
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.out)) as db, db:
                db.execute("CREATE TABLE IF NOT EXISTS result (number, key, _lineage, _epoch)")
                db.execute("CREATE TABLE IF NOT EXISTS _onceflow_ledger (output, lineage, epoch)")
                db.execute("DELETE FROM _onceflow_ledger")
                ledger = ("echo/result/result", self.lineage, epoch)
                db.execute("INSERT INTO _onceflow_ledger VALUES (?, ?, ?)", ledger)
                db.executemany(f"INSERT INTO result VALUES (?, ?, 'l', {epoch})", listed)
            return
        self.out.mkdir(exist_ok=True)
        name = f"{self.lineage}-{epoch:010d}-part.parquet" if self.lineage != "l" else (
            f"{epoch:010d}-part.parquet"
        )  # fmt: skip
        numbers, keys = zip(*listed, strict=True)
        pq.write_table(pa.table({"number": numbers, "key": keys}), self.out / name)
        data = (self.out / name).read_bytes()
        file = {"path": name, "rows": len(listed), "bytes": len(data), "crc32": zlib.crc32(data),
                "partition": 0, "first": self.rows}  # fmt: skip
        self.files[epoch] = file
        self.rows += len(listed)
        entry = {
            "type": "epoch", "output": "echo/result/result", "lineage": self.lineage,
            "epoch": epoch, "files": [file],
        }  # fmt: skip
        self.commits += 1
        self._put(self.out / "_commits", self.commits, "commit", entry)

    @staticmethod
    def _put(folder: Path, number: int, kind: str, entry: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:012d}.json").write_bytes(seal(kind, "it", entry))

    def two_epochs(self) -> Folder:
        for rows in (ROWS[:6], ROWS[6:]):
            self.decide(len(rows))
            self.publish(rows)
        self.observer.poll()
        return self

    def kinds(self, expected: Expected = TRUE, **options: Any) -> list[str]:
        said = check("echo", self.home, self.observer, {"result/result": expected}, **options)
        return [violation.kind for violation in said]


@pytest.fixture(params=["files", "sqlite", "log"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Folder:
    return Folder(tmp_path, request.param).two_epochs()


def test_nothing_is_wrong_with_what_is_right(folder: Folder) -> None:
    assert folder.kinds(in_order="number") == []


def test_lost(folder: Folder) -> None:
    assert folder.kinds(Expected(Counter([*ROWS, (12, "key-0")]))) == ["lost"]


def test_duplicated(folder: Folder) -> None:
    folder.decide(1)
    folder.publish(ROWS[:1])
    folder.observer.poll()
    assert folder.kinds() == ["duplicated"]


def test_a_row_that_is_in_no_truth(folder: Folder) -> None:
    folder.decide(1)
    folder.publish([(3, "another key")])
    folder.observer.poll()
    assert folder.kinds() == ["corrupt"]


def test_a_part_of_an_epoch(folder: Folder) -> None:
    folder.decide(4)
    folder.publish([(12, "key-0"), (13, "key-1")])
    folder.observer.poll()
    more = [*ROWS, *((n, f"key-{n % 3}") for n in range(12, 16))]
    assert folder.kinds(Expected(Counter(more))) == ["lost", "torn"]


def test_one_of_several_outputs_lacks_a_decided_epoch(folder: Folder) -> None:
    folder.decide(0)
    folder.observer.poll()
    assert folder.kinds() == ["torn"], "its ledger is behind the decision"


def test_a_reader_went_backwards(folder: Folder) -> None:
    if folder.kind == "sqlite":
        with closing(sqlite3.connect(folder.out)) as db, db:
            db.execute("DELETE FROM result WHERE _epoch = 0")
    else:
        for path in folder.out.glob("_commits/*1.json"):
            path.unlink()
    folder.observer.poll()
    assert "backwards" in folder.kinds()


# ---------------------------------------------------------------- taken back


def go_back(folder: Folder, choice: str, **how: bool) -> None:
    folder.observer.restoring({"result/result": choice})
    folder.restore(0)
    folder.take_back(0, **how)
    folder.observer.poll()


def again(folder: Folder, rows: list[tuple[Any, ...]]) -> None:
    folder.decide(len(rows))
    folder.publish(rows)
    folder.observer.poll()


def test_rows_that_were_taken_back_may_go_and_come_again(folder: Folder) -> None:
    go_back(folder, "rewind")
    assert folder.observer.published == 6
    assert folder.observer.progress() == {"result": 0}
    assert "backwards" in folder.kinds(), "they have not come yet"
    again(folder, ROWS[6:8])  # in other epochs than before
    again(folder, ROWS[8:])
    left = [*folder.out.glob("0000000001-*")] if folder.kind == "files" else []
    assert folder.kinds(in_order="number") == ["left"] * len(left)
    assert folder.observer.progress() == {"result": 2}


def test_rows_that_nobody_asked_to_take_back_may_not_go(folder: Folder) -> None:
    go_back(folder, "skip")
    again(folder, ROWS[6:])
    assert "backwards" in folder.kinds()


def test_nor_may_rows_of_before_the_cut(folder: Folder) -> None:
    folder.observer.restoring({"result/result": "rewind"})
    folder.restore(0)
    folder.take_back(-1)
    folder.observer.poll()
    again(folder, ROWS)
    assert "backwards" in folder.kinds()


def test_rows_that_are_left_are_there_twice(folder: Folder) -> None:
    go_back(folder, "rewind", rows=False)
    again(folder, ROWS[6:])
    assert "duplicated" in folder.kinds()


def test_other_rows_that_come_instead_are_not_the_ones_that_went(folder: Folder) -> None:
    go_back(folder, "rewind")
    again(folder, ROWS[6:11])
    assert folder.kinds(Expected(Counter(ROWS[:11]))).count("backwards") == 1


@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_a_file_that_is_not_what_its_commit_says(tmp_path: Path, how: str) -> None:
    folder = Folder(tmp_path).two_epochs()
    (path,) = folder.out.glob("0000000001-*.parquet")
    data = path.read_bytes()
    changed = {"cut": data[:-9], "flipped": data[:40] + bytes([data[40] ^ 1]) + data[41:]}
    path.unlink() if how == "gone" else path.write_bytes(changed[how])
    assert folder.kinds()[0] == "corrupt"


def test_rows_of_a_key_behind_later_ones(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "log")
    for rows in (ROWS[6:], ROWS[:6]):
        folder.decide(6)
        folder.publish(rows)
    folder.observer.poll()
    assert folder.kinds(in_order="number") == ["disordered"]


def test_a_version_that_no_records_add_up_to_was_seen(tmp_path: Path) -> None:
    target = Target("result/result", "sqlite", str(tmp_path / "o.db"), "result", ("key",), "update")
    observer = Observer(tmp_path / "home", "echo", [target])

    def say(count: int) -> None:
        with closing(sqlite3.connect(tmp_path / "o.db")) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS result (key PRIMARY KEY, count)")
            db.execute("INSERT OR REPLACE INTO result VALUES ('a', ?)", (count,))
        observer.poll()

    expected = Expected(Counter([("a", 3)]), frozenset([("a", 1), ("a", 3)]))
    say(1)
    say(3)
    assert check("echo", tmp_path / "home", observer, {"result/result": expected}) == []
    say(2)
    say(3)
    (violation,) = check("echo", tmp_path / "home", observer, {"result/result": expected})
    assert violation.kind == "dirty"


def test_sums_where_rows_are_left_to_chance(tmp_path: Path) -> None:
    path = str(tmp_path / "o.db")
    target = Target("result/result", "sqlite", path, "result", ("face",), "update")
    observer = Observer(tmp_path / "home", "dice", [target])
    with closing(sqlite3.connect(tmp_path / "o.db")) as db, db:
        db.execute("CREATE TABLE result (face PRIMARY KEY, count, total)")
        db.executemany("INSERT INTO result VALUES (?, ?, ?)", [(1, 3, 30), (4, 2, 12)])

    def kinds(*total: int) -> list[str]:
        expected = {"result/result": Expected(Counter(), total=total)}
        return [v.kind for v in check("dice", tmp_path / "home", observer, expected)]

    assert kinds(5, 42) == []
    assert kinds(6, 42) == ["lost"]
    assert kinds(4, 42) == ["duplicated"]
    assert kinds(5, 43) == ["corrupt"]


@pytest.mark.parametrize(
    "name",
    [
        "home/echo/lineages/l/result/onceflow/staged/l-1-1-x/part.parquet",
        "home/echo/lineages/l/result/onceflow/log/.put-abc",
        "out/0000000009-part.parquet",
        "out/_commits/.put-abc",
    ],
)
def test_something_is_left_behind(tmp_path: Path, name: str) -> None:
    folder = Folder(tmp_path).two_epochs()
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert folder.kinds() == ["left"]


def test_a_lease_is_still_held(tmp_path: Path) -> None:
    folder = Folder(tmp_path).two_epochs()
    lock = tmp_path / "home" / "echo" / "lease" / "x.lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert folder.kinds() == ["left"]
    assert folder.kinds() == []
