"""`onceflow status`"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from onceflow.cli.output import home_option, json_option, number, show, table
from onceflow.errors import JobError, OnceflowError
from onceflow.home import JobFolder, Query, jobs
from onceflow.runtime.lease import Lease


@click.command("status")
@click.argument("job", required=False)
@home_option
@json_option
def command(job: str | None, home: str, as_json: bool) -> None:
    """Where each query of a job stands: read from the home, also while the job runs.

    Without JOB: all jobs of the home. Exit code 7: files of a job are damaged.
    """
    found = [status(folder) for folder in chosen(home, job)]
    show(found, as_json=as_json, text=lambda s: _text(s, home))
    sys.exit(7 if any(s["state"] == "damaged" for s in found) else 0)


def chosen(home: str, job: str | None) -> list[JobFolder]:
    """The job with that name, or all."""
    found = list(jobs(home))
    if job is None:
        return found
    names = ", ".join(folder.name for folder in found)
    hint = f"there are: {names}" if names else "name the home with --home DIR"
    found = [folder for folder in found if folder.name == job]
    if not found:
        raise JobError(f"no job {job} ran under {home}", hint=hint)
    return found


def status(folder: JobFolder) -> dict[str, Any]:
    lease = Lease(folder.folder / "lease", folder.name)
    found: dict[str, Any] = {
        "job": folder.name, "state": "stopped", "leader": None, "term": 0, "lineage": None,
        "queries": [], "error": None,
    }  # fmt: skip
    try:
        holder = lease.holder()
        if holder is not None:
            found["term"] = holder.term
            if lease.alive(holder):
                leader = {"pid": holder.pid, "host": holder.host, "since": holder.since}
                found.update(state="running", leader=leader)
        found["lineage"] = folder.lineage()
        found["queries"] = [_query(query) for query in folder.queries()]
    except OnceflowError as error:
        found.update(state="damaged", error=str(error))
    return found


def _query(query: Query) -> dict[str, Any]:
    log = query.epoch_log().read()
    last = log.last
    return {
        "query": query.name,
        "epoch": last.epoch if last else None,
        "decided": last.at if last else None,
        "rows": last.rows if last else 0,
        "watermark_ms": last.watermark if last else None,
        "end": last.end if last else {},
        "retained_epochs": len(log.decisions),
        "log_entries": log.entries,
        "log_bytes": _held(query.folder / "onceflow" / "log")[1],
        "staged_bytes": _held(query.staged)[1],
        "checkpoint_files": _held(query.folder)[0],
        "state_bytes": _held(query.folder / "state")[1],
        "outputs": {
            name: _commits(target)
            for name, target in ((log.leader or {}).get("outputs") or {}).items()
        },
    }


def _commits(target: dict[str, Any]) -> dict[str, Any]:
    """What an output keeps beside its rows: commits and manifests of a folder."""
    found: dict[str, Any] = {"kind": target.get("kind"), "path": target.get("path")}
    if target.get("kind") in ("files", "log"):
        commits = _held(Path(target["path"]) / "_commits")
        manifests = _held(Path(target["path"]) / "_manifests")
        found.update(
            commits=commits[0], manifests=manifests[0], ledger_bytes=commits[1] + manifests[1]
        )
    return found


def _held(folder: Path) -> tuple[int, int]:
    """How many files, and their bytes. A running job may sweep them while we look."""
    files = total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(place, name))
                files += 1
    return files, total


def _text(found: list[dict[str, Any]], home: str) -> str:
    if not found:
        return f"no job ran under {home} yet"
    return "\n\n".join(_job(job) for job in found)


def _job(job: dict[str, Any]) -> str:
    leader = job["leader"]
    who = f"last term {job['term']}"
    if leader:
        since = f"since {leader['since']}, term {job['term']}"
        who = f"process {leader['pid']} on {leader['host']}, {since}"
    title = f"{job['job']}: {job['state']} ({who})"
    if job["error"]:
        return f"{title}\n  {job['error']}"
    head = ["query", "last epoch", "decided", "rows in it", "epochs kept", "log", "state",
            "staged"]  # fmt: skip
    rows = [
        [
            query["query"],
            "-" if query["epoch"] is None else f"{query['epoch']:,}",
            query["decided"] or "-",
            number(query["rows"], "rows"),
            number(query["retained_epochs"], "epochs"),
            number(query["log_bytes"], "bytes"),
            number(query["state_bytes"], "bytes"),
            number(query["staged_bytes"], "bytes"),
        ]
        for query in job["queries"]
    ]
    body = table(head, rows) if rows else "no query has started"
    for query in job["queries"]:
        for name, held in query["outputs"].items():
            if "commits" in held:
                body += (
                    f"\noutput {name} keeps {number(held['commits'], 'commits')} and "
                    f"{number(held['manifests'], 'manifests')} "
                    f"({number(held['ledger_bytes'], 'bytes')}) in {held['path']}"
                )
    return title + "\n  " + body.replace("\n", "\n  ")
