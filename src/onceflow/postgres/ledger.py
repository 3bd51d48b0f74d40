"""The ledger of outputs in PostgreSQL: a row for each, in the schema of its table.

Whoever publishes or fences locks the row first. Connections carry the output and the term in
their application_name, so that a successor finds and ends those of older terms: a driver that was
paused inside a transaction would hold the lock for as long as it sleeps.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from onceflow.contract.ledger import Ledger, Position, Publication
from onceflow.errors import Fenced, TargetBehind, TargetForeign
from onceflow.postgres.connection import client
from onceflow.tables.names import quote

if TYPE_CHECKING:
    from onceflow.postgres.connection import Db

NAME = "_onceflow_ledger"
COLUMNS = (
    "output text PRIMARY KEY, target text NOT NULL UNIQUE, columns text[], "
    "term bigint NOT NULL, token text NOT NULL, lineage text, epoch bigint, decision text"
)
_END_MS = 5000


class LedgerTable:
    """The ledgers of all outputs whose tables are in one schema."""

    def __init__(self, schema: str, target: str) -> None:
        self.schema = schema
        self.sql = f"{quote(schema)}.{NAME}"
        self._in_query = self.sql.replace("%", "%%")
        self._target = target  # for messages

    def exists(self, db: Db) -> bool:
        row = db.execute("SELECT to_regclass(%s) IS NOT NULL", (self.sql,)).fetchone()
        return bool(row and row[0])

    def ensure(self, db: Db) -> None:
        errors = client().errors
        if not self.exists(db):
            # somebody else may do so at the same time
            with contextlib.suppress(errors.DuplicateTable, errors.UniqueViolation):
                db.execute(f"CREATE TABLE IF NOT EXISTS {self.sql} ({COLUMNS})")

    def read(self, db: Db, output: str, *, lock: bool = False) -> Ledger:
        row = db.execute(
            f"SELECT term, lineage, epoch, decision FROM {self._in_query} WHERE output = %s"
            + (" FOR UPDATE" if lock else ""),
            (output,),
        ).fetchone()
        if row is None:
            return Ledger()
        position = Position(row[1], row[2]) if row[1] else None
        return Ledger(row[0], position, row[3] or "")

    def lock(self, db: Db, output: str) -> Ledger:
        """Read it; nobody else publishes or fences until the transaction ends."""
        if not self.exists(db):
            raise self._gone(output)
        return self.read(db, output, lock=True)

    def fence(self, db: Db, output: str, *, table: str, term: int, token: str) -> Ledger:
        """Inside a transaction. The term in a ledger only grows."""
        self.refuse_other_owner(db, output, table)
        db.execute(
            f"INSERT INTO {self._in_query} (output, target, term, token) VALUES (%s, %s, 0, '') "
            "ON CONFLICT (output) DO NOTHING",
            (output, table),
        )
        ledger = self.read(db, output, lock=True)
        said = db.execute(
            f"UPDATE {self._in_query} SET target = %s, term = %s, token = %s "
            "WHERE output = %s AND (term < %s OR token = %s)",
            (table, term, token, output, term, token),
        )
        if said.rowcount != 1 or ledger.term > term:
            raise Fenced(
                f"{self._target} has seen term {ledger.term}, this driver has term {term}",
                hint="another driver leads this job now",
            )
        return Ledger(term, ledger.position, ledger.decision)

    def advance(self, db: Db, publication: Publication, columns: Iterable[str]) -> None:
        self.move(db, publication.output, publication.position, publication.decision)
        db.execute(
            f"UPDATE {self._in_query} SET columns = %s WHERE output = %s",
            (list(columns), publication.output),
        )

    def move(self, db: Db, output: str, to: Position, decision: str) -> None:
        said = db.execute(
            f"UPDATE {self._in_query} SET lineage = %s, epoch = %s, decision = %s "
            "WHERE output = %s",
            (to.lineage, to.epoch, decision, output),
        )
        if said.rowcount != 1:
            raise self._gone(output)

    def written_columns(self, db: Db, output: str) -> list[str]:
        """What the output published last filled."""
        row = db.execute(
            f"SELECT columns FROM {self._in_query} WHERE output = %s", (output,)
        ).fetchone()
        return list(row[0] or ()) if row else []

    def refuse_other_owner(self, db: Db, output: str, table: str) -> None:
        row = db.execute(
            f"SELECT output FROM {self._in_query} WHERE target = %s", (table,)
        ).fetchone()
        if row is not None and row[0] != output:
            raise TargetForeign(
                f"{self._target} belongs to output {row[0]}, not to {output}",
                hint="give every output a table of its own",
            )

    def _gone(self, output: str) -> TargetBehind:
        return TargetBehind(
            f"{self._target}: the ledger of {output} is gone from {self.sql}",
            hint="bring back the database as it was, or write to a new table",
        )

    # -------------------------------------------------------------- connections of an output

    def whose(self, output: str) -> str:
        """Short, for names of connections and tables."""
        return hashlib.blake2b(f"{self.schema}/{output}".encode(), digest_size=6).hexdigest()

    def connection_name(self, output: str, term: int) -> str:
        return f"onceflow/{self.whose(output)}/{term}"

    def end_older(self, db: Db, output: str, term: int) -> list[int]:
        """End the connections that older terms of this output left: those that we may not end."""
        mine = f"onceflow/{self.whose(output)}/"
        rows = db.execute(
            "SELECT pid, application_name FROM pg_stat_activity "
            "WHERE datname = current_database() AND starts_with(application_name, %s)",
            (mine,),
        ).fetchall()
        left = []
        for backend, name in rows:
            found = re.fullmatch(r"\d+", name.removeprefix(mine))
            if found and int(found[0]) < term and not end_backend(db, backend, name):
                left.append(backend)
        return left


def end_backend(db: Db, backend: int, name: str) -> bool:
    """End a connection that has this name; False if our role may not."""
    try:
        db.execute(
            "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity "
            "WHERE pid = %s AND application_name = %s AND pid <> pg_backend_pid()",
            (_END_MS, backend, name),
        )
    except client().errors.InsufficientPrivilege:
        return False
    return True
