"""What a process returned, as it was declared, or a refusal that names the column.

A value is never changed on the way: numbers may get wider or narrower of their own kind, if none
of them is lost by it (a double that is declared float is rounded). Nothing else is cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import types as t

from onceflow.state.vectors import one


class Unfit(Exception):
    """What was returned does not fit. The step says by whom."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def same_kind(found: pa.DataType, declared: pa.DataType) -> bool:
    """Whether values may become `declared` without becoming something else."""
    if found == declared or t.is_null(found):
        return True
    if t.is_dictionary(found):
        return same_kind(found.value_type, declared)
    if t.is_struct(found) and t.is_struct(declared):
        names = {field.name for field in found}
        if names != {field.name for field in declared} or len(names) != found.num_fields:
            return False
        return all(same_kind(found.field(f.name).type, f.type) for f in declared)
    if t.is_map(found) and t.is_map(declared):
        keys = same_kind(found.key_type, declared.key_type)
        return keys and same_kind(found.item_type, declared.item_type)
    if _is_list(found) and t.is_list(declared):
        return same_kind(found.value_type, declared.value_type)
    if t.is_timestamp(found) and t.is_timestamp(declared):
        return (found.tz is None) == (declared.tz is None)
    return any(is_kind(found) and is_kind(declared) for is_kind in _KINDS)


def _is_list(kind: pa.DataType) -> bool:
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind))


_KINDS = (t.is_integer, t.is_floating, t.is_decimal, t.is_date, _is_text, _is_bytes)


def fitted(column: Any, declared: pa.DataType, what: str) -> pa.Array:
    """The column as the declared type."""
    array = _array(column, declared, what)
    if array.type == declared:
        return array
    if not same_kind(array.type, declared):
        raise Unfit(
            f"{what} is of {array.type}, declared is {declared}",
            hint="cast it where it is made, or declare the type that it has",
        )
    try:
        return array.cast(declared)
    except pa.ArrowInvalid as error:
        raise Unfit(
            f"{what} does not fit {declared}: {error}",
            hint="declare a wider type, or mend the value",
        ) from error


def _array(column: Any, declared: pa.DataType, what: str) -> pa.Array:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return one(column)
    try:
        return pa.array(column)  # numpy, mostly
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError) as error:
        raise Unfit(
            f"{what} is {type(column).__name__}: {error}", hint="return an Arrow array"
        ) from error


def pair(returned: Any) -> tuple[Any, Any]:
    """(out, new_state), of which each may be None; None is both."""
    if returned is None:
        return None, None
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise Unfit(f"it returned {_kind(returned)}", hint="return out, new_state; each may be None")


def _kind(value: Any) -> str:
    count = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{count}"


def _by_name(table: Any, what: str) -> Mapping[str, Any]:
    """The columns of a table, record batch or dict."""
    if isinstance(table, pa.Table | pa.RecordBatch):
        twice = sorted({n for n in table.column_names if table.column_names.count(n) > 1})
        if twice:
            raise Unfit(f"{what} has {', '.join(twice)} twice", hint="rename one")
        return dict(zip(table.column_names, table.columns, strict=True))
    if isinstance(table, Mapping):
        return table
    raise Unfit(
        f"{what} is {_kind(table)}", hint="return a pyarrow Table, or a dict of name to array"
    )


def fit_out(returned: Any, schema: pa.Schema) -> pa.Table | None:
    """The rows that a process emits, in the order of its output."""
    if returned is None:
        return None
    columns = _by_name(returned, "out")
    missing = [name for name in schema.names if name not in columns]
    extra = [str(name) for name in columns if name not in schema.names]
    if missing or extra:
        raise Unfit(difference("out", missing, extra), hint="let output and out agree, by name")
    arrays = [fitted(columns[f.name], f.type, f"column {f.name} of out") for f in schema]
    lengths = {name: len(array) for name, array in zip(schema.names, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        raise Unfit(f"the columns of out differ in length: {lengths}", hint="make them equal")
    return pa.table(arrays, schema=schema)


def difference(what: str, missing: Iterable[str], extra: Iterable[str]) -> str:
    lacks, has = ", ".join(missing), ", ".join(extra)
    parts = [f"lacks {lacks}"] if lacks else []
    parts += [f"has {has}, which is not declared"] if has else []
    return f"{what} {' and '.join(parts)}"


def fit_state(returned: Any, keys: pa.Table, declared: pa.Schema) -> dict[str, pa.Array]:
    """The columns of new_state that say something, each with a value for each key.

    `keys` has the key columns only: if they are returned, they must be what was given.
    """
    if returned is None:
        return {}
    columns = _by_name(returned, "new_state")
    unknown = [n for n in columns if n not in declared.names and n not in keys.column_names]
    if unknown:
        raise Unfit(
            difference("new_state", [], map(str, unknown)),
            hint=f"declared are {', '.join(declared.names)}",
        )
    found = {}
    for name, column in columns.items():
        is_key = name in keys.column_names
        kind = keys.schema.field(name).type if is_key else declared.field(name).type
        array = fitted(column, kind, f"column {name} of new_state")
        if len(array) != len(keys):
            raise Unfit(
                f"column {name} of new_state has {len(array)} rows for {len(keys)} keys",
                hint="return one row for each key, in the order of keys",
            )
        if not is_key:
            found[name] = array
        elif not array.equals(one(keys[name])):
            raise Unfit(
                f"new_state is for other keys than were given: column {name} differs",
                hint="return one row for each key, in the order of keys",
            )
    return found
