"""Rows in a table of an SQLite database, published by one transaction for each epoch."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from onceflow.contract.ledger import (
    Committable,
    Ledger,
    Outcome,
    Position,
    Publication,
    staged_file_gone,
)
from onceflow.contract.schema import columns, leaf_types, refuse_difference
from onceflow.errors import JobError, PublishFailed, SchemaMismatch
from onceflow.faults.points import reach
from onceflow.sqlite.connection import Database
from onceflow.sqlite.ledger import SqliteLedger
from onceflow.sqlite.undo import TAGS, SqliteUndo
from onceflow.sqlite.values import (
    affinity,
    count_unstorable,
    may_be_unstorable,
    sqlite_type,
    sqlite_values,
)
from onceflow.tables.names import definitions, list_of, on_conflict, quote
from onceflow.tables.sink import TableSink

_NO_FORM = re.compile(r"time\(|variant|interval|void|geometry|geography").match


class Sqlite(TableSink):
    """Every row of a decided epoch is in the table exactly once; readers see whole epochs only.

    The sink does not notice rows that somebody else writes into the table. SQLite has no NaN (it
    becomes NULL), and only integers, doubles, text and bytes: timestamps are text in UTC, decimals
    and dates are text, nested values are JSON text. Text that is not UTF-8 and times before the
    year 1 or after 9999 (SQLite's own functions for dates end there) stop the job before the epoch
    is decided.

    Without `key`: append; each row is tagged with `_lineage` and `_epoch`. With `key`: upsert;
    if an epoch has several rows of one key, the one staged last stays. The sink creates the table
    if there is none. A second table keeps the rows that the last `keep_before` epochs changed as
    they were before, so that these epochs can be taken back (rows that are only appended need no
    copy); with 0 nothing is kept and nothing can be taken back. Changes that somebody else made to
    such rows are lost when they are taken back.
    """

    kind = "sqlite"
    place = "path"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        table: str,
        key: str | Iterable[str] = (),
        timeout: float = 30.0,
        keep_before: int = 100,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", table) or table.startswith("_onceflow"):
            raise JobError(f"{table!r} is not a name for a table", hint="use letters and digits")
        super().__init__(table, key, keep_before)
        self.path = Path(os.path.abspath(path))
        self._database = Database(self.path, str(self), timeout)
        self._ledger = SqliteLedger(table, str(self))
        self._undo: SqliteUndo = SqliteUndo(str(self), table, self.key, keep_before)

    def __str__(self) -> str:
        return f"Sqlite({str(self.path)!r}, table={self.table!r})"

    def arguments(self) -> dict[str, Any]:
        return {
            "path": str(self.path), "table": self.table, "key": list(self.key),
            "timeout": self._database.timeout, "keep_before": self.keep_before,
        }  # fmt: skip

    # -------------------------------------------------------------- before an epoch

    def _refuse_target(self, output: str, schema: str, mode: str) -> None:
        wanted = self._columns(schema, mode)
        self._refuse_types(schema)
        taken = [name for name in columns(schema) if name.lower() in TAGS and mode == "append"]
        if taken and not self.key:
            raise JobError(f"{self} writes {', '.join(taken)} itself", hint="rename the column")
        self._refuse_creation(wanted, images=not self._undo.is_tagged(mode))
        if not self.path.exists():
            return
        with self._database.reading() as db:
            self._ledger.refuse_other_owner(db, output)
            have = self._have(db)
            if have:
                refuse_difference(str(self), have, wanted)
                self._refuse_other_key(db)

    def _doubtful(self, files: Iterable[Committable], schema: str) -> Iterator[Any]:
        kinds = leaf_types(schema)
        names = [n for n in kinds if n in self.key or any(map(may_be_unstorable, kinds[n]))]
        for file in files if names else ():
            yield from _batches(file.path, names)

    def _unstorable_in(self, schema: str) -> Callable[[Any], Counter[str]]:
        return partial(count_unstorable, key=self.key)

    # -------------------------------------------------------------- ledger and publish

    def published(self, output: str) -> Ledger:
        if not self.path.exists():
            return Ledger()
        with self._database.reading() as db:
            return self._ledger.read(db, output)

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        with self._database.writing() as db:
            self._ledger.ensure(db)
            if self._keeps_images:
                self._undo.ensure(db)
            return self._ledger.fence(db, output, term=term, token=token)

    def publish(self, publication: Publication) -> Outcome:
        with self._database.writing() as db:
            outcome = self._publish(db, publication, partial(self._write_exactly, db, publication))
        if outcome is Outcome.PUBLISHED:
            reach("sqlite.committed")
        return outcome

    def _write_exactly(
        self, db: sqlite3.Connection, publication: Publication, ledger: Ledger
    ) -> None:
        if ledger.position is not None and not self._have(db):
            raise self._gone()
        step = None
        if self._keeps_images:
            names = list(self._columns(publication.schema, publication.mode))
            step = self._undo.note(db, publication, names)
        rows = self._write(db, publication, step)
        if rows != publication.rows:
            raise PublishFailed(
                f"{self}: the staged files of epoch {publication.epoch} have {rows} rows, "
                f"but {publication.rows} were decided",
                hint="the staged files were changed; put them back from a backup",
            )

    def add(self, publication: Publication) -> None:
        if all(os.path.exists(file.path) for file in publication.files):
            with self._database.writing() as db:
                self._write(db, publication, None)

    def rewind(self, output: str, *, cut: Position, to: Position, term: int, decision: str) -> None:
        with self._database.writing() as db:
            if self._ledger.read(db, output).position is not None and not self._have(db):
                raise self._gone()
            self._rewind(db, output, cut=cut, to=to, term=term, decision=decision)
            reach("sqlite.rewound")

    def refuse_rewind(self, output: str, cut: Position) -> None:
        if not self.path.exists():
            raise self._gone()
        with self._database.reading() as db:
            self._undo.back_to(db, output, cut)

    def _write(self, db: sqlite3.Connection, publication: Publication, step: int | None) -> int:
        """Write the rows. With a `step`: first keep the rows that they change."""
        wanted = self._columns(publication.schema, publication.mode)
        self._create(db, wanted)
        if step is not None and not self._undo.is_tagged(publication.mode):
            self._undo.watch(db, step, publication.mode, list(wanted))
        if publication.mode == "complete":
            db.execute(f"DELETE FROM {self.table}")
        marks = ", ".join("?" * len(wanted))
        insert = f"INSERT INTO {self.table} ({list_of(wanted)}) VALUES ({marks})"
        if self.key:
            insert += f" {on_conflict(self.key, wanted)}"
        return self._fill(db, publication, insert)

    def _fill(self, db: sqlite3.Connection, publication: Publication, insert: str) -> int:
        kinds, count = columns(publication.schema), 0
        tagged = self._undo.is_tagged(publication.mode)
        tags = (publication.lineage, publication.epoch) if tagged else ()
        for file in publication.files:
            if not os.path.exists(file.path):
                raise staged_file_gone(str(self), file.path, publication.epoch)
            for batch in _batches(file.path):
                lists = [sqlite_values(batch.column(name), kinds[name]) for name in kinds]
                db.executemany(insert, (row + tags for row in zip(*lists, strict=True)))
                count += batch.num_rows
        return count

    # -------------------------------------------------------------- the table

    def _refuse_types(self, schema: str) -> None:
        """Refuse types that SQLite cannot store: a decided epoch must be publishable."""
        kinds = columns(schema)
        wrong = [
            f"{name} ({kinds[name]})"
            for name, leaves in leaf_types(schema).items()
            if any(map(_NO_FORM, leaves))
        ]
        if wrong:
            raise JobError(
                f"{self} cannot store column {', '.join(wrong)}",
                hint="cast it, for instance to string",
            )

    def _columns(self, schema: str, mode: str) -> dict[str, str]:
        kinds = {name: sqlite_type(kind) for name, kind in columns(schema).items()}
        return {**kinds, **TAGS} if self._undo.is_tagged(mode) else kinds

    def _create(self, db: sqlite3.Connection, wanted: dict[str, str]) -> None:
        body = definitions(wanted)
        if self.key:
            body += f", PRIMARY KEY ({list_of(self.key)})"
        db.execute(f"CREATE TABLE IF NOT EXISTS {self.table} ({body})")

    def _refuse_creation(self, wanted: dict[str, str], *, images: bool) -> None:
        """Create such a table in memory, to see whether it is possible: the real one is created
        with the first epoch, which is decided by then."""
        try:
            with contextlib.closing(sqlite3.connect(":memory:")) as db:
                self._create(db, wanted)
                if images and self._keeps_images:
                    self._undo.make(db, list(wanted))
        except (sqlite3.Error, UnicodeError) as error:
            raise JobError(
                f"{self} cannot be created: {error}",
                hint="choose other names for table and columns, or fewer columns",
            ) from error

    def _have(self, db: sqlite3.Connection) -> dict[str, str]:
        rows = db.execute(f"PRAGMA table_info({self.table})").fetchall()
        return {row[1]: affinity(row[2]) for row in rows}

    def _refuse_other_key(self, db: sqlite3.Connection) -> None:
        """ON CONFLICT (key) needs a unique index over all rows, of just these columns."""
        indexes = db.execute(f"PRAGMA index_list({self.table})").fetchall()
        unique = [
            {(row[2], row[4]) for row in self._pragma(db, "index_xinfo", index[1]) if row[5]}
            for index in indexes
            if index[2] and not index[4]  # not a partial one
        ]
        primary = [row for row in self._pragma(db, "table_info", self.table) if row[5]]
        if len(primary) == 1 and primary[0][2].upper() == "INTEGER":
            unique.append({(primary[0][1], "BINARY")})  # the row id, which has no index
        if self.key and {(name, "BINARY") for name in self.key} not in unique:
            raise SchemaMismatch(
                f"{self}: the table has no unique index on ({', '.join(self.key)})",
                hint=f"CREATE UNIQUE INDEX {self.table}_key ON {self.table} ({list_of(self.key)})",
            )

    @staticmethod
    def _pragma(db: sqlite3.Connection, name: str, of: str) -> list[Any]:
        return db.execute(f"PRAGMA {name}({quote(of)})").fetchall()


def _batches(path: str, names: list[str] | None = None) -> Iterator[Any]:
    import pyarrow.parquet as pq

    yield from pq.ParquetFile(path).iter_batches(batch_size=20_000, columns=names)
