"""Taking back epochs from a table of PostgreSQL: as `sqlite_before.py`, with the same tables.

They are in the schema of the target. Rows of a table without a key carry their epoch in the
`epoch_column`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onceflow.contract.ledger import Position, Publication
from onceflow.errors import JobError, TargetBehind, TargetError
from onceflow.postgres.connection import client
from onceflow.postgres.table import LONGEST_NAME, Table, exists, lacking, may_create, refuse_rights
from onceflow.tables.names import THERE, WHOLE, quote
from onceflow.tables.rewind_history import Steps

if TYPE_CHECKING:
    from onceflow.postgres.connection import Db

STEP = "_onceflow_step"
_NOTES = "_onceflow_rewind"
_MOST_COLUMNS = 1600
_OFF = "or choose keep_before=0, and nothing can be taken back"


class Before:
    """The images of one table. What writes is inside a transaction of the caller's."""

    def __init__(self, target: str, table: Table, steps: int) -> None:
        self._target = target  # for messages
        self._table, self._most = table, steps
        self._notes = f"{quote(table.schema)}.{_NOTES}"
        self._images = f"{quote(table.schema)}.{quote(images_of(table.name))}"

    def tags(self, mode: str) -> bool:
        """Do rows carry their epoch, and nothing else changes?"""
        return mode == "append" and not self._table.key

    # -------------------------------------------------------------- before an epoch

    def refuse(self, db: Db, wanted: Sequence[str], mode: str) -> None:
        """Say which rights are missing."""
        needed = {self._notes: ["SELECT", "INSERT", "UPDATE"]}
        if not self.tags(mode):
            needed[self._images] = ["SELECT", "INSERT", "DELETE"]
            if len(wanted) > _MOST_COLUMNS - 2:
                raise JobError(
                    f"{self._target}: a table of so many columns cannot have one beside it that "
                    "keeps what its epochs change",
                    hint=f"write at most {_MOST_COLUMNS - 2} columns, {_OFF}",
                )
            if self._table.exists(db):
                refuse_rights(db, self._table.sql, ["SELECT"])
        for table, rights in needed.items():
            if exists(db, table):
                refuse_rights(db, table, rights)
            elif not may_create(db, self._table.schema):
                error = lacking(db, f"CREATE ON SCHEMA {quote(self._table.schema)}")
                raise TargetError(
                    f"{error.message}, for {table}, by which epochs can be taken back",
                    hint=f"{error.hint} {_OFF}",
                )
        have, fits = self._shape(db, wanted)
        if self._images in needed and have and not fits and not _owns(db, self._images):
            raise TargetError(
                f"{self._images}, by which epochs can be taken back, has other columns than the "
                "rows, and belongs to another role",
                hint=f"DROP TABLE {self._images}; and make it again (docs/postgres.md), {_OFF}",
            )

    def ensure(self, db: Db) -> None:
        errors = client().errors
        if not exists(db, self._notes):
            # somebody else may do so at the same time
            with contextlib.suppress(errors.DuplicateTable, errors.UniqueViolation):
                db.execute(
                    f"CREATE TABLE IF NOT EXISTS {self._notes} "
                    "(output text PRIMARY KEY, steps jsonb NOT NULL)"
                )

    # -------------------------------------------------------------- publishing

    def keep(self, db: Db, publication: Publication, names: Sequence[str], new: str | None) -> None:
        """Note that this is published, and keep what the rows in table `new` are about to change.
        Images that are too old go."""
        steps = self._read(db, publication.output).after(publication)
        if not self.tags(publication.mode):
            steps = steps.forgetting(steps.done - self._most)
            if not self._make(db, names):
                steps = steps.forgetting(steps.done - 1)
            gone = f"{STEP} <= {steps.known} OR {STEP} >= {steps.done}"  # the latter: of nobody
            db.execute(f"DELETE FROM {self._images} WHERE {gone}")
            self._keep(db, steps.done, publication.mode, names, new)
        self._write(db, publication.output, steps)

    def _make(self, db: Db, wanted: Sequence[str]) -> bool:
        """False if images begin here: there were none, or those of a table of another shape."""
        have, fits = self._shape(db, wanted)
        if have and fits:
            return True
        db.execute(f"DROP TABLE IF EXISTS {self._images}")
        db.execute(
            f"CREATE TABLE {self._images} AS SELECT NULL::bigint AS {STEP}, "
            f"NULL::smallint AS {THERE}, {_list(wanted)} FROM {self._table.sql} WITH NO DATA"
        )
        db.execute(f"CREATE INDEX ON {self._images} USING brin ({STEP})")
        return False

    def _shape(self, db: Db, wanted: Sequence[str]) -> tuple[bool, bool]:
        """Are there images? Have they just the columns that we write, with the table's types?"""
        have, types = _kinds(db, self._images, self._table.sql)
        return bool(have), not types or have == {name: types.get(name) for name in wanted}

    def _keep(self, db: Db, step: int, mode: str, names: Sequence[str], new: str | None) -> None:
        into = f"INSERT INTO {self._images} ({STEP}, {THERE}, {_list(names)})"
        if mode == "complete":
            db.execute(f"INSERT INTO {self._images} ({STEP}, {THERE}) VALUES ({step}, {WHOLE})")
            db.execute(f"{into} SELECT {step}, 1, {_list(names)} FROM {self._table.sql}")
            return
        key, keys = self._table.key, _list(self._table.key)
        theirs = ", ".join(f"{'k' if name in key else 't'}.{quote(name)}" for name in names)
        db.execute(
            f"{into} SELECT {step}, (t.{quote(key[0])} IS NOT NULL)::int, {theirs} "
            f"FROM (SELECT DISTINCT {keys} FROM {new}) k LEFT JOIN {self._table.sql} t "
            f"USING ({keys})"
        )

    # -------------------------------------------------------------- going back

    def back_to(self, db: Db, output: str, cut: Position) -> Steps:
        """The steps as they were at the cut; says why one cannot go back to there."""
        steps = self._steps(db, output)
        back = steps.back_to(cut, self._target)
        if not self._table.exists(db):
            raise TargetBehind(
                f"{self._target}: the table is gone, with the epochs that it had",
                hint="bring back the table as it was, or write to a new one",
            )
        if self._table.key and back.done < steps.done and not exists(db, self._images):
            raise TargetBehind(
                f"{self._target}: what its epochs changed is gone ({self._images} was dropped)",
                hint="bring back the database as it was, or choose --published skip",
            )
        more = ["INSERT", "UPDATE"] if self._table.key else ["INSERT"]
        refuse_rights(db, self._table.sql, ["SELECT", "DELETE", *more])
        return back

    def rewind(self, db: Db, output: str, cut: Position, to: Position) -> None:
        """Bring the table back to what it was at the cut."""
        back, column = self.back_to(db, output, cut), self._table.epoch_column
        if exists(db, self._images):
            self._bring_back(db, back.done)
        if not self._table.key and column is not None:
            db.execute(f"DELETE FROM {self._table.sql} WHERE {quote(column)} > {cut.epoch}")
        self._write(db, output, back.begin(to))

    def _bring_back(self, db: Db, step: int) -> None:
        kept, have = _kinds(db, self._images, self._table.sql)
        names = [name for name in kept if name in have]
        key, table = self._table.key, self._table.sql
        rest = [name for name in names if name not in key]
        sets = ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in rest)
        found = db.execute(
            f"SELECT {STEP}, min({THERE}) FROM {self._images} WHERE {STEP} > {step} "
            f"GROUP BY {STEP} ORDER BY {STEP} DESC"
        ).fetchall()
        for number, there in found:
            images = f"FROM {self._images} WHERE {STEP} = {number}"
            put = f"INSERT INTO {table} ({_list(names)}) SELECT {_list(names)} {images}"
            if there == WHOLE:
                db.execute(f"DELETE FROM {table}")
                db.execute(f"{put} AND {THERE} = 1")
            else:
                new = f"SELECT {_list(key)} {images} AND {THERE} = 0"
                db.execute(f"DELETE FROM {table} WHERE ({_list(key)}) IN ({new})")
                act = f"UPDATE SET {sets}" if rest else "NOTHING"
                db.execute(f"{put} AND {THERE} = 1 ON CONFLICT ({_list(key)}) DO {act}")
        db.execute(f"DELETE FROM {self._images} WHERE {STEP} > {step}")

    # -------------------------------------------------------------- what is kept

    def _steps(self, db: Db, output: str) -> Steps:
        return self._read(db, output) if exists(db, self._notes) else Steps()

    def _read(self, db: Db, output: str) -> Steps:
        row = db.execute(f"SELECT steps FROM {self._notes} WHERE output = %s", (output,)).fetchone()
        return Steps.of(row[0]) if row else Steps()

    def _write(self, db: Db, output: str, steps: Steps) -> None:
        db.execute(
            f"INSERT INTO {self._notes} VALUES (%s, %s::jsonb) ON CONFLICT (output) DO UPDATE "
            "SET steps = excluded.steps",
            (output, json.dumps(steps.as_json())),
        )


def images_of(table: str) -> str:
    """The name of the table that keeps what epochs changed in this one."""
    name = f"_onceflow_before_{table}"
    if len(name.encode()) <= LONGEST_NAME:
        return name
    return f"_onceflow_before_{hashlib.blake2b(table.encode(), digest_size=12).hexdigest()}"


def _owns(db: Db, table: str) -> bool:
    """Or is a member of the role that does."""
    row = db.execute(
        "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass(%s)", (table,)
    ).fetchone()
    return bool(row and row[0])


def _kinds(db: Db, *tables: str) -> list[dict[str, str]]:
    """For each table column -> type; empty if there is no such table."""
    found: list[dict[str, str]] = [{} for _ in tables]
    rows = db.execute(
        "SELECT place, attname, format_type(atttypid, atttypmod) "
        "FROM unnest(%s::text[]) WITH ORDINALITY AS t (name, place) "
        "JOIN pg_attribute ON attrelid = to_regclass(t.name) "
        "WHERE attnum > 0 AND NOT attisdropped ORDER BY attnum",
        (list(tables),),
    ).fetchall()
    for place, name, kind in rows:
        if name not in (STEP, THERE):
            found[place - 1][name] = kind
    return found


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(quote, names))
