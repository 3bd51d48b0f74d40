"""Processes that emit as rows come: totals, first rows, the last row, the largest rows of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import JobError
from onceflow.state.aggregates import find_starts, parse_aggregates
from onceflow.state.process import KeyedProcess
from onceflow.state.states import ListState, ReducingState, Span, ValueState, parse_span
from onceflow.state.vectors import (
    LONG_AGO,
    TIMESTAMP,
    Bools,
    Ints,
    append_elements,
    combine,
    get_field,
    is_valid,
    pack,
    row_type,
    rows_to_structs,
    structs_to_columns,
    to_micros,
)


class Totals(KeyedProcess):
    """Running totals: emits each key that has rows in an epoch, with its totals so far.

    `Totals({"spend": "sum(amount)", "n": "count"})`; there are sum, min, max, count, first, last.
    """

    def __init__(self, totals: Mapping[str, str], *, ttl: Span | None = None) -> None:
        self._totals, self._ttl = dict(totals), ttl

    def bind(self, keys: pa.Schema, rows: pa.Schema) -> None:
        for found in parse_aggregates(self._totals, rows, type(self).__name__):
            state = ReducingState(found.type, found.how, of=found.of, ttl=self._ttl)
            self.declare(**{found.name: state})


class Deduplicate(KeyedProcess):
    """Emits the first row of a key with each `id`, unchanged, and drops the others.

    Without `id` the key itself is the id. With `ttl`, a row counts as first again if it is at least
    that far from every emitted row with its id, by event time if there is a watermark. Dropped rows
    do not extend the time. Null is an id like any other.
    """

    def __init__(self, *, id: str | Sequence[str] = (), ttl: Span | None = None) -> None:
        self._id, self._ttl = [id] if isinstance(id, str) else list(id), ttl

    def bind(self, keys: pa.Schema, rows: pa.Schema) -> None:
        refuse_missing(self, self._id, rows)
        fields = [(f"id{n}", rows.field(name).type) for n, name in enumerate(self._id)]
        kind = pa.struct([*fields, ("at", TIMESTAMP)])
        ttl = {} if self._ttl is None else {"ttl": self._ttl, "time": "at"}
        self.declare(ids=ListState(kind, **ttl))  # type: ignore[arg-type]
        self.output = rows

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        known = combine(keys["ids"])
        new = self._ids(rows, known.type.value_type)
        both, of, stood = append_elements(known, new, self.index)
        codes = of
        for n in range(len(self._id)):
            codes = _pair_codes(codes, combine(both.field(n)))
        before = len(both) - len(rows)
        ttl = None if self._ttl is None else parse_span(self._ttl)
        kept = _find_kept(
            codes, to_micros(both.field(len(self._id)), LONG_AGO), stood < before, ttl
        )
        ids = pack(both.take(pa.array(kept)), of[kept], len(keys), known.type)
        fresh = stood[kept] - before
        return rows.take(pa.array(np.sort(fresh[fresh >= 0]))), {"ids": ids}

    def _ids(self, rows: pa.Table, kind: pa.StructType) -> pa.Array:
        bound = self.binding
        if bound.watermark:
            at = combine(rows[bound.event_time]).cast(pa.int64()).cast(TIMESTAMP)
            if self.time.watermark is not None:
                at = at.fill_null(pa.scalar(self.time.watermark, TIMESTAMP))
        else:
            at = pa.array(np.full(len(rows), self.time.now)).cast(TIMESTAMP)
        columns = [*(combine(rows[name]) for name in self._id), at]
        return pa.StructArray.from_arrays(columns, fields=list(kind))


def _find_kept(codes: Ints, at: Ints, known: Bools, ttl: int | None) -> Ints:
    """The known ones, and of the others, by time, each that is `ttl` from all kept ones of its
    code. None: the first of each code."""
    order = np.lexsort((at, ~known, codes) if ttl is None else (at, codes))
    codes, at, kept = codes[order], at[order], known[order]
    left = ~kept
    while left.any():
        if ttl is None:
            near = _fill_forward(kept, codes) >= 0
        else:
            last, following = (
                _fill_forward(kept, codes),
                _fill_forward(kept[::-1], codes[::-1])[::-1],
            )
            following = np.where(following >= 0, len(codes) - 1 - following, -1)
            near = (last >= 0) & (at - at[last] < ttl)
            near |= (following >= 0) & (at[following] - at < ttl)
        left &= ~near
        rest = np.flatnonzero(left)
        first = rest[find_starts(codes[rest])]
        kept[first], left[first] = True, False
    return np.sort(order[kept])


def _fill_forward(marked: Bools, codes: Ints) -> Ints:
    """For each the last marked one at or before it with the same code; -1: none."""
    last = np.maximum.accumulate(np.where(marked, np.arange(len(marked)), -1))
    return np.where((last >= 0) & (codes[last] == codes), last, -1)


def _pair_codes(codes: Ints, values: pa.Array) -> Ints:
    """A number for each pair of a code and a value, equal for equal pairs."""
    encoded = values.dictionary_encode(null_encoding="encode")
    numbers = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    _, both = np.unique(codes * (len(encoded.dictionary) + 1) + numbers, return_inverse=True)
    return both.astype(np.int64)


class Last(KeyedProcess):
    """Emits the last row of each key by `order` whenever it changes.

    Of equal rows the one that came later. A row whose `order` is null is before all others.
    """

    def __init__(self, *, order: str, ttl: Span | None = None) -> None:
        self._order, self._ttl = order, ttl

    def bind(self, keys: pa.Schema, rows: pa.Schema) -> None:
        refuse_missing(self, [self._order], rows)
        if self._order in keys.names:
            raise JobError(
                f"{type(self).__name__}: order={self._order!r} is a key", hint="name another column"
            )
        self.declare(row=ValueState(row_type(rows, keys), ttl=self._ttl))
        self.output = rows

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        old = combine(keys["row"])
        by = combine(rows[self._order])
        order = pc.sort_indices(
            pa.table({"key": pa.array(self.index), "there": by.is_valid(), "by": by}),
            sort_keys=[("key", "ascending"), ("there", "ascending"), ("by", "ascending")],
        )
        # Every key has rows, so the last row of each precedes the first of the next.
        last = order.take(pa.array(np.append(self.starts[1:], len(rows)) - 1))
        new = rows_to_structs(rows.take(last), old.type)
        newer = _is_not_before(
            get_field(new, self._order), get_field(old, self._order)
        ) | ~is_valid(old)
        which = np.arange(len(keys)) + np.where(newer, len(keys), 0)
        row = pa.concat_arrays([old, new]).take(pa.array(which))
        at = np.flatnonzero(newer)
        columns = structs_to_columns(
            keys.select(self.binding.keys.names), at, row.take(pa.array(at))
        )
        return columns, {"row": row}


def _is_not_before(new: pa.Array, old: pa.Array) -> Bools:
    """Null is before every value."""
    later = pc.fill_null(pc.greater_equal(new, old), False).to_numpy(zero_copy_only=False)
    return np.asarray(later | ~is_valid(old), np.bool_)


class TopN(KeyedProcess):
    """Emits the `n` rows of each key with the largest `by`, with their `rank`, when they change.

    Of equal rows those that came first. Rows whose `by` is null or NaN are ignored.
    """

    def __init__(
        self, n: int, *, by: str, largest: bool = True, rank: str = "rank", ttl: Span | None = None
    ) -> None:
        self._n, self._by, self._largest, self._rank, self._ttl = n, by, largest, rank, ttl

    def bind(self, keys: pa.Schema, rows: pa.Schema) -> None:
        owner = type(self).__name__
        refuse_missing(self, [self._by], rows)
        if not isinstance(self._n, int) or self._n < 1:
            raise JobError(f"{owner}: n is {self._n!r}", hint="use a number from 1 on")
        if self._by in keys.names:
            raise JobError(f"{owner}: by={self._by!r} is a key", hint="name another column")
        if self._rank in rows.names:
            raise JobError(f"{owner}: the rows have a column {self._rank}", hint="give rank=…")
        self.declare(top=ListState(row_type(rows, keys), ttl=self._ttl))
        self.output = rows.append(pa.field(self._rank, pa.int32()))

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        known = combine(keys["top"])
        new = rows_to_structs(rows, known.type.value_type)
        there = is_valid(get_field(new, self._by))
        if pa.types.is_floating(get_field(new, self._by).type):
            there &= ~np.isnan(get_field(new, self._by).to_numpy(zero_copy_only=False))
        able = np.flatnonzero(there)
        both, of, stood = append_elements(known, new.take(pa.array(able)), self.index[able])
        order = pc.sort_indices(
            pa.table({"key": pa.array(of), "by": get_field(both, self._by)}),
            sort_keys=[
                ("key", "ascending"),
                ("by", "descending" if self._largest else "ascending"),
            ],
        ).to_numpy()
        of = of[order]
        starts = find_starts(of)
        ranks = np.arange(len(of)) - np.repeat(starts, np.diff(np.append(starts, len(of))))
        best = np.flatnonzero(ranks < self._n)
        of, ranks, order = of[best], ranks[best], order[best]
        kept = both.take(pa.array(order))
        is_new = stood[order] >= len(both) - len(able)
        changed = np.zeros(len(keys), np.bool_)
        changed[of[is_new]] = True
        shown = np.flatnonzero(changed[of])
        plain = keys.select(self.binding.keys.names)
        out = structs_to_columns(plain, of[shown], kept.take(pa.array(shown)))
        out[self._rank] = pa.array(ranks[shown] + 1, pa.int32())
        return out, {"top": pack(kept, of, len(keys), known.type)}


def refuse_missing(process: KeyedProcess, names: Sequence[str], rows: pa.Schema) -> None:
    missing = [name for name in names if name not in rows.names]
    if missing:
        raise JobError(
            f"{type(process).__name__}: the rows have no column {', '.join(missing)}",
            hint=f"they have {', '.join(rows.names)}",
        )
