"""`onceflow savepoint`"""

from __future__ import annotations

import json
from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show, table
from onceflow.cli.stop import stop_job
from onceflow.jobs.stop_request import who
from onceflow.protocol.home import chosen
from onceflow.protocol.retained_decisions import sweep_all
from onceflow.service.units import number
from onceflow.snapshots.listings import about, details, find, listed
from onceflow.snapshots.savepoints import Savepoints


@click.group("savepoint")
def command() -> None:
    """Name the state of a job, so that it can be moved, gone back to, or forked.

    A savepoint holds all that a restore needs, wherever its folder is moved.
    """


@command.command("create")
@click.argument("job")
@click.option("--name", help="What to call it; else the time.")
@click.option("--stop", is_flag=True, help="Stop the job first: onceflow stop --savepoint.")
@home_option
@json_option
def create(job: str, name: str | None, stop: bool, home: str, as_json: bool) -> None:
    """Of a running or a stopped job, which is not paused by it."""
    if stop:
        stop_job(job, home=home, savepoint=name or "", as_json=as_json)
        return
    folder = chosen(home, job)[0]
    made = Savepoints(folder).create(name, {"who": who()})
    show(about(made), as_json=as_json, text=lambda found: _table([found]))


@command.command("list")
@click.argument("job")
@click.option("--epochs", "each", is_flag=True, help="Each retained epoch, not only which.")
@home_option
@json_option
def list_(job: str, each: bool, home: str, as_json: bool) -> None:
    """Savepoints of a job, oldest first, and retained epochs: a job can go back to these too."""
    folder = chosen(home, job)[0]
    found = listed(folder, each=each)
    show(found, as_json=as_json, text=_list)


@command.command("show")
@click.argument("job")
@click.argument("savepoint")
@home_option
@json_option
def show_(job: str, savepoint: str, home: str, as_json: bool) -> None:
    """What a savepoint holds; by its name, or by the folder that it was moved to."""
    found = find(home, job, savepoint)
    show(details(found), as_json=as_json, text=_show)


@command.command("verify")
@click.argument("job")
@click.argument("savepoint")
@home_option
@json_option
def verify(job: str, savepoint: str, home: str, as_json: bool) -> None:
    """Is every file of it what it was, byte by byte, and could a job start from it here?

    Exit code 7: no, and why.
    """
    found = find(home, job, savepoint)
    found.verify()
    show({**about(found), "whole": True}, as_json=as_json, text=_whole)


@command.command("delete")
@click.argument("job")
@click.argument("savepoint")
@home_option
@json_option
def delete(job: str, savepoint: str, home: str, as_json: bool) -> None:
    """Remove a savepoint of the job. Refused while a lineage that was restored from it needs it."""
    folder = chosen(home, job)[0]
    Savepoints(folder).delete(savepoint)
    sweep_all(folder)
    deleted = {"job": job, "name": savepoint, "deleted": True}
    show(deleted, as_json=as_json, text=lambda d: f"savepoint {d['name']} is deleted")


# ---------------------------------------------------------------- what is said


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
    for told in found["retained"]:
        lines += ["", _retained(found["job"], told)]
    return "\n".join(lines)


def _retained(job: str, told: dict[str, Any]) -> str:
    if not told["count"]:
        return f"{told['query']}: no epoch is decided yet"
    if "epochs" in told:
        rows = [[str(e["epoch"]), e["at"], number(e["rows"], "rows")] for e in told["epochs"]]
        return table([f"epoch of {told['query']}", "decided", "published"], rows)
    first, last = told["first"], told["last"]
    return (
        f"{told['query']}: {number(told['count'], 'epochs')} retained, {first['epoch']} of "
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
