"""Calls of a process in one epoch, and what becomes of the state by what they return."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import ProcessFailed
from onceflow.state.binding import Bound
from onceflow.state.fit import fit_out, fit_state, pair
from onceflow.state.per_key import PerKey, Returned
from onceflow.state.process import Call, KeyedProcess, Time
from onceflow.state.results import Blame
from onceflow.state.segments import ROWS, Segments, Turns, Work
from onceflow.state.states import EVENT
from onceflow.state.vectors import (
    LONG_AGO,
    NEVER,
    Bools,
    Ints,
    blanked,
    empty_is_null,
    micros,
    ranges,
    valid,
)

_MOST_FIRED = 1000


class Calls:
    """How a process is called."""

    def __init__(self, process: KeyedProcess, bound: Bound, keys: pa.Schema) -> None:
        self.process, self.bound, self.owner = process, bound, type(process).__name__
        self.states = pa.schema([(column.name, column.type) for column in bound.columns])
        self.per_key = PerKey(process, keys, bound.columns, bound.output)


class Epoch:
    """The calls for one slice of keys."""

    def __init__(
        self,
        calls: Calls,
        keys: pa.Table,
        rows: pa.Table,
        segments: Segments,
        *,
        time: Time,
        where: str,
    ) -> None:
        self._calls, self._keys, self._rows = calls, keys, rows
        self._segments, self._time, self._where = segments, time, where
        self._out: list[pa.Table] = []

    def emitted(self) -> pa.Table:
        return pa.concat_tables(self._out) if self._out else self._calls.bound.output.empty_table()

    def turn(self, kind: str, work: Work, which: Ints, turns: Turns) -> Work:
        """Give these keys their rows, or say that their timers are due."""
        if kind == ROWS:
            return self._rows_turn(work, turns.until[which])
        due = (turns.due if kind == EVENT else turns.due_now)[which]
        return self._timers_turn(kind, work, due)

    def _rows_turn(self, work: Work, until: Ints) -> Work:
        rows, index = self._slice(work.next, until)
        settled = self._segments.settled(work.ids, until, self._time.watermark)
        keys = self._keys_of(work.ids)
        method = self._calls.bound.rows
        blame = self._blame(method or "process", keys)
        call = Call(self._time, len(keys), index, settled, rows, work.columns)
        with blame.said():
            if method == "process_key":
                returned = self._per_key(call, keys, blame)
            else:
                returned = self._vectorised(call, keys, work.columns, method)
        at = self._segments.at
        written = None if at is None else at[until - 1]
        work = replace(work, next=until, fired=np.zeros_like(work.fired))
        return self._kept(work, returned, written)

    def _timers_turn(self, kind: str, work: Work, due: Ints) -> Work:
        method = self._calls.bound.timers
        assert method is not None  # no timers without it
        fired = {
            timer.name: micros(work.columns[timer.name], NEVER) == due
            for timer in self._segments.timers
            if timer.clock == kind
        }
        keys = self._keys_of(work.ids)
        work = replace(work, fired=work.fired + 1)
        endless = np.flatnonzero(work.fired > _MOST_FIRED)
        if len(endless):
            raise self._endless(method, keys.take(pa.array(endless)), fired)
        settled = self._segments.settled(work.ids, work.next, self._time.watermark)
        blame = self._blame(method, keys)
        call = Call(self._time, len(keys), None, settled, None, work.columns, fired)
        with blame.said():
            if method == "on_timer_key":
                returned = self._per_key(call, keys, blame)
            else:
                returned = self._vectorised(call, keys, work.columns, method)
        cleared = {name: blanked(work.columns[name], mask) for name, mask in fired.items()}
        work = replace(
            work, columns={**work.columns, **cleared}, changed=np.ones_like(work.changed)
        )
        return self._kept(work, returned, due if kind == EVENT else None)

    # ------------------------------------------------------------ calling

    def _per_key(self, call: Call, keys: pa.Table, blame: Blame) -> Returned:
        process, per_key = self._calls.process, self._calls.per_key
        process._call = call
        collects = gc.isenabled()
        gc.disable()  # it would walk over all rows of the slice again and again, and find nothing
        try:
            if call.rows is None:
                return per_key.timers(keys, call.columns, call.due, blame)
            return per_key.rows(keys, call.columns, call.rows, process.starts, blame)
        finally:
            process._call = None
            if collects:
                gc.enable()

    def _vectorised(
        self, call: Call, keys: pa.Table, columns: Mapping[str, pa.Array], method: str | None
    ) -> Returned:
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
                out, new = pair(getattr(process, method)(*arguments))
        finally:
            process._call = None
        return Returned(fit_out(out, bound.output), fit_state(new, keys, self._calls.states))

    def _slice(self, starts: Ints, ends: Ints) -> tuple[pa.Table, Ints]:
        lengths = ends - starts
        index = np.repeat(np.arange(len(starts)), lengths)
        if len(index) == len(self._rows) and (starts[1:] >= starts[:-1]).all():
            return self._rows, index
        return self._rows.take(pa.array(ranges(starts, ends))), index

    def _keys_of(self, ids: Ints) -> pa.Table:
        if len(ids) == len(self._keys) and (ids[1:] > ids[:-1]).all():
            return self._keys
        return self._keys.take(pa.array(ids))

    def _blame(self, method: str, keys: pa.Table) -> Blame:
        return Blame(self._calls.owner, method, self._time.epoch, keys, self._where)

    def _endless(self, method: str, keys: pa.Table, fired: Mapping[str, Bools]) -> ProcessFailed:
        names = ", ".join(name for name, mask in fired.items() if mask.any())
        error = RuntimeError(f"{names} was set to a time that is due {_MOST_FIRED} times in a row")
        return ProcessFailed(
            self._blame(method, keys).failed(error).message,
            hint="set a timer later than it was due and, if it comes again and again, in larger "
            "steps; a timer that is left out of new_state is not set again",
        )

    # ------------------------------------------------------------ keeping

    def _kept(self, work: Work, returned: Returned, event: Ints | None) -> Work:
        """What was returned, over what was there. `event`: when it was written, by events."""
        if returned.out is not None and len(returned.out):
            self._out.append(returned.out)
        columns, changed = dict(work.columns), work.changed.copy()
        for column in self._calls.bound.columns:
            if column.name not in returned.columns:
                continue
            old, new = work.columns[column.name], empty_is_null(returned.columns[column.name])
            touched = None if returned.touched is None else returned.touched[column.name]
            columns[column.name] = new
            differs = _differ(old, new)
            changed |= differs if touched is None else differs & touched
            if column.written is not None:
                stamp = self._stamps(event if column.clock == EVENT else None, column.clock, work)
                before = micros(columns[column.written], LONG_AGO)
                after = np.maximum(before, stamp)
                after = after if touched is None else np.where(touched, after, before)
                gone = ~valid(new) | (after == LONG_AGO)
                changed |= (after != before) & ~gone
                columns[column.written] = pa.array(after, pa.int64(), mask=gone)
        return replace(work, columns=columns, changed=changed)

    def _stamps(self, event: Ints | None, clock: str, work: Work) -> Ints:
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
    there = valid(old) | valid(new)
    if pa.types.is_nested(old.type):
        return there
    same = pc.fill_null(pc.equal(old, new), False).to_numpy(zero_copy_only=False)
    return np.asarray(there & ~same, np.bool_)
