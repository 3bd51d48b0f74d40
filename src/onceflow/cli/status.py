"""`onceflow status`"""

from __future__ import annotations

from typing import Any

import click

from onceflow.cli.output import home_option, json_option, number, show, table
from onceflow.errors import JobError
from onceflow.home import JobFolder, Query, jobs
from onceflow.runtime.lease import Lease


@click.command("status")
@click.argument("job", required=False)
@home_option
@json_option
def command(job: str | None, home: str, as_json: bool) -> None:
    """Where each query of a job stands: read from the home, also while the job runs."""
    found = [folder for folder in jobs(home) if job in (None, folder.name)]
    if job is not None and not found:
        raise JobError(f"no job {job} ran under {home}", hint=known(home))
    show([status(folder) for folder in found], as_json=as_json, text=lambda s: _text(s, home))


def known(home: str) -> str:
    names = ", ".join(folder.name for folder in jobs(home))
    return f"there are: {names}" if names else "name the home with --home DIR"


def status(folder: JobFolder) -> dict[str, Any]:
    lease = Lease(folder.folder / "lease", folder.name)
    holder = lease.holder()
    running = holder is not None and lease.alive(holder)
    return {
        "job": folder.name,
        "state": "running" if running else "stopped",
        "leader": str(holder) if holder and running else None,
        "term": holder.term if holder else 0,
        "lineage": folder.lineage(),
        "queries": [_query(query) for query in folder.queries()],
    }


def _query(query: Query) -> dict[str, Any]:
    log = query.epoch_log().read()
    last = log.last
    staged = [p.stat().st_size for p in query.staged.rglob("*") if p.is_file()]
    return {
        "query": query.name,
        "epoch": last.epoch if last else None,
        "decided": last.at if last else None,
        "rows": last.rows if last else 0,
        "watermark_ms": last.watermark if last else None,
        "end": last.end if last else {},
        "retained_epochs": len(log.decisions),
        "log_entries": log.entries,
        "staged_bytes": sum(staged),
    }


def _text(found: list[dict[str, Any]], home: str) -> str:
    if not found:
        return f"no job ran under {home} yet"
    parts = []
    for job in found:
        who = f" by {job['leader']}" if job["leader"] else f" (last term {job['term']})"
        head = ["query", "last epoch", "decided", "rows", "log", "staged"]
        rows = [
            [
                query["query"],
                "-" if query["epoch"] is None else str(query["epoch"]),
                query["decided"] or "-",
                number(query["rows"], "rows"),
                number(query["log_entries"], "entries"),
                number(query["staged_bytes"], "bytes"),
            ]
            for query in job["queries"]
        ]
        indented = table(head, rows).replace("\n", "\n  ") if rows else "no query has started"
        parts.append(f"{job['job']}: {job['state']}{who}\n  {indented}")
    return "\n\n".join(parts)
