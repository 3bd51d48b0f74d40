"""In which order rows and timers of a key come, for all keys at once.

An event timer that is due at T fires after the key's rows up to T and before its later ones. It is
looked for again after each call, so a timer that a call sets, moves or takes back counts at once.
Timers of the processing clock come when there are no rows and no event timers left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from onceflow.state.process import Time
from onceflow.state.states import EVENT, PROCESSING, Column
from onceflow.state.vectors import LONG_AGO, NEVER, Bools, Ints, micros

DONE, ROWS = "done", "rows"


@dataclass(frozen=True)
class Work:
    """Keys that are not done yet, and how far each of them is."""

    ids: Ints  # which keys
    columns: Mapping[str, pa.Array]  # what they keep, now
    next: Ints  # the first row that was not processed yet
    changed: Bools
    fired: Ints  # how often timers fired since the last row

    def take(self, which: Ints) -> Work:
        if len(which) == len(self.ids):
            return self
        some = pa.array(which)
        columns = {name: column.take(some) for name, column in self.columns.items()}
        return Work(
            self.ids[which], columns, self.next[which], self.changed[which], self.fired[which]
        )

    @staticmethod
    def joined(parts: Sequence[Work]) -> Work:
        if len(parts) == 1:
            return parts[0]
        columns = {
            name: pa.concat_arrays([part.columns[name] for part in parts])
            for name in parts[0].columns
        }
        return Work(
            np.concatenate([part.ids for part in parts]), columns,
            np.concatenate([part.next for part in parts]),
            np.concatenate([part.changed for part in parts]),
            np.concatenate([part.fired for part in parts]),
        )  # fmt: skip

    def in_order(self) -> Work:
        """By the number of the key."""
        if (self.ids[1:] > self.ids[:-1]).all():
            return self
        return self._ordered(np.argsort(self.ids))

    def _ordered(self, order: Ints) -> Work:
        some = pa.array(order)
        columns = {name: column.take(some) for name, column in self.columns.items()}
        return Work(
            self.ids[order], columns, self.next[order], self.changed[order], self.fired[order]
        )


@dataclass(frozen=True)
class Turns:
    """What comes next for each key of a work: keys by what it is, and up to which row."""

    keys: Mapping[str, Ints]  # ROWS, EVENT, PROCESSING or DONE -> numbers in the work
    until: Ints  # the first row that must wait
    due: Ints  # the first event timer, or NEVER
    due_now: Ints  # the first processing timer, or NEVER


class Segments:
    """The rows of an epoch and the timers of their keys."""

    def __init__(self, at: Ints | None, starts: Ints, ends: Ints, timers: Sequence[Column]) -> None:
        self.at = at  # the event time of each row, ascending inside a key
        self.starts, self.ends = starts, ends
        self.timers = timers

    def first_due(self, columns: Mapping[str, pa.Array], clock: str, until: int | None) -> Ints:
        """For each key its first timer that is due, or NEVER."""
        size = len(next(iter(columns.values()))) if columns else 0
        first = np.full(size, NEVER, np.int64)
        if until is not None:
            for timer in self.timers:
                if timer.clock == clock:
                    first = np.minimum(first, micros(columns[timer.name], NEVER))
        return np.where(first <= (NEVER - 1 if until is None else until), first, NEVER)

    def turns(self, work: Work, time: Time) -> Turns:
        ends = self.ends[work.ids]
        if not self.timers:
            has_rows = ends > work.next
            keys = {ROWS: np.flatnonzero(has_rows), DONE: np.flatnonzero(~has_rows)}
            never = np.full(len(work.ids), NEVER, np.int64)
            return Turns(keys, ends, never, never)
        due = self.first_due(work.columns, EVENT, time.watermark)
        due_now = self.first_due(work.columns, PROCESSING, time.now)
        until = self._up_to(due, work.next, ends)
        has_rows = until > work.next
        is_due = ~has_rows & (due != NEVER)
        is_due_now = ~has_rows & ~is_due & (due_now != NEVER)
        keys = {
            ROWS: np.flatnonzero(has_rows), EVENT: np.flatnonzero(is_due),
            PROCESSING: np.flatnonzero(is_due_now),
            DONE: np.flatnonzero(~has_rows & ~is_due & ~is_due_now),
        }  # fmt: skip
        return Turns(keys, until, due, due_now)

    def _up_to(self, due: Ints, low: Ints, high: Ints) -> Ints:
        """The first row after the timer; a search in all keys at once."""
        if self.at is None or not len(self.at) or (due == NEVER).all():
            return high
        low, high = low.copy(), high.copy()
        low = np.where(due == NEVER, high, low)
        while (searching := low < high).any():
            middle = (low + high) // 2
            before = searching & (self.at[np.minimum(middle, len(self.at) - 1)] <= due)
            low = np.where(before, middle + 1, low)
            high = np.where(searching & ~before, middle, high)
        return low

    def settled(self, ids: Ints, upcoming: Ints, watermark: int | None) -> Ints:
        """For each key the time before which nothing is to come, if `upcoming` is its next row."""
        known = np.full(len(ids), LONG_AGO if watermark is None else watermark, np.int64)
        if self.at is None or not len(self.at):
            return known
        waiting = upcoming < self.ends[ids]
        following = self.at[np.minimum(upcoming, len(self.at) - 1)]
        return np.where(waiting, np.minimum(known, following), known)
