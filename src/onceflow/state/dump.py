"""State as Parquet files that `load` makes the same state of, to the last column."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from onceflow.state.keys import group_of
from onceflow.state.load import Tell
from onceflow.state.store import Reader
from onceflow.store.posix import fsync_file, translate_disk_full

_WRITE_ROWS, _WRITE_BYTES = 1 << 16, 32 << 20  # at a time
_FILE_BYTES = 256 << 20


def dump(reader: Reader, folder: Path, tell: Tell = lambda _: None) -> int:
    """All keys that there are, in the order of their places; how many. At least one file is
    written. `tell` is called with the number of key groups that are done."""
    parts = _Parts(folder, reader.schema.keys, reader.schema.values)
    for places, keys, values in reader.scan():
        rows = pa.Table.from_arrays([*keys.columns, *values.columns], schema=parts.schema)
        parts.add(rows)
        tell(group_of(int(places[-1]), reader.manifest.groups))
    tell(reader.manifest.groups)
    return parts.close()


class _Parts:
    """Files of bounded size, each of them durable when the next one begins."""

    def __init__(self, folder: Path, keys: pa.Schema, values: pa.Schema) -> None:
        self.schema = pa.schema([field.with_nullable(True) for field in (*keys, *values)])
        self._folder, self._files, self._rows = folder, 0, 0
        self._held: list[pa.Table] = []
        self._held_rows = self._held_bytes = self._file_bytes = 0
        self._writer: pq.ParquetWriter | None = None

    @property
    def _path(self) -> Path:
        return self._folder / f"part-{self._files:05d}.parquet"

    def add(self, rows: pa.Table) -> None:
        self._held.append(rows)
        self._held_rows += rows.num_rows
        self._held_bytes += rows.nbytes
        if self._held_rows >= _WRITE_ROWS or self._held_bytes >= _WRITE_BYTES:
            self._write()
            if self._file_bytes >= _FILE_BYTES:
                self._end()

    def _write(self) -> None:
        with translate_disk_full(self._path):
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, self.schema)
            table = pa.concat_tables([self.schema.empty_table(), *self._held])
            self._writer.write_table(table)
        self._rows += self._held_rows
        self._file_bytes += self._held_bytes
        self._held, self._held_rows, self._held_bytes = [], 0, 0

    def _end(self) -> None:
        assert self._writer is not None
        with translate_disk_full(self._path):
            self._writer.close()
            fsync_file(self._path)
        self._writer, self._file_bytes = None, 0
        self._files += 1

    def close(self) -> int:
        if self._held or self._writer is not None or not self._files:
            self._write()
            self._end()
        return self._rows
