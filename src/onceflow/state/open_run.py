"""A run that is open for reading: look-ups that cost what the keys cost, not what the run does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from onceflow.state.evolve import adapt
from onceflow.state.keys import END, Places
from onceflow.state.runs import (
    BLOCKS,
    KEYS,
    Identity,
    Mask,
    Rows,
    Run,
    StoreSchema,
    same_keys,
    times,
    verify,
)

_KEPT = 128
_open: dict[tuple[Identity, StoreSchema], OpenRun] = {}  # the one that was used last comes last


def opened(folder: Path, run: Run, schema: StoreSchema) -> OpenRun:
    """A run that stays mapped for who needs it next: mapping it anew costs as much as reading it.

    See `let_go` for files that are removed.
    """
    key = (verify(folder / run.name, run), schema)
    found = _open.pop(key, None) or OpenRun(folder, run, schema)
    _open[key] = found
    while len(_open) > _KEPT:
        del _open[next(iter(_open))]
    return found


def let_go() -> None:
    """Unmap runs whose files were removed."""
    for key in [key for key in _open if not os.path.exists(key[0][0])]:
        del _open[key]


class OpenRun:
    """A run that was compared with its checksum, as blocks of rows. Nothing is held in memory."""

    def __init__(self, folder: Path, run: Run, schema: StoreSchema) -> None:
        path = folder / run.name
        verify(path, run)
        self._schema = schema
        self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        own = self._file.schema
        self._keys = int(own.metadata[KEYS])
        number = self._file.num_record_batches - 1
        blocks = json.loads(self._file.get_batch_with_custom_metadata(number)[1][BLOCKS])
        self.firsts = np.array([block["first"] for block in blocks], np.int64)
        self.lasts = np.array([block["last"] for block in blocks], np.int64)
        self._timers = [block["timers"] for block in blocks]
        self._names = own.names
        self._blocks: list[tuple[pa.RecordBatch, Places] | None] = [None] * number

    def __len__(self) -> int:
        return len(self._blocks)

    def block(self, number: int) -> pa.RecordBatch:
        return self._block(number)[0]

    def places(self, number: int) -> Places:
        return self._block(number)[1]

    def _block(self, number: int) -> tuple[pa.RecordBatch, Places]:
        found = self._blocks[number]
        if found is None:
            batch = self._file.get_batch(number)
            found = self._blocks[number] = (batch, batch.column(0).to_numpy())
        return found

    def keys(self, rows: pa.Table) -> pa.Table:
        return adapt(rows.select(range(1, self._keys + 1)), self._schema.keys)

    def live(self, rows: pa.Table) -> Mask:
        found: Mask = rows.column(self._keys + 1).to_numpy()
        return found

    def values(self, rows: pa.Table) -> pa.Table:
        return adapt(rows.select(range(self._keys + 2, rows.num_columns)), self._schema.values)

    def earliest(self, number: int, timer: str) -> int | None:
        """A time that no time of a block is before; None if it has no times at all."""
        if timer in self._timers[number]:
            found: int | None = self._timers[number][timer]
            return found
        return -END  # it was no timer when the run was written

    def times(self, number: int, timer: str) -> pa.Array | None:
        if timer not in self._names[self._keys + 2 :]:
            return None
        at = self._names.index(timer, self._keys + 2)
        return times(self.block(number).column(at))

    def between(self, low: int, high: int) -> list[pa.RecordBatch]:
        """Rows at places in [low, high)."""
        found = []
        for number in self.overlapping(low, high):
            places = self.places(number)
            start, stop = bounds(places, low, high)
            if start < stop:
                found.append(self.block(number).slice(start, stop - start))
        return found

    def overlapping(self, low: int, high: int) -> range:
        """Blocks that may have rows at places in [low, high)."""
        start = int(self.lasts.searchsorted(low)) if low < END else len(self)
        stop = int(self.firsts.searchsorted(high)) if high < END else len(self)
        return range(start, stop)

    def complete(self, number: int) -> bool:
        """Does the last place of a block end with it? The next one may have more of its keys."""
        return number + 1 == len(self) or bool(self.firsts[number + 1] > self.lasts[number])

    def find(
        self, places: Places, keys: pa.Table, *, values: bool = True
    ) -> list[tuple[Rows, pa.Table]]:
        """Which of these keys the run has, and their rows; `values`: with their values."""
        starts, stops = places.searchsorted(self.firsts), places.searchsorted(self.lasts, "right")
        tried = []
        for number in np.flatnonzero(starts < stops).tolist():
            start, stop = starts[number], stops[number]
            mine, here = places[start:stop], self.places(number)
            at = here.searchsorted(mine)
            hit = np.flatnonzero(here[at] == mine)
            if hit.size:
                tried.append((number, at[hit], hit + start))
        found = []
        while tried:
            rows = pa.Table.from_batches([self._take(n, at, values) for n, at, _ in tried])
            who = np.concatenate([who for _, _, who in tried])
            # A place that goes on in the next block is asked for in both.
            each_once = len(who) == len(places) and (who[1:] > who[:-1]).all()
            asked = keys if each_once else keys.take(who)
            same = same_keys(self.keys(rows), asked)
            if same.all():
                found.append((who, rows))
                break
            found.append((who[same], rows.filter(pa.array(same))))
            tried = self._next(tried, same, places)
        return found

    def _next(
        self, tried: Sequence[tuple[int, Rows, Rows]], same: Mask, places: Places
    ) -> list[tuple[int, Rows, Rows]]:
        """The rows after those that have the place and not the key, if they have the place too."""
        left, start = [], 0
        for number, at, who in tried:
            wrong = ~same[start : start + len(at)]
            start += len(at)
            here, after, asked = self.places(number), at[wrong] + 1, who[wrong]
            hit = here[np.minimum(after, len(here) - 1)] == places[asked]
            hit &= after < len(here)
            if hit.any():
                left.append((number, after[hit], asked[hit]))
        return left

    def _take(self, number: int, at: Rows, values: bool) -> pa.RecordBatch:
        block = self.block(number)
        if not values:
            block = block.select(range(self._keys + 1))
        return block.take(pa.array(at))


def bounds(places: Places, low: int, high: int) -> tuple[int, int]:
    """The slice of ordered places that lies in [low, high)."""
    stop = int(places.searchsorted(high)) if high < END else len(places)
    return int(places.searchsorted(low)) if low < END else len(places), stop
