"""A job of the user: its input and its expected result.

The input comes from its `workload` or from a recorded log. The expected result comes from
undisturbed runs over the same input, once in one epoch and once in many. If the two differ, there
is no expected result.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.abilities import CanReadBack, can_rewind
from onceflow.contract.registry import open_target
from onceflow.errors import JobError, SetupError
from onceflow.harness.builtin_catalog import Expected
from onceflow.harness.case_runner import Case, CaseRunner
from onceflow.harness.checker import differences
from onceflow.harness.drivers import Drivers
from onceflow.harness.target_reader import read
from onceflow.harness.targets import Target
from onceflow.jobs.job import Workload, load
from onceflow.log.embedded import EmbeddedLog
from onceflow.log.new_log import spark_json

if TYPE_CHECKING:
    import pyarrow as pa

_SIZE = 20  # rows of a commit
_SAMPLE = 200  # rows from which the columns are inferred
_OURS = ("files", "sqlite", "log")  # they are read without their sinks
_DECLARED_WITHIN = 120.0  # seconds


@dataclass(frozen=True)
class Generated:
    """An input made by functions of the row number."""

    workloads: dict[str, Workload]  # path of a log -> the function that makes its rows
    schemas: dict[str, pa.Schema]
    seed: int

    @property
    def logs(self) -> dict[str, dict[str, Any]]:
        return {path: {"schema": schema} for path, schema in self.schemas.items()}

    def commit(self, number: int) -> dict[str, pa.Table] | None:
        numbers = range(number * _SIZE, (number + 1) * _SIZE)
        return {
            path: rows_of(workload, self.seed, numbers, self.schemas[path])
            for path, workload in self.workloads.items()
        }

    def last(self, number: int) -> dict[str, pa.Table]:
        return {}


def rows_of(workload: Workload, seed: int, numbers: range, schema: pa.Schema | None) -> pa.Table:
    import pyarrow as pa

    rows = [dict(workload(n, random.Random(f"{seed}/{n}"))) for n in numbers]
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise JobError(f"the workload's rows do not fit together: {error}",
                       hint="give every row the same columns and types") from error  # fmt: skip


class Recorded:
    """The rows of a recorded log, in the order in which they were appended."""

    def __init__(self, path: str, recorded: EmbeddedLog) -> None:
        import pyarrow as pa

        self._path, names = path, recorded.schema.names
        batches = list(recorded.read(columns=names))
        self._rows = pa.Table.from_batches(batches, recorded.schema if not batches else None)
        self._schema = recorded.facts.schema

    @property
    def logs(self) -> dict[str, dict[str, Any]]:
        return {self._path: {"schema": self._schema}}

    def commit(self, number: int) -> dict[str, pa.Table] | None:
        part = self._rows.slice(number * _SIZE, _SIZE)
        return {self._path: part} if part.num_rows else None

    def last(self, number: int) -> dict[str, pa.Table]:
        return {}


# ---------------------------------------------------------------- the case


def user_case(
    spec: str, folder: Path, *, seed: int, recorded: str | None, drivers: Drivers
) -> Case:
    """The case of `JOB.py[:name]`. Refuses a job that can't be verified, with the reason."""
    path, _, name = spec.partition(":")
    spec = f"{Path(path).absolute()}:{name}" if name else str(Path(path).absolute())
    job = load(spec)
    log = EmbeddedLog(recorded) if recorded is not None else None
    if log is None and job.workload is None:
        raise JobError(
            f"job {job.name} names no workload, so there is no input for it",
            hint='@job("name", workload=row) with def row(number, random) -> dict, or --input LOG',
        )
    schemas: dict[str, str] = {}
    workloads: dict[str, Workload] = {}
    if log is not None:
        schemas[""] = log.facts.schema
    else:
        given = job.workload if isinstance(job.workload, Mapping) else {"": job.workload}
        workloads = {name: made for name, made in given.items() if made is not None}
        schemas = {
            name: spark_json(rows_of(made, seed, range(_SAMPLE), None).schema)
            for name, made in workloads.items()
        }
    said = _ask(drivers, spec, folder, schemas)
    found = {name: _log_of(name, source, folder) for name, source in said["sources"].items()}
    targets = [_target(output, folder) for output in said["outputs"]]
    _refuse_strangers(job.name, found, workloads, log)
    source: Generated | Recorded
    if log is not None:
        source = Recorded(next(iter(found.values())), log)
    else:
        made = {place: workloads.get(name) or workloads[""] for name, place in found.items()}
        tables = {place: rows_of(w, seed, range(_SAMPLE), None).schema for place, w in made.items()}
        source = Generated(made, tables, seed)
    return Case(
        job=spec, name=job.name, sinks=", ".join(sorted({t.kind for t in targets})),
        folder=folder, targets=targets, source=source,
        queries=tuple(dict.fromkeys(t.output.partition("/")[0] for t in targets)), logs=found,
        environment={}, keyed=said["keyed"],
    )  # fmt: skip


def _ask(drivers: Drivers, spec: str, folder: Path, schemas: dict[str, str]) -> dict[str, Any]:
    """Let a driver declare the job; returns its sources and outputs."""
    probe = folder.with_name(f"{folder.name}-declared")
    probe.mkdir(parents=True)
    driver = drivers.take()
    drivers.wait_until_ready(driver)
    driver.order(do="declare", job=spec, folder=str(probe), schemas=schemas)
    deadline = time.monotonic() + _DECLARED_WITHIN
    while time.monotonic() < deadline and driver.exit_code is None:
        for event in driver.events():
            if event["event"] == "declared":
                drivers.give_back(driver)
                if "error" in event:
                    raise JobError(event["error"]["message"], hint=event["error"]["hint"])
                here, there = str(probe), str(folder)
                for place in (*event["sources"].values(), *(o["target"] for o in event["outputs"])):
                    if place.get("path", "").startswith(here):
                        place["path"] = there + place["path"].removeprefix(here)
                return event
        time.sleep(0.02)
    raise SetupError("the job could not be declared", hint=f"see {driver.log}")


def _log_of(name: str, source: dict[str, str], folder: Path) -> str:
    """The path of the log of a source, relative to the folder."""
    if source["kind"] != "log":
        raise JobError(
            f"source {name!r} is {source['kind']}: it cannot be fed and replayed here",
            hint="verify a job that reads logs: flow.read(name, Log(path))",
        )
    return _inside(source["path"], folder, f"source {name!r} reads")


def _target(said: dict[str, Any], folder: Path) -> Target:
    target, output = said["target"], f"{said['query']}/{said['output']}"
    sink = open_target(target)
    theirs = target["kind"] not in _OURS
    if theirs and not isinstance(sink, CanReadBack):
        raise JobError(
            f"output {output} goes to {said['sink']}, which verify cannot read: "
            f"{type(sink).__name__} has no ability CanReadBack",
            hint=f"verify reads {', '.join(_OURS)}, and sinks that inherit from CanReadBack "
            "(onceflow.sinks)",
        )
    if sink.place != "path":
        raise JobError(
            f"output {output} goes to {said['sink']}, which has no path, and verify runs the job "
            "in a folder of its own",
            hint='verify a job whose sinks write to a path, which a sink says by place = "path"',
        )
    _inside(target["path"], folder, f"output {output} writes to")
    key = tuple(sink.key if isinstance(sink, CanReadBack) else target.get("key") or ())
    if said["mode"] == "update" and not key:
        raise JobError(
            f"output {output} has versions of rows without a key: they cannot be compared",
            hint=f"name it: {said['sink'].partition('(')[0]}(…, key=…)",
        )
    return Target(
        output, target["kind"], target["path"], target.get("table", ""), key, said["mode"],
        settings=target if theirs else None, rewinds=can_rewind(sink),
    )  # fmt: skip


def _inside(path: str, folder: Path, what: str) -> str:
    if not Path(path).is_relative_to(folder):
        raise JobError(
            f"{what} {path}, and verify runs the job in a folder of its own",
            hint="make the path relative: it is taken from the working directory",
        )
    return str(Path(path).relative_to(folder))


def _refuse_strangers(
    job: str, logs: dict[str, str], workloads: dict[str, Workload], log: EmbeddedLog | None
) -> None:
    if not logs:
        raise JobError(f"job {job} reads no log", hint="begin with flow.read(name, Log(path))")
    if log is not None and len(set(logs.values())) > 1:
        raise JobError(
            f"job {job} reads {len(logs)} logs, --input is one", hint="name a workload for each"
        )
    if log is None and "" in workloads and len(set(logs.values())) > 1:
        names = ", ".join(f'"{name}": …' for name in logs)
        raise JobError(
            f"job {job} reads {len(logs)} logs, and has one workload",
            hint=f"name one for each: workload={{{names}}}",
        )
    missing = [name for name in logs if log is None and not {name, ""} & set(workloads)]
    if missing:
        raise JobError(
            f"source {', '.join(missing)} of job {job} has no workload",
            hint=f'workload={{"{missing[0]}": row}}',
        )


# ---------------------------------------------------------------- the expected result


class UnstableResult(Exception):
    """Undisturbed runs over the same input differ."""


def undisturbed_result(runner: CaseRunner) -> dict[str, Expected]:
    """Two runs of the same job over the input of `runner`, without faults."""
    assert runner.feed is not None
    one = _undisturbed(runner, "one-epoch", ahead=True)
    many = _undisturbed(runner, "many-epochs", ahead=False)
    for output, rows in one.items():
        different = list(differences(output, rows, many[output]))
        if different:
            raise UnstableResult(
                f"the result depends on the size of epochs, so there is no expected result "
                f"({different[0].message} in one epoch only). Late rows, order or chance do that"
            )
    return {output: Expected(rows) for output, rows in one.items()}


def _undisturbed(runner: CaseRunner, name: str, *, ahead: bool) -> dict[str, Counter[Any]]:
    assert runner.feed is not None
    case = runner.case
    folder = case.folder.with_name(f"{case.folder.name}-{name}")
    here, there = str(case.folder), str(folder)
    targets = [replace(t, path=there + t.path.removeprefix(here)) for t in case.targets]
    calm = CaseRunner(
        replace(case, folder=folder, targets=targets), runner.drivers, began=runner.began,
        tell=lambda: None, pause=0.0 if ahead else 0.05, commits=runner.feed.commits, ahead=ahead,
    )  # fmt: skip
    calm.perform([], lambda *_: None)
    if calm.violations:
        raise UnstableResult(f"an undisturbed run failed: {calm.violations[0]}")
    return dict(_rows(case.name, targets))


def _rows(job: str, targets: list[Target]) -> Iterator[tuple[str, Counter[Any]]]:
    for target in targets:
        found = read(target, job)
        kept = found.last_of_key(target.key).values() if target.upserted else found.rows
        yield target.output, Counter(kept)
