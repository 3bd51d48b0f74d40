"""Our own sinks, held to the contract that anybody's sink is held to."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from onceflow.contract.abilities import can_rewind, require_rewind
from onceflow.errors import JobError, TargetBehind
from onceflow.files.sink import published_files
from onceflow.log import EmbeddedLog
from onceflow.sinks import Files, Kafka, Log, Position, Postgres, Sink, Sqlite
from onceflow.store.posix import LocalStore
from onceflow.testing import SinkContract


class OurContract(SinkContract):
    tries = 1000 if os.environ.get("ONCEFLOW_TEST_ALL") else 8

    def test_what_a_rewind_would_refuse_is_said_before(self) -> None:
        cuts = [self.run(self.driver(1).open(), 0)]
        driver = self.driver(2)
        driver.fence()
        cuts += [self.run(driver, 1), self.run(driver, 2)]
        child = self.driver(3, lineage="a child")
        child.fence()
        child.rewind(cuts[1])
        sink = self.make_sink(self.folder)  # as the command does that plans a restore
        for cut in cuts[:2]:
            sink.refuse_rewind(cut.output, cut.position)
        for position in (cuts[2].position, Position("a child", 2)):
            with pytest.raises(TargetBehind):
                sink.refuse_rewind(child.output, position)
        self.check(replace(cuts[1], lineage="a child"), 0, 1, term=3)


class FailingPuts(LocalStore):
    """The first commit ends with an error."""

    def __init__(self, root: Path, *, landed: bool) -> None:
        super().__init__(root)
        self.landed, self.hit = landed, False

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if self.hit or not name.startswith("_commits/"):
            return super().put_if_absent(name, data)
        self.hit = True
        if self.landed:
            super().put_if_absent(name, data)
        raise OSError(errno.EIO, "Input/output error")


class FolderContract(OurContract):
    @contextmanager
    def commit_fails(self, sink: Any, *, landed: bool) -> Iterator[None]:
        log = sink._commit_log.numbered
        right, log.store = log.store, FailingPuts(log.store.root, landed=landed)
        yield
        assert log.store.hit
        log.store = right


class RollingUp(Files):
    roll_up_every = 8


class TestFiles(FolderContract):
    def make_sink(self, folder: Path) -> Sink:
        return RollingUp(folder / "out")

    def read_rows(self, folder: Path) -> list[dict[str, Any]]:
        """As a plain reader does: every file whose name does not begin with _ or a dot."""
        files = (folder / "out").rglob("[!_.]*.parquet")
        return _rows(path for path in files if "_staged" not in path.parts)

    def read_epochs(self, folder: Path) -> list[dict[str, Any]]:
        return _rows(folder / "out" / file["path"] for file in published_files(folder / "out"))


class TestFilesInSubFolders(TestFiles):
    def make_sink(self, folder: Path) -> Sink:
        return Files(folder / "out", by=["ok", "day"])


class Copying(Files):
    """As on another file system than the home: rows are staged in the target."""

    _renames = False


class TestFilesOnAnotherFileSystem(TestFiles):
    def make_sink(self, folder: Path) -> Sink:
        return Copying(folder / "out")


class TestLog(FolderContract):
    def make_sink(self, folder: Path) -> Sink:
        return Log(folder / "log")

    def read_rows(self, folder: Path) -> list[dict[str, Any]]:
        if not (folder / "log" / "_commits").exists():
            return []
        log = EmbeddedLog(folder / "log")
        return [row for batch in log.read(columns=log.schema.names) for row in batch.to_pylist()]

    def read_latest(self, folder: Path) -> list[dict[str, Any]]:
        return list({row["id"]: row for row in self.read_rows(folder)}.values())


class TestLogWithKey(TestLog):
    def make_sink(self, folder: Path) -> Sink:
        return Log(folder / "log", key="id", partitions=3)

    def folders(self, sink: Sink, row: dict[str, Any]) -> tuple[str, ...]:
        return (str((zlib.crc32(str(row["id"]).encode()) & 0x7FFFFFFF) % 3),)


class FailingDatabase:
    """The first COMMIT ends with an error; without an effect SQLite keeps the transaction."""

    def __init__(self, db: sqlite3.Connection, landed: bool) -> None:
        self._db, self._landed = db, landed

    def execute(self, sql: str, *args: Any) -> Any:
        if sql == "COMMIT":
            if self._landed:
                self._db.execute(sql)
            raise sqlite3.OperationalError("disk I/O error")
        return self._db.execute(sql, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


class TestSqlite(OurContract):
    modes = ("append", "complete")

    @contextmanager
    def commit_fails(self, sink: Any, *, landed: bool) -> Iterator[None]:
        connect, hits = sqlite3.connect, []

        def failing(*args: Any, **kwargs: Any) -> Any:
            db = connect(*args, **kwargs)
            hits.append(db)
            return FailingDatabase(db, landed) if len(hits) == 1 else db

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sqlite3, "connect", failing)
            yield
        assert hits

    def make_sink(self, folder: Path) -> Sink:
        return Sqlite(folder / "out.db", table="rows")

    def read_rows(self, folder: Path) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(f"file:{folder}/out.db?mode=ro", uri=True)) as db:
            db.row_factory = sqlite3.Row
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rows'").fetchall():
                return []
            return [_value_of(row) for row in db.execute("SELECT * FROM rows")]


class TestSqliteWithKey(TestSqlite):
    modes = ("append", "update", "complete")
    upserts = True

    def make_sink(self, folder: Path) -> Sink:
        return Sqlite(folder / "out.db", table="rows", key="id")


@pytest.mark.parametrize(
    "sink",
    [Kafka("rows", servers="host:9092", value="name"), Postgres(table="rows"),
     Postgres(table="rows", key="id", keep_before=0), Sqlite("rows", table="rows", keep_before=0)],
    ids=str,
)  # fmt: skip
def test_a_sink_that_cannot_take_rows_back_says_so(sink: Sink) -> None:
    cut, to = Position("parent", 1), Position("child", 1)
    assert not can_rewind(sink)
    with pytest.raises(JobError, match="cannot take back what it published: ") as refused:
        require_rewind(sink).rewind("job/query/output", cut=cut, to=to, term=1, decision="")
    assert "--published skip" in refused.value.hint
    with pytest.raises(JobError, match="cannot take back what it published: "):
        require_rewind(sink).refuse_rewind("job/query/output", cut)


def _rows(paths: Any) -> list[dict[str, Any]]:
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


def _value_of(row: sqlite3.Row) -> dict[str, Any]:
    """SQLite has no type for these: they are text, as `Sqlite` says."""
    forms: dict[str, Any] = {
        "amount": Decimal,
        "day": date.fromisoformat,
        "at": lambda text: datetime.fromisoformat(text).replace(tzinfo=UTC),
        "tags": json.loads,
        "place": json.loads,
    }
    return {
        name: row[name] if row[name] is None else forms.get(name, lambda value: value)(row[name])
        for name in row.keys()  # noqa: SIM118
    }
