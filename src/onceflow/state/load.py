"""Load state from Parquet files: history for a new step, or state that was corrected by hand.

Every row becomes the state of its key, or nothing is loaded: a column that does not fit, or a key
that comes twice, is an error that names it. There may be any number of rows, in any order:

1. check   the columns of all files, by name
2. spread  the rows over small scratch files, by the places of their keys
3. sort    each scratch file, and write it to runs

Memory is bounded by one scratch file. A row whose states are all null is skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import BadInput, BadRows, OnceflowError
from onceflow.state.evolve import adapt
from onceflow.state.files import HIDDEN, Tell, check_files, list_files, open_parquet, to_spark_types
from onceflow.state.keys import Places, find_repeats, groups_of, places_of
from onceflow.state.manifest import SUFFIX, Manifest, Run, find_earliest
from onceflow.state.runs import RunWriter, StoreSchema
from onceflow.state.vectors import combine, empty_to_null, is_valid
from onceflow.store.posix import translate_disk_full

_READ_ROWS = 1 << 17  # at a time
_SCRATCH_ROWS, _SCRATCH_BYTES, _MOST_SCRATCH = 1 << 19, 32 << 20, 512
_RUN_BYTES = 256 << 20
_FEW = 3  # keys that an error names


@dataclass(frozen=True)
class LoadResult:
    """State whose runs are on disk and whose manifest is not."""

    manifest: Manifest
    rows: int
    earliest: dict[str, int | None]  # of each timer
    absent: tuple[str, ...]  # states that some files lack


def load(
    source: Path,
    into: Path,
    schema: StoreSchema,
    groups: int,
    *,
    prefix: str,
    epoch: int,
    now: int,
    scratch: Path,
    tell: Tell = lambda _: None,
) -> LoadResult:
    """Write the rows at `source` to runs in `into` whose names begin with `prefix`.

    They become the state of `epoch`. Values without a time of writing count as written `now`.
    `scratch` is a new folder, removed at the end.
    """
    # 1. check
    absent = check_files(source, schema)
    scratch.mkdir(parents=True)
    try:
        # 2. spread
        spread = _spread(source, schema, scratch, now, tell)

        # 3. sort
        with _RunsWriter(into, prefix, schema, groups, epoch) as runs:
            for path in spread:
                _sort(path, schema, runs, source)
            found = runs.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    earliest = {timer: find_earliest(run.timers[timer] for run in found) for timer in schema.timers}
    manifest = Manifest(epoch, groups).advance(epoch, found)
    return LoadResult(manifest, sum(run.rows for run in found), earliest, absent)


# ---------------------------------------------------------------- 2. spread


def _spread(source: Path, schema: StoreSchema, scratch: Path, now: int, tell: Tell) -> list[Path]:
    """Write the rows to scratch files; places ascend from file to file, not inside a file."""
    parts = _count_parts(source)
    paths = [scratch / f"{number}{SUFFIX}" for number in range(parts)]
    layout = _scratch_schema(schema)
    total = 0
    with contextlib.ExitStack() as stack, translate_disk_full(scratch):
        writers = [stack.enter_context(pa.ipc.new_file(str(path), layout)) for path in paths]
        for rows in _read(source, schema, now):
            total += rows.num_rows
            number = groups_of(rows.column(0).to_numpy(), parts)
            order = np.argsort(number, kind="stable")
            ordered = rows.take(pa.array(order))
            ends = np.searchsorted(number[order], np.arange(parts + 1))
            for writer, start, end in zip(writers, ends[:-1], ends[1:], strict=True):
                if start < end:
                    writer.write_table(ordered.slice(start, end - start))
            tell(total)
    return paths


def _count_parts(source: Path) -> int:
    rows = size = 0
    for path in list_files(source):
        with open_parquet(path) as file:
            about = file.metadata
            rows += about.num_rows
            size += sum(about.row_group(n).total_byte_size for n in range(about.num_row_groups))
    return min(max(rows // _SCRATCH_ROWS, size // _SCRATCH_BYTES) + 1, _MOST_SCRATCH)


def _scratch_schema(schema: StoreSchema) -> pa.Schema:
    return pa.schema([pa.field("_place", pa.int64()), *schema.keys, *schema.values])


def _read(source: Path, schema: StoreSchema, now: int) -> Iterator[pa.Table]:
    for path in list_files(source):
        with open_parquet(path) as file:
            plain = to_spark_types(path, file.schema_arrow, schema)
            try:
                for batch in file.iter_batches(_READ_ROWS):
                    rows = pa.Table.from_batches([batch]).cast(plain)
                    yield _add_places(rows, schema, now)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise BadInput(
                    f"{path} cannot be read as state: {error}",
                    hint="write it again with the types of the state",
                ) from None


def _add_places(rows: pa.Table, schema: StoreSchema, now: int) -> pa.Table:
    keys = adapt(rows.select(schema.keys.names), schema.keys)
    known = [name for name in schema.values.names if name in rows.column_names]
    values = adapt(rows.select(known), schema.values)
    columns = {name: empty_to_null(combine(values[name])) for name in values.column_names}
    live = np.zeros(rows.num_rows, np.bool_)
    for name, column in list(columns.items()):
        if not name.startswith(HIDDEN):
            live |= is_valid(column)
        elif name not in known:
            of = columns[name.removeprefix(HIDDEN)]
            columns[name] = pc.if_else(of.is_valid(), pa.scalar(now, pa.int64()), None)
    table = pa.Table.from_arrays(
        [pa.array(places_of(keys)), *keys.columns, *columns.values()],
        schema=_scratch_schema(schema),
    )
    return table if live.all() else table.filter(pa.array(live))


# ---------------------------------------------------------------- 3. sort


def _sort(path: Path, schema: StoreSchema, runs: _RunsWriter, source: Path) -> None:
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all().combine_chunks()
        order = np.argsort(table.column(0).to_numpy(), kind="stable")
        table = table.take(pa.array(order)).combine_chunks()
    os.unlink(path)
    places = table.column(0).to_numpy()
    keys = table.select(schema.keys.names)
    again = find_repeats(places, keys)
    if again is not None:
        _refuse_repeats(keys.filter(pa.array(again)), source)
    runs.add(places, keys, table.select(schema.values.names))


def _refuse_repeats(keys: pa.Table, source: Path) -> None:
    rows = keys.slice(0, _FEW).to_pylist()
    some = "; ".join(", ".join(f"{k}={v!r}" for k, v in row.items()) for row in rows)
    raise BadRows(
        f"{source} has keys more than once, at least {keys.num_rows}: {some}",
        hint="write one row for each key",
    )


class _RunsWriter:
    """Writes runs of bounded size, each key group to one of them; removes them if that fails."""

    def __init__(
        self, folder: Path, prefix: str, schema: StoreSchema, groups: int, epoch: int
    ) -> None:
        self._folder, self._prefix, self._schema = folder, prefix, schema
        self._groups, self._epoch = groups, epoch
        self._done: list[Run] = []
        self._begin()

    def __enter__(self) -> _RunsWriter:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not None:
            with contextlib.suppress(OSError, OnceflowError):
                self._writer.close(born=self._epoch)
            for path in (*(self._folder / run.name for run in self._done), self._path):
                path.unlink(missing_ok=True)

    def _begin(self) -> None:
        self._path = self._folder / f"{self._prefix}-{len(self._done)}{SUFFIX}"
        self._writer = RunWriter(self._path, self._schema, self._groups)
        self._bytes, self._last = 0, -1  # the last group of its rows

    def add(self, places: Places, keys: pa.Table, values: pa.Table) -> None:
        start = 0
        if self._bytes > _RUN_BYTES and len(places):
            groups = groups_of(places, self._groups)
            start = int(np.searchsorted(groups, self._last, "right"))
            self._put(places[:start], keys.slice(0, start), values.slice(0, start))
            if start < len(places):
                self._end()
                self._begin()
        self._put(places[start:], keys.slice(start), values.slice(start))

    def _put(self, places: Places, keys: pa.Table, values: pa.Table) -> None:
        if len(places):
            self._writer.add(places, keys, values, np.ones(len(places), np.bool_))
            self._bytes += keys.nbytes + values.nbytes
            self._last = int(groups_of(places[-1:], self._groups)[0])

    def _end(self) -> None:
        run = self._writer.close(born=self._epoch)
        if run is not None:
            self._done.append(run)

    def close(self) -> list[Run]:
        self._end()
        return self._done
