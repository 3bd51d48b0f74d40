"""Undo in a table of SQLite: see `tables/undo.py`.

Each step begins with a row of its own, and its images follow in the order of the changes. So the
row id gives the step of an image, and no index is needed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from onceflow.contract.ledger import Position
from onceflow.tables.names import list_of, quote
from onceflow.tables.rewind_history import RewindHistory
from onceflow.tables.undo import HISTORIES, PART, THERE, WHOLE, Undo

TAGS = {"_lineage": "TEXT", "_epoch": "INTEGER"}  # of rows without a key
_AT = "_onceflow_at"  # step * _ROOM + place
_ROOM = 2**32


class SqliteUndo(Undo):
    mark = "?"

    def __init__(self, target: str, table: str, key: Sequence[str], keep: int) -> None:
        images = quote(f"_onceflow_before_{table.lower()}")
        super().__init__(
            target, table=table, images=images, histories=HISTORIES, key=key, keep=keep
        )

    def ensure(self, db: sqlite3.Connection) -> None:
        db.execute(
            f"CREATE TABLE IF NOT EXISTS {HISTORIES} (output TEXT PRIMARY KEY, steps TEXT) STRICT"
        )

    def make(self, db: sqlite3.Connection, names: Sequence[str]) -> bool:
        """The columns of images have no type, so that values stay unchanged."""
        have = self._columns(db, self._images)
        if have and {*have} == {*names}:
            return True
        db.execute(f"DROP TABLE IF EXISTS {self._images}")
        body = f"{_AT} INTEGER PRIMARY KEY, {list_of([THERE, *names])}"
        db.execute(f"CREATE TABLE {self._images} ({body})")
        return False

    def watch(self, db: sqlite3.Connection, step: int, mode: str, names: Sequence[str]) -> None:
        """Keep every row that this transaction changes from here on, as it was before."""
        is_whole = mode == "complete"
        place = f"{step * _ROOM}, {WHOLE if is_whole else PART}"
        db.execute(f"INSERT INTO {self._images} ({_AT}, {THERE}) VALUES ({place})")
        into = f"INSERT INTO {self._images} ({THERE}, {list_of(names)})"
        if is_whole:
            db.execute(f"{into} SELECT 1, {list_of(names)} FROM {self._table}")
            return
        # Only this connection has these triggers, and it is closed with the transaction.
        added = f"INSERT INTO {self._images} ({THERE}, {list_of(self._key)})"
        for event, keep in {
            "BEFORE UPDATE": f"{into} VALUES (1, {list_of(names, 'OLD.')})",
            "AFTER INSERT": f"{added} VALUES (0, {list_of(self._key, 'NEW.')})",
        }.items():
            name = quote(f"_onceflow {event}")
            db.execute(f"CREATE TEMP TRIGGER {name} {event} ON {self._table} BEGIN {keep}; END")

    def _has_histories(self, db: sqlite3.Connection) -> bool:
        return bool(self._columns(db, HISTORIES))

    def _has_images(self, db: sqlite3.Connection) -> bool:
        return bool(self._columns(db, self._images))

    def _shared_columns(self, db: sqlite3.Connection) -> list[str]:
        have = self._columns(db, self._table)
        return [name for name in self._columns(db, self._images) if name in have]

    def _drop(self, db: sqlite3.Connection, *, up_to: int = -1, since: int) -> None:
        gone = f"{_AT} < {(up_to + 1) * _ROOM} OR {_AT} >= {since * _ROOM}"
        db.execute(f"DELETE FROM {self._images} WHERE {gone}")

    def _kept(self, db: sqlite3.Connection, above: int) -> Iterable[tuple[str, bool]]:
        found = db.execute(
            f"SELECT {_AT}, {THERE} FROM {self._images} "
            f"WHERE {_AT} >= {(above + 1) * _ROOM} AND {THERE} < 0 ORDER BY {_AT} DESC"
        ).fetchall()
        for first, what in found:
            images = f"FROM {self._images} WHERE {_AT} > {first} AND {_AT} < {first + _ROOM}"
            if what == PART:  # a row that changed twice has two: the first is from before the step
                images = (
                    f"FROM {self._images} WHERE {_AT} IN (SELECT min({_AT}) {images} "
                    f"GROUP BY {list_of(self._key)})"
                )
            yield images, what == WHOLE

    def _remove_tagged(
        self, db: sqlite3.Connection, cut: Position, then: RewindHistory, now: RewindHistory
    ) -> None:
        if not {*TAGS} <= {*self._columns(db, self._table)}:
            return
        for lineage, above in then.gone(now):
            where = "_lineage = ? AND _epoch > ?"
            db.execute(f"DELETE FROM {self._table} WHERE {where}", (lineage, above))

    @staticmethod
    def _columns(db: sqlite3.Connection, table: str) -> list[str]:
        """Without the columns that images add; empty if there is no such table."""
        rows = db.execute(f"PRAGMA table_info({table})").fetchall()
        return [row[1] for row in rows if row[1] not in (_AT, THERE)]
