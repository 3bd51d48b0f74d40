"""Parquet files of state: which they are, whether their columns fit, and how `dump` writes them.

Columns are matched by name, whatever program wrote the files, and numbers may be narrower than
those of the state (`evolve.py`). A state that a file lacks is null. Any other difference is an
error that names the column.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types as t

from onceflow.contract.schema import arrow_schema, spark_schema
from onceflow.errors import BadInput, JobError
from onceflow.state.evolve import find_key_misfits, find_misfits
from onceflow.state.keys import group_of
from onceflow.state.runs import StoreSchema
from onceflow.state.store import Reader
from onceflow.store.posix import fsync_file, translate_disk_full

Tell = Callable[[int], None]  # how far it is

ABOUT = "_onceflow.json"  # beside exported files: what they are, and whether they are all
HIDDEN = "_written."  # columns with the time at which a value was written
_UTC = pa.timestamp("us", "UTC")


def check_files(source: Path, schema: StoreSchema) -> tuple[str, ...]:
    """`JobError` unless the files fit; returns the states that some of them lack."""
    absent: set[str] = set()
    for path in list_files(source):
        with open_parquet(path) as file:
            absent |= _check_file(path, file.schema_arrow, schema)
    return tuple(name for name in schema.values.names if name in absent)


def list_files(source: Path) -> list[Path]:
    """The file, or the Parquet files that Spark would read in the folder and its sub-folders."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise JobError(f"there is no {source}", hint="name a folder with Parquet files")
    found = [
        path
        for path in sorted(source.rglob("*.parquet"))
        if not any(part.startswith(("_", ".")) for part in path.relative_to(source).parts)
    ]
    about = source / ABOUT
    if about.is_file() and not json.loads(about.read_text())["complete"]:
        raise JobError(
            f"{source} is of an export that did not come to its end",
            hint="remove the folder and export again",
        )
    if not found:
        raise JobError(
            f"{source} has no Parquet files", hint="name a folder with files called *.parquet"
        )
    return found


def open_parquet(path: Path) -> Any:
    try:
        return pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
    except pa.ArrowInvalid as error:
        raise BadInput(
            f"{path} is no Parquet file, or is damaged: {error}", hint="write it again"
        ) from None


def _check_file(path: Path, given: pa.Schema, schema: StoreSchema) -> set[str]:
    """The states that the file lacks."""
    wanted = [*schema.keys.names, *schema.values.names]
    unknown = [name for name in given.names if name not in wanted]
    missing = [name for name in schema.keys.names if name not in given.names]
    wrong = [f"there is no column {name}, which is part of the key" for name in missing]
    wrong += [f"the state has no column {name}" for name in unknown]
    twice = sorted({name for name in given.names if given.names.count(name) > 1})
    wrong += [f"column {name} is there twice" for name in twice]
    states = {name for name in schema.values.names if not name.startswith(HIDDEN)}
    absent = states - set(given.names)
    if absent == states:
        wrong.append("there is no state in it, only keys")
    if not wrong:
        plain = to_spark_types(path, given, schema)
        keys, values = (
            pa.schema([plain.field(name) for name in part.names if name in plain.names])
            for part in (schema.keys, schema.values)
        )
        wrong += find_key_misfits(_with_zones(keys), _with_zones(schema.keys))
        wrong += find_misfits(_with_zones(values), _with_zones(schema.values))
    if wrong:
        raise JobError(
            f"the columns of {path} do not fit the state:\n  - " + "\n  - ".join(wrong),
            hint=f"the state has the key {_describe(schema.keys)}, and {_describe(schema.values)}; "
            "cast and rename what differs",
        )
    return absent


def _describe(schema: pa.Schema) -> str:
    return ", ".join(
        f"{field.name} {field.type}" for field in schema if not field.name.startswith(HIDDEN)
    )


def to_spark_types(path: Path, given: pa.Schema, schema: StoreSchema) -> pa.Schema:
    """The columns with the Arrow types of Spark, whatever program wrote the file."""
    fields = []
    for field in given:
        if t.is_null(field.type):  # its nulls have no type of their own
            part = schema.keys if field.name in schema.keys.names else schema.values
            fields.append(part.field(field.name))
            continue
        try:
            fields.append(arrow_schema(spark_schema(pa.schema([field]))).field(0))
        except JobError:
            raise JobError(
                f"column {field.name} of {path} is {field.type}, for which Spark has no type",
                hint="cast it to the type of the state",
            ) from None
    return pa.schema(fields)


def _with_zones(schema: pa.Schema) -> pa.Schema:
    """To compare: a time without a zone is UTC (files of Spark often lack the zone)."""
    return pa.schema([field.with_type(_with_zone(field.type)) for field in schema])


def _with_zone(kind: pa.DataType) -> pa.DataType:
    if t.is_timestamp(kind):
        return _UTC
    if t.is_struct(kind):
        return pa.struct([field.with_type(_with_zone(field.type)) for field in kind])
    if t.is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_zone(kind.value_type)))
    if t.is_map(kind):
        return pa.map_(
            _with_zone(kind.key_type), kind.item_field.with_type(_with_zone(kind.item_type))
        )
    return kind


_WRITE_ROWS, _WRITE_BYTES = 1 << 16, 32 << 20  # at a time
_FILE_BYTES = 256 << 20


def dump(reader: Reader, folder: Path, tell: Tell = lambda _: None) -> int:
    """Write all keys in the order of their places, to at least one file; returns their number.

    `load` makes the same state of the files. `tell` is called with the key groups done so far.
    """
    parts = _PartWriter(folder, reader.schema.keys, reader.schema.values)
    for places, keys, values in reader.scan():
        rows = pa.Table.from_arrays([*keys.columns, *values.columns], schema=parts.schema)
        parts.add(rows)
        tell(group_of(int(places[-1]), reader.manifest.groups))
    tell(reader.manifest.groups)
    return parts.close()


class _PartWriter:
    """Files of bounded size, each of them durable before the next one begins."""

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
