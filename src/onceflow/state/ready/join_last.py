"""`JoinLast`: each row with the last row of another kind before it, in whatever order they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import JobError
from onceflow.state.process import KeyedProcess
from onceflow.state.ready.running import refuse_missing
from onceflow.state.states import ListState, Span, Timer, parse_span
from onceflow.state.vectors import (
    LONG_AGO,
    Ints,
    append_elements,
    combine,
    get_field,
    order_by_key_and_time,
    pack,
    row_type,
    rows_to_structs,
    structs_to_columns,
    take_or_null,
    to_micros,
    to_timestamps,
)

_AT, _KIND = "at", "kind"


class JoinLast(KeyedProcess):
    """Emits each row of the kind `of` once, with the last row of the kind `to` before it.

    `JoinLast("order", to=["click", "impression"], within="7 days", take=["ad"])`: an order with the
    last click of its key at or before it, at most seven days old; if there is none, with the last
    impression; else alone. The order waits until the watermark has passed it, so the result does
    not depend on which of the rows came first.

    `kind` names the column with the kind of each row; rows of other kinds are ignored. The output
    has the columns of the row, then `matched` (the kind that was found, or null), `matched_at`, and
    `matched_<column>` for each column of `take`. Of rows at the same time the one that came later
    matches. A row without an event time matches nothing.
    """

    def __init__(
        self,
        of: str,
        *,
        to: str | Sequence[str],
        within: Span,
        kind: str = "kind",
        take: Sequence[str] = (),
    ) -> None:
        self._of, self._to = of, [to] if isinstance(to, str) else list(to)
        self._given, self._kind = within, kind
        self._take = [take] if isinstance(take, str) else list(take)

    def bind(self, keys: pa.Schema, rows: pa.Schema) -> None:
        owner, at = type(self).__name__, self.binding.event_time
        if at is None or not self.binding.watermark:
            raise JobError(
                f"{owner} needs a watermark: without one, no match is final",
                hint="give the step event_time= and watermark=",
            )
        refuse_missing(self, [self._kind, *self._take], rows)
        if self._of in self._to or not self._to:
            raise JobError(f"{owner}: to={self._to!r}", hint=f"name other kinds than {self._of}")
        self._within, self._at = parse_span(self._given), at
        self._time_type = rows.field(at).type
        taken = [pa.field(f"matched_{name}", rows.field(name).type) for name in self._take]
        found = [pa.field("matched", pa.string()), pa.field("matched_at", self._time_type), *taken]
        if twice := [f.name for f in found if f.name in rows.names]:
            raise JobError(f"{owner}: the rows have a column {twice[0]}", hint="rename it")
        fields = [(f"take{n}", rows.field(name).type) for n, name in enumerate(self._take)]
        seen = pa.struct([(_KIND, pa.int32()), (_AT, self._time_type), *fields])
        # A row that may match until the end of `within` must still be there just after it.
        ttl = timedelta(microseconds=self._within + 2)
        self.declare(
            waiting=ListState(row_type(rows, keys)),
            seen=ListState(seen, ttl=ttl, ttl_on="event", time=_AT),
            answer_at=Timer("event"),
        )
        self.output = pa.schema([*rows, *found])

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        kinds = combine(rows[self._kind])
        asking = np.flatnonzero(_is(kinds, self._of))
        rank = pc.index_in(kinds.cast(pa.string()), pa.array(self._to, pa.string()))
        rank = rank.fill_null(-1).to_numpy(zero_copy_only=False)
        at = to_micros(rows[self._at], LONG_AGO)
        answering = np.flatnonzero((rank >= 0) & (at != LONG_AGO))
        seen = self._to_seen(rows, rank, answering)
        asks = rows.take(pa.array(asking))
        return self._answer(keys, asks, self.index[asking], seen, self.index[answering])

    def on_timer(self, keys: pa.Table) -> Any:
        nothing = np.empty(0, np.int64)
        rows = self.binding.rows.empty_table()
        return self._answer(keys, rows, nothing, self._to_seen(rows, nothing, nothing), nothing)

    def _to_seen(self, rows: pa.Table, rank: Ints, which: Ints) -> pa.Array:
        some = rows.take(pa.array(which))
        taken = [combine(some[name]) for name in self._take]
        columns = [pa.array(rank[which], pa.int32()), combine(some[self._at]), *taken]
        names = [_KIND, _AT, *(f"take{n}" for n in range(len(taken)))]
        return pa.StructArray.from_arrays(columns, names)

    def _answer(
        self, keys: pa.Table, rows: pa.Table, rows_of: Ints, seen: pa.Array, seen_of: Ints
    ) -> Any:
        """Emit the rows whose match is final; the others wait. `rows` ask, `seen` answer."""
        waiting, known = combine(keys["waiting"]), combine(keys["seen"])
        new = rows_to_structs(rows, waiting.type.value_type)
        asked, of, _ = append_elements(waiting, new, rows_of)
        at = to_micros(get_field(asked, self._at), LONG_AGO)
        elements, elements_of, _ = append_elements(known, seen, seen_of)
        there = _Seen(elements, elements_of, to_micros(get_field(elements, _AT), LONG_AGO)).sort()

        certain = (at < self.settled[of]) | (at == LONG_AGO)
        sure, unsure = np.flatnonzero(certain), np.flatnonzero(~certain)
        match = self._match(there, of[sure], at[sure])
        out = structs_to_columns(
            keys.select(self.binding.keys.names), of[sure], asked.take(pa.array(sure))
        )
        found = take_or_null(there.elements, match)
        kinds = pa.array(self._to, pa.string())
        out["matched"] = kinds.take(get_field(found, _KIND))
        out["matched_at"] = get_field(found, _AT)
        for n, name in enumerate(self._take):
            out[f"matched_{name}"] = get_field(found, f"take{n}")

        rest_of, rest = of[unsure], asked.take(pa.array(unsure))
        answer = np.full(len(keys), np.iinfo(np.int64).max)
        np.minimum.at(answer, rest_of, at[unsure] + 1)  # just after, as rows at the same time count
        kept = there.take(there.find_useful(self.settled))
        return out, {
            "waiting": pack(rest, rest_of, len(keys), waiting.type),
            "seen": pack(kept.elements, kept.of, len(keys), known.type),
            "answer_at": to_timestamps(answer, answer == np.iinfo(np.int64).max),
        }

    def _match(self, seen: _Seen, of: Ints, at: Ints) -> Ints:
        """For each asking row the number of the seen row that matches; -1: none."""
        match = np.full(len(of), -1, np.int64)
        kinds = seen.kinds()
        for rank in range(len(self._to)):
            some = np.flatnonzero(kinds == rank)
            last = _find_last_before(seen.of[some], seen.at[some], of, at)
            index = some[last[last >= 0]]
            asks = np.flatnonzero(last >= 0)
            fits = (seen.at[index] >= at[asks] - self._within) & (match[asks] < 0)
            match[asks[fits]] = index[fits]
        return match


@dataclass(frozen=True)
class _Seen:
    """Rows of many keys that may match."""

    elements: pa.Array
    of: Ints
    at: Ints

    def kinds(self) -> Ints:
        return np.asarray(get_field(self.elements, _KIND).to_numpy(zero_copy_only=False))

    def take(self, which: Ints) -> _Seen:
        return _Seen(self.elements.take(pa.array(which)), self.of[which], self.at[which])

    def sort(self) -> _Seen:
        """By key and time; rows at the same time in the order in which they came."""
        return self.take(order_by_key_and_time(self.of, self.at))

    def find_useful(self, settled: Ints) -> Ints:
        """All except those that a later one of their kind hides from every row still to come."""
        kinds = self.kinds()
        order = order_by_key_and_time(self.of, kinds)  # by key and kind, and still by time
        is_past = (self.at < settled[self.of])[order]
        of, kinds = self.of[order], kinds[order]
        hidden = np.zeros(len(order), np.bool_)
        hidden[:-1] = is_past[1:] & (of[1:] == of[:-1]) & (kinds[1:] == kinds[:-1])
        return np.sort(order[~hidden])


def _find_last_before(seen_of: Ints, seen_at: Ints, of: Ints, at: Ints) -> Ints:
    """For each (key, time) the last seen row of that key at or before it; -1: none."""
    if not len(seen_of) or not len(of):
        return np.full(len(of), -1, np.int64)
    keys, times = np.concatenate((seen_of, of)), np.concatenate((seen_at, at))
    order = order_by_key_and_time(keys, times)  # of equal times the seen rows come first
    number = np.concatenate((np.arange(len(seen_of)), np.full(len(of), -1)))[order]
    last = np.empty(len(order), np.int64)
    last[order] = np.maximum.accumulate(number)
    found = last[len(seen_of) :]
    same = (found >= 0) & (seen_of[np.maximum(found, 0)] == of)
    return np.where(same, found, -1)


def _is(kinds: pa.Array, kind: str) -> Any:
    return pc.fill_null(pc.equal(kinds, kind), False).to_numpy(zero_copy_only=False)
