"""`onceflow stop`"""

from __future__ import annotations

import time
from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show
from onceflow.errors import NotStopped
from onceflow.jobs.stop_request import StopResult, stop
from onceflow.protocol.home import select_jobs
from onceflow.snapshots.savepoint import Savepoint
from onceflow.snapshots.savepoints import Savepoints
from onceflow.store.names import check_name

_TIMEOUT = 300.0


@click.command("stop")
@click.argument("job")
@click.option(
    "--savepoint",
    metavar="[NAME]",
    is_flag=False,
    flag_value="",
    help="Create a savepoint of the epochs that the job ended with. Without NAME it is named by "
    "the time. Give this option after JOB.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=_TIMEOUT,
    show_default=True,
    help="How long to wait. Then the exit code is 75; the job still stops when its epoch ends.",
)
@home_option
@json_option
def command(job: str, savepoint: str | None, timeout: float, home: str, as_json: bool) -> None:
    """Stop a running job at the end of its epoch, and wait for that.

    Works on any machine that has the home. The onceflow run of the job ends with exit code 0. A
    job that does not run is left alone.

    With --json: one object with job, state, was_running, process (pid and host, or null), queries
    (the last epoch of each), seconds, savepoint (name, path and bytes, or null). Exit codes: 0; 75
    the job has not stopped in time, or not at the end of an epoch.

    \b
    onceflow stop word-count
    onceflow stop word-count --savepoint before-upgrade
    """
    stop_job(job, home=home, savepoint=savepoint, timeout=timeout, as_json=as_json)


def stop_job(
    job: str, *, home: str, savepoint: str | None, timeout: float = _TIMEOUT, as_json: bool
) -> None:
    """`savepoint`: its name, "" for a name of the time, None for none."""
    folder = select_jobs(home, job)[0]
    savepoints = Savepoints(folder)
    if savepoint:
        savepoints.refuse_taken(check_name("savepoint", savepoint))
    began = time.monotonic()
    tell = lambda text: None if as_json else click.echo(text, err=True)  # noqa: E731
    done = stop(folder, timeout=timeout, tell=tell)
    answer: dict[str, Any] = {
        "job": job, "state": "stopped", "was_running": done.ran,
        "process": None, "queries": done.queries, "seconds": round(time.monotonic() - began, 1),
        "savepoint": None,
    }  # fmt: skip
    if done.holder is not None:
        answer["process"] = {"pid": done.holder.pid, "host": done.holder.host}
    if savepoint is not None:
        made = _make(savepoints, savepoint, done)
        answer["savepoint"] = {"name": made.name, "path": str(made.folder), "bytes": made.bytes}
    show(answer, as_json=as_json, text=_text)


def _make(savepoints: Savepoints, name: str, done: StopResult) -> Savepoint:
    made = savepoints.create(name or None, {})
    epochs = {query: part["epoch"] for query, part in made.body["queries"].items()}
    if epochs != {query: epoch for query, epoch in done.queries.items() if epoch is not None}:
        savepoints.delete(made.name)
        raise NotStopped(
            "the job was started again after it stopped, so no savepoint was created",
            hint="stop it again, or create a savepoint while it runs: onceflow savepoint create",
        )
    return made


def _text(answer: dict[str, Any]) -> str:
    at = ", ".join(
        f"{name} after {'nothing' if epoch is None else f'epoch {epoch:,}'}"
        for name, epoch in answer["queries"].items()
    )
    how = "stopped" if answer["was_running"] else "was not running"
    took = f" ({answer['seconds']} s)" if answer["was_running"] else ""
    lines = [f"{answer['job']} {how}{': ' + at if at else ''}{took}"]
    if answer["savepoint"]:
        lines.append(f"savepoint {answer['savepoint']['name']}: {answer['savepoint']['path']}")
    return "\n".join(lines)
