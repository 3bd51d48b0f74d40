"""The ledgers of outputs in a table of the database that holds their rows: one row an output.

Except for those that only read, all calls belong inside a transaction of the caller, in which
nobody else publishes or fences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from onceflow.contract.ledger import Ledger, Position, Publication, refuse_older
from onceflow.errors import TargetBehind, TargetForeign

LEDGER = "_onceflow_ledger"


class LedgerTable(ABC):
    """The ledger of one output's table. `target` is the sink, for messages."""

    mark: ClassVar[str]  # the placeholder for a value in a statement
    locks: ClassVar[str] = ""  # behind a SELECT that locks the row until the transaction ends

    def __init__(self, sql: str, table: str, target: str) -> None:
        self.sql = sql  # the name of the ledger table in a statement
        self._table, self._target = table, target

    @abstractmethod
    def exists(self, db: Any) -> bool: ...

    @abstractmethod
    def ensure(self, db: Any) -> None:
        """Create the ledger table if there is none."""

    def read(self, db: Any, output: str) -> Ledger:
        return self._read(db, output) if self.exists(db) else Ledger()

    def _read(self, db: Any, output: str, locks: str = "") -> Ledger:
        asked = f"SELECT term, lineage, epoch, decision FROM {self.sql} WHERE output = ?{locks}"
        row = self._execute(db, asked, output).fetchone()
        if row is None:
            return Ledger()
        return Ledger(row[0], Position(row[1], row[2]) if row[1] else None, row[3] or "")

    def lock(self, db: Any, output: str) -> Ledger:
        """Read it; nobody else publishes or fences until the transaction ends."""
        if not self.exists(db):
            raise self._gone(output)
        return self._read(db, output, self.locks)

    def fence(self, db: Any, output: str, *, term: int, token: str) -> Ledger:
        """The term in a ledger only grows."""
        self.refuse_other_owner(db, output)
        self._execute(
            db,
            f"INSERT INTO {self.sql} (output, target, term, token) VALUES (?, ?, 0, '') "
            "ON CONFLICT (output) DO NOTHING",
            output, self._table,
        )  # fmt: skip
        ledger = self._read(db, output, self.locks)
        said = self._execute(
            db,
            f"UPDATE {self.sql} SET target = ?, term = ?, token = ? "
            "WHERE output = ? AND (term < ? OR token = ?)",
            self._table, term, token, output, term, token,
        )  # fmt: skip
        refuse_older(ledger.term, term, self._target, is_ours=said.rowcount == 1)
        return Ledger(term, ledger.position, ledger.decision)

    def advance(self, db: Any, publication: Publication) -> None:
        self.move(db, publication.output, publication.position, publication.decision)

    def move(self, db: Any, output: str, to: Position, decision: str) -> None:
        said = self._execute(
            db,
            f"UPDATE {self.sql} SET lineage = ?, epoch = ?, decision = ? WHERE output = ?",
            to.lineage, to.epoch, decision, output,
        )  # fmt: skip
        if said.rowcount != 1:
            raise self._gone(output)

    def refuse_other_owner(self, db: Any, output: str) -> None:
        if not self.exists(db):
            return
        row = self._execute(
            db, f"SELECT output FROM {self.sql} WHERE target = ?", self._table
        ).fetchone()
        if row is not None and row[0] != output:
            raise TargetForeign(
                f"{self._target} belongs to output {row[0]}, not to {output}",
                hint="give every output a table of its own",
            )

    def _execute(self, db: Any, statement: str, *values: Any) -> Any:
        return db.execute(with_marks(statement, self.mark), values)

    def _gone(self, output: str) -> TargetBehind:
        return TargetBehind(
            f"{self._target}: the ledger of {output} is gone from {self.sql}",
            hint="bring back the database as it was, or write to a new one",
        )


def with_marks(statement: str, mark: str) -> str:
    """The statement with a client's placeholder instead of `?`, which no name in it may contain."""
    return statement if mark == "?" else statement.replace("%", "%%").replace("?", mark)
