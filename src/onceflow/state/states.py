"""What a keyed process declares: states and timers, as a user writes them and as they are stored.

A wrong declaration is an error before the job starts, with the name of the class and the attribute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import types as t

from onceflow.contract.schema import arrow_schema, nullable, parse_schema
from onceflow.errors import JobError
from onceflow.state.evolve import is_same_kind
from onceflow.state.vectors import TIMESTAMP

EVENT, PROCESSING = "event", "processing"
REDUCTIONS = ("sum", "min", "max", "count", "first", "last")
Fold = Callable[[pa.Array, pa.Array], pa.Array]
Type: TypeAlias = "str | pa.DataType"  # Spark's, as a person writes it
Span = str | timedelta

_UNITS = {
    "us": 1, "microsecond": 1, "ms": 1_000, "millisecond": 1_000, "s": 1_000_000,
    "sec": 1_000_000, "second": 1_000_000, "min": 60_000_000, "minute": 60_000_000,
    "h": 3_600_000_000, "hour": 3_600_000_000, "d": 86_400_000_000, "day": 86_400_000_000,
    "week": 604_800_000_000,
}  # fmt: skip


class StateDeclaration:
    """A state or timer that a process keeps for each key."""


@dataclass(frozen=True)
class ValueState(StateDeclaration):
    """One value for each key. With `ttl` it expires when it was not written for that long."""

    type: Type
    ttl: Span | None = None
    ttl_on: str | None = None


@dataclass(frozen=True)
class ListState(StateDeclaration):
    """A list for each key. With `time`, a field of its structs, elements expire one by one."""

    type: Type
    ttl: Span | None = None
    ttl_on: str | None = None
    time: str | None = None


@dataclass(frozen=True)
class MapState(StateDeclaration):
    """A map for each key. With `time`, a field of its values, entries expire one by one."""

    key: Type
    value: Type
    ttl: Span | None = None
    ttl_on: str | None = None
    time: str | None = None


@dataclass(frozen=True)
class ReducingState(StateDeclaration):
    """One value for each key, into which values of rows are folded; nulls are skipped.

    `how`: sum, min, max, count, first, last, or an associative function of two Arrow arrays of
    equal length, without nulls, that returns a value for each pair. `of`: the column of the rows.
    """

    type: Type
    how: str | Fold
    of: str | None = None
    ttl: Span | None = None
    ttl_on: str | None = None


@dataclass(frozen=True)
class Timer(StateDeclaration):
    """A time for each key, on the event clock or the processing clock. Null: not set."""

    clock: str = EVENT


@dataclass(frozen=True)
class Column:
    """A state or timer as it is stored."""

    name: str
    type: pa.DataType
    declared: StateDeclaration
    clock: str  # of the timer, or of `ttl`
    ttl: int | None = None  # microseconds
    time: str | None = None  # the field by which elements expire

    @property
    def written(self) -> str | None:
        """The hidden column with the time at which the value was last written."""
        return f"_written.{self.name}" if self.ttl is not None and self.time is None else None

    @property
    def is_timer(self) -> bool:
        return isinstance(self.declared, Timer)


def parse_span(text: Span) -> int:
    """The microseconds of "30 days", "1 hour 30 minutes" or a timedelta."""
    if isinstance(text, timedelta):
        total = text // timedelta(microseconds=1)
    else:
        parts = re.findall(r"(\d+)\s*([a-z]+)\s*", str(text))
        is_whole = re.fullmatch(r"\s*(\d+\s*[a-z]+\s*)+", str(text)) is not None
        units = [_UNITS.get(unit) or _UNITS.get(unit.removesuffix("s"), 0) for _, unit in parts]
        is_known = is_whole and all(units)
        total = sum(int(n) * u for (n, _), u in zip(parts, units, strict=True)) * is_known
    if total <= 0:
        raise JobError(f"{text!r} is not a span of time", hint='write it like "30 days" or "90 s"')
    return total


def arrow_type(kind: Type) -> pa.DataType:
    """The Arrow type of a Spark type string; every part of it is nullable."""
    if isinstance(kind, pa.DataType):
        return kind
    fields = arrow_schema(nullable(parse_schema(f"value {kind}")))
    if len(fields) != 1:
        raise JobError(f"{kind!r} is more than one type", hint='write one, like "double"')
    return fields.field(0).type


@dataclass(frozen=True)
class Binding:
    """What a process knows about its step, and what its declarations must fit."""

    keys: pa.Schema
    rows: pa.Schema
    event_time: str | None
    watermark: bool


def resolve_columns(
    states: Mapping[str, StateDeclaration], owner: str, binding: Binding
) -> tuple[Column, ...]:
    """The columns to store; `JobError` for the first wrong declaration of the class `owner`."""
    taken = {name.lower(): "a key column" for name in binding.keys.names}
    found = []
    for name, declared in states.items():
        where = f"{owner}.{name}"
        if name.startswith("_"):
            raise JobError(f"{where}: the name of a state must not begin with _", hint="rename it")
        if (other := taken.get(name.lower())) is not None:
            raise JobError(
                f"{where} has the name of {other}", hint="rename it; case does not count in names"
            )
        taken[name.lower()] = "another state"
        try:
            found.append(_resolve_column(name, declared, binding))
        except JobError as error:
            raise JobError(f"{where}: {error.message}", hint=error.hint) from None
    return tuple(found)


def _resolve_column(name: str, declared: StateDeclaration, binding: Binding) -> Column:
    match declared:
        case Timer(clock=clock):
            return Column(name, TIMESTAMP, declared, _check_clock(clock, binding))
        case ValueState(type=kind):
            whole, time = arrow_type(kind), None
        case ReducingState(type=kind):
            whole, time = arrow_type(kind), None
            _refuse_reduction(declared, whole, binding.rows)
        case ListState(type=kind, time=time):
            element = arrow_type(kind)
            _refuse_time(time, declared.ttl, element)
            whole = pa.list_(pa.field("element", element))
        case MapState(key=key, value=value, time=time):
            item = arrow_type(value)
            _refuse_time(time, declared.ttl, item)
            whole = pa.map_(arrow_type(key), pa.field("value", item))
        case _:
            raise JobError(
                f"{type(declared).__name__} is not a state",
                hint="declare a ValueState, ListState, MapState, ReducingState or Timer",
            )
    if declared.ttl is None and declared.ttl_on is not None:
        raise JobError("ttl_on= has no effect without ttl=", hint='add it, like ttl="30 days"')
    default = EVENT if binding.watermark else PROCESSING
    clock = _check_clock(default if declared.ttl_on is None else declared.ttl_on, binding)
    ttl = None if declared.ttl is None else parse_span(declared.ttl)
    return Column(name, whole, declared, clock, ttl, time)


def _check_clock(clock: str, binding: Binding) -> str:
    if clock not in (EVENT, PROCESSING):
        raise JobError(f"there is no clock {clock!r}", hint='write "event" or "processing"')
    if clock == EVENT and not binding.watermark:
        raise JobError(
            "the event clock needs a watermark",
            hint='give the step event_time= and watermark=, or write "processing"',
        )
    return clock


def _refuse_time(time: str | None, ttl: Span | None, element: pa.DataType) -> None:
    if time is None:
        return
    if ttl is None:
        raise JobError("time= has no effect without ttl=", hint='add it, like ttl="7 days"')
    if not t.is_struct(element) or element.get_field_index(time) < 0:
        raise JobError(
            f"there is no field {time!r} in {element}",
            hint=f"declare the elements as struct<…, {time}: timestamp>",
        )
    if not t.is_timestamp(element.field(time).type):
        raise JobError(
            f"the field {time!r} is of {element.field(time).type}", hint="declare it as timestamp"
        )


def is_number(kind: pa.DataType) -> bool:
    return bool(t.is_signed_integer(kind) or t.is_floating(kind) or t.is_decimal(kind))


def _refuse_reduction(state: ReducingState, kind: pa.DataType, rows: pa.Schema) -> None:
    how = state.how
    if not callable(how) and how not in REDUCTIONS:
        raise JobError(
            f"{how!r} is not a way to reduce",
            hint=f"write one of {', '.join(REDUCTIONS)}, or a function",
        )
    if how == "sum" and not is_number(kind):
        raise JobError(f"a sum cannot be of {kind}", hint="use a number, like long or double")
    if how == "count" and not t.is_int64(kind):
        raise JobError(f"a count cannot be of {kind}", hint="use long")
    if state.of is None:
        return
    if rows.get_field_index(state.of) < 0:
        raise JobError(
            f"the rows have no column {state.of!r}",
            hint=f"of= names one of {', '.join(rows.names)}",
        )
    given = rows.field(state.of).type
    if how != "count" and not _folds_into(given, kind, how):
        raise JobError(
            f"{state.of} is of {given}, which is not folded into {kind}",
            hint="cast the column, or declare the type that it has",
        )


def _folds_into(given: pa.DataType, kind: pa.DataType, how: Any) -> bool:
    if is_same_kind(given, kind):
        return True
    wider = is_number(given) and not t.is_integer(kind) and is_number(kind)
    return wider and not (t.is_floating(given) and t.is_decimal(kind)) and not callable(how)
