"""Bind a process to the columns that it will work on, or name what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from onceflow.contract.schema import arrow_schema, nullable, parse_schema
from onceflow.errors import JobError
from onceflow.state.evolve import is_same_kind
from onceflow.state.process import KeyedProcess, folds_by_itself
from onceflow.state.states import Binding, Column, StateDeclaration, resolve_columns

# A state of such a name would hide the helper from the process.
_HELPERS = frozenset(name for name in dir(KeyedProcess) if not name.startswith("_")) | {
    "process", "process_key", "on_timer", "on_timer_key",
}  # fmt: skip


@dataclass(frozen=True)
class BoundProcess:
    """The states, output and methods of a process, once its columns are known."""

    columns: tuple[Column, ...]
    output: pa.Schema
    rows: str | None  # the method that takes rows; None: they are folded
    timers: str | None  # the method that takes timers


def bind_process(process: KeyedProcess, binding: Binding) -> BoundProcess:
    """`JobError` for a process that cannot work, with the name of its class."""
    owner = type(process).__name__
    if not isinstance(process, KeyedProcess):
        raise JobError(f"{owner} is not a KeyedProcess", hint="derive it from KeyedProcess")
    _refuse_times(owner, binding)
    process._binding, process._declared, process._columns = binding, None, None
    process.bind(binding.keys, binding.rows)
    states = {**_find_states(process, owner), **(process._declared or {})}
    columns = resolve_columns(states, owner, binding)
    rows = _find_method(process, owner, "process", "process_key")
    timers = _find_method(process, owner, "on_timer", "on_timer_key")
    _refuse_methods(owner, columns, rows, timers)
    process._columns = {column.name: column for column in columns}
    output = _declared_output(process, owner)
    if rows is None:
        output = _folded_output(owner, columns, binding.keys, output)
    elif output is None:
        raise JobError(
            f"{owner} does not declare what it emits",
            hint='declare output, like output = "user string, total double"',
        )
    return BoundProcess(columns, output, rows, timers)


def _find_states(process: KeyedProcess, owner: str) -> dict[str, StateDeclaration]:
    """The states of base classes, of the class and of the instance, in this order."""
    found: dict[str, Any] = {}
    for kind in reversed(type(process).__mro__):
        found.update(vars(kind))
    found.update(vars(process))
    states = {name: value for name, value in found.items() if isinstance(value, StateDeclaration)}
    for name in states:
        if name in _HELPERS:
            raise JobError(
                f"{owner}.{name} has the name of a part of KeyedProcess",
                hint=f"rename the state; these names are taken: {', '.join(sorted(_HELPERS))}",
            )
    return states


def _find_method(process: KeyedProcess, owner: str, one: str, other: str) -> str | None:
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


def _declared_output(process: KeyedProcess, owner: str) -> pa.Schema | None:
    """It is declared as a schema string, an Arrow schema, or a method that returns one of them."""
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
    """The columns of the key and all states, or those of them that are declared."""
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
