"""The calls of a process for one slice of keys in one epoch, and the state that they leave.

An event timer that is due at T fires after the rows of its key up to T and before the later ones.
The timers are read again after each call, so one that a call sets, moves or removes counts at once.
Timers of the processing clock fire when neither rows nor event timers are left.
"""

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
_MOST_FIRED = 1000


# ---------------------------------------------------------------- order


@dataclass(frozen=True)
class Pending:
    """Keys that are not done yet, and how far each of them is."""

    ids: Ints  # which keys
    columns: Mapping[str, pa.Array]  # their state now
    next: Ints  # the first row that was not processed yet
    changed: Bools
    fired: Ints  # how often timers fired since the last row

    def take(self, which: Ints) -> Pending:
        """`which` ascends."""
        return self if len(which) == len(self.ids) else self._take(which)

    def sort(self) -> Pending:
        """By the number of the key."""
        is_sorted = (self.ids[1:] > self.ids[:-1]).all()
        return self if is_sorted else self._take(np.argsort(self.ids))

    def _take(self, which: Ints) -> Pending:
        some = pa.array(which)
        columns = {name: column.take(some) for name, column in self.columns.items()}
        return Pending(
            self.ids[which], columns, self.next[which], self.changed[which], self.fired[which]
        )

    @staticmethod
    def join(parts: Sequence[Pending]) -> Pending:
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


@dataclass(frozen=True)
class Turns:
    """What comes next for each pending key."""

    keys: Mapping[str, Ints]  # ROWS, EVENT, PROCESSING or DONE -> numbers among the pending
    until: Ints  # the first row that must wait
    due: Ints  # the first event timer, or NEVER
    due_now: Ints  # the first processing timer, or NEVER


class Timeline:
    """The rows of an epoch and the timers of their keys, in the order of time."""

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

    def turns(self, pending: Pending, time: Time) -> Turns:
        ends = self.ends[pending.ids]
        if not self.timers:
            has_rows = ends > pending.next
            keys = {ROWS: np.flatnonzero(has_rows), DONE: np.flatnonzero(~has_rows)}
            never = np.full(len(pending.ids), NEVER, np.int64)
            return Turns(keys, ends, never, never)
        due = self.first_due(pending.columns, EVENT, time.watermark)
        due_now = self.first_due(pending.columns, PROCESSING, time.now)
        until = self._find_rows_after(due, pending.next, ends)
        has_rows = until > pending.next
        is_due = ~has_rows & (due != NEVER)
        is_due_now = ~has_rows & ~is_due & (due_now != NEVER)
        keys = {
            ROWS: np.flatnonzero(has_rows), EVENT: np.flatnonzero(is_due),
            PROCESSING: np.flatnonzero(is_due_now),
            DONE: np.flatnonzero(~has_rows & ~is_due & ~is_due_now),
        }  # fmt: skip
        return Turns(keys, until, due, due_now)

    def _find_rows_after(self, due: Ints, low: Ints, high: Ints) -> Ints:
        """The first row of each key after its timer: a binary search for all keys at once."""
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

    def settled(self, ids: Ints, upcoming: Ints, time: Time) -> Ints:
        """For each key the time before which no row is to come, if `upcoming` is its next row."""
        known = np.full(len(ids), time.passed, np.int64)
        if self.at is None or not len(self.at):
            return known
        waiting = upcoming < self.ends[ids]
        following = self.at[np.minimum(upcoming, len(self.at) - 1)]
        return np.where(waiting, np.minimum(known, following), known)


# ---------------------------------------------------------------- one call


class ProcessCaller:
    """Calls a process, by the method that it defines, and checks what it returns."""

    def __init__(self, process: KeyedProcess, bound: BoundProcess, keys: pa.Schema) -> None:
        self.process, self.bound, self.owner = process, bound, type(process).__name__
        self.states = pa.schema([(column.name, column.type) for column in bound.columns])
        self._per_key = PerKeyCaller(process, keys, bound.columns, bound.output)

    def call(self, call: Call, keys: pa.Table, site: CallSite) -> CallResult:
        """Give the keys their rows; without rows, tell them that their timers fire."""
        method = self.bound.timers if call.rows is None else self.bound.rows
        with site.report_failures():
            self.process._call = call
            try:
                if method in ("process_key", "on_timer_key"):
                    return self._call_per_key(call, keys, site)
                return self._call_vectorised(call, keys, method)
            finally:
                self.process._call = None

    def _call_per_key(self, call: Call, keys: pa.Table, site: CallSite) -> CallResult:
        collects = gc.isenabled()
        gc.disable()  # it would walk over all rows of the slice again and again, and find nothing
        try:
            if call.rows is None:
                return self._per_key.fire_timers(keys, call.columns, call.due, site)
            starts = self.process.starts
            return self._per_key.process_rows(keys, call.columns, call.rows, starts, site)
        finally:
            if collects:
                gc.enable()

    def _call_vectorised(self, call: Call, keys: pa.Table, method: str | None) -> CallResult:
        output = self.bound.output
        if method is None:
            new = self.process.folded()
            both = {**dict(zip(keys.column_names, keys.columns, strict=True)), **new}
            out = {name: both[name] for name in output.names}
        else:
            known = [call.columns[name] for name in self.states.names]
            schema = pa.schema([*keys.schema, *self.states])
            table = pa.table([*keys.columns, *known], schema=schema)
            arguments = (table,) if call.rows is None else (table, call.rows)
            out, new = split_result(getattr(self.process, method)(*arguments))
        return CallResult(check_out(out, output), check_state(new, keys, self.states))


# ---------------------------------------------------------------- all calls


class SliceRun:
    """The calls for one slice of keys in one epoch."""

    def __init__(
        self,
        caller: ProcessCaller,
        keys: pa.Table,
        rows: pa.Table,
        timeline: Timeline,
        *,
        time: Time,
        where: str,
    ) -> None:
        self._caller, self._keys, self._rows = caller, keys, rows
        self._timeline, self._time, self._where = timeline, time, where
        self._out: list[pa.Table] = []

    def collect_output(self) -> pa.Table:
        output = self._caller.bound.output
        return pa.concat_tables(self._out) if self._out else output.empty_table()

    def take_turn(self, kind: str, pending: Pending, which: Ints, turns: Turns) -> Pending:
        """Give these keys their rows, or tell them that their timers fire."""
        if kind == ROWS:
            return self._process_rows(pending, turns.until[which])
        due = (turns.due if kind == EVENT else turns.due_now)[which]
        return self._fire_timers(kind, pending, due)

    def _process_rows(self, pending: Pending, until: Ints) -> Pending:
        rows, index = self._slice_rows(pending.next, until)
        settled = self._timeline.settled(pending.ids, until, self._time)
        keys = self._take_keys(pending.ids)
        call = Call(self._time, len(keys), index, settled, rows, pending.columns)
        site = self._site(self._caller.bound.rows or "process", keys)
        result = self._caller.call(call, keys, site)
        at = self._timeline.at
        written = None if at is None else at[until - 1]
        pending = replace(pending, next=until, fired=np.zeros_like(pending.fired))
        return self._apply(pending, result, written)

    def _fire_timers(self, kind: str, pending: Pending, due: Ints) -> Pending:
        method = self._caller.bound.timers
        assert method is not None  # no timers without it
        fired = {
            timer.name: to_micros(pending.columns[timer.name], NEVER) == due
            for timer in self._timeline.timers
            if timer.clock == kind
        }
        keys = self._take_keys(pending.ids)
        pending = replace(pending, fired=pending.fired + 1)
        endless = np.flatnonzero(pending.fired > _MOST_FIRED)
        if len(endless):
            raise self._endless(self._site(method, keys.take(pa.array(endless))), fired)
        settled = self._timeline.settled(pending.ids, pending.next, self._time)
        call = Call(self._time, len(keys), None, settled, None, pending.columns, fired)
        result = self._caller.call(call, keys, self._site(method, keys))
        cleared = {name: set_null(pending.columns[name], mask) for name, mask in fired.items()}
        pending = replace(
            pending, columns={**pending.columns, **cleared}, changed=np.ones_like(pending.changed)
        )
        return self._apply(pending, result, due if kind == EVENT else None)

    def _slice_rows(self, starts: Ints, ends: Ints) -> tuple[pa.Table, Ints]:
        lengths = ends - starts
        index = np.repeat(np.arange(len(starts)), lengths)
        if len(index) == len(self._rows) and (starts[1:] >= starts[:-1]).all():
            return self._rows, index
        return self._rows.take(pa.array(expand_ranges(starts, ends))), index

    def _take_keys(self, ids: Ints) -> pa.Table:
        if len(ids) == len(self._keys) and (ids[1:] > ids[:-1]).all():
            return self._keys
        return self._keys.take(pa.array(ids))

    def _site(self, method: str, keys: pa.Table) -> CallSite:
        return CallSite(self._caller.owner, method, self._time.epoch, keys, self._where)

    def _endless(self, site: CallSite, fired: Mapping[str, Bools]) -> ProcessFailed:
        names = ", ".join(name for name, mask in fired.items() if mask.any())
        error = RuntimeError(f"{names} was set to a time that is due {_MOST_FIRED} times in a row")
        return ProcessFailed(
            site.failure(error).message,
            hint="set a timer later than it was due and, if it comes again and again, in larger "
            "steps; a timer that is left out of new_state is not set again",
        )

    # ------------------------------------------------------------ state

    def _apply(self, pending: Pending, result: CallResult, event: Ints | None) -> Pending:
        """Write the result over the state. `event`: the event time at which it was written."""
        if result.out is not None and len(result.out):
            self._out.append(result.out)
        columns, changed = dict(pending.columns), pending.changed.copy()
        for column in self._caller.bound.columns:
            if column.name not in result.columns:
                continue
            old, new = pending.columns[column.name], empty_to_null(result.columns[column.name])
            touched = None if result.touched is None else result.touched[column.name]
            columns[column.name] = new
            differs = _find_changes(old, new)
            changed |= differs if touched is None else differs & touched
            if column.written is not None:
                stamp = self._write_times(pending, column.clock, event)
                before = to_micros(columns[column.written], LONG_AGO)
                after = np.maximum(before, stamp)
                after = after if touched is None else np.where(touched, after, before)
                gone = ~is_valid(new) | (after == LONG_AGO)
                changed |= (after != before) & ~gone
                columns[column.written] = pa.array(after, pa.int64(), mask=gone)
        return replace(pending, columns=columns, changed=changed)

    def _write_times(self, pending: Pending, clock: str, event: Ints | None) -> Ints:
        """The time of writing: now, or on the clock of events that of the last row or the timer."""
        if clock != EVENT:
            return np.full(len(pending.ids), self._time.now, np.int64)
        passed = self._time.passed
        if event is None:
            return np.full(len(pending.ids), passed, np.int64)
        return np.where(event == LONG_AGO, passed, event)


def _find_changes(old: pa.Array, new: pa.Array) -> Bools:
    """Where the value may have changed. Nested values are not compared."""
    there = is_valid(old) | is_valid(new)
    if pa.types.is_nested(old.type):
        return there
    same = pc.fill_null(pc.equal(old, new), False).to_numpy(zero_copy_only=False)
    return np.asarray(there & ~same, np.bool_)
