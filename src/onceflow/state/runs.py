"""Runs: immutable files of rows in the order of their places, and how they are read.

A run is an Arrow file, read through the page cache. Its columns are the place, the key columns,
`_live` (a row that is not live is a tombstone, and its values are null), and the value columns. Its
rows lie in blocks, which the metadata of an empty block at the end describes. Each file has its own
schema, so runs from before and after a change of columns are read together.

A process compares a file with the checksum in the manifest before it reads anything else of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as t

from onceflow.errors import Damaged, JobError, OnceflowError
from onceflow.state.evolve import adapt
from onceflow.state.keys import END, Places, compare_keys, find_repeats, groups_of
from onceflow.state.manifest import SUFFIX, Run, find_earliest
from onceflow.state.vectors import Bools, Ints, to_longs
from onceflow.store.posix import fsync_dir, make_dirs, translate_disk_full

Identity = tuple[str, int, int, int, int]  # of a file: path, inode, size, time, checksum

BLOCK_ROWS, BLOCK_BYTES = 1 << 16, 8 << 20
KEYS, BLOCKS = b"onceflow.keys", b"onceflow.blocks"
_CHUNK = 1 << 20
_REMEMBERED = 4096


@dataclass(frozen=True)
class StoreSchema:
    """Key columns, value columns, and which value columns are timers."""

    keys: pa.Schema
    values: pa.Schema
    timers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.keys) or not len(self.values):
            raise JobError(
                "keyed state has no key column or no value column", hint="declare at least one"
            )
        for name in self.timers:
            kind = self.values.field(name).type
            if not (t.is_int64(kind) or t.is_timestamp(kind)):
                raise JobError(f"timer {name} is {kind}", hint="declare it long or timestamp")
        # Tombstones and keys without state have null values, whatever was declared.
        loose = pa.schema([field.with_nullable(True) for field in self.values])
        object.__setattr__(self, "values", loose)
        object.__setattr__(self, "keys", self.keys.remove_metadata())

    @cached_property
    def file(self) -> pa.Schema:
        fields = [pa.field("_place", pa.int64()), *self.keys, pa.field("_live", pa.bool_())]
        return pa.schema([*fields, *self.values], metadata={KEYS: str(len(self.keys))})


# ---------------------------------------------------------------- writing


class RunWriter:
    """Writes one run in bounded memory. Once `close` has returned, the file survives a power cut.

    `path` must be new: names are never used twice. No manifest names the file of a writer that was
    not closed.
    """

    def __init__(self, path: Path, schema: StoreSchema, groups: int) -> None:
        if path.suffix != SUFFIX:
            raise ValueError(f"the name of a run ends with {SUFFIX}, not as {path} does")
        self._path, self._schema, self._groups = path, schema, groups
        self._counts = np.zeros(groups, np.int64)
        self._blocks: list[dict[str, Any]] = []
        self._held: list[pa.Table] = []
        self._rows = self._bytes = 0
        self._last = -(1 << 63)
        self._file: _ChecksummedFile | None = None
        self._writer: Any = None

    def add(self, places: Places, keys: pa.Table, values: pa.Table, live: Bools) -> None:
        """Add rows whose places follow those of the rows before; each key once."""
        if not len(places):
            return
        if int(places[0]) < self._last or (places[1:] < places[:-1]).any():
            raise ValueError(f"rows for {self._path} are not in the order of their places")
        if find_repeats(places, keys) is not None:
            raise ValueError(f"rows for {self._path} have a key twice")
        if not live.all():
            values = values.take(pa.array(np.arange(len(live)), mask=~live))
        schema = self._schema
        columns = [
            pa.array(places), *(keys[name] for name in schema.keys.names), pa.array(live),
            *(values[name] for name in schema.values.names),
        ]  # fmt: skip
        table = pa.Table.from_arrays(columns, schema=schema.file)
        self._last = int(places[-1])
        self._counts += np.bincount(groups_of(places, self._groups), minlength=self._groups)
        self._held.append(table)
        self._rows += table.num_rows
        self._bytes += table.nbytes
        if self._rows >= BLOCK_ROWS or self._bytes >= BLOCK_BYTES:
            self._write()

    def discard(self) -> None:
        """Remove the file, instead of `close`."""
        if self._file is not None:
            self._file.discard()
            self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            with translate_disk_full(self._path):
                yield
        except OnceflowError:
            self.discard()
            raise

    def _write(self) -> None:
        if not self._rows:
            return
        table = pa.concat_tables(self._held).combine_chunks()
        pieces = max(-(-self._rows // BLOCK_ROWS), -(-self._bytes // BLOCK_BYTES))
        with self._on_disk():
            if self._file is None:
                make_dirs(self._path.parent)
                self._file = _ChecksummedFile(self._path)
                self._writer = pa.ipc.new_file(pa.PythonFile(self._file, "w"), table.schema)
            for block in table.to_batches(max_chunksize=-(-self._rows // pieces)):
                self._writer.write_batch(block)
                self._blocks.append(self._describe(block))
        self._held, self._rows, self._bytes = [], 0, 0

    def _describe(self, block: pa.RecordBatch) -> dict[str, Any]:
        places = block.column(0)
        timers = {
            name: pc.min(to_longs(block.column(self._at(name)))).as_py()
            for name in self._schema.timers
        }
        return {
            "first": places[0].as_py(), "last": places[-1].as_py(), "rows": block.num_rows,
            "timers": timers,
        }  # fmt: skip

    def _at(self, value: str) -> int:
        return len(self._schema.keys) + 2 + int(self._schema.values.get_field_index(value))

    def close(self, born: int) -> Run | None:
        """The run, whose newest row is of epoch `born`; None, and no file, without rows."""
        self._write()
        if self._file is None:
            return None
        with self._on_disk():
            empty = [pa.nulls(0, field.type) for field in self._schema.file]
            end = pa.RecordBatch.from_arrays(empty, schema=self._schema.file)
            self._writer.write_batch(end, custom_metadata={BLOCKS: json.dumps(self._blocks)})
            self._writer.close()
            self._file.harden()
            fsync_dir(self._path.parent)
        some = np.flatnonzero(self._counts)
        earliest = {
            name: find_earliest(block["timers"][name] for block in self._blocks)
            for name in self._schema.timers
        }
        run = Run(
            self._path.name, int(self._counts.sum()), self._file.size, self._file.crc32, born,
            int(some[0]), tuple(self._counts[some[0] : some[-1] + 1].tolist()), earliest,
        )  # fmt: skip
        _remember(self._path, run)
        return run


class _ChecksummedFile:
    """A new file that counts its size and checksum."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115
        self.size = self.crc32 = 0

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Called by Arrow's writer; `harden` closes the file."""

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full for the buffer too
            self._file.close()
        self.closed = True

    def harden(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.closed = True


# ---------------------------------------------------------------- checksums


_verified: dict[Identity, None] = {}  # oldest first


def _identity(path: Path, run: Run) -> Identity:
    status = os.stat(path)
    return (str(path), status.st_ino, status.st_size, status.st_mtime_ns, run.crc32)


def _remember(path: Path, run: Run) -> None:
    while len(_verified) >= _REMEMBERED:
        del _verified[next(iter(_verified))]
    _verified[_identity(path, run)] = None


def verify(path: Path, run: Run) -> Identity:
    """`Damaged` unless the file has the size and checksum of the run; once for each process."""
    hint = (
        f"restore a savepoint, or roll back to an epoch before {run.born}; nothing was computed "
        "from the file"
    )
    try:
        identity = _identity(path, run)
        if identity in _verified:
            return identity
        size = crc = 0
        with open(path, "rb", buffering=0) as file:
            chunk = memoryview(bytearray(_CHUNK))
            while read := file.readinto(chunk):
                size += read
                crc = zlib.crc32(chunk[:read], crc)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing, and the state has rows in it", hint=hint) from None
    if (size, crc) != (run.bytes, run.crc32):
        raise Damaged(
            f"{path} is damaged: {size} bytes with checksum {crc:08x}, the manifest has "
            f"{run.bytes} bytes with {run.crc32:08x}",
            hint=hint,
        )
    _remember(path, run)
    return identity


_MOST_OPEN = 128
_open: dict[tuple[Identity, StoreSchema], OpenRun] = {}  # least recently used first


def open_run(folder: Path, run: Run, schema: StoreSchema) -> OpenRun:
    """Open a run, which stays mapped: to map it again costs as much as to read it."""
    key = (verify(folder / run.name, run), schema)
    found = _open.pop(key, None) or OpenRun(folder, run, schema)
    _open[key] = found
    while len(_open) > _MOST_OPEN:
        del _open[next(iter(_open))]
    return found


def close_removed() -> None:
    """Unmap runs whose files were removed."""
    for key in [key for key in _open if not os.path.exists(key[0][0])]:
        del _open[key]


class OpenRun:
    """A verified run as blocks of rows. A look-up costs what its keys do, not what the run does."""

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

    def live(self, rows: pa.Table) -> Bools:
        found: Bools = rows.column(self._keys + 1).to_numpy()
        return found

    def values(self, rows: pa.Table) -> pa.Table:
        return adapt(rows.select(range(self._keys + 2, rows.num_columns)), self._schema.values)

    def earliest(self, number: int, timer: str) -> int | None:
        """No time of the block is before this one; None if it has no times."""
        if timer in self._timers[number]:
            found: int | None = self._timers[number][timer]
            return found
        return -END  # the column was no timer when the run was written

    def times(self, number: int, timer: str) -> pa.Array | None:
        if timer not in self._names[self._keys + 2 :]:
            return None
        at = self._names.index(timer, self._keys + 2)
        return to_longs(self.block(number).column(at))

    def between(self, low: int, high: int) -> list[pa.RecordBatch]:
        """The rows at places in [low, high)."""
        found = []
        for number in self.overlapping(low, high):
            places = self.places(number)
            start, stop = find_bounds(places, low, high)
            if start < stop:
                found.append(self.block(number).slice(start, stop - start))
        return found

    def overlapping(self, low: int, high: int) -> range:
        """The blocks that may have rows at places in [low, high)."""
        start = int(self.lasts.searchsorted(low)) if low < END else len(self)
        stop = int(self.firsts.searchsorted(high)) if high < END else len(self)
        return range(start, stop)

    def is_complete(self, number: int) -> bool:
        """Does the block have all rows of its last place? The next block may have more of them."""
        return number + 1 == len(self) or bool(self.firsts[number + 1] > self.lasts[number])

    def find(
        self, places: Places, keys: pa.Table, *, values: bool = True
    ) -> list[tuple[Ints, pa.Table]]:
        """Which of these keys the run has, and their rows, with or without `values`."""
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
            # A place that continues in the next block is looked up in both.
            each_once = len(who) == len(places) and (who[1:] > who[:-1]).all()
            asked = keys if each_once else keys.take(who)
            same = compare_keys(self.keys(rows), asked)
            if same.all():
                found.append((who, rows))
                break
            found.append((who[same], rows.filter(pa.array(same))))
            tried = self._next(tried, same, places)
        return found

    def _next(
        self, tried: Sequence[tuple[int, Ints, Ints]], same: Bools, places: Places
    ) -> list[tuple[int, Ints, Ints]]:
        """The following rows of the same place, for rows that have another key."""
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

    def _take(self, number: int, at: Ints, values: bool) -> pa.RecordBatch:
        block = self.block(number)
        if not values:
            block = block.select(range(self._keys + 1))
        return block.take(pa.array(at))


def find_bounds(places: Places, low: int, high: int) -> tuple[int, int]:
    """The slice of the ordered places in [low, high)."""
    stop = int(places.searchsorted(high)) if high < END else len(places)
    return int(places.searchsorted(low)) if low < END else len(places), stop
