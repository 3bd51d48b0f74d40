"""`onceflow savepoint`"""

from __future__ import annotations

import json
from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show, table
from onceflow.cli.stop import stop_job
from onceflow.jobs.stop_request import who
from onceflow.protocol.home import select_jobs
from onceflow.protocol.retained_decisions import sweep_all
from onceflow.service.number_format import number
from onceflow.snapshots.listings import (
    find_savepoint,
    list_savepoints,
    savepoint_details,
    savepoint_summary,
)
from onceflow.snapshots.savepoints import Savepoints


@click.group("savepoint")
def command() -> None:
    """Create, list, show, verify and delete savepoints.

    A savepoint is the state of a job under a name, with all that a restore needs, even after its
    folder is moved. docs/operations.md says what it holds and costs.
    """


@command.command("create")
@click.argument("job")
@click.option("--name", help="The name; by default the time.")
@click.option("--stop", is_flag=True, help="Stop the job first, as onceflow stop --savepoint does.")
@home_option
@json_option
def create(job: str, name: str | None, stop: bool, home: str, as_json: bool) -> None:
    """Create a savepoint without pausing the job, which may run or not.

    With --json: one object with name, job, at, lineage, epochs, bytes, files, spark, code (a
    fingerprint), onceflow, who, path.

    \b
    onceflow savepoint create orders --name before-the-sale
    """
    if stop:
        stop_job(job, home=home, savepoint=name or "", as_json=as_json)
        return
    folder = select_jobs(home, job)[0]
    made = Savepoints(folder).create(name, {"who": who()})
    show(savepoint_summary(made), as_json=as_json, text=lambda found: _table([found]))


@command.command("list")
@click.argument("job")
@click.option(
    "--epochs",
    "each",
    is_flag=True,
    help="List each retained epoch; for thousands this takes seconds.",
)
@home_option
@json_option
def list_(job: str, each: bool, home: str, as_json: bool) -> None:
    """List the savepoints of a job and its retained epochs.

    Savepoints are listed in the order of creation. A job can go back to retained epochs as well:
    onceflow rollback.

    With --json: one object with job, savepoints (as of create; one that cannot be read has name
    and error alone) and retained (for each query its count, first and last; epochs with --epochs).

    \b
    onceflow savepoint list orders
    """
    folder = select_jobs(home, job)[0]
    found = list_savepoints(folder, each=each)
    show(found, as_json=as_json, text=_list)


@command.command("show")
@click.argument("job")
@click.argument("savepoint")
@home_option
@json_option
def show_(job: str, savepoint: str, home: str, as_json: bool) -> None:
    """Show what a savepoint holds.

    SAVEPOINT is a name, or the path of a folder that one was moved to.

    With --json: as of create, and queries: epoch, decided, watermark_ms, end, files, bytes,
    operators and outputs of each.

    \b
    onceflow savepoint show orders before-the-sale
    """
    found = find_savepoint(home, job, savepoint)
    show(savepoint_details(found), as_json=as_json, text=_show)


@command.command("verify")
@click.argument("job")
@click.argument("savepoint")
@home_option
@json_option
def verify(job: str, savepoint: str, home: str, as_json: bool) -> None:
    """Verify every byte of a savepoint, and that a job can start from it here.

    SAVEPOINT is a name, or the path of a folder
    that one was moved to.

    With --json: as of create, and whole. Exit codes: 0; 7 it is damaged, or does not fit.

    \b
    onceflow savepoint verify orders before-the-sale
    """
    found = find_savepoint(home, job, savepoint)
    found.verify()
    show({**savepoint_summary(found), "whole": True}, as_json=as_json, text=_whole)


@command.command("delete")
@click.argument("job")
@click.argument("savepoint")
@home_option
@json_option
def delete(job: str, savepoint: str, home: str, as_json: bool) -> None:
    """Delete a savepoint. Refused while a lineage that was restored from it needs it.

    With --json: one object with job, name, deleted.

    \b
    onceflow savepoint delete orders before-the-sale
    """
    folder = select_jobs(home, job)[0]
    Savepoints(folder).delete(savepoint)
    sweep_all(folder)
    deleted = {"job": job, "name": savepoint, "deleted": True}
    show(deleted, as_json=as_json, text=lambda d: f"savepoint {d['name']} is deleted")


# ---------------------------------------------------------------- text


def _list(found: dict[str, Any]) -> str:
    readable = [s for s in found["savepoints"] if "error" not in s]
    lines = [_table(readable)] if readable else []
    lines += [
        f"savepoint {s['name']} cannot be read: {s['error']}"
        for s in found["savepoints"]
        if "error" in s
    ]
    if not found["savepoints"]:
        lines.append(f"job {found['job']} has no savepoint")
    for query in found["retained"]:
        lines += ["", _retained(found["job"], query)]
    return "\n".join(lines)


def _retained(job: str, query: dict[str, Any]) -> str:
    if not query["count"]:
        return f"{query['query']}: no epoch is decided yet"
    if "epochs" in query:
        rows = [[str(e["epoch"]), e["at"], number(e["rows"], "rows")] for e in query["epochs"]]
        return table([f"epoch of {query['query']}", "decided", "published"], rows)
    first, last = query["first"], query["last"]
    return (
        f"{query['query']}: {number(query['count'], 'epochs')} retained, {first['epoch']} of "
        f"{first['at']} to {last['epoch']} of {last['at']}\n"
        f"  go back to one: onceflow rollback {job} --to EPOCH|TIME; list them: --epochs"
    )


def _show(found: dict[str, Any]) -> str:
    lines = [
        f"savepoint {found['name']} of job {found['job']}, made {found['at']}"
        + (f" by {found['who']}" if found["who"] else ""),
        f"  lineage  {found['lineage']}",
        f"  code     {found['code'] or 'not known: no job file'}",
        f"  made by  onceflow {found['onceflow']}, Spark {found['spark']}",
        f"  holds    {number(found['bytes'], 'bytes')} in {number(found['files'], 'files')}, in "
        f"{found['path']}",
    ]
    for name, query in found["queries"].items():
        lines += ["", f"query {name}: epoch {query['epoch']}, decided {query['decided']}"]
        lines += [f"  source {source} up to {json.dumps(end)}"
                  for source, end in query["end"].items()]  # fmt: skip
        lines += [f"  output {output} had published epoch {query['epoch']}"
                  for output in query["outputs"]]  # fmt: skip
        if query["operators"]:
            lines.append(
                f"  state of {number(len(query['operators']), 'operators')}: "
                f"{number(query['bytes'], 'bytes')} in {number(query['files'], 'files')}"
            )
    return "\n".join(lines)


def _whole(found: dict[str, Any]) -> str:
    return (
        f"savepoint {found['name']} is whole: {number(found['files'], 'files')}, "
        f"{number(found['bytes'], 'bytes')}; a job can start from it"
    )


def _table(found: list[dict[str, Any]]) -> str:
    rows = [
        [f["name"], f["at"], ", ".join(f"{q} {e}" for q, e in f["epochs"].items()),
         f["lineage"][:8], (f["code"] or "-")[:8], number(f["bytes"], "bytes"), f["path"]]
        for f in found
    ]  # fmt: skip
    return table(["savepoint", "at", "epochs", "lineage", "code", "size", "path"], rows)
