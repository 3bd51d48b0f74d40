"""`Sessions`: rows of a key that follow each other closely, emitted once when they are complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.errors import JobError
from onceflow.state.aggregates import Aggregate, find_starts, parse_aggregates, reduce
from onceflow.state.process import KeyedProcess
from onceflow.state.results import convert
from onceflow.state.states import ListState, Span, Timer, parse_span
from onceflow.state.vectors import (
    LONG_AGO,
    Ints,
    combine,
    is_valid,
    order_by_key_and_time,
    pack,
    to_micros,
    to_timestamps,
    unpack,
)

_START, _END = "start", "end"


class Sessions(KeyedProcess):
    """Emits each session once, when the watermark has passed its last row by `gap`.

    The result does not depend on the order of rows or on epochs: a row between two sessions joins
    them. `end` is the time of the last row. A row `gap` after it begins another session. Rows
    without an event time are ignored. The totals are those of `Totals`, except that first and last
    are the values of the first and last row even if they are null.
    """

    def __init__(self, gap: Span, totals: Mapping[str, str] | None = None) -> None:
        self._given, self._totals = gap, dict(totals or {})

    def bind(self, keys: pa.Schema, rows: pa.Schema) -> None:
        owner, at = type(self).__name__, self.binding.event_time
        if at is None or not self.binding.watermark:
            raise JobError(
                f"{owner} needs a watermark: without one, no session is ever complete",
                hint="give the step event_time= and watermark=",
            )
        self._gap = parse_span(self._given)
        self._aggregates = parse_aggregates(self._totals, rows, owner)
        taken = [*keys.names, _START, _END]
        if twice := [name for name in self._totals if name in taken]:
            raise JobError(f"{owner}: {twice[0]} is there already", hint="rename the total")
        if twice := [name for name in keys.names if name in (_START, _END)]:
            raise JobError(f"{owner}: a key is called {twice[0]}", hint="rename the column")
        self._kind = rows.field(at).type
        times = [(_START, self._kind), (_END, self._kind)]
        fields = [*times, *((found.name, found.type) for found in self._aggregates)]
        self.declare(open_sessions=ListState(pa.struct(fields)), close_at=Timer("event"))
        self.output = pa.schema([*keys, *pa.struct(fields)])

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        at = to_micros(rows[self.binding.event_time], LONG_AGO)
        there = np.flatnonzero(at != LONG_AGO)
        some = pa.array(there)
        values = [_values_of_rows(found, rows).take(some) for found in self._aggregates]
        new = _Sessions(self.index[there], at[there], at[there], values)
        return self._close(keys, self._merge(_concatenate(self._open(keys), new)))

    def on_timer(self, keys: pa.Table) -> Any:
        return self._close(keys, self._open(keys))

    def _open(self, keys: pa.Table) -> _Sessions:
        elements, of = unpack(combine(keys["open_sessions"]))
        start, end, *values = elements.flatten()
        return _Sessions(of, to_micros(start, LONG_AGO), to_micros(end, LONG_AGO), values)

    def _merge(self, all_: _Sessions) -> _Sessions:
        """Join sessions that touch."""
        if not len(all_.of):
            return all_
        found = all_.take(order_by_key_and_time(all_.of, all_.start))
        latest = _find_latest_so_far(found)
        is_first = np.ones(len(found.of), np.bool_)
        apart = found.start[1:] >= latest[:-1] + self._gap
        is_first[1:] = apart | (found.of[1:] != found.of[:-1])
        group = np.cumsum(is_first) - 1
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(group)) - 1
        values = [
            _reduce_sessions(aggregate, column, group, found.end)
            for aggregate, column in zip(self._aggregates, found.values, strict=True)
        ]
        return _Sessions(found.of[firsts], found.start[firsts], latest[lasts], values)

    def _close(self, keys: pa.Table, found: _Sessions) -> Any:
        """Emit the complete sessions, keep the others, and set a timer for the first of them."""
        complete = found.end + self._gap <= self.settled[found.of]
        out = found.take(np.flatnonzero(complete))
        rest = found.take(np.flatnonzero(~complete))
        known = combine(keys["open_sessions"]).type
        names = known.value_type
        some = pa.array(out.of)
        columns = {name: keys[name].take(some) for name in self.binding.keys.names}
        for n, column in enumerate(self._columns_of(out)):
            columns[names.field(n).name] = column
        structs = pa.StructArray.from_arrays(self._columns_of(rest), fields=list(names))
        first = find_starts(rest.of)
        close = np.full(len(keys), LONG_AGO, np.int64)
        close[rest.of[first]] = rest.end[first] + self._gap
        return columns, {
            "open_sessions": pack(structs, rest.of, len(keys), known),
            "close_at": to_timestamps(close, close == LONG_AGO),
        }

    def _columns_of(self, found: _Sessions) -> list[pa.Array]:
        times = (to_timestamps(at, kind=self._kind) for at in (found.start, found.end))
        return [*times, *found.values]


@dataclass(frozen=True)
class _Sessions:
    """Sessions of many keys; a row is a session that begins and ends at once."""

    of: Ints  # the number of the key
    start: Ints
    end: Ints
    values: list[pa.Array]

    def take(self, which: Ints) -> _Sessions:
        some = pa.array(which)
        values = [column.take(some) for column in self.values]
        return _Sessions(self.of[which], self.start[which], self.end[which], values)


def _concatenate(known: _Sessions, new: _Sessions) -> _Sessions:
    values = [pa.concat_arrays(pair) for pair in zip(known.values, new.values, strict=True)]
    return _Sessions(
        np.concatenate((known.of, new.of)), np.concatenate((known.start, new.start)),
        np.concatenate((known.end, new.end)), values,
    )  # fmt: skip


def _find_latest_so_far(found: _Sessions) -> Ints:
    """The latest end of the sessions of the key so far; by rank, so that keys can be offset."""
    order = np.argsort(found.end, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    above = np.maximum.accumulate(rank + found.of * len(order)) - found.of * len(order)
    return np.asarray(found.end[order][above])


def _values_of_rows(found: Aggregate, rows: pa.Table) -> pa.Array:
    """The total of each row alone."""
    if found.how != "count":
        return combine(rows[found.of]).cast(found.type)
    if found.of is None:
        return pa.array(np.ones(len(rows), np.int64))
    return pa.array(is_valid(combine(rows[found.of])).astype(np.int64))


def _reduce_sessions(found: Aggregate, values: pa.Array, group: Ints, end: Ints) -> pa.Array:
    size = int(group[-1]) + 1
    if found.how == "first":
        return values.take(pa.array(find_starts(group)))
    if found.how == "last":
        order = order_by_key_and_time(group, end)
        lasts = np.append(find_starts(group)[1:], len(group)) - 1
        return values.take(pa.array(order[lasts]))
    how = "sum" if found.how == "count" else found.how
    return convert(reduce(how, values, group, size), found.type, f"total {found.name}")
