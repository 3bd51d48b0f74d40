"""Taking back epochs from a table of SQLite: what they change is kept for a while, as it was.

    _onceflow_rewind            for each output: the steps by which it came to where it is
    _onceflow_before_<table>    what a step changed, as it was before: the row, or that it was not
                                there; in complete mode the whole table

Going back, images are put back step by step, the newest first. Rows of a table without a key carry
their epoch, so they are just removed. All of it is written in the transaction that publishes.

The images of a step follow a row of its own, in the order in which they are made; so the row id
says of which step they are, and no index is needed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from onceflow.contract.ledger import Position, Publication
from onceflow.errors import TargetBehind
from onceflow.tables.names import PART, THERE, WHOLE, quote
from onceflow.tables.rewind_history import Steps

TAGS = {"_lineage": "TEXT", "_epoch": "INTEGER"}  # of rows without a key
_AT = "_onceflow_at"  # step * _ROOM + place
_ROOM = 2**32
_NOTES = "_onceflow_rewind"


class Before:
    """The images of one table. All calls are inside a transaction of the caller's."""

    def __init__(self, target: str, table: str, key: Sequence[str], steps: int) -> None:
        self._target = target  # for messages
        self._table, self._key, self._most = table, tuple(key), steps
        self._images = quote(f"_onceflow_before_{table.lower()}")

    @staticmethod
    def ensure(db: sqlite3.Connection) -> None:
        db.execute(
            f"CREATE TABLE IF NOT EXISTS {_NOTES} (output TEXT PRIMARY KEY, steps TEXT) STRICT"
        )

    # -------------------------------------------------------------- publishing

    def note(
        self,
        db: sqlite3.Connection,
        publication: Publication,
        names: Sequence[str],
        *,
        tagged: bool,
    ) -> int:
        """Note that this is published; the number of the step. Images that are too old go."""
        steps = self._steps(db, publication.output).after(publication)
        if not tagged:
            steps = steps.forgetting(steps.done - self._most)
            if not self.make(db, names):
                steps = steps.forgetting(steps.done - 1)
            old, nobodys = (steps.known + 1) * _ROOM, steps.done * _ROOM
            db.execute(f"DELETE FROM {self._images} WHERE {_AT} < {old} OR {_AT} >= {nobodys}")
        self._write(db, publication.output, steps)
        return steps.done

    def begin(self, db: sqlite3.Connection, step: int, mode: str, names: Sequence[str]) -> None:
        """Keep what the rows that are written from here on change."""
        whole = mode == "complete"
        place = f"{step * _ROOM}, {WHOLE if whole else PART}"
        db.execute(f"INSERT INTO {self._images} ({_AT}, {THERE}) VALUES ({place})")
        into = f"INSERT INTO {self._images} ({THERE}, {_list(names)})"
        if whole:
            db.execute(f"{into} SELECT 1, {_list(names)} FROM {self._table}")
            return
        # Triggers of this connection alone, which is closed with the transaction.
        added = f"INSERT INTO {self._images} ({THERE}, {_list(self._key)})"
        for event, keep in {
            "BEFORE UPDATE": f"{into} VALUES (1, {_list(names, 'OLD.')})",
            "AFTER INSERT": f"{added} VALUES (0, {_list(self._key, 'NEW.')})",
        }.items():
            name = quote(f"_onceflow {event}")
            db.execute(f"CREATE TEMP TRIGGER {name} {event} ON {self._table} BEGIN {keep}; END")

    def make(self, db: sqlite3.Connection, names: Sequence[str]) -> bool:
        """False if images begin here: there were none, or those of a table of another shape.
        Their columns have no type: values stay what they are."""
        have = self._columns(db)
        if have and {*have} == {*names}:
            return True
        db.execute(f"DROP TABLE IF EXISTS {self._images}")
        body = f"{_AT} INTEGER PRIMARY KEY, {_list([THERE, *names])}"
        db.execute(f"CREATE TABLE {self._images} ({body})")
        return False

    # -------------------------------------------------------------- going back

    def back_to(self, db: sqlite3.Connection, output: str, cut: Position) -> Steps:
        """The steps as they were at the cut; says why one cannot go back to there."""
        steps = self._steps(db, output)
        back = steps.back_to(cut, self._target)
        if self._key and back.done < steps.done and not self._columns(db):
            raise TargetBehind(
                f"{self._target}: what its epochs changed is gone ({self._images} was dropped)",
                hint="bring back the database as it was, or choose --published skip",
            )
        return back

    def rewind(
        self, db: sqlite3.Connection, output: str, cut: Position, to: Position, have: Sequence[str]
    ) -> None:
        """Bring the table back to what it was at the cut; `have`: the columns that it has."""
        back = self.back_to(db, output, cut)
        if self._columns(db):
            self._bring_back(db, back.done, have)
        if not self._key and {*TAGS} <= {*have}:
            for lineage, above in back.gone(self._steps(db, output)):
                where = "_lineage = ? AND _epoch > ?"
                db.execute(f"DELETE FROM {self._table} WHERE {where}", (lineage, above))
        self._write(db, output, back.begin(to))

    def _bring_back(self, db: sqlite3.Connection, step: int, have: Sequence[str]) -> None:
        names = [name for name in self._columns(db) if name in have]
        rest = [name for name in names if name not in self._key]
        sets = ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in rest)
        keys = _list(self._key)
        found = db.execute(
            f"SELECT {_AT}, {THERE} FROM {self._images} "
            f"WHERE {_AT} >= {(step + 1) * _ROOM} AND {THERE} < 0 ORDER BY {_AT} DESC"
        ).fetchall()
        for first, what in found:
            images = f"FROM {self._images} WHERE {_AT} > {first} AND {_AT} < {first + _ROOM}"
            if what == PART:  # of several of a row, the first is of before the step
                images = (
                    f"FROM {self._images} WHERE {_AT} IN (SELECT min({_AT}) {images} "
                    f"GROUP BY {keys})"
                )
            put = f"INSERT INTO {self._table} ({_list(names)}) SELECT {_list(names)} {images}"
            if what == WHOLE:
                db.execute(f"DELETE FROM {self._table}")
                db.execute(put)
            else:
                new = f"SELECT {keys} {images} AND {THERE} = 0"
                db.execute(f"DELETE FROM {self._table} WHERE ({keys}) IN ({new})")
                act = f"UPDATE SET {sets}" if rest else "NOTHING"
                db.execute(f"{put} AND {THERE} = 1 ON CONFLICT ({keys}) DO {act}")
        db.execute(f"DELETE FROM {self._images} WHERE {_AT} >= {(step + 1) * _ROOM}")

    # -------------------------------------------------------------- what is kept

    def _columns(self, db: sqlite3.Connection) -> list[str]:
        """Of the images; empty if there are none."""
        rows = db.execute(f"PRAGMA table_info({self._images})").fetchall()
        return [row[1] for row in rows if row[1] not in (_AT, THERE)]

    @staticmethod
    def _steps(db: sqlite3.Connection, output: str) -> Steps:
        if not db.execute(f"PRAGMA table_info({_NOTES})").fetchall():
            return Steps()
        row = db.execute(f"SELECT steps FROM {_NOTES} WHERE output = ?", (output,)).fetchone()
        return Steps.of(json.loads(row[0])) if row else Steps()

    @staticmethod
    def _write(db: sqlite3.Connection, output: str, steps: Steps) -> None:
        db.execute(
            f"INSERT INTO {_NOTES} VALUES (?, ?) ON CONFLICT (output) DO UPDATE "
            "SET steps = excluded.steps",
            (output, json.dumps(steps.as_json())),
        )


def _list(names: Sequence[str], of: str = "") -> str:
    return ", ".join(f"{of}{quote(name)}" for name in names)
