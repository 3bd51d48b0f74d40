"""Arrow columns for whole slices of keys: nulls, times, lists and maps, structs, Python values.

No function of this module changes a value. `of` is an array that says for each element the number
of its row, or of its key.
"""

from __future__ import annotations

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
    """The column as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.array([], column.type)
    return pa.concat_arrays(column.chunks)


def to_array(column: Any) -> pa.Array:
    """A column of Arrow, numpy or Python as one array."""
    return combine(column) if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column)


def to_longs(column: Any) -> Any:
    """Numbers as they are, timestamps as microseconds since 1970. Null stays null."""
    if t.is_timestamp(column.type) and column.type.unit != "us":
        column = column.cast(pa.timestamp("us", column.type.tz))
    return column.cast(pa.int64())


def to_micros(column: pa.Array | pa.ChunkedArray, empty: int) -> Ints:
    """Timestamps as microseconds since 1970, `empty` for null."""
    array = to_longs(combine(column))
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
    """The values at these indexes; null for each negative index."""
    gone = which < 0
    return array.take(pa.array(which, pa.int64(), mask=gone if gone.any() else None))


def scatter(array: pa.Array, which: Ints, size: int) -> pa.Array:
    """`size` values: those of the array at the indexes `which`, null elsewhere."""
    if len(which) == size:
        return array
    places = np.full(size, -1, np.int64)
    places[which] = np.arange(len(which))
    return take_or_null(array, places)


def set_null(array: pa.Array, where: Bools) -> pa.Array:
    """The array with null where the mask says so. Works for every type, also nested ones."""
    if not where.any():
        return array
    return take_or_null(array, np.where(where, -1, np.arange(len(array))))


def expand_ranges(starts: Ints, ends: Ints) -> Ints:
    """The numbers of all ranges [start, end), one range after the other."""
    lengths = ends - starts
    if not len(lengths):
        return np.empty(0, np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def order_by_key_and_time(of: Ints, at: Ints) -> Ints:
    """The indexes that sort by key, then by time. Equal elements keep their order."""
    if not len(of):
        return np.empty(0, np.int64)
    first, span = int(at.min()), int(at.max()) - int(at.min()) + 1
    if span * (int(of.max()) + 1) >= NEVER:
        return np.lexsort((at, of))
    return np.argsort(of * span + (at - first), kind="stable")  # many times faster


def is_collection(kind: pa.DataType) -> bool:
    return bool(t.is_list(kind) or t.is_map(kind))


def unpack(array: pa.Array) -> tuple[pa.Array, Ints]:
    """The elements of a list or map column, and for each element its row.

    The elements of a map are structs of key and value. Null has no elements.
    """
    if t.is_map(array.type):
        fields = [array.type.key_field, array.type.item_field]
        elements = pa.StructArray.from_arrays([array.keys, array.items], fields=fields)
    else:
        elements = array.values
    offsets = np.asarray(array.offsets)
    starts, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    if array.null_count:
        ends = np.where(is_valid(array), ends, starts)  # under a null may be anything
    of = np.repeat(np.arange(len(array)), ends - starts)
    if len(starts) and np.array_equal(starts[1:], ends[:-1]):
        return elements.slice(starts[0], ends[-1] - starts[0]), of
    return elements.take(pa.array(expand_ranges(starts, ends))), of


def pack(elements: pa.Array, of: Ints, size: int, kind: pa.DataType) -> pa.Array:
    """The list or map column of `size` rows that `unpack` takes apart; `of` must not decrease.

    A row without elements is null.
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
    """Lists and maps without elements as null, which is how state keeps them."""
    if not is_collection(array.type) or not len(array):
        return array
    return set_null(array, (np.diff(np.asarray(array.offsets)) == 0) & is_valid(array))


def to_datetime(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def datetime_to_micros(at: datetime) -> int:
    """Microseconds since 1970. A datetime without a zone is UTC."""
    zoned = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return (zoned - _EPOCH) // timedelta(microseconds=1)


def to_python(array: pa.Array) -> list[Any]:
    """As `to_pylist`, with maps as dicts, and several times faster for times and structs."""
    kind = array.type
    if t.is_timestamp(kind) and kind.unit == "us":
        found = _to_datetimes(array)
    elif t.is_struct(kind):
        names = [field.name for field in kind]
        columns = [to_python(part) for part in array.flatten()]
        found = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    elif is_collection(kind):
        found = _to_collections(array)
    else:
        return list(array.to_pylist())
    if not array.null_count:
        return found
    present = is_valid(array).tolist()
    return [v if there else None for v, there in zip(found, present, strict=True)]


def _to_datetimes(array: pa.Array) -> list[Any]:
    numbers = to_micros(array, 0)
    if array.type.tz is None:
        found: list[Any] = numbers.astype("M8[us]").tolist()
        return found
    return [_EPOCH + since for since in numbers.astype("m8[us]").tolist()]


def _to_collections(array: pa.Array) -> list[Any]:
    make: type[Any] = list
    elements, of = unpack(array)
    if t.is_map(array.type):
        make = dict
        keys, items = to_python(elements.field(0)), to_python(elements.field(1))
        flat = list(zip(keys, items, strict=True))
    else:
        flat = to_python(elements)
    ends = np.cumsum(np.bincount(of, minlength=len(array))).tolist() if len(array) else []
    return [make(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


# ---------------------------------------------------------------- rows kept in a state


def row_type(rows: pa.Schema, keys: pa.Schema) -> pa.StructType:
    """The struct that keeps a row in the state of its key: all columns except those of the key."""
    return pa.struct([(f.name, f.type) for f in rows if f.name not in keys.names])


def rows_to_structs(rows: pa.Table, kind: pa.StructType) -> pa.Array:
    if not kind.num_fields:
        return pa.array([{}] * len(rows), kind)
    return pa.StructArray.from_arrays([combine(rows[f.name]) for f in kind], fields=list(kind))


def structs_to_columns(keys: pa.Table, of: Ints, structs: pa.Array) -> dict[str, pa.Array]:
    """Kept rows with the columns of their keys again."""
    some = pa.array(of)
    columns = {name: combine(keys[name].take(some)) for name in keys.column_names}
    fields = structs.flatten()
    return {**columns, **{f.name: fields[n] for n, f in enumerate(structs.type)}}


def append_elements(known: pa.Array, new: pa.Array, of: Ints) -> tuple[pa.Array, Ints, Ints]:
    """The elements of a list column and new ones, by key, those of the column first.

    Also the key of each element, and its index before: those of the column come before the new.
    """
    elements, known_of = unpack(known)
    both = np.concatenate((known_of, of)).astype(np.int64)
    order = np.argsort(both, kind="stable")
    whole = pa.concat_arrays([elements, new.cast(elements.type)])
    return whole.take(pa.array(order)), both[order], order


def get_field(structs: pa.Array, name: str) -> pa.Array:
    return structs.flatten()[structs.type.get_field_index(name)]
