"""Runs: immutable files of rows in the order of their places.

A run is an Arrow file, read through the page cache. Its columns are the place, the key columns,
whether the row is live (if not it is a tombstone, and its values are null), and the value columns.
Its rows lie in blocks; an empty block at the end says what is in them. A file has its own schema,
so runs of before and after a change of columns are read together.

A process reads nothing from a run before it has compared the file with the checksum that the
manifest has of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as t

from onceflow.errors import Damaged, JobError, OnceflowError
from onceflow.state.keys import Places, groups_of
from onceflow.store.posix import fsync_dir, make_dirs, translate_disk_full

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Identity = tuple[str, int, int, int, int]  # of a file: path, inode, size, time, checksum

SUFFIX = ".arrow"
BLOCK_ROWS, BLOCK_BYTES = 1 << 16, 8 << 20
KEYS, BLOCKS = b"onceflow.keys", b"onceflow.blocks"
_CHUNK = 1 << 20
_REMEMBERED = 4096


@dataclass(frozen=True)
class StoreSchema:
    """Key columns, value columns, and those value columns that are times to wake up at."""

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
        # Tombstones and keys that are not found have null values, whatever was declared.
        loose = pa.schema([field.with_nullable(True) for field in self.values])
        object.__setattr__(self, "values", loose)
        object.__setattr__(self, "keys", self.keys.remove_metadata())

    @cached_property
    def file(self) -> pa.Schema:
        fields = [pa.field("_place", pa.int64()), *self.keys, pa.field("_live", pa.bool_())]
        return pa.schema([*fields, *self.values], metadata={KEYS: str(len(self.keys))})


@dataclass(frozen=True)
class Run:
    """What a manifest says of one file of the store's folder."""

    name: str
    rows: int
    bytes: int
    crc32: int
    born: int  # the epoch of its newest row
    first: int  # the first group that it has rows of
    counts: tuple[int, ...]  # rows of that group and of those that follow it
    timers: Mapping[str, int | None]  # the earliest time in each timer column

    def count(self, group: int) -> int:
        at = group - self.first
        return self.counts[at] if 0 <= at < len(self.counts) else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "rows": self.rows, "bytes": self.bytes, "crc32": self.crc32,
            "born": self.born, "first": self.first, "counts": list(self.counts),
            "timers": dict(self.timers),
        }  # fmt: skip

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Run:
        return cls(**{**body, "counts": tuple(body["counts"])})


def same_keys(one: pa.Table, two: pa.Table) -> Mask:
    """Row by row: are these the same key? Null is the same as null."""
    same = np.ones(one.num_rows, np.bool_)
    for left, right in zip(one.columns, two.columns, strict=True):
        equal = pc.equal(left, right)
        if equal.null_count:
            both = pc.and_(pc.is_null(left), pc.is_null(right))
            equal = pc.or_(pc.fill_null(equal, False), both)
        same &= equal.to_numpy()
    return same


def repeated(places: Places, keys: pa.Table) -> Mask | None:
    """Which rows have the key of a row before them; places are in order. None: no row has."""
    found = None
    distance = 1
    later = np.flatnonzero(places[1:] == places[:-1]) + 1
    while later.size:
        again = same_keys(keys.take(later), keys.take(later - distance))
        if again.any():
            found = np.zeros(len(places), np.bool_) if found is None else found
            found[later[again]] = True
        distance += 1
        later = later[~again & (later >= distance)]
        later = later[places[later] == places[later - distance]]
    return found


# ---------------------------------------------------------------- writing


class RunWriter:
    """Writes one run, in bounded memory. When `close` returns the file survives a power cut.

    `path` must be new: names are never used again. What is left of a writer that was not closed
    is named by no manifest.
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
        self._file: _Summed | None = None
        self._writer: Any = None

    def add(self, places: Places, keys: pa.Table, values: pa.Table, live: Mask) -> None:
        """Rows that follow those that were added before; each key once."""
        if not len(places):
            return
        if int(places[0]) < self._last or (places[1:] < places[:-1]).any():
            raise ValueError(f"rows for {self._path} are not in the order of their places")
        if repeated(places, keys) is not None:
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
        """Leave no file. For a writer that will not be closed."""
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
                self._file = _Summed(self._path)
                self._writer = pa.ipc.new_file(pa.PythonFile(self._file, "w"), table.schema)
            for block in table.to_batches(max_chunksize=-(-self._rows // pieces)):
                self._writer.write_batch(block)
                self._blocks.append(self._described(block))
        self._held, self._rows, self._bytes = [], 0, 0

    def _described(self, block: pa.RecordBatch) -> dict[str, Any]:
        places = block.column(0)
        timers = {
            name: pc.min(times(block.column(self._at(name)))).as_py()
            for name in self._schema.timers
        }
        return {
            "first": places[0].as_py(), "last": places[-1].as_py(), "rows": block.num_rows,
            "timers": timers,
        }  # fmt: skip

    def _at(self, value: str) -> int:
        return len(self._schema.keys) + 2 + int(self._schema.values.get_field_index(value))

    def close(self, born: int) -> Run | None:
        """The run, whose newest row is of epoch `born`. None, and no file, if it has no rows."""
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
            name: min((b["timers"][name] for b in self._blocks if b["timers"][name] is not None),
                      default=None)
            for name in self._schema.timers
        }  # fmt: skip
        run = Run(
            self._path.name, int(self._counts.sum()), self._file.size, self._file.crc32, born,
            int(some[0]), tuple(self._counts[some[0] : some[-1] + 1].tolist()), earliest,
        )  # fmt: skip
        remember(self._path, run)
        return run


class _Summed:
    """A new file that knows its size and checksum."""

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
        """Arrow's writer is done; `harden` closes."""

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # what is buffered does not fit either
            self._file.close()
        self.closed = True

    def harden(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.closed = True


def times(column: Any) -> Any:
    """A timer column as numbers: microseconds, if it is of timestamps."""
    if t.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz))
    return column.cast(pa.int64())


# ---------------------------------------------------------------- checksums


_verified: dict[Identity, None] = {}  # the oldest first


def _identity(path: Path, run: Run) -> Identity:
    status = os.stat(path)
    return (str(path), status.st_ino, status.st_size, status.st_mtime_ns, run.crc32)


def remember(path: Path, run: Run) -> None:
    while len(_verified) >= _REMEMBERED:
        del _verified[next(iter(_verified))]
    _verified[_identity(path, run)] = None


def verify(path: Path, run: Run) -> Identity:
    """`Damaged` unless the file is what was written. Once for each file and process."""
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
    remember(path, run)
    return identity
