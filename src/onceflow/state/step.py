"""One keyed step over a slice of keys: state and rows in, rows and state out. No files, no Spark.

1. What has expired is taken out of the state.
2. Rows and timers that are due go to the process, in the order that `segments` says.
3. What it returned is checked, and written over the state that it was given.

The same keys, state, rows and time give the same result, if the process does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from onceflow.state.binding import bound
from onceflow.state.calls import Calls, Epoch
from onceflow.state.expiry import Expiry, shrunk
from onceflow.state.process import Binding, KeyedProcess, Time
from onceflow.state.segments import DONE, Segments, Work
from onceflow.state.states import EVENT
from onceflow.state.vectors import (
    LONG_AGO,
    Bools,
    Ints,
    by_key_and_time,
    empty_is_null,
    micros,
    one,
    valid,
)

__all__ = ["Step", "Stepped", "Time"]


@dataclass(frozen=True)
class Stepped:
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
        found = bound(process, Binding(keys, rows, event_time, watermark))
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
    ) -> Stepped:
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
        segments = Segments(at, starts, ends, self._timers)

        # 1. expire
        stored = {name: one(state[name]) for name in self.values.names}
        columns = self._expiry.read(stored, _clock(segments, stored, time), time.now)
        changed = np.zeros(len(keys), np.bool_)
        for name in self.values.names:
            changed |= shrunk(stored[name], columns[name])

        # 2. and 3. rows and timers
        work = Work(numbers, columns, starts, changed, np.zeros(len(keys), np.int64))
        run = Epoch(self._calls, keys, rows, segments, time=time, where=where)
        done: list[Work] = []
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
            work = Work.joined(parts)
        end = Work.joined(done or [work]).in_order()
        table = pa.table([end.columns[name] for name in self.values.names], schema=self.values)
        return Stepped(run.emitted(), table, end.changed, self._live(end.columns, len(keys)))

    def expired(self, values: pa.Table, time: Time) -> Bools:
        """Rows of which nothing is left: nobody will see any of it again."""
        return ~self._live(self._seen(values, time), len(values))

    def visible(self, values: pa.Table, time: Time) -> pa.Table:
        """States and timers as they are read at that time: without what has expired."""
        seen = self._seen(values, time)
        return pa.table([seen[name] for name in self.states.names], schema=self.states)

    def _seen(self, values: pa.Table, time: Time) -> dict[str, pa.Array]:
        known = LONG_AGO if time.watermark is None else time.watermark
        stored = {name: one(values[name]) for name in self.values.names}
        return self._expiry.read(stored, np.full(len(values), known, np.int64), time.now)

    def _live(self, columns: Mapping[str, pa.Array], size: int) -> Bools:
        live = np.zeros(size, np.bool_)
        for name in self.states.names:
            live |= valid(empty_is_null(columns[name]))
        return live


def _clock(segments: Segments, stored: Mapping[str, pa.Array], time: Time) -> Ints:
    """The time of events of each key, by which its values expire: the watermark of the epochs
    before, by which merging runs lets them go as well, or the first timer that it has passed."""
    known = LONG_AGO if time.watermark is None else time.watermark
    clock = np.full(len(segments.starts), known, np.int64)
    if not segments.timers or time.watermark is None:
        return clock
    return np.minimum(clock, segments.first_due(stored, EVENT, time.watermark))


def _by_time(rows: pa.Table, index: Ints, column: str) -> tuple[pa.Table, Ints, Ints]:
    """The rows of each key by their time, those without one first; else as they came."""
    at = micros(rows[column], LONG_AGO)
    if ((at[1:] >= at[:-1]) | (index[1:] != index[:-1])).all():
        return rows, index, at
    order = by_key_and_time(index, at)
    return rows.take(pa.array(order)), index[order], at[order]
