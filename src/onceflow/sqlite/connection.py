"""Connections to SQLite: one for each piece of work. Errors name the fix."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from onceflow.errors import DiskFull, PublishFailed, PublishUnknown, TargetError
from onceflow.store.posix import make_dirs

_NO_SPACE = 2**20  # bytes; an I/O error with less left than this is a full disk


class Database:
    """The file of a database. `target` is the sink, for messages."""

    def __init__(self, path: Path, target: str, timeout: float) -> None:
        self.path, self.timeout = path, timeout
        self._target = target

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._connect() as db:
            try:
                yield db
            except sqlite3.Error as error:
                raise self._translate(error) from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it, or nothing. Fails if another process keeps its lock."""
        make_dirs(self.path.parent)
        with self._connect() as db:
            try:
                self._use_write_ahead_log(db)
                db.execute("PRAGMA synchronous=FULL")
                db.execute("BEGIN IMMEDIATE")
                yield db
            except sqlite3.Error as error:
                _roll_back(db)
                raise self._translate(error) from error
            except BaseException:
                _roll_back(db)
                raise
            try:
                db.execute("COMMIT")
            except sqlite3.Error as error:
                # If the disk is full, SQLite has rolled back already.
                if db.in_transaction or getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
                    _roll_back(db)
                    raise self._translate(error) from error
                raise PublishUnknown(
                    f"{self._target}: no answer to COMMIT: {error}",
                    hint="start the job again; it reads the ledger first",
                ) from error

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        try:
            db = sqlite3.connect(self.path, timeout=self.timeout, isolation_level=None)
        except sqlite3.Error as error:
            raise TargetError(
                f"cannot open {self.path}: {error}", hint="check the path and its permissions"
            ) from error
        try:
            yield db
        finally:
            db.close()

    def _use_write_ahead_log(self, db: sqlite3.Connection) -> None:
        """If SQLite cannot change the mode, it keeps the old one and says so only in this answer.
        In another mode readers and the job lock each other out, and a power cut can undo the last
        commits."""
        mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise TargetError(
                f"{self._target}: SQLite cannot keep a write-ahead log here; "
                f"the journal mode stays {mode}",
                hint="move the database to a local file system (WAL needs shared memory)",
            )

    def _translate(self, error: sqlite3.Error) -> Exception:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith("SQLITE_FULL") or (
            name.startswith("SQLITE_IOERR") and shutil.disk_usage(self.path.parent).free < _NO_SPACE
        ):
            return DiskFull(
                f"no space left on the file system of {self.path}",
                hint="free some space and start the job again; it continues where it stopped",
            )
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return TargetError(
                f"{self.path} is not a database, or it is damaged: {error}",
                hint="put it back from a backup, or name another file",
            )
        hint = (
            f"end the program that holds it (fuser {self.path}), then start the job again; nothing "
            "became visible"
        )
        if name.startswith("SQLITE_CONSTRAINT"):
            hint = (
                "the table refuses rows that are decided: drop the constraint and start the job "
                "again; nothing is lost"
            )
        return PublishFailed(f"{self._target}: {error}", hint=hint)


def _roll_back(db: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):
        if db.in_transaction:
            db.execute("ROLLBACK")
