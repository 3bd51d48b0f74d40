"""SQLite files that survive `kill -9`, and that others can read at the same time."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any


def connect(path: Path) -> sqlite3.Connection:
    """Open or create a file. A commit is on the disk when it returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    _use_wal(db)
    db.execute("PRAGMA synchronous = FULL")
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """One transaction; nobody else writes meanwhile."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def rows(path: Path, sql: str) -> list[dict[str, Any]]:
    """The rows of a query; none if the file or the table does not exist yet."""
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        try:
            return [dict(row) for row in db.execute(sql)]
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise


def _use_wal(db: sqlite3.Connection) -> None:
    """Readers and a writer do not wait for each other then. Of two who change it at the same time
    one is refused."""
    while db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            time.sleep(0.01)
