"""Keyed state as plain Python values, for tests of the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.state.keys import Places, places_of
from onceflow.state.manifest import SUFFIX, Manifest, Run
from onceflow.state.runs import RunWriter, StoreSchema
from onceflow.state.store import Reader

Key = tuple[Any, ...]
SCHEMA = StoreSchema(
    pa.schema([("user", pa.int64())]),
    pa.schema([("total", pa.int64()), ("wake", pa.timestamp("us", "UTC"))]),
    ("wake",),
)


def keys_table(keys: list[Key], schema: StoreSchema = SCHEMA) -> pa.Table:
    columns = list(zip(*keys, strict=True)) if keys else [()] * len(schema.keys)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema.keys, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema.keys)


def placed(keys: list[Key], schema: StoreSchema = SCHEMA, modulo: int = 0) -> list[int]:
    """The places of keys; with `modulo`, of only so many, so that many keys share one."""
    found = places_of(keys_table(keys, schema)).tolist()
    if not modulo:
        return found
    return [(place % modulo) * ((1 << 64) // modulo) - (1 << 63) for place in found]


def in_order(
    keys: list[Key], schema: StoreSchema = SCHEMA, modulo: int = 0
) -> tuple[Places, list[Key]]:
    pairs = sorted(zip(placed(keys, schema, modulo), keys, strict=True), key=lambda pair: pair[0])
    return np.array([place for place, _ in pairs], np.int64), [key for _, key in pairs]


def write_run(
    path: Path,
    rows: Mapping[Key, tuple[Any, ...] | None],
    *,
    born: int = 1,
    schema: StoreSchema = SCHEMA,
    groups: int = 8,
    modulo: int = 0,
) -> Run | None:
    """A run of keys and their values; None stands for a tombstone."""
    places, keys = in_order(list(rows), schema, modulo)
    writer = RunWriter(path, schema, groups)
    width = len(schema.values)
    values = [rows[key] or (None,) * width for key in keys]
    arrays = [
        pa.array([value[i] for value in values], field.type)
        for i, field in enumerate(schema.values)
    ]
    table = pa.Table.from_arrays(arrays, schema=schema.values)
    live = np.array([rows[key] is not None for key in keys], np.bool_)
    writer.add(places, keys_table(keys, schema), table, live)
    return writer.close(born)


def plain(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows; timestamps as microseconds."""
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in table.columns
    ]
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def looked_up(reader: Reader, keys: list[Key], modulo: int = 0) -> dict[Key, tuple[Any, ...]]:
    """The keys that there are, with their values."""
    places, ordered = in_order(keys, reader.schema, modulo)
    values, found = reader.look_up(places, keys_table(ordered, reader.schema))
    rows = plain(values)
    nothing = (None,) * len(reader.schema.values)
    assert all(row == nothing for row, there in zip(rows, found, strict=True) if not there)
    return {key: row for key, row, there in zip(ordered, rows, found, strict=True) if there}


def scanned(reader: Reader) -> dict[Key, tuple[Any, ...]]:
    found: list[tuple[Key, tuple[Any, ...]]] = []
    before = -(1 << 63)
    for places, keys, values in reader.scan():
        assert before <= int(places[0])
        assert (np.diff(places) >= 0).all()
        before = int(places[-1])
        found += zip(plain(keys), plain(values), strict=True)
    assert len(dict(found)) == len(found), "a key was scanned twice"
    return dict(found)


def state_of(folder: Path, manifest: Manifest, schema: StoreSchema = SCHEMA) -> Reader:
    return Reader(folder, manifest, schema)


def find_unreachable(folder: Path, manifests: Iterable[Manifest]) -> list[Path]:
    """The runs in the folder that none of the manifests names."""
    needed = set().union(*(manifest.run_names() for manifest in manifests))
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.name not in needed)
