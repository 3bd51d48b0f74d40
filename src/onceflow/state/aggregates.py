"""Aggregates: `reduce` the values of each key to one, `fold` them into the value that is known.

Nulls are skipped, as in SQL: a key that has only nulls has null, or a count of 0. NaN is the
largest number, and a sum with NaN is NaN. Integers never wrap: a sum that is too large raises.

`index` says for each value the number of its key, and must not decrease.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as t

from onceflow.errors import JobError
from onceflow.state.results import convert
from onceflow.state.states import REDUCTIONS, Fold, is_number
from onceflow.state.vectors import Ints, is_valid, scatter, to_array

_LIMB = np.int64(0xFFFFFFFF)


def reduce(how: str, values: Any, index: Ints, size: int) -> pa.Array:
    """One value for each of `size` keys. A sum is long, double or decimal(38, s)."""
    array = to_array(values)
    if len(array) != len(index):
        raise ValueError(f"{how}: {len(array)} values for {len(index)} rows")
    if array.null_count:
        there = np.flatnonzero(is_valid(array))
        array, index = array.take(pa.array(there)), index[there]
    if how == "count":
        return pa.array(np.bincount(index, minlength=size).astype(np.int64))
    starts = find_starts(index)
    return scatter(_reduce(how, array, index, starts), index[starts], size)


def find_starts(index: Ints) -> Ints:
    """The first index of each number."""
    if not len(index):
        return np.empty(0, np.int64)
    return np.flatnonzero(np.concatenate(([True], index[1:] != index[:-1])))


def _reduce(how: str, array: pa.Array, index: Ints, starts: Ints) -> pa.Array:
    if how == "first":
        return array.take(pa.array(starts))
    if how == "last":
        return array.take(pa.array(np.append(starts[1:], len(array))[: len(starts)] - 1))
    if how == "sum":
        return _sum(array, starts)
    return _find_extremes(how, array, index, starts)


def _find_extremes(how: str, array: pa.Array, index: Ints, starts: Ints) -> pa.Array:
    kind = array.type
    if t.is_integer(kind) or t.is_floating(kind) or t.is_temporal(kind):
        short = t.is_date32(kind) or t.is_time32(kind)
        bits = pa.int32() if short else pa.int64()
        raw = array.cast(bits) if t.is_temporal(kind) else array
        numbers = raw.to_numpy(zero_copy_only=False)
        best = np.fmin if how == "min" else np.maximum  # NaN is the largest
        return pa.array(best.reduceat(numbers, starts), raw.type).cast(kind)
    order = pc.sort_indices(
        pa.table({"key": pa.array(index), "value": array}),
        sort_keys=[("key", "ascending"), ("value", "ascending" if how == "min" else "descending")],
    )
    return array.take(order.take(pa.array(starts)))


# ---------------------------------------------------------------- sums


def _sum(array: pa.Array, starts: Ints) -> pa.Array:
    if t.is_decimal(array.type):
        return _sum_decimals(array, starts)
    if t.is_floating(array.type):
        numbers = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return pa.array(np.add.reduceat(numbers, starts), pa.float64())
    if not t.is_integer(array.type):
        raise TypeError(f"sum: {array.type} is not a number")
    whole = array.cast(pa.int64()).to_numpy(zero_copy_only=False)
    sums = np.add.reduceat(whole, starts)
    # A sum that wrapped is off by a multiple of 2**64, more than any rounding of doubles.
    rough = np.add.reduceat(whole.astype(np.float64), starts)
    if (np.abs(rough - sums.astype(np.float64)) > 2.0**62).any():
        raise OverflowError("sum: the result is larger than a long can be")
    return pa.array(sums, pa.int64())


def _sum_decimals(array: pa.Array, starts: Ints) -> pa.Array:
    """Exact: 128 bits as four numbers of 32, with room for the carries of 2**31 values."""
    wide = pa.decimal128(38, array.type.scale)
    array = array.cast(wide)
    if not len(starts):
        return array
    words = np.frombuffer(array.buffers()[1], np.int64).reshape(-1, 2)
    words = words[array.offset : array.offset + len(array)]
    low, high = words[:, 0].view(np.uint64), words[:, 1]
    limbs = [
        (low & np.uint64(_LIMB)).astype(np.int64), (low >> np.uint64(32)).astype(np.int64),
        high & _LIMB, high >> np.int64(32),
    ]  # fmt: skip
    sums = [np.add.reduceat(limb, starts) for limb in limbs]
    for at in range(3):
        sums[at + 1] += sums[at] >> np.int64(32)
        sums[at] &= _LIMB
    if (np.abs(sums[3]) >= 2**31).any():
        raise OverflowError("sum: the result has more than 38 digits")
    out: npt.NDArray[np.int64] = np.empty((len(starts), 2), np.int64)
    out[:, 0] = (sums[0].view(np.uint64) | (sums[1].view(np.uint64) << np.uint64(32))).view(
        np.int64
    )
    out[:, 1] = sums[2] | (sums[3] << np.int64(32))
    found = pa.Array.from_buffers(wide, len(out), [None, pa.py_buffer(out.tobytes())])
    try:
        found.validate(full=True)
    except pa.ArrowInvalid:
        raise OverflowError("sum: the result has more than 38 digits") from None
    return found


# ---------------------------------------------------------------- into the known value


def fold(how: str | Fold, old: pa.Array, values: Any, index: Ints, *, what: str) -> pa.Array:
    """Fold the values of its rows into the value of each key; the type stays that of `old`."""
    kind, size = old.type, len(old)
    array = to_array(values)
    if how == "count":
        return pc.add_checked(pc.fill_null(old, 0), reduce("count", array, index, size))
    if len(array) != len(index):
        raise ValueError(f"{what}: {len(array)} values for {len(index)} rows")
    if array.type != kind:
        array = array.cast(kind)
    if how in ("first", "last"):
        new = reduce(str(how), array, index, size)
        return pc.coalesce(old, new) if how == "first" else pc.coalesce(new, old)
    if how == "sum" and not t.is_decimal(kind):
        return convert(_add(old, reduce("sum", array, index, size)), kind, what)
    # The known value comes first among the values of its key.
    numbers = np.concatenate((np.arange(size), index))
    order = np.argsort(numbers, kind="stable")
    both, numbers = pa.concat_arrays([old, array]).take(pa.array(order)), numbers[order]
    if not callable(how):
        return convert(reduce(how, both, numbers, size), kind, what)
    there = np.flatnonzero(is_valid(both))
    return _fold_pairs(how, both.take(pa.array(there)), numbers[there], size, what)


def _add(old: pa.Array, new: pa.Array) -> pa.Array:
    """Null plus a number is the number."""
    wide = old.cast(new.type)
    try:
        return pc.coalesce(pc.add_checked(wide, new), wide, new)
    except pa.ArrowInvalid:
        raise OverflowError("sum: the result is larger than a long can be") from None


def _fold_pairs(how: Fold, values: pa.Array, index: Ints, size: int, what: str) -> pa.Array:
    """Fold neighbours in pairs, in order, until each key has one value."""
    kind = values.type
    while True:
        starts = find_starts(index)
        if len(starts) == len(index):
            return scatter(values, index, size)
        lengths = np.diff(np.append(starts, len(index)))
        nth = np.arange(len(index)) - np.repeat(starts, lengths)
        right = np.flatnonzero(nth % 2 == 1)
        pairs = how(values.take(pa.array(right - 1)), values.take(pa.array(right)))
        folded = convert(pairs, kind, what)
        if len(folded) != len(right):
            raise ValueError(
                f"{what}: the function made {len(folded)} values of {len(right)} pairs"
            )
        left = np.flatnonzero(nth % 2 == 0)
        source = left.copy()
        source[np.searchsorted(left, right - 1)] = len(values) + np.arange(len(right))
        values = pa.concat_arrays([values, folded]).take(pa.array(source))
        index = index[left]


@dataclass(frozen=True)
class Aggregate:
    """A parsed `"sum(amount)"` or `"count"`."""

    name: str
    how: str
    of: str | None
    type: pa.DataType


# ---------------------------------------------------------------- as text


def parse_aggregates(given: Mapping[str, str], rows: pa.Schema, owner: str) -> list[Aggregate]:
    """`JobError` for text that is no aggregate, or not of a column of the rows."""
    return [_parse(name, text, rows, owner) for name, text in given.items()]


def _parse(name: str, text: str, rows: pa.Schema, owner: str) -> Aggregate:
    found = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(.+?)\s*\))?\s*", str(text))
    how, of = (found[1], found[2]) if found else ("", None)
    of = None if of == "*" else of
    if how not in REDUCTIONS or (of is None and how != "count"):
        raise JobError(
            f"{owner}: {name} is {text!r}, which is not an aggregate",
            hint=f'write it like "sum(amount)" or "count"; there are {", ".join(REDUCTIONS)}',
        )
    if of is None:
        return Aggregate(name, how, None, pa.int64())
    if of not in rows.names:
        raise JobError(
            f"{owner}: {name} is {text!r}, and the rows have no column {of!r}",
            hint=f"they have {', '.join(rows.names)}",
        )
    kind = rows.field(of).type
    if how == "sum" and not is_number(kind):
        raise JobError(
            f"{owner}: {name} is {text!r}, and {of} is of {kind}", hint="sum a column of numbers"
        )
    return Aggregate(name, how, of, _result_type(how, kind))


def _result_type(how: str, kind: pa.DataType) -> pa.DataType:
    """As in Spark: sums are long, double, or a decimal with ten digits more."""
    if how == "count":
        return pa.int64()
    if how != "sum":
        return kind
    if t.is_decimal(kind):
        return pa.decimal128(min(38, kind.precision + 10), kind.scale)
    return pa.float64() if t.is_floating(kind) else pa.int64()
