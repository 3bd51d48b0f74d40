"""Keys: the place of each key, the key group of each place, and whether two keys are the same.

A place is Spark's `xxhash64` of the key columns, with integers cast to long, so that a key column
may be widened. In jobs Spark computes it; `places_of` computes the same bits without a JVM.

Different keys may share a place, so code that finds a place compares the keys too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as t

from onceflow.contract.schema import type_name
from onceflow.errors import JobError
from onceflow.state.vectors import Bools

Places = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

END = 1 << 63  # one above the last place
_SEED = 42
_AT_ONCE = 1 << 20  # bytes of text to hash at a time
_SIGN = np.uint64(1 << 63)
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(n)
    for n in (
        0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)  # fmt: skip
_KEYS = (
    "byte", "short", "integer", "long", "string", "binary", "boolean", "date", "timestamp",
    "timestamp_ntz",
)  # fmt: skip


def check_key(name: str, kind: Any) -> None:
    """`JobError` unless a column of this type, in Spark's JSON, can be part of a key."""
    if isinstance(kind, str) and (kind in _KEYS or kind.startswith("decimal(")):
        return
    if kind in ("float", "double"):
        fix = f"cast {name} to decimal or string: equal fractions may differ in their last bit"
    elif isinstance(kind, dict) and kind["type"] in ("struct", "array", "map"):
        fix = f"take the fields of {name} that make the key, each as a column of its own"
    else:
        fix = f"cast {name} to one of {', '.join(_KEYS)} or decimal"
    raise JobError(f"column {name} is {type_name(kind)}, which cannot be part of a key", hint=fix)


# ---------------------------------------------------------------- groups


def group_of(place: int, groups: int) -> int:
    """The key group of a place: groups are equal slices of all places, in their order."""
    return ((place + END) >> 32) * groups >> 32


def groups_of(places: Places, groups: int) -> npt.NDArray[np.int64]:
    high = (places.view(np.uint64) ^ _SIGN) >> np.uint64(32)
    return (high * np.uint64(groups) >> np.uint64(32)).view(np.int64)


def first_place(group: int, groups: int) -> int:
    """The smallest place of a group; for the group after the last one, `END`."""
    return (-(-(group << 32) // groups) << 32) - END


def task_ranges(groups: int, tasks: int) -> list[range]:
    """The groups of each task, in order and as even as possible."""
    cuts = [groups * task // tasks for task in range(tasks + 1)]
    return [range(one, two) for one, two in pairwise(cuts)]


# ---------------------------------------------------------------- the same key


def compare_keys(one: pa.Table, two: pa.Table) -> Bools:
    """Row by row: are the two keys the same? Null equals null."""
    same = np.ones(one.num_rows, np.bool_)
    for left, right in zip(one.columns, two.columns, strict=True):
        equal = pc.equal(left, right)
        if equal.null_count:
            both = pc.and_(pc.is_null(left), pc.is_null(right))
            equal = pc.or_(pc.fill_null(equal, False), both)
        same &= equal.to_numpy()
    return same


def find_repeats(places: Places, keys: pa.Table) -> Bools | None:
    """Which rows have the key of an earlier row; places are in order. None: no row does."""
    found = None
    distance = 1
    later = np.flatnonzero(places[1:] == places[:-1]) + 1
    while later.size:
        again = compare_keys(keys.take(later), keys.take(later - distance))
        if again.any():
            found = np.zeros(len(places), np.bool_) if found is None else found
            found[later[again]] = True
        distance += 1
        later = later[~again & (later >= distance)]
        later = later[places[later] == places[later - distance]]
    return found


def unique_keys(places: np.ndarray, keys: pa.Table) -> tuple[np.ndarray, pa.Table, np.ndarray]:
    """Distinct keys in the order of their places, and for each given row the number of its key."""
    if not len(places):
        return places, keys, np.zeros(0, np.int64)
    order = None
    if (places[1:] < places[:-1]).any():  # their difference may not fit into a long
        order = np.argsort(places, kind="stable")
        places, keys = places[order], keys.take(pa.array(order))
    first = np.empty(len(places), bool)
    first[0] = True
    np.not_equal(places[1:], places[:-1], out=first[1:])
    again = np.flatnonzero(~first)  # each has the place of the row before it
    if not compare_keys(keys.take(pa.array(again)), keys.take(pa.array(again - 1))).all():
        return _unique_by_value(places, keys, order)
    number = np.cumsum(first) - 1
    starts = np.flatnonzero(first)
    found = keys if len(starts) == len(places) else keys.take(pa.array(starts))
    return places[starts], found, _undo_order(number, order)


def _undo_order(number: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    if order is None:
        return number
    back = np.empty(len(number), np.int64)
    back[order] = number
    return back


def _unique_by_value(
    places: np.ndarray, keys: pa.Table, order: np.ndarray | None
) -> tuple[np.ndarray, pa.Table, np.ndarray]:
    """As `unique_keys`, if different keys share a place."""
    seen: dict[tuple[Any, ...], int] = {}
    number = np.empty(len(places), np.int64)
    starts: list[int] = []
    # As numbers: Python cannot represent every time of Arrow.
    plain = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in keys.columns]
    columns = [column.to_pylist() for column in plain]
    for row, key in enumerate(zip(places.tolist(), *columns, strict=True)):
        if key not in seen:
            seen[key] = len(starts)
            starts.append(row)
        number[row] = seen[key]
    rows = np.array(starts)
    return places[rows], keys.take(pa.array(rows)), _undo_order(number, order)


# ---------------------------------------------------------------- places


def places_of(keys: pa.Table) -> Places:
    """The place of each row."""
    places = np.full(keys.num_rows, _SEED, np.uint64)
    for name, column in zip(keys.column_names, keys.columns, strict=True):
        start = 0
        for chunk in filter(len, column.chunks):
            part = slice(start, start + len(chunk))
            hashed = _hash_column(name, chunk, places[part])
            # A null keeps the hash of the columns before it.
            there = chunk.is_valid().to_numpy(zero_copy_only=False)
            places[part] = np.where(there, hashed, places[part])
            start += len(chunk)
    return places.view(np.int64)


def _hash_column(name: str, values: pa.Array, seeds: Hashes) -> Hashes:
    kind = values.type
    if t.is_dictionary(kind):
        return _hash_column(name, values.dictionary_decode(), seeds)
    if t.is_signed_integer(kind) or t.is_timestamp(kind):
        whole = values.cast(pa.timestamp("us", kind.tz)) if t.is_timestamp(kind) else values
        return _hash_longs(_to_numbers(whole.cast(pa.int64())).view(np.uint64), seeds)
    if t.is_boolean(kind) or t.is_date32(kind):
        whole = values.cast(pa.int32() if t.is_date32(kind) else pa.int8())
        return _hash_ints(_to_numbers(whole.cast(pa.int64())).view(np.uint64), seeds)
    if t.is_decimal128(kind):
        halves = np.frombuffer(values.buffers()[1], np.int64).reshape(-1, 2)
        halves = halves[values.offset : values.offset + len(values)]
        if kind.precision <= 18:
            return _hash_longs(np.ascontiguousarray(halves[:, 0]).view(np.uint64), seeds)
        return _hash_bytes(pa.array(map(_java_bytes, halves), pa.large_binary()), seeds)
    if t.is_string(kind) or t.is_large_string(kind):
        return _hash_bytes(values.cast(pa.large_string()).cast(pa.large_binary()), seeds)
    if t.is_binary(kind) or t.is_large_binary(kind):
        return _hash_bytes(values.cast(pa.large_binary()), seeds)
    raise JobError(f"column {name} is {kind}, which cannot be part of a key", hint="cast it")


def _to_numbers(values: pa.Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = values.fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _java_bytes(halves: npt.NDArray[np.int64]) -> bytes:
    """As `BigInteger.toByteArray`: the fewest bytes that hold the number and its sign."""
    number = int.from_bytes(halves.tobytes(), "little", signed=True)
    bits = (number if number >= 0 else ~number).bit_length()
    return number.to_bytes(bits // 8 + 1, "big", signed=True)


# ---------------------------------------------------------------- xxHash64


def _rotate(x: Hashes, by: int) -> Hashes:
    return (x << np.uint64(by)) | (x >> np.uint64(64 - by))


def _finish(h: Hashes) -> Hashes:
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


def _mix_long(h: Hashes, values: Hashes) -> Hashes:
    return _rotate(h ^ (_rotate(values * _P2, 31) * _P1), 27) * _P1 + _P4


def _mix_int(h: Hashes, values: Hashes) -> Hashes:
    return _rotate(h ^ ((values & np.uint64(0xFFFFFFFF)) * _P1), 23) * _P2 + _P3


def _hash_longs(values: Hashes, seeds: Hashes) -> Hashes:
    return _finish(_mix_long(seeds + _P5 + np.uint64(8), values))


def _hash_ints(values: Hashes, seeds: Hashes) -> Hashes:
    return _finish(_mix_int(seeds + _P5 + np.uint64(4), values))


def _hash_bytes(values: pa.Array, seeds: Hashes) -> Hashes:
    """Values of the same length are hashed together."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    text = np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)
    lengths = np.diff(ends)
    hashes = np.empty(len(values), np.uint64)
    order = np.argsort(lengths, kind="stable")
    sizes, starts = np.unique(lengths[order], return_index=True)
    for size, these in zip(sizes.tolist(), np.split(order, starts[1:]), strict=True):
        step = max(1, _AT_ONCE // max(size, 1))
        for rows in (these[i : i + step] for i in range(0, len(these), step)):
            square = np.zeros((len(rows), -(-size // 8) * 8), np.uint8)
            square[:, :size] = text[ends[rows, None] + np.arange(size)]
            hashes[rows] = _hash_words(square, size, seeds[rows])
    return hashes


def _hash_words(square: npt.NDArray[np.uint8], size: int, seeds: Hashes) -> Hashes:
    words = square.view("<u8").T
    at = 0
    if size >= 32:
        lanes = [seeds + _P1 + _P2, seeds + _P2, seeds, seeds - _P1]
        while at + 4 <= size // 8:
            for i in range(4):
                lanes[i] = _rotate(lanes[i] + words[at + i] * _P2, 31) * _P1
            at += 4
        one, two, three, four = lanes
        h = _rotate(one, 1) + _rotate(two, 7) + _rotate(three, 12) + _rotate(four, 18)
        for lane in lanes:
            h = (h ^ (_rotate(lane * _P2, 31) * _P1)) * _P1 + _P4
    else:
        h = seeds + _P5
    h = h + np.uint64(size)
    for word in words[at : size // 8]:
        h = _mix_long(h, word)
    rest = size // 8 * 8
    if size - rest >= 4:
        h = _mix_int(h, words[-1])
        rest += 4
    for byte in square.T[rest:size]:
        h = _rotate(h ^ (byte.astype(np.uint64) * _P5), 11) * _P1
    return _finish(h)
