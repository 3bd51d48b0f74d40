"""Named fault points: places between two steps where a test may break the driver.

`reach(point)` does nothing unless a fault was armed: in this process by `arm`, or for a driver
that a test starts by the environment variable `ONCEFLOW_FAULT=point:action[:visit[:folder]]`.

| action | what happens at the point |
|---|---|
| kill | the process ends at once, as by `kill -9` |
| raise | `InjectedFault` is raised |
| pause | `<folder>/paused` appears and the thread waits until `<folder>/resume` does |

`record(path)`, or `ONCEFLOW_TRACE=path`, appends a JSON line for every point that the process
reaches, with the facts that the caller of `reach` adds. `tests/model/traces.py` compares them with
the model.

The crash matrix is the product of `POINTS` and `SOME_OPENINGS` with sinks and queries: a new point
needs no new test.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

OPENING = (
    "open.led",
    "open.fenced",
    "open.ledger-fenced",
    "open.ledgers-read",
    "open.published",
    "open.spark-agrees",
    "open.swept",
    "open.ready",
)
EPOCH = (
    "epoch.checked",
    "epoch.staged",
    "epoch.hardened",
    "epoch.decided",
    "epoch.output-published",
    "epoch.published",
    "epoch.swept",
)
# Inside these steps: the model does not distinguish them.
WITHIN = (
    "open.shut-out",
    "open.sources-repaired",
    "open.offsets-dropped",
    "epoch.remembered",
    "stage.written",
)
# Only some openings reach these: the first one clears the checkpoint, later ones repair it.
SOME_OPENINGS = (
    "open.checkpoint-cleared",
    "open.offsets-repaired",
    "open.commit-repaired",
    "open.no-data-planned",
)
PUT = ("put.written", "put.linked")
FOLDER = ("folder.moved-one", "folder.moved", "folder.committed")
SQLITE = ("sqlite.begun", "sqlite.written", "sqlite.committed")
POSTGRES = ("postgres.copied", "postgres.begun", "postgres.written", "postgres.committed")
KAFKA = (
    "kafka.fenced-one",
    "kafka.begun",
    "kafka.written",
    "kafka.committed-one",
    "kafka.committed",
)
ROLL_UP = ("rollup.written", "rollup.pruned-one")

# Commands on a log reach these; no job does.
TRIM = ("trim.committed", "trim.removed-one", "drop.committed", "drop.removed-one")

# Snapshots: `tests/spark/test_restore.py` breaks a restore, and the start after it, at each.
SNAPSHOTS = (
    "savepoint.held",
    "savepoint.linked",
    "savepoint.copied",
    "savepoint.listed",
    "savepoint.unlisted",
    "past.kept",
    "restore.fenced",
    "restore.published",
    "restore.placed",
    "restore.written",
    "restore.made",
    "restore.ended-one",
    "job.begun",
    "job.made",
    "job.listed",
    "open.ledger-moved",
    "sqlite.rewound",
)

# Keyed steps, on the driver and in tasks: `tests/spark/test_keyed_crashes.py`.
KEYED = ("keyed.ran", "keyed.listed", "keyed.step-staged")
TASK = ("task.rows-written", "task.run-written", "task.merged")

# Targets that are servers: only tests with these servers reach them.
SERVICES = POSTGRES + KAFKA

# Every job reaches these, with any sink.
JOB = OPENING + EPOCH + WITHIN + PUT + ROLL_UP
POINTS = JOB + FOLDER + SQLITE


class InjectedFault(Exception):
    """Raised by an armed fault point. Not an OnceflowError: only tests know it."""


@dataclass
class _Armed:
    act: Callable[[str], None]
    visit: int
    seen: int = field(default=0)


_armed: dict[str, _Armed] = {}
_trace: int | None = None  # a file descriptor
_tracing = threading.Lock()  # a thread that outlives its test must not write into a closed file


def reach(point: str, **facts: object) -> None:
    """Mark that the driver is at `point`; break it if a fault is armed there."""
    if _trace is not None:
        _record({"driver": os.getpid(), "point": point, **facts})
    if not _armed:
        return
    armed = _armed.get(point)
    if armed is None:
        return
    armed.seen += 1
    if armed.seen == armed.visit:
        armed.act(point)


def reach_in_task(point: str) -> None:
    """Mark that a task is at `point`. `ONCEFLOW_TASK_FAULT=point:action:folder` breaks the first
    task there, by `kill` or `raise`, and creates a file with the name of the point in the folder.
    """
    fault = os.environ.get("ONCEFLOW_TASK_FAULT", "")
    if not fault.startswith(f"{point}:"):
        return
    _, action, folder = fault.split(":", 2)
    try:
        Path(folder, point).touch(exist_ok=False)
    except FileExistsError:
        return
    _action(action, folder)(point)


def arm(
    point: str, action: str | Callable[[str], None], *, visit: int = 1, folder: str = ""
) -> None:
    """Break this process at the given visit of `point`."""
    if point not in POINTS + SOME_OPENINGS + TRIM + SNAPSHOTS + KEYED + SERVICES:
        known = ", ".join(POINTS + SOME_OPENINGS + KEYED + SERVICES)
        raise ValueError(f"no fault point is called {point!r}; there are: {known}")
    act = action if callable(action) else _action(action, folder)
    _armed[point] = _Armed(act, visit)


def disarm() -> None:
    """Disarm all faults and stop recording."""
    _armed.clear()
    record(None)


def record(path: str | os.PathLike[str] | None) -> None:
    """Append every point that this process reaches to a file; None stops that."""
    global _trace
    with _tracing:
        if _trace is not None:
            os.close(_trace)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        _trace = None if path is None else os.open(path, flags, 0o644)


def _record(event: dict[str, object]) -> None:
    with _tracing:
        if _trace is not None:
            os.write(_trace, json.dumps(event).encode() + b"\n")  # one write: lines stay whole


def arm_from_environment() -> None:
    """Arm the faults in `ONCEFLOW_FAULT` (separated by commas); record to `ONCEFLOW_TRACE`."""
    if os.environ.get("ONCEFLOW_TRACE"):
        record(os.environ["ONCEFLOW_TRACE"])
    for spec in filter(None, os.environ.get("ONCEFLOW_FAULT", "").split(",")):
        point, action, *rest = spec.split(":")
        visit = int(rest[0]) if rest else 1
        arm(point, action, visit=visit, folder=rest[1] if len(rest) > 1 else "")


def _action(name: str, folder: str) -> Callable[[str], None]:
    if name == "kill":
        return lambda _: os.kill(os.getpid(), signal.SIGKILL)
    if name == "raise":
        return _raise
    if name == "pause":
        return lambda _: _pause(Path(folder))
    raise ValueError(f"unknown fault action {name!r}; use kill, raise or pause")


def _raise(point: str) -> None:
    raise InjectedFault(point)


def _pause(folder: Path) -> None:
    (folder / "paused").touch()
    while not (folder / "resume").exists():
        time.sleep(0.02)
