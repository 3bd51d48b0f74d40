"""Undo in a table of PostgreSQL: see `tables/undo.py`.

Images and histories are in the schema of the table. Rows of a table without a key carry their
epoch in the `epoch_column`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onceflow.contract.ledger import Position
from onceflow.errors import JobError, TargetBehind, TargetError
from onceflow.postgres.table import (
    LONGEST_NAME,
    Table,
    ensure_table,
    exists,
    lacking,
    may_create,
    refuse_rights,
)
from onceflow.tables.names import list_of, quote
from onceflow.tables.rewind_history import RewindHistory
from onceflow.tables.undo import HISTORIES, THERE, WHOLE, Undo

if TYPE_CHECKING:
    from onceflow.postgres.connection import Db

STEP = "_onceflow_step"
_MOST_COLUMNS = 1600
_OFF = "or choose keep_before=0: then nothing can be taken back"


class PostgresUndo(Undo):
    mark = "%s"

    def __init__(self, target: str, table: Table, keep: int) -> None:
        schema = quote(table.schema)
        super().__init__(
            target,
            table=table.sql,
            images=f"{schema}.{quote(images_of(table.name))}",
            histories=f"{schema}.{HISTORIES}",
            key=table.key,
            keep=keep,
        )
        self._place = table

    # -------------------------------------------------------------- before an epoch

    def refuse(self, db: Db, wanted: Sequence[str], mode: str) -> None:
        """Say which rights are missing."""
        needed = {self._histories: ["SELECT", "INSERT", "UPDATE"]}
        if not self.is_tagged(mode):
            needed[self._images] = ["SELECT", "INSERT", "DELETE"]
            if len(wanted) > _MOST_COLUMNS - 2:
                raise JobError(
                    f"{self._target}: the rows have too many columns for a table that keeps what "
                    "epochs change",
                    hint=f"write at most {_MOST_COLUMNS - 2} columns, {_OFF}",
                )
            if self._place.exists(db):
                refuse_rights(db, self._table, ["SELECT"])
        for table, rights in needed.items():
            if exists(db, table):
                refuse_rights(db, table, rights)
            elif not may_create(db, self._place.schema):
                error = lacking(db, f"CREATE ON SCHEMA {quote(self._place.schema)}")
                raise TargetError(
                    f"{error.message}, for {table}, which is needed to take epochs back",
                    hint=f"{error.hint} {_OFF}",
                )
        have, fits = self._shape(db, wanted)
        if self._images in needed and have and not fits and not _owns(db, self._images):
            raise TargetError(
                f"{self._images}, which is needed to take epochs back, has other columns than the "
                "rows, and belongs to another role",
                hint=f"DROP TABLE {self._images}; and create it again (docs/postgres.md), {_OFF}",
            )

    def ensure(self, db: Db) -> None:
        ensure_table(db, self._histories, "output text PRIMARY KEY, steps jsonb NOT NULL")

    # -------------------------------------------------------------- publishing

    def make(self, db: Db, names: Sequence[str]) -> bool:
        have, fits = self._shape(db, names)
        if have and fits:
            return True
        db.execute(f"DROP TABLE IF EXISTS {self._images}")
        db.execute(
            f"CREATE TABLE {self._images} AS SELECT NULL::bigint AS {STEP}, "
            f"NULL::smallint AS {THERE}, {list_of(names)} FROM {self._table} WITH NO DATA"
        )
        db.execute(f"CREATE INDEX ON {self._images} USING brin ({STEP})")
        return False

    def _shape(self, db: Db, wanted: Sequence[str]) -> tuple[bool, bool]:
        """Is there a table of images? Has it just our columns, with the types of the table?"""
        have, types = _kinds(db, self._images, self._table)
        return bool(have), not types or have == {name: types.get(name) for name in wanted}

    def keep(self, db: Db, step: int, mode: str, names: Sequence[str], new: str | None) -> None:
        """Keep the rows that those in table `new` will change; in complete mode all rows."""
        into = f"INSERT INTO {self._images} ({STEP}, {THERE}, {list_of(names)})"
        if mode == "complete":
            db.execute(f"INSERT INTO {self._images} ({STEP}, {THERE}) VALUES ({step}, {WHOLE})")
            db.execute(f"{into} SELECT {step}, 1, {list_of(names)} FROM {self._table}")
            return
        keys = list_of(self._key)
        theirs = ", ".join(f"{'k' if name in self._key else 't'}.{quote(name)}" for name in names)
        db.execute(
            f"{into} SELECT {step}, (t.{quote(self._key[0])} IS NOT NULL)::int, {theirs} "
            f"FROM (SELECT DISTINCT {keys} FROM {new}) k LEFT JOIN {self._table} t USING ({keys})"
        )

    # -------------------------------------------------------------- going back

    def back_to(self, db: Db, output: str, cut: Position) -> RewindHistory:
        back = super().back_to(db, output, cut)
        if not self._place.exists(db):
            raise TargetBehind(
                f"{self._target}: the table is gone, with all its epochs",
                hint="bring back the table as it was, or write to a new one",
            )
        more = ["INSERT", "UPDATE"] if self._key else ["INSERT"]
        refuse_rights(db, self._table, ["SELECT", "DELETE", *more])
        return back

    def _has_histories(self, db: Db) -> bool:
        return exists(db, self._histories)

    def _has_images(self, db: Db) -> bool:
        return exists(db, self._images)

    def _shared_columns(self, db: Db) -> list[str]:
        images, table = _kinds(db, self._images, self._table)
        return [name for name in images if name in table]

    def _drop(self, db: Db, *, up_to: int = -1, since: int) -> None:
        db.execute(f"DELETE FROM {self._images} WHERE {STEP} <= {up_to} OR {STEP} >= {since}")

    def _kept(self, db: Db, above: int) -> Iterable[tuple[str, bool]]:
        found = db.execute(
            f"SELECT {STEP}, min({THERE}) FROM {self._images} WHERE {STEP} > {above} "
            f"GROUP BY {STEP} ORDER BY {STEP} DESC"
        ).fetchall()
        for number, there in found:
            yield f"FROM {self._images} WHERE {STEP} = {number}", there == WHOLE

    def _remove_tagged(
        self, db: Db, cut: Position, then: RewindHistory, now: RewindHistory
    ) -> None:
        column = self._place.epoch_column
        if column is not None:
            db.execute(f"DELETE FROM {self._table} WHERE {quote(column)} > {cut.epoch}")


def images_of(table: str) -> str:
    """The name of the table that keeps what epochs changed in this one."""
    name = f"_onceflow_before_{table}"
    if len(name.encode()) <= LONGEST_NAME:
        return name
    return f"_onceflow_before_{hashlib.blake2b(table.encode(), digest_size=12).hexdigest()}"


def _owns(db: Db, table: str) -> bool:
    """Does our role own the table, or is it a member of the role that does?"""
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
