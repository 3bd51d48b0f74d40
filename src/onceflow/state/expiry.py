"""What is too old is not there: values that were not written for their ttl, and old elements.

On the clock of events a key's time is the watermark that the epochs before have reached, but not
later than the first of its timers that is due. So a row at or after the watermark never misses a
value that was written less than its ttl before it; it may see one a little longer. A row behind the
watermark (the first of a partition that nobody has waited for) sees what merging runs has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from onceflow.state.states import EVENT, Column
from onceflow.state.vectors import (
    LONG_AGO,
    NEVER,
    Bools,
    Ints,
    blanked,
    micros,
    packed,
    unpacked,
    valid,
)


class Expiry:
    """Of all columns of a process."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self._columns = [column for column in columns if column.ttl is not None]
        self.hidden = [column.written for column in self._columns if column.written is not None]

    def read(self, stored: Mapping[str, pa.Array], event: Ints, now: int) -> dict[str, pa.Array]:
        """The columns without what has expired. `event`: for each key its time of events."""
        found = dict(stored)
        for column in self._columns:
            clock = event if column.clock == EVENT else np.full(len(event), now, np.int64)
            if column.time is not None:
                found[column.name] = _without_old(stored[column.name], column, clock)
            elif column.written is not None:
                gone = _is_old(stored[column.written], column, clock)
                found[column.name] = blanked(stored[column.name], gone)
                found[column.written] = blanked(stored[column.written], gone)
        return found


def _is_old(written: pa.Array, column: Column, clock: Ints) -> Bools:
    """A value whose time of writing is not known (ttl= is new) stays until it is written again."""
    at = micros(written, NEVER)
    return np.asarray((at != NEVER) & (at <= _before(clock, column)), np.bool_)


def _before(clock: Ints, column: Column) -> Ints:
    """What was written at or before this is gone."""
    assert column.ttl is not None
    return np.where(clock > LONG_AGO + column.ttl, clock - column.ttl, LONG_AGO)


def _without_old(array: pa.Array, column: Column, clock: Ints) -> pa.Array:
    """An element without a time stays."""
    elements, of = unpacked(array)
    if not len(elements):
        return array
    items = elements if pa.types.is_list(array.type) else elements.field(1)
    index = items.type.get_field_index(column.time)
    at = micros(items.flatten()[index], NEVER)
    keep = at > _before(clock, column)[of]
    if keep.all():
        return array
    kept = np.flatnonzero(keep)
    return packed(elements.take(pa.array(kept)), of[kept], len(array), array.type)


def shrunk(before: pa.Array, after: pa.Array) -> Bools:
    """Where less is there than before; for lists and maps by how much there is."""
    if before is after:
        return np.zeros(len(before), np.bool_)
    if pa.types.is_list(before.type) or pa.types.is_map(before.type):
        counts = [np.bincount(unpacked(a)[1], minlength=len(a)) for a in (before, after)]
        return np.asarray(counts[0] != counts[1], np.bool_)
    return np.asarray(valid(before) != valid(after), np.bool_)
