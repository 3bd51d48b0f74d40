"""One keyed step over a slice of keys: state and rows in, rows and state out. No files, no Spark.

1. Remove what has expired from the state.
2. Give rows, and timers that are due, to the process, in the order of `calls.py`.
3. Check what it returned, and write it over the state.

The same keys, state, rows and time give the same result if the process is deterministic.

On the clock of events the time of a key is the watermark of the epochs before, but not later than
the first of its timers that is due. So a row at or after the watermark always sees a value that was
written less than its ttl before it, and may see one a little longer. A row behind the watermark
(one of the first rows of its partition) sees what merges of runs have left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from onceflow.state.binding import bind_process
from onceflow.state.calls import DONE, Pending, ProcessCaller, SliceRun, Timeline
from onceflow.state.process import KeyedProcess, Time
from onceflow.state.states import EVENT, Binding, Column
from onceflow.state.vectors import (
    LONG_AGO,
    NEVER,
    Bools,
    Ints,
    combine,
    empty_to_null,
    is_valid,
    order_by_key_and_time,
    pack,
    set_null,
    to_micros,
    unpack,
)


@dataclass(frozen=True)
class StepResult:
    """`state` has a row for each key. `changed`: which to write; `live`: which have any value."""

    out: pa.Table
    state: pa.Table
    changed: Bools
    live: Bools


class Step:
    """A process that knows the columns of its keys and rows; `JobError` if it cannot work."""

    def __init__(
        self,
        process: KeyedProcess,
        *,
        keys: pa.Schema,
        rows: pa.Schema,
        event_time: str | None = None,
        watermark: bool = False,
    ) -> None:
        found = bind_process(process, Binding(keys, rows, event_time, watermark))
        self.process, self.keys, self.rows, self.event_time = process, keys, rows, event_time
        self.output: pa.Schema = found.output
        self.states: pa.Schema = pa.schema([(c.name, c.type) for c in found.columns])
        self._expiry = Expiry(found.columns)
        hidden = [pa.field(name, pa.int64()) for name in self._expiry.hidden]
        self.values: pa.Schema = pa.schema([*self.states, *hidden])
        self._timers = [column for column in found.columns if column.is_timer]
        self.timers: Mapping[str, str] = {timer.name: timer.clock for timer in self._timers}
        self._caller = ProcessCaller(process, found, keys)

    def run(
        self,
        keys: pa.Table,
        state: pa.Table,
        rows: pa.Table,
        index: Ints,
        time: Time,
        *,
        where: str = "",
    ) -> StepResult:
        """One epoch of these keys. `where` begins the message of a failure.

        `state` has a row for each key, null where nothing is stored. `index` has for each row the
        number of its key, and does not decrease.
        """
        at = None
        if self.event_time is not None:
            rows, index, at = _sort_by_time(rows, index, self.event_time)
        numbers = np.arange(len(keys))
        starts = np.searchsorted(index, numbers, "left").astype(np.int64)
        ends = np.searchsorted(index, numbers, "right").astype(np.int64)
        timeline = Timeline(at, starts, ends, self._timers)

        # 1. expire
        stored = {name: combine(state[name]) for name in self.values.names}
        columns = self._expiry.read(stored, _event_clock(timeline, stored, time), time.now)
        changed = np.zeros(len(keys), np.bool_)
        for name in self.values.names:
            changed |= _find_shrunk(stored[name], columns[name])

        # 2. and 3. call, and apply
        pending = Pending(numbers, columns, starts, changed, np.zeros(len(keys), np.int64))
        run = SliceRun(self._caller, keys, rows, timeline, time=time, where=where)
        done: list[Pending] = []
        while len(pending.ids):
            turns = timeline.turns(pending, time)
            done.append(pending.take(turns.keys[DONE]))
            parts = [
                run.take_turn(kind, pending.take(which), which, turns)
                for kind, which in turns.keys.items()
                if kind != DONE and len(which)
            ]
            if not parts:
                break
            pending = Pending.join(parts)
        end = Pending.join(done or [pending]).sort()
        table = pa.table([end.columns[name] for name in self.values.names], schema=self.values)
        live = self._find_live(end.columns, len(keys))
        return StepResult(run.collect_output(), table, end.changed, live)

    def is_expired(self, values: pa.Table, time: Time) -> Bools:
        """Which rows have no value left that any later epoch will read."""
        return ~self._find_live(self._read(values, time), len(values))

    def read(self, values: pa.Table, time: Time) -> pa.Table:
        """States and timers at that time, without what has expired."""
        found = self._read(values, time)
        return pa.table([found[name] for name in self.states.names], schema=self.states)

    def _read(self, values: pa.Table, time: Time) -> dict[str, pa.Array]:
        stored = {name: combine(values[name]) for name in self.values.names}
        return self._expiry.read(stored, np.full(len(values), time.passed, np.int64), time.now)

    def _find_live(self, columns: Mapping[str, pa.Array], size: int) -> Bools:
        live = np.zeros(size, np.bool_)
        for name in self.states.names:
            live |= is_valid(empty_to_null(columns[name]))
        return live


def _event_clock(timeline: Timeline, stored: Mapping[str, pa.Array], time: Time) -> Ints:
    """The event time of each key, by which its values expire (see the top of this module)."""
    clock = np.full(len(timeline.starts), time.passed, np.int64)
    if not timeline.timers or time.watermark is None:
        return clock
    return np.minimum(clock, timeline.first_due(stored, EVENT, time.watermark))


def _sort_by_time(rows: pa.Table, index: Ints, column: str) -> tuple[pa.Table, Ints, Ints]:
    """Sort the rows of each key by time. Those without a time come first."""
    at = to_micros(rows[column], LONG_AGO)
    if ((at[1:] >= at[:-1]) | (index[1:] != index[:-1])).all():
        return rows, index, at
    order = order_by_key_and_time(index, at)
    return rows.take(pa.array(order)), index[order], at[order]


# ---------------------------------------------------------------- expiry


class Expiry:
    """Which values are gone because they were not written for their ttl, or are that old."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self._columns = [column for column in columns if column.ttl is not None]
        self.hidden = [column.written for column in self._columns if column.written is not None]

    def read(self, stored: Mapping[str, pa.Array], event: Ints, now: int) -> dict[str, pa.Array]:
        """The columns without what has expired. `event`: the event time of each key."""
        found = dict(stored)
        for column in self._columns:
            clock = event if column.clock == EVENT else np.full(len(event), now, np.int64)
            if column.time is not None:
                found[column.name] = _drop_old_elements(stored[column.name], column, clock)
            elif column.written is not None:
                gone = _is_old(stored[column.written], column, clock)
                found[column.name] = set_null(stored[column.name], gone)
                found[column.written] = set_null(stored[column.written], gone)
        return found


def _is_old(written: pa.Array, column: Column, clock: Ints) -> Bools:
    """A value without a time of writing (its ttl= is new) stays until it is written again."""
    at = to_micros(written, NEVER)
    return np.asarray((at != NEVER) & (at <= _limit(clock, column)), np.bool_)


def _limit(clock: Ints, column: Column) -> Ints:
    """Values that were written at or before this time are gone."""
    assert column.ttl is not None
    return np.where(clock > LONG_AGO + column.ttl, clock - column.ttl, LONG_AGO)


def _drop_old_elements(array: pa.Array, column: Column, clock: Ints) -> pa.Array:
    """Elements without a time stay."""
    elements, of = unpack(array)
    if not len(elements):
        return array
    items = elements if pa.types.is_list(array.type) else elements.field(1)
    index = items.type.get_field_index(column.time)
    at = to_micros(items.flatten()[index], NEVER)
    keep = at > _limit(clock, column)[of]
    if keep.all():
        return array
    kept = np.flatnonzero(keep)
    return pack(elements.take(pa.array(kept)), of[kept], len(array), array.type)


def _find_shrunk(before: pa.Array, after: pa.Array) -> Bools:
    """Where a value, or an element of a list or map, was removed."""
    if before is after:
        return np.zeros(len(before), np.bool_)
    if pa.types.is_list(before.type) or pa.types.is_map(before.type):
        counts = [np.bincount(unpack(a)[1], minlength=len(a)) for a in (before, after)]
        return np.asarray(counts[0] != counts[1], np.bool_)
    return np.asarray(is_valid(before) != is_valid(after), np.bool_)
