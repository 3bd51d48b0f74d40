"""The base class of keyed processes: code of the user that works on the rows of many keys at once.

Each row is given to the process once, with the state that its key had before it. The new state and
the rows that the process emits are kept together, or not at all. Within an epoch the rows of a key
come in the order of their event time if the step has one, and else in no order. The number of calls
and of tasks is not defined, so a process must not keep anything on itself between calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import JobError
from onceflow.state.aggregates import fold, reduce
from onceflow.state.states import Binding, Column, ReducingState, StateDeclaration
from onceflow.state.vectors import LONG_AGO, Bools, Ints, to_array, to_datetime


@dataclass(frozen=True)
class Time:
    """The time of an epoch, in microseconds. `watermark`: no row before it is still to come."""

    now: int
    watermark: int | None
    epoch: int

    @property
    def passed(self) -> int:
        """The watermark; without one, before every time."""
        return LONG_AGO if self.watermark is None else self.watermark

    @property
    def now_at(self) -> datetime:
        return to_datetime(self.now)

    @property
    def watermark_at(self) -> datetime | None:
        return None if self.watermark is None else to_datetime(self.watermark)


@dataclass(frozen=True)
class Call:
    """What the helpers of a process know during one call."""

    time: Time
    size: int  # keys
    index: Ints | None  # for each row the number of its key; None: there are no rows
    settled: Ints
    rows: pa.Table | None
    columns: Mapping[str, pa.Array]  # the state of these keys
    due: Mapping[str, Bools] = field(default_factory=dict)


class KeyedProcess:
    """Derive from it, declare states and `output`, and define one of these (docs/state.md)

    process(keys, rows) -> (out, new_state)     for a slice of keys, as Arrow tables
    process_key(key, rows, state) -> rows out   for one key at a time; slower
    neither                                     ReducingStates are folded and emitted

    With timers also `on_timer(keys)`, or `on_timer_key(key, state)`.
    """

    output: Any = None
    _call: Call | None = None
    _binding: Binding | None = None
    _declared: Mapping[str, StateDeclaration] | None = None
    _columns: Mapping[str, Column] | None = None

    def bind(self, keys: pa.Schema, rows: pa.Schema) -> None:
        """Called once the columns are known, before output and states are read."""

    def declare(self, **states: StateDeclaration) -> None:
        """Declare more states, from inside `bind`."""
        self._declared = {**(self._declared or {}), **states}

    @property
    def binding(self) -> Binding:
        """The columns of keys and rows, the name of the event time, and if there is a watermark."""
        if self._binding is None:
            raise JobError(
                f"{type(self).__name__} is not part of a step yet",
                hint="use binding in bind or later; in a test, pass the process to KeyedHarness",
            )
        return self._binding

    # ------------------------------------------------------------ inside a call

    @property
    def time(self) -> Time:
        """Now, the watermark and the number of the epoch."""
        return self._current().time

    @property
    def index(self) -> Ints:
        """For each row the number of its key in `keys`."""
        index = self._current().index
        if index is None:
            raise RuntimeError("on_timer has no rows, so there is no index, sum, min, …")
        return index

    @property
    def starts(self) -> Ints:
        """For each key the number of its first row."""
        return np.searchsorted(self.index, np.arange(self._current().size)).astype(np.int64)

    @property
    def settled(self) -> Ints:
        """For each key a time in microseconds; all of its rows before that time have come."""
        return self._current().settled

    def due(self, timer: str) -> pa.Array:
        """In `on_timer`: for which keys this timer fires."""
        call = self._current()
        return pa.array(call.due.get(timer, np.zeros(call.size, np.bool_)))

    def sum(self, column: Any, where: Any = None) -> pa.Array:
        """For each key the sum over its rows; `where` selects some of the rows."""
        return self._reduce("sum", column, where)

    def min(self, column: Any, where: Any = None) -> pa.Array:
        return self._reduce("min", column, where)

    def max(self, column: Any, where: Any = None) -> pa.Array:
        return self._reduce("max", column, where)

    def first(self, column: Any, where: Any = None) -> pa.Array:
        return self._reduce("first", column, where)

    def last(self, column: Any, where: Any = None) -> pa.Array:
        return self._reduce("last", column, where)

    def count(self, column: Any = None, where: Any = None) -> pa.Array:
        """For each key the number of its rows, or of values that are not null."""
        return self._reduce("count", self._ones() if column is None else column, where)

    def fold(self, state: str, column: Any = None, where: Any = None) -> pa.Array:
        """The value of a ReducingState after these values, one a row; return it in new_state."""
        column_of = (self._columns or {}).get(state)
        if column_of is None or not isinstance(column_of.declared, ReducingState):
            raise ValueError(f"{state!r} is not a ReducingState of {type(self).__name__}")
        call, declared = self._current(), column_of.declared
        if column is None:
            column = self._ones() if declared.of is None else self._rows()[declared.of]
        values = _mask(column, where)
        old = call.columns[state]
        return fold(declared.how, old, values, self.index, what=f"state {state}")

    def folded(self) -> dict[str, pa.Array]:
        """`fold` of all counts, and of all ReducingStates that have an `of`."""
        names = [n for n, c in (self._columns or {}).items() if folds_by_itself(c.declared)]
        return {name: self.fold(name) for name in names}

    def _reduce(self, how: str, column: Any, where: Any) -> pa.Array:
        return reduce(how, _mask(column, where), self.index, self._current().size)

    def _ones(self) -> pa.Array:
        return pa.array(np.ones(len(self.index), np.int8))

    def _rows(self) -> pa.Table:
        rows = self._current().rows
        assert rows is not None  # `index` was read before
        return rows

    def _current(self) -> Call:
        if self._call is None:
            raise RuntimeError("this is known only while rows are processed or timers fire")
        return self._call


def folds_by_itself(declared: StateDeclaration) -> bool:
    return isinstance(declared, ReducingState) and (
        declared.of is not None or declared.how == "count"
    )


def _mask(column: Any, where: Any) -> Any:
    if where is None:
        return column
    array = to_array(column)
    return pc.if_else(to_array(where), array, pa.scalar(None, array.type))
