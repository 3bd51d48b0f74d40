"""Arrow columns as numpy and Python see them. Nothing here changes a value."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types as t

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TIMESTAMP = pa.timestamp("us", "UTC")
NEVER = np.iinfo(np.int64).max  # later than every time
LONG_AGO = np.iinfo(np.int64).min  # before every time
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def combine(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column in one piece."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.array([], column.type)
    return pa.concat_arrays(column.chunks)


def to_micros(column: pa.Array | pa.ChunkedArray, empty: int) -> Ints:
    """Timestamps as microseconds, with `empty` for null."""
    array = combine(column)
    if t.is_timestamp(array.type) and array.type.unit != "us":
        array = array.cast(pa.timestamp("us", array.type.tz))
    array = array.cast(pa.int64())
    if array.null_count:
        array = array.fill_null(empty)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def to_timestamps(
    values: Ints, empty: Bools | None = None, kind: pa.DataType = TIMESTAMP
) -> pa.Array:
    """Microseconds as timestamps, null where `empty`."""
    return pa.array(values, pa.int64(), mask=empty).cast(kind)


def is_valid(array: pa.Array) -> Bools:
    """Where the value is not null."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False))


def take_or_null(array: pa.Array, which: Ints) -> pa.Array:
    """The values at `which`, null for each negative number."""
    gone = which < 0
    return array.take(pa.array(which, pa.int64(), mask=gone if gone.any() else None))


def scatter(array: pa.Array, which: Ints, size: int) -> pa.Array:
    """`size` values: the array's at the places `which`, null elsewhere."""
    if len(which) == size:
        return array
    places = np.full(size, -1, np.int64)
    places[which] = np.arange(len(which))
    return take_or_null(array, places)


def set_null(array: pa.Array, where: Bools) -> pa.Array:
    """The same with null at `where`. For every type, nested ones too."""
    if not where.any():
        return array
    return take_or_null(array, np.where(where, -1, np.arange(len(array))))


def expand_ranges(starts: Ints, ends: Ints) -> Ints:
    """All numbers of [start, end) of each pair, one after the other."""
    lengths = ends - starts
    if not len(lengths):
        return np.empty(0, np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def order_by_key_and_time(of: Ints, at: Ints) -> Ints:
    """The order by key, then by time; equal ones stay as they are."""
    if not len(of):
        return np.empty(0, np.int64)
    first, span = int(at.min()), int(at.max()) - int(at.min()) + 1
    if span * (int(of.max()) + 1) >= NEVER:
        return np.lexsort((at, of))
    return np.argsort(of * span + (at - first), kind="stable")  # many times faster


def is_collection(kind: pa.DataType) -> bool:
    return bool(t.is_list(kind) or t.is_map(kind))


def unpack(array: pa.Array) -> tuple[pa.Array, Ints]:
    """The elements of a list or map column, and for each the row that it is of.

    A map's elements are structs of key and value. Null has no elements.
    """
    if t.is_map(array.type):
        fields = [array.type.key_field, array.type.item_field]
        elements = pa.StructArray.from_arrays([array.keys, array.items], fields=fields)
    else:
        elements = array.values
    offsets = np.asarray(array.offsets)
    starts, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    if array.null_count:
        ends = np.where(is_valid(array), ends, starts)  # what is under a null is anything
    return _taken(elements, starts, ends), np.repeat(np.arange(len(array)), ends - starts)


def _taken(elements: pa.Array, starts: Ints, ends: Ints) -> pa.Array:
    if len(starts) and np.array_equal(starts[1:], ends[:-1]):
        return elements.slice(starts[0], ends[-1] - starts[0])
    return elements.take(pa.array(expand_ranges(starts, ends)))


def pack(elements: pa.Array, of: Ints, size: int, kind: pa.DataType) -> pa.Array:
    """The list or map column of `size` rows with these elements; `of` must not decrease.

    Null where a row has no element.
    """
    lengths = np.bincount(of, minlength=size) if len(of) else np.zeros(size, np.int64)
    offsets = np.zeros(size + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    if t.is_map(kind):
        keys, items = elements.field(0), elements.field(1)
        array = pa.MapArray.from_arrays(pa.array(offsets), keys, items, type=kind)
    else:
        array = pa.ListArray.from_arrays(pa.array(offsets), elements, type=kind)
    return set_null(array, lengths == 0)


def empty_to_null(array: pa.Array) -> pa.Array:
    """A list or map without elements says as little as null does, so it is kept as null."""
    if not is_collection(array.type) or not len(array):
        return array
    return set_null(array, (np.diff(np.asarray(array.offsets)) == 0) & is_valid(array))


def to_datetime(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def datetime_to_micros(at: datetime) -> int:
    """Of a time; one without a zone is UTC."""
    zoned = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return (zoned - _EPOCH) // timedelta(microseconds=1)


def to_python(array: pa.Array) -> list[Any]:
    """As `to_pylist`, with maps as dicts, and several times faster for times and structs."""
    kind = array.type
    if t.is_timestamp(kind) and kind.unit == "us":
        return _datetimes(array)
    if t.is_struct(kind):
        names = [field.name for field in kind]
        columns = [to_python(part) for part in array.flatten()]
        found: list[Any] = [
            dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)
        ]
        return found if not array.null_count else _holed(found, array)
    if is_collection(kind):
        elements, of = unpack(array)
        flat: Sequence[Any]
        if t.is_map(kind):
            keys, items = to_python(elements.field(0)), to_python(elements.field(1))
            flat = list(zip(keys, items, strict=True))
        else:
            flat = to_python(elements)
        ends = np.cumsum(np.bincount(of, minlength=len(array))).tolist() if len(array) else []
        cut = zip([0, *ends], ends, strict=False)
        found = [dict(flat[a:b]) if t.is_map(kind) else list(flat[a:b]) for a, b in cut]
        return found if not array.null_count else _holed(found, array)
    values: list[Any] = array.to_pylist()
    return values


def _datetimes(array: pa.Array) -> list[Any]:
    numbers = to_micros(array, 0)
    if array.type.tz is None:
        found = numbers.astype("M8[us]").tolist()
    else:
        found = [_EPOCH + since for since in numbers.astype("m8[us]").tolist()]
    return found if not array.null_count else _holed(found, array)


def _holed(values: list[Any], array: pa.Array) -> list[Any]:
    return [v if there else None for v, there in zip(values, is_valid(array).tolist(), strict=True)]


def to_longs(column: Any) -> Any:
    """A timer column as numbers: microseconds, if it is of timestamps."""
    if t.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz))
    return column.cast(pa.int64())


def row_type(rows: pa.Schema, keys: pa.Schema) -> pa.StructType:
    """All columns of a row but those of its key; any of them may be null."""
    return pa.struct([(f.name, f.type) for f in rows if f.name not in keys.names])


def rows_to_structs(rows: pa.Table, kind: pa.StructType) -> pa.Array:
    if not kind.num_fields:
        return pa.array([{}] * len(rows), kind)
    return pa.StructArray.from_arrays([combine(rows[f.name]) for f in kind], fields=list(kind))


def structs_to_columns(keys: pa.Table, of: Ints, structs: pa.Array) -> dict[str, pa.Array]:
    """The rows again, by column; `of` says which key each is of."""
    some = pa.array(of)
    columns = {name: combine(keys[name].take(some)) for name in keys.column_names}
    fields = structs.flatten()
    return {**columns, **{f.name: fields[n] for n, f in enumerate(structs.type)}}


def append_elements(known: pa.Array, new: pa.Array, of: Ints) -> tuple[pa.Array, Ints, Ints]:
    """Elements of a list column and new ones, those of a key together and the known ones first.

    With the key of each, and where each stood: below the number of known ones, or above.
    """
    elements, known_of = unpack(known)
    both = np.concatenate((known_of, of)).astype(np.int64)
    order = np.argsort(both, kind="stable")
    whole = pa.concat_arrays([elements, new.cast(elements.type)])
    return whole.take(pa.array(order)), both[order], order


def get_field(structs: pa.Array, name: str) -> pa.Array:
    """A field of all structs."""
    return structs.flatten()[structs.type.get_field_index(name)]
