"""Calls of a process in one epoch, and what becomes of the state by what they return."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import ProcessFailed
from onceflow.state.binding import BoundProcess
from onceflow.state.per_key import CallResult, PerKeyCaller
from onceflow.state.process import Call, KeyedProcess, Time
from onceflow.state.results import CallSite, check_out, check_state, split_result
from onceflow.state.states import EVENT, PROCESSING, Column
from onceflow.state.vectors import (
    LONG_AGO,
    NEVER,
    Bools,
    Ints,
    empty_to_null,
    expand_ranges,
    is_valid,
    set_null,
    to_micros,
)

DONE, ROWS = "done", "rows"


@dataclass(frozen=True)
class Pending:
    """Keys that are not done yet, and how far each of them is."""

    ids: Ints  # which keys
    columns: Mapping[str, pa.Array]  # what they keep, now
    next: Ints  # the first row that was not processed yet
    changed: Bools
    fired: Ints  # how often timers fired since the last row

    def take(self, which: Ints) -> Pending:
        if len(which) == len(self.ids):
            return self
        some = pa.array(which)
        columns = {name: column.take(some) for name, column in self.columns.items()}
        return Pending(
            self.ids[which], columns, self.next[which], self.changed[which], self.fired[which]
        )

    @staticmethod
    def joined(parts: Sequence[Pending]) -> Pending:
        if len(parts) == 1:
            return parts[0]
        columns = {
            name: pa.concat_arrays([part.columns[name] for part in parts])
            for name in parts[0].columns
        }
        return Pending(
            np.concatenate([part.ids for part in parts]), columns,
            np.concatenate([part.next for part in parts]),
            np.concatenate([part.changed for part in parts]),
            np.concatenate([part.fired for part in parts]),
        )  # fmt: skip

    def in_order(self) -> Pending:
        """By the number of the key."""
        if (self.ids[1:] > self.ids[:-1]).all():
            return self
        return self._ordered(np.argsort(self.ids))

    def _ordered(self, order: Ints) -> Pending:
        some = pa.array(order)
        columns = {name: column.take(some) for name, column in self.columns.items()}
        return Pending(
            self.ids[order], columns, self.next[order], self.changed[order], self.fired[order]
        )


@dataclass(frozen=True)
class Turns:
    """What comes next for each key of a work: keys by what it is, and up to which row."""

    keys: Mapping[str, Ints]  # ROWS, EVENT, PROCESSING or DONE -> numbers in the work
    until: Ints  # the first row that must wait
    due: Ints  # the first event timer, or NEVER
    due_now: Ints  # the first processing timer, or NEVER


class Timeline:
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
                    first = np.minimum(first, to_micros(columns[timer.name], NEVER))
        return np.where(first <= (NEVER - 1 if until is None else until), first, NEVER)

    def turns(self, work: Pending, time: Time) -> Turns:
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


_MOST_FIRED = 1000


class Calls:
    """How a process is called."""

    def __init__(self, process: KeyedProcess, bound: BoundProcess, keys: pa.Schema) -> None:
        self.process, self.bound, self.owner = process, bound, type(process).__name__
        self.states = pa.schema([(column.name, column.type) for column in bound.columns])
        self.per_key = PerKeyCaller(process, keys, bound.columns, bound.output)


class Epoch:
    """The calls for one slice of keys."""

    def __init__(
        self,
        calls: Calls,
        keys: pa.Table,
        rows: pa.Table,
        segments: Timeline,
        *,
        time: Time,
        where: str,
    ) -> None:
        self._calls, self._keys, self._rows = calls, keys, rows
        self._segments, self._time, self._where = segments, time, where
        self._out: list[pa.Table] = []

    def emitted(self) -> pa.Table:
        return pa.concat_tables(self._out) if self._out else self._calls.bound.output.empty_table()

    def turn(self, kind: str, work: Pending, which: Ints, turns: Turns) -> Pending:
        """Give these keys their rows, or say that their timers are due."""
        if kind == ROWS:
            return self._rows_turn(work, turns.until[which])
        due = (turns.due if kind == EVENT else turns.due_now)[which]
        return self._timers_turn(kind, work, due)

    def _rows_turn(self, work: Pending, until: Ints) -> Pending:
        rows, index = self._slice(work.next, until)
        settled = self._segments.settled(work.ids, until, self._time.watermark)
        keys = self._keys_of(work.ids)
        method = self._calls.bound.rows
        site = self._site(method or "process", keys)
        call = Call(self._time, len(keys), index, settled, rows, work.columns)
        with site.report_failures():
            if method == "process_key":
                returned = self._per_key(call, keys, site)
            else:
                returned = self._vectorised(call, keys, work.columns, method)
        at = self._segments.at
        written = None if at is None else at[until - 1]
        work = replace(work, next=until, fired=np.zeros_like(work.fired))
        return self._kept(work, returned, written)

    def _timers_turn(self, kind: str, work: Pending, due: Ints) -> Pending:
        method = self._calls.bound.timers
        assert method is not None  # no timers without it
        fired = {
            timer.name: to_micros(work.columns[timer.name], NEVER) == due
            for timer in self._segments.timers
            if timer.clock == kind
        }
        keys = self._keys_of(work.ids)
        work = replace(work, fired=work.fired + 1)
        endless = np.flatnonzero(work.fired > _MOST_FIRED)
        if len(endless):
            raise self._endless(method, keys.take(pa.array(endless)), fired)
        settled = self._segments.settled(work.ids, work.next, self._time.watermark)
        site = self._site(method, keys)
        call = Call(self._time, len(keys), None, settled, None, work.columns, fired)
        with site.report_failures():
            if method == "on_timer_key":
                returned = self._per_key(call, keys, site)
            else:
                returned = self._vectorised(call, keys, work.columns, method)
        cleared = {name: set_null(work.columns[name], mask) for name, mask in fired.items()}
        work = replace(
            work, columns={**work.columns, **cleared}, changed=np.ones_like(work.changed)
        )
        return self._kept(work, returned, due if kind == EVENT else None)

    # ------------------------------------------------------------ calling

    def _per_key(self, call: Call, keys: pa.Table, site: CallSite) -> CallResult:
        process, per_key = self._calls.process, self._calls.per_key
        process._call = call
        collects = gc.isenabled()
        gc.disable()  # it would walk over all rows of the slice again and again, and find nothing
        try:
            if call.rows is None:
                return per_key.timers(keys, call.columns, call.due, site)
            return per_key.rows(keys, call.columns, call.rows, process.starts, site)
        finally:
            process._call = None
            if collects:
                gc.enable()

    def _vectorised(
        self, call: Call, keys: pa.Table, columns: Mapping[str, pa.Array], method: str | None
    ) -> CallResult:
        process, bound = self._calls.process, self._calls.bound
        kept = [columns[name] for name in self._calls.states.names]
        both = pa.schema([*keys.schema, *self._calls.states])
        process._call = call
        try:
            if method is None:
                folded = process.folded()
                everything = {**dict(zip(keys.column_names, keys.columns, strict=True)), **folded}
                out, new = {name: everything[name] for name in bound.output.names}, folded
            else:
                table = pa.table([*keys.columns, *kept], schema=both)
                arguments = (table,) if call.rows is None else (table, call.rows)
                out, new = split_result(getattr(process, method)(*arguments))
        finally:
            process._call = None
        return CallResult(check_out(out, bound.output), check_state(new, keys, self._calls.states))

    def _slice(self, starts: Ints, ends: Ints) -> tuple[pa.Table, Ints]:
        lengths = ends - starts
        index = np.repeat(np.arange(len(starts)), lengths)
        if len(index) == len(self._rows) and (starts[1:] >= starts[:-1]).all():
            return self._rows, index
        return self._rows.take(pa.array(expand_ranges(starts, ends))), index

    def _keys_of(self, ids: Ints) -> pa.Table:
        if len(ids) == len(self._keys) and (ids[1:] > ids[:-1]).all():
            return self._keys
        return self._keys.take(pa.array(ids))

    def _site(self, method: str, keys: pa.Table) -> CallSite:
        return CallSite(self._calls.owner, method, self._time.epoch, keys, self._where)

    def _endless(self, method: str, keys: pa.Table, fired: Mapping[str, Bools]) -> ProcessFailed:
        names = ", ".join(name for name, mask in fired.items() if mask.any())
        error = RuntimeError(f"{names} was set to a time that is due {_MOST_FIRED} times in a row")
        return ProcessFailed(
            self._site(method, keys).failure(error).message,
            hint="set a timer later than it was due and, if it comes again and again, in larger "
            "steps; a timer that is left out of new_state is not set again",
        )

    # ------------------------------------------------------------ keeping

    def _kept(self, work: Pending, returned: CallResult, event: Ints | None) -> Pending:
        """What was returned, over what was there. `event`: when it was written, by events."""
        if returned.out is not None and len(returned.out):
            self._out.append(returned.out)
        columns, changed = dict(work.columns), work.changed.copy()
        for column in self._calls.bound.columns:
            if column.name not in returned.columns:
                continue
            old, new = work.columns[column.name], empty_to_null(returned.columns[column.name])
            touched = None if returned.touched is None else returned.touched[column.name]
            columns[column.name] = new
            differs = _differ(old, new)
            changed |= differs if touched is None else differs & touched
            if column.written is not None:
                stamp = self._stamps(event if column.clock == EVENT else None, column.clock, work)
                before = to_micros(columns[column.written], LONG_AGO)
                after = np.maximum(before, stamp)
                after = after if touched is None else np.where(touched, after, before)
                gone = ~is_valid(new) | (after == LONG_AGO)
                changed |= (after != before) & ~gone
                columns[column.written] = pa.array(after, pa.int64(), mask=gone)
        return replace(work, columns=columns, changed=changed)

    def _stamps(self, event: Ints | None, clock: str, work: Pending) -> Ints:
        """When a value is written now: of an event, that of the last row or the timer."""
        watermark = self._time.watermark
        known = LONG_AGO if watermark is None else watermark
        if clock != EVENT:
            return np.full(len(work.ids), self._time.now, np.int64)
        if event is None:
            return np.full(len(work.ids), known, np.int64)
        return np.where(event == LONG_AGO, known, event)


def _differ(old: pa.Array, new: pa.Array) -> Bools:
    """Where the value is another one. Nested values are not compared: they may be."""
    there = is_valid(old) | is_valid(new)
    if pa.types.is_nested(old.type):
        return there
    same = pc.fill_null(pc.equal(old, new), False).to_numpy(zero_copy_only=False)
    return np.asarray(there & ~same, np.bool_)
