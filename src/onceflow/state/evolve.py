"""Which column types may become which: old state under new declarations, results as declared.

State that was written with other columns is read with those that are declared now. Columns, and
fields inside them, are matched by name. Added ones are null in old rows, dropped ones are not read,
and numbers may be wider if every old number stays the same. `find_misfits` names everything else
before the job starts.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyarrow import types as t

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def find_misfits(old: pa.Schema, new: pa.Schema) -> list[str]:
    """The reasons why values that were written as `old` cannot be read as `new`."""
    return list(_compare_fields(old, new, ""))


def find_key_misfits(old: pa.Schema, new: pa.Schema) -> list[str]:
    """The same for key columns: names and order must be equal, integers may be wider."""
    if old.names != new.names:  # places are hashes of the columns in their order
        return [f"the key was {', '.join(old.names)}, now it is {', '.join(new.names)}"]
    return [
        f"key column {two.name} was {one.type}, now it is {two.type}"
        for one, two in zip(old, new, strict=True)
        if not (one.type.equals(two.type) or _is_wider_integer(one.type, two.type))
    ]


def _compare_fields(old: Iterable[pa.Field], new: Iterable[pa.Field], inside: str) -> Iterable[str]:
    before = {field.name: field for field in old}
    for field in new:
        where = f"{inside}{field.name}"
        if field.name in before:
            yield from _compare_field(before[field.name], field, where)
        elif not field.nullable:
            yield f"{where} was added and may not be null, but old rows do not have it"


def _compare_field(old: pa.Field, new: pa.Field, where: str) -> Iterable[str]:
    if old.nullable and not new.nullable:
        yield f"{where} could be null, now it may not"
    one, two = old.type, new.type
    if t.is_struct(one) and t.is_struct(two):
        yield from _compare_fields(one, two, f"{where}.")
    elif t.is_list(one) and t.is_list(two):
        yield from _compare_field(one.value_field, two.value_field, f"{where}.element")
    elif t.is_map(one) and t.is_map(two) and one.key_type.equals(two.key_type):
        yield from _compare_field(one.item_field, two.item_field, f"{where}.value")
    elif not (one.equals(two) or _is_wider(one, two)):
        yield f"{where} was {one}, now it is {two}"


def _is_wider_integer(old: pa.DataType, new: pa.DataType) -> bool:
    known = old in _INTEGERS and new in _INTEGERS
    return known and _INTEGERS.index(old) < _INTEGERS.index(new)


def _is_wider(old: pa.DataType, new: pa.DataType) -> bool:
    if t.is_float64(new):
        return t.is_float32(old) or old in _INTEGERS[:3]  # not every long is a double
    if t.is_decimal(old) and t.is_decimal(new):
        digits = new.precision - new.scale
        return bool(new.scale >= old.scale and digits >= old.precision - old.scale)
    return _is_wider_integer(old, new)


# ---------------------------------------------------------------- reading


def adapt(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Read rows that were written with other columns as `schema`.

    `find_misfits` must have found nothing.
    """
    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        at = table.schema.get_field_index(field.name)
        if at < 0:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
        else:
            chunks = [_adapt(chunk, field.type) for chunk in table.column(at).chunks]
            columns.append(pa.chunked_array(chunks, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _adapt(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if values.type.equals(kind):
        return values
    if t.is_struct(kind):
        parts = [
            _adapt(values.field(at), field.type) if at >= 0 else pa.nulls(len(values), field.type)
            for field in kind
            for at in [values.type.get_field_index(field.name)]
        ]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=values.is_null())
    if t.is_list(kind):
        return _replace_elements(values, kind, _adapt(values.values, kind.value_type))
    if t.is_map(kind):
        pair = pa.struct([kind.key_field, kind.item_field])
        entries = [values.keys, _adapt(values.items, kind.item_type)]
        return _replace_elements(
            values, kind, pa.StructArray.from_arrays(entries, fields=list(pair))
        )
    return values.cast(kind)


def _replace_elements(values: pa.Array, kind: pa.DataType, inner: pa.Array) -> pa.Array:
    """The same lists, or maps, with other elements."""
    buffers = values.buffers()[:2]
    return pa.Array.from_buffers(kind, len(values), buffers, offset=values.offset, children=[inner])


# ---------------------------------------------------------------- results


def is_same_kind(found: pa.DataType, declared: pa.DataType) -> bool:
    """May values of type `found` be cast to `declared`, if none of them is lost?"""
    if found == declared or t.is_null(found):
        return True
    if t.is_dictionary(found):
        return is_same_kind(found.value_type, declared)
    if t.is_struct(found) and t.is_struct(declared):
        names = {field.name for field in found}
        if names != {field.name for field in declared} or len(names) != found.num_fields:
            return False
        return all(is_same_kind(found.field(f.name).type, f.type) for f in declared)
    if t.is_map(found) and t.is_map(declared):
        keys = is_same_kind(found.key_type, declared.key_type)
        return keys and is_same_kind(found.item_type, declared.item_type)
    if _is_list(found) and t.is_list(declared):
        return is_same_kind(found.value_type, declared.value_type)
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
