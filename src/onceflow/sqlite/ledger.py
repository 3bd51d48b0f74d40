"""The ledger table of SQLite."""

from __future__ import annotations

import sqlite3

from onceflow.tables.ledger import LEDGER, LedgerTable


class SqliteLedger(LedgerTable):
    mark = "?"

    def __init__(self, table: str, target: str) -> None:
        super().__init__(LEDGER, table.lower(), target)

    def exists(self, db: sqlite3.Connection) -> bool:
        found = db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (LEDGER,)).fetchone()
        return found is not None

    def ensure(self, db: sqlite3.Connection) -> None:
        db.execute(
            f"CREATE TABLE IF NOT EXISTS {LEDGER} (output TEXT PRIMARY KEY, "
            "target TEXT UNIQUE, term INTEGER, token TEXT, lineage TEXT, epoch INTEGER, "
            "decision TEXT) STRICT"
        )
