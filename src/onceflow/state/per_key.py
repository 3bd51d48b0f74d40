"""One key at a time: the same state and the same guarantees, in plain Python.

The columns of a slice are converted to Python values and back as a whole, so that a key costs a few
microseconds. A key whose state did not change is not written.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.errors import OnceflowError
from onceflow.state.process import KeyedProcess
from onceflow.state.results import CallSite, UnfitResult, refuse_names
from onceflow.state.states import Column, ReducingState
from onceflow.state.vectors import Bools, Ints, combine, is_collection, to_python

_ARROW_ERRORS = (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError)


@dataclass(frozen=True)
class CallResult:
    """What a call returned. `touched`: for each column the keys that it was set for; None: all."""

    out: pa.Table | None
    columns: Mapping[str, pa.Array]
    touched: Mapping[str, Bools] | None = None


class KeyState:
    """The state of one key, as attributes; each step derives a class of its own."""

    __slots__ = ("_now", "_opened", "_set", "due")

    def __init__(self, now: list[Any], due: frozenset[str]) -> None:
        self._now = now
        self._set = 0  # a bit for each column that was assigned
        self._opened: dict[int, Any] | None = None  # mutable values, before
        self.due = due

    def fold(self, name: str, value: Any) -> None:
        """Fold a value into a ReducingState. Null is skipped."""
        how = self._hows[name]  # type: ignore[attr-defined]
        known = getattr(self, name)
        if how == "count":
            setattr(self, name, (known or 0) + (value is not None))
        elif value is not None:
            setattr(self, name, value if known is None else _FOLDS[how](known, value))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda known, value: known + value,
    "min": lambda known, value: value if value < known or _is_nan(known) else known,
    "max": lambda known, value: value if value > known or _is_nan(value) else known,
    "first": lambda known, _: known,
    "last": lambda _, value: value,
}


class PerKeyCaller:
    """Calls `process_key` and `on_timer_key` of a process."""

    def __init__(
        self, process: KeyedProcess, keys: pa.Schema, columns: Sequence[Column], output: pa.Schema
    ) -> None:
        self._process, self._columns, self._output = process, columns, output
        self._state = _state_class(type(process).__name__, columns)
        self._key: Any = None
        if len(keys) > 1:
            self._key = namedtuple("Key", keys.names, rename=True)  # type: ignore[misc]
        self._numbers = {column.name: n for n, column in enumerate(columns)}

    def process_rows(
        self, keys: pa.Table, known: Mapping[str, pa.Array], rows: pa.Table, starts: Ints,
        site: CallSite,
    ) -> CallResult:  # fmt: skip
        method = self._process.process_key  # type: ignore[attr-defined]
        names = rows.column_names
        columns = [to_python(combine(column)) for column in rows.columns]
        plain = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        cuts = pairwise([*starts.tolist(), len(plain)])
        given = (plain[start:end] for start, end in cuts)
        return self._call_each(method, self._each(keys, known), given, repeat(frozenset()), site)

    def fire_timers(
        self, keys: pa.Table, known: Mapping[str, pa.Array], due: Mapping[str, Bools],
        site: CallSite,
    ) -> CallResult:  # fmt: skip
        method = self._process.on_timer_key  # type: ignore[attr-defined]
        masks = {name: mask.tolist() for name, mask in due.items()}
        fired = [frozenset(n for n in masks if masks[n][key]) for key in range(len(keys))]
        return self._call_each(
            lambda key, _, state: method(key, state),
            self._each(keys, known), repeat(None), fired, site,
        )  # fmt: skip

    def _call_each(
        self,
        method: Callable[[Any, Any, KeyState], Any],
        each: Iterable[tuple[Any, list[Any]]],
        given: Iterable[Any],
        fired: Iterable[frozenset[str]],
        site: CallSite,
    ) -> CallResult:
        states: list[KeyState] = []
        emitted: list[Any] = []
        new = self._state
        try:
            for (key, values), rows, timers in zip(each, given, fired, strict=False):
                state = new(values, timers)
                states.append(state)
                out = method(key, rows, state)
                if out is not None:
                    _gather(emitted, out)
        except OnceflowError:
            raise
        except Exception as error:
            raise site.failure(error, key=len(states) - 1) from error
        return self._collect(emitted, states)

    def _each(
        self, keys: pa.Table, known: Mapping[str, pa.Array]
    ) -> Iterable[tuple[Any, list[Any]]]:
        """Each key with the values of its columns."""
        parts = [to_python(combine(column)) for column in keys.columns]
        named = parts[0] if self._key is None else map(self._key._make, zip(*parts, strict=True))
        columns = [to_python(known[column.name]) for column in self._columns]
        values = map(list, zip(*columns, strict=True)) if columns else ([] for _ in keys.column(0))
        return zip(named, values, strict=True)

    def _collect(self, emitted: list[Any], states: list[KeyState]) -> CallResult:
        touched: dict[int, list[int]] = {}
        for number, state in enumerate(states):
            for name in state.due:  # a timer that fired is null now unless it was set again
                n = self._numbers[name]
                if not state._set >> n & 1:
                    state._now[n] = None
                    touched.setdefault(n, []).append(number)
            if state._opened:
                for n, before in state._opened.items():
                    if not state._set >> n & 1 and state._now[n] != before:
                        touched.setdefault(n, []).append(number)
            if state._set:
                for n in range(len(self._columns)):
                    if state._set >> n & 1:
                        touched.setdefault(n, []).append(number)
        columns, masks = {}, {}
        for n, numbers in touched.items():
            name, kind = self._columns[n].name, self._columns[n].type
            columns[name] = _to_arrow([s._now[n] for s in states], kind, f"state {name}")
            masks[name] = np.zeros(len(states), np.bool_)
            masks[name][numbers] = True
        return CallResult(_to_table(emitted, self._output), columns, masks)


def _gather(emitted: list[Any], out: Any) -> None:
    if isinstance(out, dict):
        emitted.append(out)
    else:
        emitted.extend(out)


def _to_table(emitted: list[Any], schema: pa.Schema) -> pa.Table | None:
    if not emitted:
        return None
    names, width = schema.names, len(schema)
    try:
        if all(type(row) is dict and len(row) == width for row in emitted):
            columns = [[row[name] for row in emitted] for name in names]
        else:
            columns = [
                list(part) for part in zip(*(_to_tuple(r, names) for r in emitted), strict=True)
            ]
    except KeyError:
        for row in emitted:
            _refuse_names(row, names)
        raise
    arrays = [
        _to_arrow(v, f.type, f"column {f.name} of out")
        for v, f in zip(columns, schema, strict=True)
    ]
    return pa.table(arrays, schema=schema)


def _to_tuple(row: Any, names: list[str]) -> tuple[Any, ...]:
    if isinstance(row, dict):
        if set(row) != set(names):
            _refuse_names(row, names)
        return tuple(row[name] for name in names)
    if not isinstance(row, tuple | list) or len(row) != len(names):
        raise UnfitResult(
            f"a row of out is {row!r}", hint=f"emit dicts or tuples of {', '.join(names)}"
        )
    return tuple(row)


def _refuse_names(row: Mapping[str, Any], names: list[str]) -> None:
    refuse_names("a row of out", row, names, hint="let output and rows have the same names")


def _to_arrow(values: list[Any], kind: pa.DataType, what: str) -> pa.Array:
    try:
        return pa.array(_maps_to_pairs(values, kind), kind)
    except _ARROW_ERRORS as error:
        wrong = next((value for value in values if not _is_convertible(value, kind)), None)
        raise UnfitResult(
            f"{what} is {wrong!r}, declared is {kind}: {error}",
            hint="fix the value, or declare the type that it has",
        ) from error


def _is_convertible(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array(_maps_to_pairs([value], kind), kind)
    except _ARROW_ERRORS:
        return False
    return True


def _maps_to_pairs(values: list[Any], kind: pa.DataType) -> list[Any]:
    """Arrow takes maps as lists of pairs."""
    if not pa.types.is_map(kind):
        return values
    return [list(v.items()) if isinstance(v, dict) else v for v in values]


# ---------------------------------------------------------------- the class of a state


def _state_class(owner: str, columns: Sequence[Column]) -> type[KeyState]:
    members: dict[str, Any] = {"__slots__": ()}
    for n, column in enumerate(columns):
        members[column.name] = _property(n, column.type)
    members["_hows"] = {
        column.name: column.declared.how
        for column in columns
        if isinstance(column.declared, ReducingState) and not callable(column.declared.how)
    }
    return type(f"{owner}State", (KeyState,), members)


def _property(n: int, kind: pa.DataType) -> property:
    """A list, dict or struct may be changed in place, so a copy is kept to compare with."""
    bit = 1 << n
    empty = dict if pa.types.is_map(kind) else list if is_collection(kind) else None

    def get(self: KeyState) -> Any:
        return self._now[n]

    def get_mutable(self: KeyState) -> Any:
        if self._set & bit:
            return self._now[n]
        if self._opened is None:
            self._opened = {}
        if n not in self._opened:
            if self._now[n] is None and empty is not None:
                self._now[n] = empty()
            self._opened[n] = _copy(self._now[n])
        return self._now[n]

    def assign(self: KeyState, value: Any) -> None:
        self._now[n] = value
        self._set |= bit

    is_mutable = empty is not None or pa.types.is_struct(kind)
    return property(get_mutable if is_mutable else get, assign)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy(inner) for inner in value]
    return value
