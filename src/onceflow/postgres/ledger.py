"""The ledger of outputs in PostgreSQL: a row for each, in the schema of its table.

A driver that publishes or fences locks the row first. Connections carry output and term in their
application_name, so that a successor finds and ends those of older terms: a driver that is paused
inside a transaction would hold the lock until it continues.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from onceflow.postgres.connection import client
from onceflow.postgres.table import ensure_table, exists
from onceflow.tables.ledger import LEDGER, LedgerTable
from onceflow.tables.names import quote

if TYPE_CHECKING:
    from onceflow.postgres.connection import Db

COLUMNS = (
    "output text PRIMARY KEY, target text NOT NULL UNIQUE, columns text[], "
    "term bigint NOT NULL, token text NOT NULL, lineage text, epoch bigint, decision text"
)
_END_MS = 5000


class PostgresLedger(LedgerTable):
    """The ledgers of all outputs whose tables are in one schema."""

    mark = "%s"
    locks = " FOR UPDATE"

    def __init__(self, schema: str, table: str, target: str) -> None:
        super().__init__(f"{quote(schema)}.{LEDGER}", table, target)
        self.schema = schema

    def exists(self, db: Db) -> bool:
        return exists(db, self.sql)

    def ensure(self, db: Db) -> None:
        ensure_table(db, self.sql, COLUMNS)

    def note_columns(self, db: Db, output: str, columns: Iterable[str]) -> None:
        """Call it inside the transaction that fills them."""
        self._execute(
            db, f"UPDATE {self.sql} SET columns = ? WHERE output = ?", list(columns), output
        )

    def noted_columns(self, db: Db, output: str) -> list[str]:
        """The columns that the last publication of the output filled."""
        asked = f"SELECT columns FROM {self.sql} WHERE output = ?"
        row = self._execute(db, asked, output).fetchone()
        return list(row[0] or ()) if row else []

    # -------------------------------------------------------------- connections of an output

    def whose(self, output: str) -> str:
        """A short name of the output, for names of connections and tables."""
        return hashlib.blake2b(f"{self.schema}/{output}".encode(), digest_size=6).hexdigest()

    def connection_name(self, output: str, term: int) -> str:
        return f"onceflow/{self.whose(output)}/{term}"

    def end_older(self, db: Db, output: str, term: int) -> list[int]:
        """End the connections of older terms of this output. Returns those that we may not end."""
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
