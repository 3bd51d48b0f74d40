"""One task of a keyed step in one epoch.

Spark gives it the rows of its key groups in the order of their places. It reads the state of their
keys after the epoch before, calls the process, and writes rows and new state to new files. It
yields one row that describes them. The driver uses the files of the attempts whose row it received,
and no others, so rows and state come from one attempt.

A task holds one slice of its rows at a time, which has all rows of each of its keys, and the state
of the keys of the slice.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from onceflow.contract.schema import arrow_schema
from onceflow.errors import BadRows
from onceflow.faults.points import reach_in_task
from onceflow.state.compact import compact, plan_merges
from onceflow.state.keys import first_place, task_ranges, unique_keys
from onceflow.state.manifest import Manifest, find_earliest
from onceflow.state.process import KeyedProcess, Time
from onceflow.state.runs import RunWriter, StoreSchema
from onceflow.state.step import Step
from onceflow.state.store import Reader
from onceflow.store.posix import translate_disk_full

PLACE, LATE, PART = "_onceflow_place", "_onceflow_late", "_onceflow_part"
REPORT = "report"
_SLICE = 1 << 18  # rows of a slice
_SLICE_BYTES = 1 << 27
_DUE = 1 << 16  # keys whose timers fire at once


@dataclass(frozen=True)
class StepWork:
    """What all tasks of one step know in one epoch."""

    name: str
    process: KeyedProcess
    by: tuple[str, ...]
    rows: str  # Spark's schema of the rows
    output: str  # and of the rows that the process emits
    event_time: str | None
    watermark: bool
    null_keys: str
    tasks: int
    state: str  # the folder of the step's state
    rows_to: str  # the folder of the emitted rows
    late_to: str | None
    prefix: str  # of the names of all files that tasks write
    manifest: Manifest  # the state before
    time: Time
    # Timer -> the epoch before, and the time up to which it fired.
    handled: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def due_until(self, timers: Mapping[str, str]) -> dict[str, int]:
        """Timer -> the time up to which it fires in this epoch. `timers`: timer -> clock."""
        ends = {"event": self.time.watermark, "processing": self.time.now}
        return {timer: end for timer, clock in timers.items() if (end := ends[clock]) is not None}

    def bind(self) -> Step:
        rows = arrow_schema(self.rows)
        keys = pa.schema([rows.field(name) for name in self.by])
        return Step(
            self.process, keys=keys, rows=rows, event_time=self.event_time, watermark=self.watermark
        )


def store_schema(step: Step) -> StoreSchema:
    return StoreSchema(step.keys, step.values, tuple(step.timers))


@dataclass
class _Counts:
    rows: int = 0
    late: int = 0
    out: int = 0
    fired: int = 0
    seen: dict[str, int] = field(default_factory=dict)  # partition -> latest event time


def run_task(work: StepWork, number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
    yield pa.RecordBatch.from_pydict({REPORT: [json.dumps(_Task(work, number).run(batches))]})


class _Task:
    def __init__(self, work: StepWork, number: int) -> None:
        self._work = work
        self._step = work.bind()
        self._schema = arrow_schema(work.rows)
        self._groups = task_ranges(work.manifest.groups, work.tasks)[number]
        store = store_schema(self._step)
        self._reader = Reader(Path(work.state), work.manifest, store, self._groups)
        self._prefix = f"{work.prefix}-{number}-{uuid.uuid4().hex[:8]}"
        self._writer = RunWriter(
            Path(work.state) / f"{self._prefix}.arrow", store, work.manifest.groups
        )
        self._merged = Path(work.state) / f"{self._prefix}-merged.arrow"
        # A class that was pickled by value may have its states in another order.
        self._output = arrow_schema(work.output)
        self._out = _RowFile(Path(work.rows_to) / f"{self._prefix}.parquet", self._output)
        late = None if work.late_to is None else Path(work.late_to) / f"{self._prefix}.parquet"
        self._late = None if late is None else _RowFile(late, self._schema)
        self._until = work.due_until(self._step.timers)
        self._counts = _Counts()
        self._where = f"{work.name}, key groups {self._groups.start} to {self._groups.stop - 1}"

    def run(self, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        low = first_place(self._groups.start, self._work.manifest.groups)
        end = first_place(self._groups.stop, self._work.manifest.groups)
        nothing = pa.schema([*self._schema, pa.field(PLACE, pa.int64())]).empty_table()
        for rows, high in _cut_slices(batches, end, nothing):
            self._process(self._drop_late(rows), low, high)
            low = high
        files = self._out.close()
        late = [] if self._late is None else self._late.close()
        reach_in_task("task.rows-written")
        run = self._writer.close(born=self._work.time.epoch)
        reach_in_task("task.run-written")
        merged = self._compact(run)
        reach_in_task("task.merged")
        counts = self._counts
        return {
            "rows": counts.rows, "late": counts.late, "out": counts.out, "fired": counts.fired,
            "seen": counts.seen, "next": self._find_next_due(run),
            "files": files, "late_files": late,
            "run": None if run is None else run.to_json(), "merged": merged,
        }  # fmt: skip

    def _drop_late(self, rows: pa.Table) -> pa.Table:
        """Count the rows, and put late ones aside."""
        counts = self._counts
        counts.rows += rows.num_rows
        if not rows.num_rows or not self._work.watermark:
            return rows
        time = pc.cast(rows[self._work.event_time], pa.int64())
        latest = (
            pa.table({"part": rows[PART], "at": time}).group_by("part").aggregate([("at", "max")])
        )
        for part, at in zip(*(latest[c].to_pylist() for c in ("part", "at_max")), strict=True):
            if at is not None:
                counts.seen[part] = max(at, counts.seen.get(part, at))
        late = rows[LATE].combine_chunks()
        number = pc.sum(late).as_py() or 0
        if not number:
            return rows
        counts.late += number
        if self._late is not None:
            self._late.add(rows.filter(late).select(self._schema.names).cast(self._schema))
        return rows.filter(pc.invert(late))

    def _process(self, rows: pa.Table, low: int, high: int) -> None:
        """Give keys at places in [low, high) their rows, and fire their timers."""
        while True:
            places, due, reached = self._find_due(low, high)
            places_of_rows = _numpy(rows[PLACE]) if rows.num_rows else np.zeros(0, np.int64)
            cut = rows.num_rows if reached >= high else int(places_of_rows.searchsorted(reached))
            self._run_step(rows.slice(0, cut), places_of_rows[:cut], places, due)
            if reached >= high:
                return
            rows, low = rows.slice(cut), reached

    def _find_due(self, low: int, high: int) -> tuple[np.ndarray, pa.Table | None, int]:
        """Keys from `low` on that have a due timer, and the place up to which these are all."""
        reached, found = high, []
        for timer, until in self._until.items():
            handled = self._work.handled.get(timer)
            places, keys, to = self._reader.find_due(timer, until, low, high, _DUE, handled=handled)
            found.append((places, keys))
            reached = min(reached, to)
        if not found:
            return np.zeros(0, np.int64), None, reached
        places = np.concatenate([p for p, _ in found])
        keys = pa.concat_tables([k for _, k in found])
        within = places < reached
        places, keys = places[within], keys.filter(pa.array(within))
        places, keys, _ = unique_keys(places, keys)
        self._counts.fired += len(places)
        return places, keys, reached

    def _run_step(
        self, rows: pa.Table, places: np.ndarray, due: np.ndarray, due_keys: pa.Table | None
    ) -> None:
        if not len(places) and not len(due):
            return
        keys = rows.select(self._work.by).cast(self._step.keys)
        if self._work.null_keys == "refuse":
            self._refuse_nulls(keys)
        if due_keys is not None and len(due):
            everything = np.concatenate([places, due])
            both = pa.concat_tables([keys, due_keys.cast(self._step.keys)])
            key_places, key_table, number = unique_keys(everything, both)
            index = number[: len(places)]
        else:
            key_places, key_table, index = unique_keys(places, keys)
        inner = rows.select(self._schema.names)
        inner = inner if inner.schema.equals(self._schema) else inner.cast(self._schema)
        if len(index) and (np.diff(index) < 0).any():  # keys that share a place
            order = np.argsort(index, kind="stable")
            inner, index = inner.take(pa.array(order)), index[order]
        state, _ = self._reader.look_up(key_places, key_table)
        done = self._step.run(key_table, state, inner, index, self._work.time, where=self._where)
        changed = np.flatnonzero(done.changed)
        if len(changed):
            whole = len(changed) == len(key_places)
            new_state = done.state if whole else done.state.take(pa.array(changed))
            new_keys = key_table if whole else key_table.take(pa.array(changed))
            self._writer.add(key_places[changed], new_keys, new_state, done.live[changed])
        self._out.add(done.out.select(self._output.names).cast(self._output))
        self._counts.out += done.out.num_rows

    def _refuse_nulls(self, keys: pa.Table) -> None:
        for name in keys.column_names:
            if keys[name].null_count:
                raise BadRows(
                    f"{self._where}: {keys[name].null_count} rows of epoch "
                    f"{self._work.time.epoch} have no {name!r}, which is part of the key",
                    hint="filter them before flow.keyed, or pass null_keys='keep', which makes "
                    "null a key like any other",
                )

    def _compact(self, run: Any) -> list[Any]:
        plan = plan_merges(self._work.manifest, run, self._groups)
        if not plan:
            return []

        def expired(values: pa.Table) -> np.ndarray:
            return self._step.is_expired(values, self._work.time)

        return [m.to_json() for m in compact(self._reader, plan, self._merged, expired)]

    def _find_next_due(self, run: Any) -> Mapping[str, int | None]:
        """Timer -> no timer of this name is due before that time."""
        found = {}
        for timer in self._step.timers:
            times = [self._reader.find_next_due(timer, self._until.get(timer))]
            if run is not None:
                times.append(run.timers.get(timer))
            found[timer] = find_earliest(times)
        return found


class _RowFile:
    """A Parquet file that exists only if there are rows.

    It is not synced: the driver hardens the files that it decides, and the others are read in the
    same epoch or never.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        with translate_disk_full(self._path):
            if self._writer is None:
                os.makedirs(self._path.parent, exist_ok=True)
                self._writer = pq.ParquetWriter(self._path, self._schema)
            self._writer.write_table(rows)

    def close(self) -> list[str]:
        """The path, if there is a file."""
        if self._writer is None:
            return []
        with translate_disk_full(self._path):
            self._writer.close()
        return [str(self._path)]


def _cut_slices(
    batches: Iterator[pa.RecordBatch], end: int, nothing: pa.Table
) -> Iterator[tuple[pa.Table, int]]:
    """The rows in slices that have all rows of a place, each with the first place after it."""
    held: list[pa.RecordBatch] = []
    size, weight, schema = 0, 0, None
    for batch in batches:
        schema = batch.schema
        if not batch.num_rows:
            continue
        held.append(batch)
        size += batch.num_rows
        weight += batch.nbytes
        if size < _SLICE and weight < _SLICE_BYTES:
            continue
        last = batch[PLACE][-1].as_py()
        cut = int(_numpy(batch[PLACE]).searchsorted(last))
        if cut == 0 and held[0][PLACE][0].as_py() == last:
            continue  # all rows are of one place
        table = pa.Table.from_batches(held)
        cut = int(_numpy(table[PLACE]).searchsorted(last))
        yield table.slice(0, cut), last
        held = table.slice(cut).to_batches()
        size, weight = table.num_rows - cut, sum(batch.nbytes for batch in held)
    table = pa.Table.from_batches(held, schema) if schema is not None else nothing
    yield table, end


def _numpy(column: Any) -> np.ndarray:
    found = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.asarray(found.to_numpy(zero_copy_only=False), np.int64)
