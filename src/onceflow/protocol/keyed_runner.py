"""Run the keyed steps of a query on the driver: one action for each step, over staged rows.

The state of a step is under `onceflow/keyed/<step>/` of the query: immutable runs, and a manifest
for each epoch that lists the runs of its state. A decision names the manifests of its epoch, and
onceflow reads no manifest that no decision names. So an epoch that is run again reads the state
that the epoch before decided, and never files of an attempt that failed.

1. place   compute the place of each row (Spark hashes the key), and whether it is late
2. run     one action: each task writes rows and a run of state, and describes them
3. list    write the manifest of the epoch: the runs of the attempts that Spark took, and older ones
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onceflow.contract.ledger import Committable
from onceflow.contract.observation import Observer
from onceflow.contract.schema import arrow_schema, columns, quoted, spark_schema
from onceflow.contract.staged_files import AS_WRITTEN, COMMITTER, describe, read_staged
from onceflow.errors import Damaged, JobError, PlanChanged
from onceflow.faults.points import reach
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import Query
from onceflow.protocol.keyed_spec import EpochContext, KeyedStep
from onceflow.protocol.keyed_time import (
    idle_at,
    known_partitions,
    lateness,
    next_due,
    next_watermark,
    partitions_seen,
    wake,
)
from onceflow.protocol.staging import refuse_other_rows, set_for_writing, staging_differs
from onceflow.spark.arrow_map import map_in_arrow
from onceflow.spark.running_query import is_deterministic
from onceflow.state.evolve import find_key_misfits, find_misfits
from onceflow.state.files import check_files
from onceflow.state.load import load
from onceflow.state.manifest import Manifest, MergeResult, Run
from onceflow.state.process import Time
from onceflow.state.runs import StoreSchema
from onceflow.state.task import PLACE, REPORT, StepWork, run_task, store_schema
from onceflow.store.posix import make_dirs

FOLDER = "onceflow/keyed"
_FEW = 10_000  # rows: so few are read on the driver, without a job of Spark
_WRITTEN = re.compile(r"([0-9a-f]{8})-\d+-(\d+)-")  # lineage, epoch and term of the writer
_logger = logging.getLogger(__name__)
_BATCH_ROWS = "65536"  # in each batch that Spark gives to Python


LateRows = tuple[tuple[Committable, ...], Callable[[], Any]]  # files; a function that reads them


@dataclass(frozen=True)
class KeyedResult:
    """The staged results of the keyed steps of one epoch."""

    rows: Any  # DataFrame
    late: Mapping[str, LateRows]  # by output
    keyed: dict[str, dict[str, Any]]  # for the decision


def files_of(folder: Path, decision: Decision) -> list[Path]:
    """The files of keyed state after an epoch. `folder`: that of the query."""
    found = []
    for name, previous in decision.keyed.items():
        manifest = manifest_of(folder, decision, name)
        path = _manifest_path(folder, name, previous)
        found += [path, *(folder / FOLDER / name / run for run in sorted(manifest.run_names()))]
    return found


def manifest_of(folder: Path, decision: Decision, step: str) -> Manifest:
    previous = decision.keyed[step]
    return Manifest.read(_manifest_path(folder, step, previous), previous["crc"])


def _manifest_path(folder: Path, step: str, previous: Mapping[str, Any]) -> Path:
    return folder / FOLDER / step / str(previous["manifest"])


class KeyedRunner:
    """The keyed steps of one query under one term."""

    def __init__(self, query: Query, steps: tuple[KeyedStep, ...], df: Any) -> None:
        """`df`: the stream that the first step reads."""
        self._query, self._steps, self._spark = query, steps, df.sparkSession
        self._fickle = not is_deterministic(df)
        self._manifests: dict[str, tuple[int, Manifest]] = {}  # by step: epoch, manifest
        self._reachable: dict[tuple[str, str], frozenset[str]] = {}  # by step and manifest: runs

    # -------------------------------------------------------------- opening

    def open(self, last: Decision | None) -> None:
        """Refuse, before anything runs, state that does not fit what the job declares now."""
        kept = {} if last is None else last.keyed
        gone = sorted(set(kept) - {step.name for step in self._steps})
        if gone:
            raise JobError(
                f"{self._query.name} has state of keyed step {', '.join(gone)}, and the job no "
                "longer has a step of that name",
                hint="give the step that name again (name=…), or start the job under another name",
            )
        for step in self._steps:
            if step.name in kept:
                self._refuse_other_state(step, kept[step.name])
            elif step.initial is not None:
                check_files(step.initial, self._schema(step))

    def _refuse_other_state(self, step: KeyedStep, previous: Mapping[str, Any]) -> None:
        if previous["groups"] != step.groups:
            raise JobError(
                f"keyed step {step.name!r} has state in {previous['groups']} key groups, and the "
                f"job says {step.groups}",
                hint=f"use groups={previous['groups']}: the number cannot change for a state",
            )
        new = self._schema(step)
        wrong = find_key_misfits(arrow_schema(previous["schema"]["keys"]), new.keys)
        wrong += find_misfits(arrow_schema(previous["schema"]["values"]), new.values)
        if wrong:
            raise JobError(
                f"the state of keyed step {step.name!r} does not fit what the job declares now:"
                "\n  - " + "\n  - ".join(wrong),
                hint="declare it as before; give a state of another type another name, and keep "
                "the old one beside it as long as you need it",
            )

    # -------------------------------------------------------------- one epoch

    def run(self, batch: Any, context: EpochContext, last: Decision | None) -> KeyedResult:
        """Run all steps of one epoch. `last`: the decision of the epoch before."""
        rows, fickle, late = batch, self._fickle, {}
        kept: dict[str, dict[str, Any]] = {}
        for number, step in enumerate(self._steps):
            previous = {} if last is None else last.keyed.get(step.name, {})
            place = context.folder / f"keyed-{number}"
            if fickle:
                rows = self._stage_input(rows, place / "input")
            kept[step.name], reports = self._run(step, rows, previous, context, place)
            if step.late is not None:
                late[step.late_output] = self._late(step, reports, place / "taken")
            rows = self._emitted(reports, step)
            for change in step.then:
                rows = change(rows)
            fickle = bool(step.then) and not is_deterministic(rows)
            reach("keyed.step-staged", epoch=context.epoch)
        return KeyedResult(rows, late, kept)

    def _run(
        self,
        step: KeyedStep,
        rows: Any,
        previous: Mapping[str, Any],
        context: EpochContext,
        place: Path,
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Run one step; return its entry for the decision, and the reports of its tasks."""
        epoch, now = context.epoch, context.now
        watermark = previous.get("watermark")
        manifest = self._manifest(step, previous, context, place)
        cores = self._spark.sparkContext.defaultParallelism
        tasks = step.tasks or min(step.groups, cores)
        handled = {timer: (epoch - 1, until) for timer, until in previous.get("until", {}).items()}
        time = Time(now, watermark, epoch)
        work = self._work(
            step, manifest, time, tag=context.tag, place=place, tasks=tasks, handled=handled
        )
        make_dirs(self._folder(step))

        # 1. place
        placed = self._partitioned(rows, step, previous, tasks, narrow=tasks == cores == 1)

        # 2. run
        self._spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", _BATCH_ROWS)
        reports = self._run_tasks(placed, work)
        if len(reports) != tasks:  # without rows Spark runs no task, but timers may be due
            nothing = self._spark.createDataFrame([], rows.schema)
            reports = self._run_tasks(
                self._partitioned(nothing, step, previous, tasks, narrow=False), work
            )
        if len(reports) != tasks:
            raise PlanChanged(
                f"keyed step {step.name!r}: {len(reports)} of {tasks} tasks ran in epoch {epoch}",
                hint="onceflow opens the query again; report it if this happens again",
            )
        reach("keyed.ran", epoch=epoch)
        self._refuse_missing(step, reports)

        # 3. list
        runs = [Run.from_json(r["run"]) for r in reports if r["run"] is not None]
        merged = [MergeResult.from_json(m) for r in reports for m in r["merged"]]
        manifest = manifest.advance(epoch, runs, merged)
        name = f"{context.tag}.json"
        crc = manifest.write(self._folder(step), name)
        self._manifests[step.name] = (epoch, manifest)
        reach("keyed.listed", epoch=epoch)
        seen = partitions_seen(known_partitions(step, previous), reports, now)
        kept = {
            "manifest": name, "crc": crc, "groups": step.groups,
            "schema": _schema_entry(store_schema(work.bind()), previous.get("schema")),
            "seen": seen, "order": list(step.order),
            "watermark": next_watermark(step, seen, watermark, now),
            "rows": sum(r["rows"] for r in reports), "late": sum(r["late"] for r in reports),
            "fired": sum(r["fired"] for r in reports), "next": next_due(reports),
            "idle_at": idle_at(step, seen, now), "until": work.due_until(step.clocks),
        }  # fmt: skip
        return kept, reports

    @staticmethod
    def _run_tasks(placed: Any, work: StepWork) -> list[dict[str, Any]]:
        """The report of each task, from the attempt that Spark took."""
        found = map_in_arrow(placed, partial(_in_task, work), f"{REPORT} string").collect()
        return [json.loads(row[0]) for row in found]

    def set_wake(self, last: Decision | None) -> None:
        """Write the time at which an epoch is due even if no rows come."""
        if any(step.ticks for step in self._steps):
            from onceflow.protocol.ticks import set_wake

            kept = {} if last is None else last.keyed
            times = [wake(step, kept.get(step.name)) for step in self._steps]
            set_wake(self._query.ticks, min((t for t in times if t is not None), default=None))

    def _work(
        self,
        step: KeyedStep,
        manifest: Manifest,
        time: Time,
        *,
        tag: str = "",
        place: Path = Path(),
        tasks: int = 1,
        handled: Mapping[str, tuple[int, int]] | None = None,
    ) -> StepWork:
        return StepWork(
            name=step.name,
            process=step.process,
            by=step.by,
            rows=step.rows,
            output=step.output,
            event_time=step.event_time,
            watermark=step.delay is not None,
            null_keys=step.null_keys,
            tasks=tasks,
            state=str(self._folder(step)),
            rows_to=str(place / "rows"),
            late_to=None if step.late is None else str(place / "late"),
            prefix=tag,
            manifest=manifest,
            time=time,
            handled=handled or {},
        )

    def _schema(self, step: KeyedStep) -> StoreSchema:
        return store_schema(self._work(step, Manifest(-1, step.groups), Time(0, None, 0)).bind())

    def _manifest(
        self, step: KeyedStep, previous: Mapping[str, Any], context: EpochContext, place: Path
    ) -> Manifest:
        if not previous:
            return self._initial(step, context, place)
        known = self._manifests.get(step.name)
        if known is not None and known[0] == context.epoch - 1:
            return known[1]
        return Manifest.read(
            _manifest_path(self._query.folder, step.name, previous), previous["crc"]
        )

    def _initial(self, step: KeyedStep, context: EpochContext, place: Path) -> Manifest:
        """The state before the step's first epoch."""
        if step.initial is None:
            return Manifest(-1, step.groups)
        loaded = load(
            step.initial,
            self._folder(step),
            self._schema(step),
            step.groups,
            prefix=f"{context.tag}-initial",
            epoch=context.epoch - 1,
            now=context.now,
            scratch=place / "initial",
        )
        return loaded.manifest

    def _refuse_missing(self, step: KeyedStep, reports: list[dict[str, Any]]) -> None:
        """Refuse the epoch if tasks wrote rows or state where this driver does not see them."""
        rows = [path for r in reports for path in (*r["files"], *r["late_files"])]
        runs = [r["run"] for r in reports] + [m["run"] for r in reports for m in r["merged"]]
        state = [self._folder(step) / Run.from_json(run).name for run in runs if run is not None]
        missing = [str(path) for path in (*rows, *state) if not os.path.exists(path)]
        if missing:
            raise staging_differs(
                f"keyed step {step.name!r}: its tasks wrote {len(rows) + len(state)} files, and "
                f"this driver does not find {len(missing)} of them, such as {missing[0]}"
            )

    def _folder(self, step: KeyedStep) -> Path:
        return self._query.folder / FOLDER / step.name

    def _stage_input(self, rows: Any, folder: Path) -> Any:
        """Stage input rows that are not deterministic, so that every task reads the same ones.

        If Spark loses a worker in the middle of the action of a step, it computes some input rows
        again; the first values of these rows may be in the state already.
        """
        set_for_writing(self._spark)
        rows, observed = Observer(("input",), digest=False).batch(rows)
        rows.write.options(**COMMITTER).parquet(str(folder))
        reach("stage.written")
        refuse_other_rows("input of keyed steps", observed().total, describe(folder, ()), folder)
        return self._spark.read.schema(rows.schema).options(**AS_WRITTEN).parquet(str(folder))

    # -------------------------------------------------------------- where rows belong

    def _partitioned(
        self, rows: Any, step: KeyedStep, previous: Mapping[str, Any], tasks: int, *, narrow: bool
    ) -> Any:
        """The rows divided into tasks, and sorted by place in each task.

        `narrow`: one task reads all rows, and nothing is shuffled.
        """
        from pyspark.sql import functions as F

        if narrow:
            rows = rows.coalesce(1)
        added = [] if step.delay is None else lateness(step, previous)
        kinds = columns(step.rows)
        small = ("byte", "short", "integer")  # so that they may become longs
        keys = (quoted(key) + "::long" * (kinds[key] in small) for key in step.by)
        added.append(F.expr(f"xxhash64({', '.join(keys)}) as {PLACE}"))
        rows = rows.select("*", *added)  # one select: building a plan takes longer than running it
        task = F.expr(_task_of(PLACE, step.groups, tasks))
        # Sort by offset, too: rows of a key have the same order when an epoch is run again.
        order = [F.col(quoted(column)) for column in step.order]
        placed = rows if narrow else rows.repartitionById(tasks, task)
        return placed.sortWithinPartitions(PLACE, *order)

    def _emitted(self, reports: list[dict[str, Any]], step: KeyedStep) -> Any:
        """The rows that the step emitted, as a DataFrame."""
        from pyspark.sql.types import StructType

        schema = StructType.fromJson(json.loads(step.output))
        files = [path for report in reports for path in report["files"]]
        if not files:
            return self._spark.createDataFrame([], schema)
        if sum(report["out"] for report in reports) <= _FEW:
            table = pa.concat_tables([pq.ParquetFile(path).read() for path in files])
            # `coalesce` hides the rows from the optimizer, which would otherwise compute them one
            # by one in each pass; and grouping needs no shuffle if there is one partition.
            few = self._spark.createDataFrame(table, schema)
            return few.coalesce(self._spark.sparkContext.defaultParallelism)
        return self._spark.read.schema(schema).options(**AS_WRITTEN).parquet(*files)

    def _late(self, step: KeyedStep, reports: list[dict[str, Any]], folder: Path) -> LateRows:
        """Move the late rows of the attempts that Spark took to a folder where no other attempt
        writes."""
        folder.mkdir(parents=True)
        for report in reports:
            for file in report["late_files"]:
                Path(file).rename(folder / Path(file).name)
        files = describe(folder, ())
        late = sum(report["late"] for report in reports)
        refuse_other_rows(f"output {step.late_output!r}", late, files, folder)
        return files, partial(read_staged, self._spark, folder, step.rows, ())

    # -------------------------------------------------------------- sweeping

    def sweep(self, retained: Sequence[Decision], term: int) -> None:
        """Remove state that no retained decision names.

        A driver that was paused here and wakes up does not know what its successor has decided. So
        it leaves the files of newer terms. Of the older files, a successor needs only those that
        our own last decision names.
        """
        root = self._query.folder / FOLDER
        for folder in root.iterdir() if root.is_dir() else ():
            previous = [d.keyed[folder.name] for d in retained if folder.name in d.keyed]
            try:
                needed = self._needed(folder, previous)
            except Damaged as error:  # without the manifest the needed runs are not known
                _logger.warning("keyed state is not swept: %s", error.message)
                continue
            for path in folder.iterdir():
                if path.name not in needed and self._is_ours(path.name, term):
                    path.unlink(missing_ok=True)

    def _needed(self, folder: Path, previous: Sequence[Mapping[str, Any]]) -> set[str]:
        needed = {str(one["manifest"]) for one in previous}
        known = {key: runs for key, runs in self._reachable.items() if key[0] != folder.name}
        for one in previous:
            key = (folder.name, str(one["manifest"]))
            if key in self._reachable:
                known[key] = self._reachable[key]
            else:
                known[key] = frozenset(Manifest.read(folder / key[1], one["crc"]).run_names())
            needed |= known[key]
        self._reachable = known
        return needed

    def _is_ours(self, name: str, term: int) -> bool:
        """Is this file of our term, an older term or an older lineage? Newer terms may be writing
        theirs at this moment."""
        found = _WRITTEN.match(name)
        if found is None:
            return False
        return found[1] != self._query.lineage[:8] or int(found[2]) <= term


def _schema_entry(schema: StoreSchema, before: Mapping[str, str] | None) -> dict[str, str]:
    """The schema for the decision. It keeps states that were dropped: old runs have their columns,
    so no new state of another type may take their names."""
    old = [] if before is None else list(arrow_schema(before["values"]))
    dropped = [field for field in old if field.name not in schema.values.names]
    values = pa.schema([*schema.values, *dropped])
    return {"keys": spark_schema(schema.keys), "values": spark_schema(values)}


def _task_of(place: str, groups: int, tasks: int) -> str:
    """A SQL expression for the task that owns a place; see `group_of` and `task_ranges`."""
    high = f"shiftrightunsigned({place} ^ {-(1 << 63)}L, 32)"
    group = f"shiftrightunsigned({high} * {groups}, 32)"
    return f"cast((({group} + 1) * {tasks} - 1) div {groups} as int)"


def _in_task(work: StepWork, batches: Any) -> Any:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return run_task(work, context.partitionId(), batches)
