"""Rows in a table of an SQLite database, published by one transaction for each epoch."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from onceflow.contract.abilities import CanAdd, CanRefuseRows, CanRewind, CanStage, Staged
from onceflow.contract.ledger import (
    Committable,
    Ledger,
    Outcome,
    Position,
    Publication,
    Verdict,
    judge,
    staged_file_gone,
)
from onceflow.contract.schema import columns, leaf_types, refuse_difference
from onceflow.contract.sink import Sink
from onceflow.contract.unstorable import refuse_unstorable, unstorable_rows
from onceflow.errors import (
    DiskFull,
    Fenced,
    JobError,
    PublishFailed,
    PublishUnknown,
    SchemaMismatch,
    TargetBehind,
    TargetError,
    TargetForeign,
)
from onceflow.faults.points import reach
from onceflow.sqlite.undo import TAGS, Before
from onceflow.sqlite.values import affinity, may_be_unfit, sqlite_type, sqlite_unfit, sqlite_values
from onceflow.store.posix import make_dirs
from onceflow.tables.names import quote

_NO_SPACE = 2**20  # bytes; an I/O error with less left than this is a full disk
_LEDGER = "_onceflow_ledger"
_NO_FORM = re.compile(r"time\(|variant|interval|void|geometry|geography").match


class Sqlite(Sink, CanStage, CanRefuseRows, CanAdd, CanRewind):
    """Every row of a decided epoch is in the table exactly once; readers see whole epochs only.

    Rows that somebody else writes into the table are not noticed. SQLite has no NaN (it becomes
    NULL), and only integers, doubles, text and bytes: timestamps are text in UTC, decimals and
    dates are text, nested values are JSON text. Text that is not UTF-8 and times before the year
    1 or after 9999 (SQLite's own functions for dates end there) stop the job before the epoch is
    decided.

    Without `key`: append; each row is tagged with `_lineage` and `_epoch`. With `key`: upsert;
    if an epoch has several rows of one key, the one staged last stays. The table is created if
    it is not there. What the last `keep_before` epochs changed is kept as it was, in a table beside
    it, so that they can be taken back (rows that are only appended need no such copy); 0: keep
    nothing, take nothing back. What somebody else changed in such rows is taken back with them.
    """

    kind = "sqlite"
    modes = ("append", "update", "complete")
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
        if keep_before < 0:
            raise JobError(f"keep_before={keep_before}: there is no such number of epochs")
        self.path = Path(os.path.abspath(path))
        self.table = table
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.timeout = timeout
        self.keep_before = keep_before
        self.no_rewind = "" if keep_before else "keep_before=0 keeps nothing of what it changes"
        self._before = Before(str(self), table, self.key, keep_before)

    def __str__(self) -> str:
        return f"Sqlite({str(self.path)!r}, table={self.table!r})"

    def arguments(self) -> dict[str, Any]:
        return {
            "path": str(self.path), "table": self.table, "key": list(self.key),
            "timeout": self.timeout, "keep_before": self.keep_before,
        }  # fmt: skip

    # -------------------------------------------------------------- before an epoch

    def prepare(self, output: str, schema: str, mode: str) -> None:
        self.refuse_mode(mode)
        if mode == "update" and not self.key:
            raise JobError(
                f"{self} has no key, so it cannot take output mode 'update'",
                hint="name the key: Sqlite(path, table=…, key=[…])",
            )
        wanted = self._columns(schema, mode)
        self._refuse_types(schema)
        missing = [name for name in self.key if name not in columns(schema)]
        if missing:
            raise JobError(f"{self}: there is no column {', '.join(missing)} to use as key")
        taken = [name for name in columns(schema) if name.lower() in TAGS and mode == "append"]
        if taken and not self.key:
            raise JobError(f"{self} writes {', '.join(taken)} itself", hint="rename the column")
        self._refuse_creation(wanted, images=not self._is_tagged(mode))
        if not self.path.exists():
            return
        with self._reading() as db:
            self._refuse_other_owner(db, output)
            have = self._have(db)
            if have:
                refuse_difference(str(self), have, wanted)
                self._refuse_other_key(db)

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        """What SQLite would refuse is refused here, before it is decided."""
        batches = self._judged(staged.files, staged.schema)
        refuse_unstorable(str(self), batches, self._unfit, self.key)
        return staged.files

    def unstorable(self, file: Committable, schema: str) -> dict[int, str]:
        return unstorable_rows(self._judged((file,), schema), self._unfit)

    def _judged(self, files: Iterable[Committable], schema: str) -> Iterator[Any]:
        """The columns that may have something unfit in them, batch by batch."""
        kinds = leaf_types(schema)
        names = [n for n in kinds if n in self.key or any(map(may_be_unfit, kinds[n]))]
        for file in files if names else ():
            yield from _batches(file.path, names)

    def _unfit(self, batch: Any) -> Counter[str]:
        return sqlite_unfit(batch, self.key)

    # -------------------------------------------------------------- ledger and publish

    def published(self, output: str) -> Ledger:
        if not self.path.exists():
            return Ledger()
        with self._reading() as db:
            return self._ledger(db, output)

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        with self._writing() as db:
            db.execute(
                f"CREATE TABLE IF NOT EXISTS {_LEDGER} (output TEXT PRIMARY KEY, "
                "target TEXT UNIQUE, term INTEGER, token TEXT, lineage TEXT, epoch INTEGER, "
                "decision TEXT) STRICT"
            )
            row = db.execute(
                f"SELECT term, token FROM {_LEDGER} WHERE output = ?", (output,)
            ).fetchone()
            if row is not None and row[0] >= term and row[1] != token:
                raise Fenced(
                    f"{self} has seen term {row[0]}, this driver has term {term}",
                    hint="another driver leads this job now",
                )
            self._refuse_other_owner(db, output)
            if self.keep_before:
                self._before.ensure(db)
            db.execute(
                f"INSERT INTO {_LEDGER} (output, target, term, token) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (output) DO UPDATE SET target = excluded.target, "
                "term = excluded.term, token = excluded.token",
                (output, self.table.lower(), term, token),
            )
            return self._ledger(db, output)

    def publish(self, publication: Publication) -> Outcome:
        with self._writing() as db:
            ledger = self._ledger(db, publication.output)
            if judge(ledger, publication, str(self)) is Verdict.ALREADY_PUBLISHED:
                return Outcome.ALREADY_PUBLISHED
            reach("sqlite.begun")
            if ledger.position is not None and not self._have(db):
                raise self._gone(ledger.position)
            tagged, step = self._is_tagged(publication.mode), None
            if self.keep_before:
                names = list(self._columns(publication.schema, publication.mode))
                step = self._before.note(db, publication, names, tagged=tagged)
            rows = self._write(db, publication, None if tagged else step)
            if rows != publication.rows:
                raise PublishFailed(
                    f"{self}: the staged files of epoch {publication.epoch} have {rows} rows, "
                    f"decided were {publication.rows}",
                    hint="the staged files were changed; put them back from a backup",
                )
            self._advance(db, publication.output, publication.position, publication.decision)
            reach("sqlite.written")
        reach("sqlite.committed")
        return Outcome.PUBLISHED

    def _advance(
        self, db: sqlite3.Connection, output: str, position: Position, decision: str
    ) -> None:
        updated = db.execute(
            f"UPDATE {_LEDGER} SET lineage = ?, epoch = ?, decision = ? WHERE output = ?",
            (position.lineage, position.epoch, decision, output),
        )
        if updated.rowcount != 1:
            raise TargetBehind(
                f"{self}: the ledger of {output} is gone",
                hint="bring back the database as it was, or write to a new one",
            )

    def rewind(self, output: str, *, cut: Position, to: Position, term: int, decision: str) -> None:
        with self._writing() as db:
            ledger = self._ledger(db, output)
            if ledger.position is not None and ledger.position.lineage == to.lineage:
                return  # done before; it may have published more since
            if ledger.term > term:
                raise Fenced(f"{self} has seen term {ledger.term}, this driver has term {term}")
            have = self._have(db)
            if ledger.position is not None and not have:
                raise self._gone(ledger.position)
            self._before.rewind(db, output, cut, to, list(have))
            self._advance(db, output, to, decision)
            reach("sqlite.rewound")

    def refuse_rewind(self, output: str, cut: Position) -> None:
        if not self.path.exists():
            raise self._gone(cut)
        with self._reading() as db:
            self._before.back_to(db, output, cut)

    def _gone(self, position: Position) -> TargetBehind:
        return TargetBehind(
            f"{self}: the table is gone, with the epochs up to {position.epoch}",
            hint="bring back the table as it was, or write to a new one",
        )

    def add(self, publication: Publication) -> None:
        if all(os.path.exists(file.path) for file in publication.files):
            with self._writing() as db:
                self._write(db, publication, None)

    def _write(self, db: sqlite3.Connection, publication: Publication, step: int | None) -> int:
        """Write the rows; with a `step`, also what they change, as it was before."""
        wanted = self._columns(publication.schema, publication.mode)
        self._create(db, wanted)
        if step is not None:
            self._before.begin(db, step, publication.mode, list(wanted))
        if publication.mode == "complete":
            db.execute(f"DELETE FROM {self.table}")
        names, marks = ", ".join(map(quote, wanted)), ", ".join("?" * len(wanted))
        insert = f"INSERT INTO {self.table} ({names}) VALUES ({marks})"
        return self._fill(db, publication, f"{insert} {self._upsert(wanted)}")

    def _upsert(self, wanted: dict[str, str]) -> str:
        if not self.key:
            return ""
        rest = [name for name in wanted if name not in self.key]
        sets = ", ".join(f"{quote(n)} = excluded.{quote(n)}" for n in rest)
        action = f"UPDATE SET {sets}" if rest else "NOTHING"
        return f"ON CONFLICT ({', '.join(map(quote, self.key))}) DO {action}"

    def _fill(self, db: sqlite3.Connection, publication: Publication, insert: str) -> int:
        kinds, count = columns(publication.schema), 0
        tagged = self._is_tagged(publication.mode)
        tags = (publication.lineage, publication.epoch) if tagged else ()
        for file in publication.files:
            if not os.path.exists(file.path):
                raise staged_file_gone(str(self), file.path, publication.epoch)
            for batch in _batches(file.path):
                lists = [sqlite_values(batch.column(name), kinds[name]) for name in kinds]
                db.executemany(insert, (row + tags for row in zip(*lists, strict=True)))
                count += batch.num_rows
        return count

    def _is_tagged(self, mode: str) -> bool:
        """Do rows carry their epoch?"""
        return mode == "append" and not self.key

    # -------------------------------------------------------------- the table

    def _refuse_types(self, schema: str) -> None:
        """A decided epoch must be publishable: what has no form here is refused before."""
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
        return {**kinds, **TAGS} if self._is_tagged(mode) else kinds

    def _create(self, db: sqlite3.Connection, wanted: dict[str, str]) -> None:
        body = ", ".join(f"{quote(name)} {kind}" for name, kind in wanted.items())
        if self.key:
            body += f", PRIMARY KEY ({', '.join(map(quote, self.key))})"
        db.execute(f"CREATE TABLE IF NOT EXISTS {self.table} ({body})")

    def _refuse_creation(self, wanted: dict[str, str], *, images: bool) -> None:
        """The table is created with the first epoch, which is decided by then: it is tried in
        memory whether there can be such a table."""
        try:
            with contextlib.closing(sqlite3.connect(":memory:")) as db:
                self._create(db, wanted)
                if images and self.keep_before:
                    self._before.make(db, list(wanted))
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
            unique.append({(primary[0][1], "BINARY")})  # the row id: it has no index
        if self.key and {(name, "BINARY") for name in self.key} not in unique:
            raise SchemaMismatch(
                f"{self}: the table has no unique index on ({', '.join(self.key)})",
                hint=f"CREATE UNIQUE INDEX {self.table}_key ON {self.table} "
                f"({', '.join(map(quote, self.key))})",
            )

    @staticmethod
    def _pragma(db: sqlite3.Connection, name: str, of: str) -> list[Any]:
        return db.execute(f"PRAGMA {name}({quote(of)})").fetchall()

    def _refuse_other_owner(self, db: sqlite3.Connection, output: str) -> None:
        if not self._has_ledger(db):
            return
        table = (self.table.lower(),)
        row = db.execute(f"SELECT output FROM {_LEDGER} WHERE target = ?", table).fetchone()
        if row is not None and row[0] != output:
            raise TargetForeign(
                f"table {self.table} in {self.path} belongs to output {row[0]}, not to {output}",
                hint="give every output a table of its own",
            )

    def _ledger(self, db: sqlite3.Connection, output: str) -> Ledger:
        if not self._has_ledger(db):
            return Ledger()
        row = db.execute(
            f"SELECT term, lineage, epoch, decision FROM {_LEDGER} WHERE output = ?", (output,)
        ).fetchone()
        if row is None:
            return Ledger()
        return Ledger(row[0], Position(row[1], row[2]) if row[1] else None, row[3] or "")

    @staticmethod
    def _has_ledger(db: sqlite3.Connection) -> bool:
        found = db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (_LEDGER,)).fetchone()
        return found is not None

    # -------------------------------------------------------------- connections

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        try:
            db = sqlite3.connect(self.path, timeout=self.timeout, isolation_level=None)
        except sqlite3.Error as error:
            raise TargetError(
                f"cannot open {self.path}: {error}", hint="look at the path and its permissions"
            ) from error
        try:
            yield db
        finally:
            db.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._connect() as db:
            try:
                yield db
            except sqlite3.Error as error:
                raise self._translate(error) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it, or nothing. A lock that nobody gives up is an error."""
        make_dirs(self.path.parent)
        with self._connect() as db:
            try:
                self._use_write_ahead_log(db)
                db.execute("PRAGMA synchronous=FULL")
                db.execute("BEGIN IMMEDIATE")
                yield db
            except sqlite3.Error as error:
                self._roll_back(db)
                raise self._translate(error) from error
            except BaseException:
                self._roll_back(db)
                raise
            try:
                db.execute("COMMIT")
            except sqlite3.Error as error:
                full = (
                    getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
                )  # SQLite has rolled back by itself
                if db.in_transaction or full:
                    self._roll_back(db)
                    raise self._translate(error) from error
                raise PublishUnknown(
                    f"{self}: no answer to COMMIT: {error}",
                    hint="start the job again; it looks at the ledger",
                ) from error

    def _use_write_ahead_log(self, db: sqlite3.Connection) -> None:
        """SQLite keeps the mode that it had if it cannot change it, and says so only here. In
        another mode readers and the job lock each other out, and a power cut can take back what was
        committed last."""
        mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise TargetError(
                f"{self}: SQLite cannot keep a write-ahead log here; the journal mode stays {mode}",
                hint="move the database to a local file system (WAL needs shared memory)",
            )

    @staticmethod
    def _roll_back(db: sqlite3.Connection) -> None:
        with contextlib.suppress(sqlite3.Error):
            if db.in_transaction:
                db.execute("ROLLBACK")

    def _translate(self, error: sqlite3.Error) -> Exception:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith("SQLITE_FULL") or (
            name.startswith("SQLITE_IOERR") and shutil.disk_usage(self.path.parent).free < _NO_SPACE
        ):
            return DiskFull(
                f"no space left on the file system of {self.path}",
                hint="make space and start the job again; it goes on where it stood",
            )
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return TargetError(
                f"{self.path} is not a database, or it is damaged: {error}",
                hint="put it back from a backup, or name another file",
            )
        hint = "see who holds it (fuser), then start the job again; nothing became visible"
        if name.startswith("SQLITE_CONSTRAINT"):
            hint = (
                "the table refuses rows that are decided: drop the constraint and start again; "
                "nothing is lost"
            )
        return PublishFailed(f"{self}: {error}", hint=hint)


def _batches(path: str, names: list[str] | None = None) -> Iterator[Any]:
    import pyarrow.parquet as pq

    yield from pq.ParquetFile(path).iter_batches(batch_size=20_000, columns=names)
