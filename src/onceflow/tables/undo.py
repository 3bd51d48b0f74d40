"""Undo for a table: for a while it keeps the rows that epochs changed as they were before.

    _onceflow_rewind            for each output: its history, the steps by which it got here
    _onceflow_before_<table>    images: the rows that a step changed as they were before it, or a
                                note that a row did not exist; in complete mode the whole table

An undo puts the images back step by step, the newest first. Rows that are only appended carry
their epoch and need no image. The transaction that publishes an epoch writes all of this.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from onceflow.contract.ledger import Position, Publication
from onceflow.errors import TargetBehind
from onceflow.tables.ledger import with_marks
from onceflow.tables.names import list_of, on_conflict
from onceflow.tables.rewind_history import RewindHistory

HISTORIES = "_onceflow_rewind"
THERE = "_onceflow_there"  # in images: did the row exist?
WHOLE, PART = -1, -2  # its values in the first row of a step: does it keep the whole table?


class Undo(ABC):
    """The images of one table. They have the columns of the table and a few of ours."""

    mark: ClassVar[str]  # the placeholder for a value in a statement

    def __init__(
        self, target: str, *, table: str, images: str, histories: str, key: Sequence[str], keep: int
    ) -> None:
        self._target = target  # for messages
        self._table, self._images, self._histories = table, images, histories  # in a statement
        self._key, self._most = tuple(key), keep

    def is_tagged(self, mode: str) -> bool:
        """Do rows carry their epoch, and nothing else changes?"""
        return mode == "append" and not self._key

    # -------------------------------------------------------------- of one database

    @abstractmethod
    def ensure(self, db: Any) -> None:
        """Create the table of histories if there is none."""

    @abstractmethod
    def make(self, db: Any, names: Sequence[str]) -> bool:
        """Create the images unless they exist with just these columns. False: it created them."""

    @abstractmethod
    def _has_histories(self, db: Any) -> bool: ...

    @abstractmethod
    def _has_images(self, db: Any) -> bool: ...

    @abstractmethod
    def _shared_columns(self, db: Any) -> list[str]:
        """The columns that images and table both have."""

    @abstractmethod
    def _drop(self, db: Any, *, up_to: int = -1, since: int) -> None:
        """Delete the images of the steps up to `up_to` and from `since` on."""

    @abstractmethod
    def _kept(self, db: Any, above: int) -> Iterable[tuple[str, bool]]:
        """The steps above this one that have images, the newest first: FROM and WHERE that select
        each row as it was before the step; and whether the step keeps the whole table."""

    @abstractmethod
    def _remove_tagged(
        self, db: Any, cut: Position, then: RewindHistory, now: RewindHistory
    ) -> None:
        """Delete the rows without a key that epochs after the cut appended."""

    # -------------------------------------------------------------- publishing

    def note(self, db: Any, publication: Publication, names: Sequence[str]) -> int:
        """Add the publication to the history and delete images that are too old. Returns the number
        of the step."""
        history = self._read(db, publication.output).after(publication)
        if not self.is_tagged(publication.mode):
            history = history.forgetting(history.done - self._most)
            if not self.make(db, names):
                history = history.forgetting(history.done - 1)
            self._drop(
                db, up_to=history.known, since=history.done
            )  # no step has written the latter
        self._write(db, publication.output, history)
        return history.done

    # -------------------------------------------------------------- going back

    def back_to(self, db: Any, output: str, cut: Position) -> RewindHistory:
        """The history as it was at the cut. Raises if the table cannot go back to there."""
        history = self._history(db, output)
        back = history.back_to(cut, self._target)
        if self._key and back.done < history.done and not self._has_images(db):
            raise TargetBehind(
                f"{self._target}: its undo data is gone ({self._images} was dropped)",
                hint="bring back the database as it was, or choose --published skip",
            )
        return back

    def rewind(self, db: Any, output: str, cut: Position, to: Position) -> None:
        """Restore the table as it was at the cut; `to` is the cut in the new lineage."""
        back = self.back_to(db, output, cut)
        if self._has_images(db):
            self._put_back(db, back.done)
        if not self._key:
            self._remove_tagged(db, cut, back, self._history(db, output))
        self._write(db, output, back.begin(to))

    def _put_back(self, db: Any, step: int) -> None:
        keys, names = list_of(self._key), self._shared_columns(db)
        for images, is_whole in self._kept(db, step):
            put = (
                f"INSERT INTO {self._table} ({list_of(names)}) "
                f"SELECT {list_of(names)} {images} AND {THERE} = 1"
            )
            if is_whole:
                db.execute(f"DELETE FROM {self._table}")
                db.execute(put)
            else:
                new = f"SELECT {keys} {images} AND {THERE} = 0"
                db.execute(f"DELETE FROM {self._table} WHERE ({keys}) IN ({new})")
                db.execute(f"{put} {on_conflict(self._key, names)}")
        self._drop(db, since=step + 1)

    # -------------------------------------------------------------- histories

    def _history(self, db: Any, output: str) -> RewindHistory:
        return self._read(db, output) if self._has_histories(db) else RewindHistory()

    def _read(self, db: Any, output: str) -> RewindHistory:
        asked = f"SELECT steps FROM {self._histories} WHERE output = ?"
        row = db.execute(with_marks(asked, self.mark), (output,)).fetchone()
        if row is None:
            return RewindHistory()
        return RewindHistory.of(json.loads(row[0]) if isinstance(row[0], str) else row[0])

    def _write(self, db: Any, output: str, history: RewindHistory) -> None:
        statement = (
            f"INSERT INTO {self._histories} VALUES (?, ?) ON CONFLICT (output) DO UPDATE "
            "SET steps = excluded.steps"
        )
        values = (output, json.dumps(history.as_json()))
        db.execute(with_marks(statement, self.mark), values)
