"""One keyed step over a slice of keys: state and rows in, rows and state out. No files, no Spark.

1. What has expired is taken out of the state.
2. Rows and timers that are due go to the process, in the order that `segments` says.
3. What it returned is checked, and written over the state that it was given.

The same keys, state, rows and time give the same result, if the process does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from onceflow.state.binding import bind_process
from onceflow.state.calls import DONE, Calls, Epoch, Pending, Timeline
from onceflow.state.process import Binding, KeyedProcess, Time
from onceflow.state.states import EVENT, Column
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

__all__ = ["Step", "StepResult", "Time"]


@dataclass(frozen=True)
class StepResult:
    """`state` has a row for each key; `changed` says which to write, `live` which hold anything."""

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
        self._calls = Calls(process, found, keys)

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
        """All that happens to these keys in one epoch. `where` stands before what fails.

        `state` has a row for each key, null where nothing is stored. `index` says for each row the
        number of its key, and does not decrease.
        """
        at = None
        if self.event_time is not None:
            rows, index, at = _by_time(rows, index, self.event_time)
        numbers = np.arange(len(keys))
        starts = np.searchsorted(index, numbers, "left").astype(np.int64)
        ends = np.searchsorted(index, numbers, "right").astype(np.int64)
        segments = Timeline(at, starts, ends, self._timers)

        # 1. expire
        stored = {name: combine(state[name]) for name in self.values.names}
        columns = self._expiry.read(stored, _clock(segments, stored, time), time.now)
        changed = np.zeros(len(keys), np.bool_)
        for name in self.values.names:
            changed |= find_shrunk(stored[name], columns[name])

        # 2. and 3. rows and timers
        work = Pending(numbers, columns, starts, changed, np.zeros(len(keys), np.int64))
        run = Epoch(self._calls, keys, rows, segments, time=time, where=where)
        done: list[Pending] = []
        while len(work.ids):
            turns = segments.turns(work, time)
            done.append(work.take(turns.keys[DONE]))
            parts = [
                run.turn(kind, work.take(which), which, turns)
                for kind, which in turns.keys.items()
                if kind != DONE and len(which)
            ]
            if not parts:
                break
            work = Pending.joined(parts)
        end = Pending.joined(done or [work]).in_order()
        table = pa.table([end.columns[name] for name in self.values.names], schema=self.values)
        return StepResult(run.emitted(), table, end.changed, self._live(end.columns, len(keys)))

    def expired(self, values: pa.Table, time: Time) -> Bools:
        """Rows of which nothing is left: nobody will see any of it again."""
        return ~self._live(self._seen(values, time), len(values))

    def visible(self, values: pa.Table, time: Time) -> pa.Table:
        """States and timers as they are read at that time: without what has expired."""
        seen = self._seen(values, time)
        return pa.table([seen[name] for name in self.states.names], schema=self.states)

    def _seen(self, values: pa.Table, time: Time) -> dict[str, pa.Array]:
        known = LONG_AGO if time.watermark is None else time.watermark
        stored = {name: combine(values[name]) for name in self.values.names}
        return self._expiry.read(stored, np.full(len(values), known, np.int64), time.now)

    def _live(self, columns: Mapping[str, pa.Array], size: int) -> Bools:
        live = np.zeros(size, np.bool_)
        for name in self.states.names:
            live |= is_valid(empty_to_null(columns[name]))
        return live


def _clock(segments: Timeline, stored: Mapping[str, pa.Array], time: Time) -> Ints:
    """The time of events of each key, by which its values expire: the watermark of the epochs
    before, by which merging runs lets them go as well, or the first timer that it has passed."""
    known = LONG_AGO if time.watermark is None else time.watermark
    clock = np.full(len(segments.starts), known, np.int64)
    if not segments.timers or time.watermark is None:
        return clock
    return np.minimum(clock, segments.first_due(stored, EVENT, time.watermark))


def _by_time(rows: pa.Table, index: Ints, column: str) -> tuple[pa.Table, Ints, Ints]:
    """The rows of each key by their time, those without one first; else as they came."""
    at = to_micros(rows[column], LONG_AGO)
    if ((at[1:] >= at[:-1]) | (index[1:] != index[:-1])).all():
        return rows, index, at
    order = order_by_key_and_time(index, at)
    return rows.take(pa.array(order)), index[order], at[order]


class Expiry:
    """Of all columns of a process."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self._columns = [column for column in columns if column.ttl is not None]
        self.hidden = [column.written for column in self._columns if column.written is not None]

    def read(self, stored: Mapping[str, pa.Array], event: Ints, now: int) -> dict[str, pa.Array]:
        """The columns without what has expired. `event`: for each key its time of events."""
        found = dict(stored)
        for column in self._columns:
            clock = event if column.clock == EVENT else np.full(len(event), now, np.int64)
            if column.time is not None:
                found[column.name] = _without_old(stored[column.name], column, clock)
            elif column.written is not None:
                gone = _is_old(stored[column.written], column, clock)
                found[column.name] = set_null(stored[column.name], gone)
                found[column.written] = set_null(stored[column.written], gone)
        return found


def _is_old(written: pa.Array, column: Column, clock: Ints) -> Bools:
    """A value whose time of writing is not known (ttl= is new) stays until it is written again."""
    at = to_micros(written, NEVER)
    return np.asarray((at != NEVER) & (at <= _before(clock, column)), np.bool_)


def _before(clock: Ints, column: Column) -> Ints:
    """What was written at or before this is gone."""
    assert column.ttl is not None
    return np.where(clock > LONG_AGO + column.ttl, clock - column.ttl, LONG_AGO)


def _without_old(array: pa.Array, column: Column, clock: Ints) -> pa.Array:
    """An element without a time stays."""
    elements, of = unpack(array)
    if not len(elements):
        return array
    items = elements if pa.types.is_list(array.type) else elements.field(1)
    index = items.type.get_field_index(column.time)
    at = to_micros(items.flatten()[index], NEVER)
    keep = at > _before(clock, column)[of]
    if keep.all():
        return array
    kept = np.flatnonzero(keep)
    return pack(elements.take(pa.array(kept)), of[kept], len(array), array.type)


def find_shrunk(before: pa.Array, after: pa.Array) -> Bools:
    """Where less is there than before; for lists and maps by how much there is."""
    if before is after:
        return np.zeros(len(before), np.bool_)
    if pa.types.is_list(before.type) or pa.types.is_map(before.type):
        counts = [np.bincount(unpack(a)[1], minlength=len(a)) for a in (before, after)]
        return np.asarray(counts[0] != counts[1], np.bool_)
    return np.asarray(is_valid(before) != is_valid(after), np.bool_)
