"""A table of an SQL database as a target: the part that is the same in every such database.

A publication is one transaction: lock the ledger and judge, write the rows, move the ledger. A
sink for one database defines its connections, its columns, and how it writes rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from onceflow.contract.abilities import (
    CanAdd,
    CanRefuseRows,
    CanRewind,
    CanStage,
    Staged,
    can_rewind,
)
from onceflow.contract.ledger import (
    Committable,
    Ledger,
    Outcome,
    Position,
    Publication,
    Verdict,
    judge,
    needs_rewind,
)
from onceflow.contract.schema import columns
from onceflow.contract.sink import Sink
from onceflow.contract.unstorable import refuse_unstorable, unstorable_rows
from onceflow.errors import JobError, TargetBehind
from onceflow.faults.points import reach
from onceflow.tables.ledger import LedgerTable
from onceflow.tables.undo import Undo


class TableSink(Sink, CanStage, CanRefuseRows, CanAdd, CanRewind):
    """Publishes each decided epoch exactly once, into a table. Readers see whole epochs only.

    Without `key` rows are appended; with `key` they replace the row of the same key. `complete`
    replaces the table. The sink does not notice rows that somebody else writes into the table.
    """

    modes = ("append", "update", "complete")
    _ledger: LedgerTable
    _undo: Undo

    def __init__(self, table: str, key: str | Iterable[str], keep_before: int) -> None:
        if keep_before < 0:
            raise JobError(
                f"keep_before={keep_before} is not a number of epochs", hint="use 0 or more"
            )
        self.table = table
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.keep_before = keep_before
        self.no_rewind = "" if keep_before else "keep_before=0 keeps no undo data"

    # -------------------------------------------------------------- of one database

    @abstractmethod
    def _refuse_target(self, output: str, schema: str, mode: str) -> None:
        """Check that the database can take such rows. Never changes rows."""

    @abstractmethod
    def _doubtful(self, files: Iterable[Committable], schema: str) -> Iterator[Any]:
        """The columns that may contain values that the database cannot store, batch by batch."""

    @abstractmethod
    def _unstorable_in(self, schema: str) -> Callable[[Any], Counter[str]]:
        """A function of a batch: kind of value that the database cannot store -> how many."""

    # -------------------------------------------------------------- before an epoch

    def prepare(self, output: str, schema: str, mode: str) -> None:
        self.refuse_mode(mode)
        if mode == "update" and not self.key:
            raise JobError(
                f"{self} has no key, so it cannot take output mode 'update'",
                hint=f"name the key: {type(self).__name__}(…, key=[…])",
            )
        missing = [name for name in self.key if name not in columns(schema)]
        if missing:
            raise JobError(
                f"{self}: there is no column {', '.join(missing)} to use as key",
                hint=f"the columns are {', '.join(columns(schema))}",
            )
        self._refuse_target(output, schema, mode)

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        """Refuse rows that the database would refuse, before they are decided."""
        batches = self._doubtful(staged.files, staged.schema)
        refuse_unstorable(str(self), batches, self._unstorable_in(staged.schema), self.key)
        return staged.files

    def unstorable(self, file: Committable, schema: str) -> dict[int, str]:
        return unstorable_rows(self._doubtful((file,), schema), self._unstorable_in(schema))

    # -------------------------------------------------------------- inside a transaction

    def _publish(
        self, db: Any, publication: Publication, write: Callable[[Ledger], None]
    ) -> Outcome:
        ledger = self._ledger.lock(db, publication.output)
        if judge(ledger, publication, str(self)) is Verdict.ALREADY_PUBLISHED:
            return Outcome.ALREADY_PUBLISHED
        reach(f"{self.kind}.begun")
        write(ledger)
        self._ledger.advance(db, publication)
        reach(f"{self.kind}.written")
        return Outcome.PUBLISHED

    def _rewind(
        self, db: Any, output: str, *, cut: Position, to: Position, term: int, decision: str
    ) -> None:
        ledger = self._ledger.lock(db, output)
        if needs_rewind(ledger, to, term=term, target=self):
            self._undo.rewind(db, output, cut, to)
            self._ledger.move(db, output, to, decision)

    @property
    def _keeps_images(self) -> bool:
        return can_rewind(self)

    def _gone(self) -> TargetBehind:
        return TargetBehind(
            f"{self}: the table is gone, with all its epochs",
            hint="bring back the table as it was, or write to a new one",
        )
