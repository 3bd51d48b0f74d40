"""`onceflow status`"""

from __future__ import annotations

import sys
from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show, table
from onceflow.protocol.home import select_jobs
from onceflow.service.number_format import number
from onceflow.service.status import status


@click.command("status")
@click.argument("job", required=False)
@home_option
@json_option
def command(job: str | None, home: str, as_json: bool) -> None:
    """Show where each query of a job stands.

    It reads the home, so the job may be running. Without JOB: all jobs of the home.

    With --json: a list with an object for each job: job, state (running, stopped or damaged),
    leader (pid, host and since, or null), term, lineage, error, and queries. Each query has query,
    epoch and decided (of the last decision, or null), rows in that epoch, watermark_ms, end (where
    the next epoch begins in each source), retained_epochs, log_entries, log_bytes, staged_bytes,
    checkpoint_files, state_bytes, and outputs (what a folder or a log keeps beside its rows).
    Exit codes: 0; 7 files of a job are damaged.

    \b
    onceflow status
    onceflow status word-count --json
    """
    found = [status(folder) for folder in select_jobs(home, job)]
    show(found, as_json=as_json, text=lambda s: _text(s, home))
    sys.exit(7 if any(s["state"] == "damaged" for s in found) else 0)


def _text(found: list[dict[str, Any]], home: str) -> str:
    if not found:
        return f"no job has run under {home} yet"
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
        for name, output in query["outputs"].items():
            if "commits" in output:
                body += (
                    f"\noutput {name} keeps {number(output['commits'], 'commits')} and "
                    f"{number(output['manifests'], 'manifests')} "
                    f"({number(output['ledger_bytes'], 'bytes')}) in {output['path']}"
                )
    return title + "\n  " + body.replace("\n", "\n  ")
