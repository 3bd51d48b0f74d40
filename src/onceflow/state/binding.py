"""A process meets the columns that it will work on; what is wrong with it is said here, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from onceflow.contract.schema import arrow_schema, nullable, parse_schema
from onceflow.errors import JobError
from onceflow.state.evolve import is_same_kind
from onceflow.state.process import Binding, KeyedProcess, folds_by_itself
from onceflow.state.states import Column, StateDeclaration, StepColumns, resolve_columns

# Whose names a state must not have, or the process could not use them.
_HELPERS = frozenset(name for name in dir(KeyedProcess) if not name.startswith("_")) | {
    "process", "process_key", "on_timer", "on_timer_key",
}  # fmt: skip


@dataclass(frozen=True)
class BoundProcess:
    columns: tuple[Column, ...]
    output: pa.Schema
    rows: str | None  # the method that rows are given to; None: they are folded
    timers: str | None


def bind_process(process: KeyedProcess, binding: Binding) -> BoundProcess:
    """The process, bound to these columns; `JobError` names the class and what to mend."""
    owner = type(process).__name__
    if not isinstance(process, KeyedProcess):
        raise JobError(f"{owner} is not a KeyedProcess", hint="derive it from KeyedProcess")
    _refuse_times(owner, binding)
    process._binding, process._declared, process._columns = binding, None, None
    process.bind(binding.keys, binding.rows)
    states = {**_attributes(process, owner), **(process._declared or {})}
    around = StepColumns(owner, binding.keys, binding.rows, binding.watermark)
    columns = resolve_columns(states, around)
    rows = _either(process, owner, "process", "process_key")
    timers = _either(process, owner, "on_timer", "on_timer_key")
    _refuse_methods(owner, columns, rows, timers)
    process._columns = {column.name: column for column in columns}
    output = _output(process, owner)
    if rows is None:
        output = _folded_output(owner, columns, binding.keys, output)
    elif output is None:
        raise JobError(
            f"{owner} does not say what it emits",
            hint='declare output, like output = "user string, total double"',
        )
    return BoundProcess(columns, output, rows, timers)


def _attributes(process: KeyedProcess, owner: str) -> dict[str, StateDeclaration]:
    """States of the class and of those that it derives from, then of the instance."""
    found: dict[str, Any] = {}
    for kind in reversed(type(process).__mro__):
        found.update(vars(kind))
    found.update(vars(process))
    states = {name: value for name, value in found.items() if isinstance(value, StateDeclaration)}
    for name in states:
        if name in _HELPERS:
            raise JobError(
                f"{owner}.{name} is called like a part of KeyedProcess",
                hint=f"rename the state; these names are taken: {', '.join(sorted(_HELPERS))}",
            )
    return states


def _either(process: KeyedProcess, owner: str, one: str, other: str) -> str | None:
    found = [name for name in (one, other) if callable(getattr(process, name, None))]
    if len(found) > 1:
        raise JobError(
            f"{owner} defines both {one} and {other}",
            hint=f"keep {one} for slices of keys, or {other} for one key at a time",
        )
    return found[0] if found else None


def _refuse_times(owner: str, binding: Binding) -> None:
    at = binding.event_time
    if at is None:
        if binding.watermark:
            raise JobError(f"{owner}: a watermark needs event_time=", hint="name the column")
        return
    if binding.rows.get_field_index(at) < 0:
        raise JobError(
            f"{owner}: the rows have no column {at!r}",
            hint=f"event_time= names one of {', '.join(binding.rows.names)}",
        )
    if not pa.types.is_timestamp(binding.rows.field(at).type):
        raise JobError(
            f"{owner}: the event time {at} is of {binding.rows.field(at).type}",
            hint="cast it to timestamp",
        )


def _refuse_methods(
    owner: str, columns: tuple[Column, ...], rows: str | None, timers: str | None
) -> None:
    has_timers = [column.name for column in columns if column.is_timer]
    if has_timers and timers is None:
        raise JobError(
            f"{owner} declares the timer {has_timers[0]} and no on_timer",
            hint="define on_timer(self, keys) or on_timer_key(self, key, state)",
        )
    if timers is not None and not has_timers:
        raise JobError(
            f"{owner} defines {timers} and declares no timer",
            hint='declare one, like remind = Timer("event")',
        )
    if rows is None:
        other = [column.name for column in columns if not folds_by_itself(column.declared)]
        if other or not columns:
            raise JobError(
                f"{owner} defines no process"
                + (f", and {other[0]} is not folded by itself" if other else " and no state"),
                hint="define process(self, keys, rows) or process_key(self, key, rows, state); "
                'only ReducingState(…, of="column") and counts need neither',
            )


def _output(process: KeyedProcess, owner: str) -> pa.Schema | None:
    """Declared as a schema string, an Arrow schema, or a method that returns one of them."""
    given = process.output
    given = given() if callable(given) else given
    if given is None or isinstance(given, pa.Schema):
        return given
    if not isinstance(given, str):
        raise JobError(
            f"{owner}.output is {given!r}", hint='write it like "user string, total double"'
        )
    try:
        return arrow_schema(nullable(parse_schema(given)))
    except JobError as error:
        raise JobError(f"{owner}.output: {error.message}", hint=error.hint) from None


def _folded_output(
    owner: str, columns: tuple[Column, ...], keys: pa.Schema, declared: pa.Schema | None
) -> pa.Schema:
    """Keys and totals, or those of them that are declared."""
    known: Mapping[str, pa.DataType] = {
        **{field.name: field.type for field in keys},
        **{column.name: column.type for column in columns},
    }
    if declared is None:
        return pa.schema(list(known.items()))
    for field in declared:
        if field.name not in known:
            raise JobError(
                f"{owner}.output names {field.name}, which is no key and no state",
                hint=f"there are {', '.join(known)}; for more, define process",
            )
        if not is_same_kind(known[field.name], field.type):
            raise JobError(
                f"{owner}.output has {field.name} as {field.type}, it is {known[field.name]}",
                hint="declare the type that it has",
            )
    return declared
