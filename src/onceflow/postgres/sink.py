"""Rows in a table of a PostgreSQL database, published by one transaction for each epoch.

1. copy     a large epoch only: the tasks of a Spark job COPY its files into an unlogged table
2. begin    lock the output's row in the ledger, and judge
3. write    COPY the files straight into the table, or move the copied rows; update the ledger
4. commit   if the reply is lost, read the outcome in the ledger

There are fault points between the steps.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from onceflow.contract.abilities import CanCleanUp
from onceflow.contract.ledger import (
    Committable,
    Ledger,
    Outcome,
    Position,
    Publication,
    Verdict,
    judge,
)
from onceflow.errors import (
    JobError,
    OnceflowError,
    PublishFailed,
    PublishUnknown,
    SchemaMismatch,
    TargetAway,
    TargetError,
)
from onceflow.faults.points import reach
from onceflow.postgres.connection import NoAnswer, Server
from onceflow.postgres.copy import (
    Apart,
    CopyTask,
    active_session,
    copy_apart,
    copy_rows,
    read_batches,
    rows_of,
)
from onceflow.postgres.ledger import PostgresLedger, end_backend
from onceflow.postgres.table import TAG, Table, lacking, may_create, refuse_rights, refuse_server
from onceflow.postgres.undo import PostgresUndo
from onceflow.postgres.unstorable import always_fits, count_unstorable
from onceflow.tables.names import definitions, quote
from onceflow.tables.sink import TableSink

if TYPE_CHECKING:
    from onceflow.postgres.connection import Db

_logger = logging.getLogger(__name__)
_SHORT = 60.0  # seconds, for what moves no rows


class Postgres(TableSink, CanCleanUp):
    """Every row of a decided epoch is in the table exactly once; readers see whole epochs only.

    The sink does not notice rows that somebody else writes into the table, nor effects of triggers
    outside of the database. A standby that is promoted may lack the last epochs.

    `dsn`: a connection string or URL; libpq takes the rest from a service file and the PG*
    environment. Without `key`: append; `epoch_column` names a column for the number of the epoch.
    With `key`: upsert; if an epoch has several rows of one key, the one staged last stays.
    `create`: create the table with the first epoch if there is none. `timeout`: seconds that one
    publishing transaction may take. With `key` or `epoch_column` epochs can be taken back: a second
    table keeps the rows that the last `keep_before` epochs changed as they were before (rows that
    are only appended need no copy); with 0 nothing is kept and nothing can be taken back.
    """

    kind = "postgres"
    copied_apart_from: ClassVar[int] = (
        5_000_000  # rows; for fewer, one COPY by the driver is faster
    )
    place = "table"

    def __init__(
        self,
        dsn: str = "",
        *,
        table: str,
        key: str | Iterable[str] = (),
        schema: str = "public",
        create: bool = True,
        epoch_column: str | None = None,
        timeout: float = 300.0,
        keep_before: int = 100,
    ) -> None:
        for name in (table, schema, *([] if epoch_column is None else [epoch_column])):
            if not re.fullmatch(r"[^\W\d][\w$ .-]{0,62}", name) or name.startswith("_onceflow"):
                raise JobError(f"{name!r} is not a name in PostgreSQL", hint="use letters, digits")
        super().__init__(table, key, keep_before)
        self.schema = schema
        self.create = create
        self.epoch_column = epoch_column
        self._server = Server(dsn, table=f"{schema}.{table}", seconds=timeout)
        self._table = Table(schema, table, self.key, epoch_column)
        self._ledger: PostgresLedger = PostgresLedger(schema, table, str(self))
        self._undo: PostgresUndo = PostgresUndo(str(self), self._table, keep_before)
        if keep_before and not (self.key or epoch_column):
            self.no_rewind = (
                "its rows do not say which epoch they are of; name an epoch_column for new tables"
            )
        self._output, self._term, self._has_copies = "", 0, False

    def __str__(self) -> str:
        return self._server.label

    def arguments(self) -> dict[str, Any]:
        return {
            "dsn": self._server.shown, "schema": self.schema, "table": self.table,
            "key": list(self.key), "create": self.create, "epoch_column": self.epoch_column,
            "timeout": self._server.seconds, "keep_before": self.keep_before,
        }  # fmt: skip

    # -------------------------------------------------------------- before an epoch

    def _refuse_target(self, output: str, schema: str, mode: str) -> None:
        wanted = self._table.wanted(schema)
        with self._server.connect("onceflow", seconds=_SHORT) as db:
            refuse_server(db, str(self), self.schema, temporary=bool(self.key))
            self._refuse_ledger(db, output, wanted)
            if self._keeps_images:
                self._undo.refuse(db, list(wanted), mode)
            if self._table.exists(db):
                self._table.refuse(db, wanted, mode)
            elif not self.create:
                raise TargetError(f"{self}: there is no such table", hint=self._create_sql(wanted))
            elif not may_create(db, self.schema):
                raise lacking(db, f"CREATE ON SCHEMA {quote(self.schema)}")
            else:
                self._table.refuse_creation(db, str(self), wanted)

    def _create_sql(self, wanted: dict[str, str]) -> str:
        return f"{self._table.create_sql(wanted)};"

    def _refuse_ledger(self, db: Db, output: str, wanted: dict[str, str]) -> None:
        if not self._ledger.exists(db):
            if not may_create(db, self.schema):
                raise lacking(db, f"CREATE ON SCHEMA {quote(self.schema)}")
            return
        refuse_rights(db, self._ledger.sql, ("SELECT", "INSERT", "UPDATE"))
        self._ledger.refuse_other_owner(db, output)
        gone = [c for c in self._ledger.noted_columns(db, output) if c not in wanted]
        if gone:
            raise SchemaMismatch(
                f"{self}: the rows lack column {', '.join(gone)}, which this output filled before",
                hint="select it again, for instance as F.lit(None).cast(…)",
            )

    def _doubtful(self, files: Iterable[Committable], schema: str) -> Iterator[Any]:
        names = [n for n, kind in _kinds(schema).items() if n in self.key or not always_fits(kind)]
        for file in files if names else ():
            yield from read_batches(file.path, schema, names)

    def _unstorable_in(self, schema: str) -> Callable[[Any], Counter[str]]:
        return partial(count_unstorable, kinds=_kinds(schema), key=self.key)

    # -------------------------------------------------------------- the ledger

    def published(self, output: str) -> Ledger:
        with self._server.connect("onceflow", seconds=_SHORT) as db:
            return self._ledger.read(db, output)

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        self._output, self._term, stuck = output, term, list[int]()
        try:
            with self._connect(output, term, seconds=_SHORT) as db:
                self._ledger.ensure(db)
                if self._keeps_images:
                    self._undo.ensure(db)
                stuck = self._ledger.end_older(db, output, term)
                with self._server.transaction(db):
                    return self._ledger.fence(db, output, term=term, token=token)
        except NoAnswer as lost:
            raise TargetAway(f"{self}: no answer: {lost}", hint="onceflow tries again") from lost
        except PublishFailed as error:
            if stuck:
                raise PublishFailed(
                    f"{self}: an older driver's connection (backend {', '.join(map(str, stuck))}) "
                    "may hold the ledger, and this role may not end it",
                    hint=f"SELECT pg_terminate_backend({stuck[0]}); as the same role or as a "
                    "superuser",
                ) from error
            raise

    def _connect(
        self, output: str, term: int, *, seconds: float | None = None
    ) -> AbstractContextManager[Db]:
        return self._server.connect(self._ledger.connection_name(output, term), seconds=seconds)

    # -------------------------------------------------------------- publish

    def publish(self, publication: Publication) -> Outcome:
        self._output = publication.output

        # 1. copy
        apart = self._copy_apart(publication, judged=True)
        try:
            with self._transaction(publication) as db:
                # 2. begin, 3. write
                write = partial(self._write_exactly, db, publication, apart)
                outcome = self._publish(db, publication, write)
            # 4. commit: the end of the transaction
        except NoAnswer as lost:
            self._find_out(publication, lost)
            outcome = Outcome.PUBLISHED
        except TargetError as error:
            if type(error) is TargetError:
                self._refuse_altered(publication)
            raise
        if outcome is Outcome.PUBLISHED:
            reach("postgres.committed")
        return outcome

    def _write_exactly(
        self, db: Db, publication: Publication, apart: Apart | None, ledger: Ledger
    ) -> None:
        self._write(db, publication, apart, first=ledger.position is None, exact=True)
        wanted = self._table.wanted(publication.schema)
        self._ledger.note_columns(db, publication.output, wanted)

    def add(self, publication: Publication) -> None:
        if not all(os.path.exists(file.path) for file in publication.files):
            return
        apart = self._copy_apart(publication, judged=False)
        try:
            with self._transaction(publication) as db:
                self._write(db, publication, apart, first=True, exact=False)
        except NoAnswer as lost:
            raise PublishUnknown(f"{self}: no answer to COMMIT: {lost}") from lost

    @contextmanager
    def _transaction(self, publication: Publication) -> Iterator[Db]:
        of = self._connect(publication.output, publication.term)
        with of as db, self._server.transaction(db):
            yield db

    def _write(
        self, db: Db, publication: Publication, apart: Apart | None, *, first: bool, exact: bool
    ) -> None:
        wanted = self._table.wanted(publication.schema)
        if not self._table.exists(db):
            if not (first and self.create):
                raise self._gone()
            db.execute(self._table.create_sql(wanted))
        rows = rows_of(publication, epoch_column=self.epoch_column, numbered=bool(self.key))
        copies = None
        if apart is not None:
            copies = apart.complete(db, str(self))
        elif self.key:
            copies = "pg_temp._onceflow_copies"
            body = definitions(self._table.copy_columns(wanted))
            db.execute(f"CREATE TEMPORARY TABLE _onceflow_copies ({body}) ON COMMIT DROP")
            copy_rows(db, copies, rows, str(self))
        if exact and self._keeps_images:
            step = self._undo.note(db, publication, list(wanted))
            if not self._undo.is_tagged(publication.mode):
                self._undo.keep(db, step, publication.mode, list(wanted), copies)
        if publication.mode == "complete":
            db.execute(f"DELETE FROM {self._table.sql}")
        if copies is not None:
            db.execute(self._table.move_sql(copies, wanted))
        elif rows.files:
            copy_rows(db, self._table.sql, rows, str(self))

    # -------------------------------------------------------------- rewind

    def rewind(self, output: str, *, cut: Position, to: Position, term: int, decision: str) -> None:
        try:
            with self._connect(output, term) as db, self._server.transaction(db):
                self._rewind(db, output, cut=cut, to=to, term=term, decision=decision)
        except NoAnswer as lost:
            raise TargetAway(f"{self}: no answer: {lost}", hint="onceflow tries again") from lost

    def refuse_rewind(self, output: str, cut: Position) -> None:
        with self._server.connect("onceflow", seconds=_SHORT) as db:
            self._undo.back_to(db, output, cut)

    # -------------------------------------------------------------- large epochs, lost replies

    def _copy_apart(self, publication: Publication, *, judged: bool) -> Apart | None:
        """None: the driver copies the rows itself, inside its transaction."""
        session = active_session() if publication.rows >= self.copied_apart_from else None
        if session is None:
            return None
        wanted = self._table.wanted(publication.schema)
        whose, term = self._ledger.whose(publication.output), publication.term
        into = f"{quote(self.schema)}._onceflow_{whose}_{term}_{publication.epoch}"
        with self._connect(publication.output, term) as db:
            if not may_create(db, self.schema) or not self._ledger.exists(db):
                return None
            if judged:
                ledger = self._ledger.read(db, publication.output)
                if judge(ledger, publication, str(self)) is Verdict.ALREADY_PUBLISHED:
                    return None
            body = definitions({**self._table.copy_columns(wanted), TAG: "bigint"})
            db.execute(f"DROP TABLE IF EXISTS {into}")
            db.execute(f"CREATE UNLOGGED TABLE {into} ({body})")
            dsn = self._server.resolved(db)
        self._has_copies = True
        rows = rows_of(publication, epoch_column=self.epoch_column, numbered=bool(self.key))
        task = CopyTask(
            dsn=dsn,
            label=f"{self.schema}.{self.table}",
            name=self._ledger.connection_name(publication.output, term),
            seconds=self._server.seconds,
            into=into,
            parts=rows.split(session.sparkContext.defaultParallelism),
        )
        apart = copy_apart(session, task)
        reach("postgres.copied")
        return apart

    def _find_out(self, publication: Publication, lost: NoAnswer) -> None:
        """Lock the ledger: once we hold the lock, the other transaction has ended, either way."""
        name = self._ledger.connection_name(publication.output, publication.term)
        try:
            with self._server.connect(name, seconds=_SHORT) as db:
                end_backend(db, lost.backend, name)
                with self._server.transaction(db):
                    ledger = self._ledger.lock(db, publication.output)
        except (OnceflowError, NoAnswer) as error:
            raise PublishUnknown(
                f"{self}: no answer to COMMIT of epoch {publication.epoch}, and the ledger cannot "
                f"be read: {error}",
                hint="start the job again; it reads the ledger first",
            ) from lost
        if judge(ledger, publication, str(self)) is not Verdict.ALREADY_PUBLISHED:
            raise PublishFailed(
                f"{self}: the connection ended before epoch {publication.epoch} was committed: "
                f"{lost}",
                hint="nothing became visible; onceflow tries again",
            ) from lost

    def _refuse_altered(self, publication: Publication) -> None:
        """Raise an error that says how the table was altered, if it was."""
        with self._server.connect("onceflow", seconds=_SHORT) as db:
            self._table.refuse(db, self._table.wanted(publication.schema), publication.mode)

    # -------------------------------------------------------------- cleaning up

    def tidy(self) -> None:
        if self._has_copies:
            self._drop_copies(self._term + 1)
            self._has_copies = False

    def sweep(self, *, below_term: int) -> None:
        self._drop_copies(below_term)

    def _drop_copies(self, below_term: int) -> None:
        """Drop tables of copies; only drivers of this output write them. A failure is harmless."""
        mine = f"_onceflow_{self._ledger.whose(self._output)}_"
        try:
            with self._connect(self._output, self._term, seconds=_SHORT) as db:
                found = db.execute(
                    "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s) "
                    "AND relkind = 'r' AND starts_with(relname, %s)",
                    (quote(self.schema), mine),
                ).fetchall()
                for (name,) in found:
                    if int(name.removeprefix(mine).partition("_")[0]) < below_term:
                        db.execute(f"DROP TABLE IF EXISTS {quote(self.schema)}.{quote(name)}")
        except OnceflowError as error:
            _logger.warning("%s: cannot drop the copies of older epochs: %s", self, error)


def _kinds(schema: str) -> dict[str, Any]:
    return {field["name"]: field["type"] for field in json.loads(schema)["fields"]}
