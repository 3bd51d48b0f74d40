"""What the page shows: a home, read from its files, as plain values that become JSON.

The same shapes as the commands' `--json` where a command has one. A damaged or half-written file is
told, never raised; `JobError` for what is not there, and for names that cannot be names. No Spark
is loaded, and Arrow only for the state of keyed steps.

These functions read anew each time; whoever looks again and again keeps a `FollowedHome`
(`jobs.py`), as `watch.py` does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onceflow.errors import JobError, OnceflowError
from onceflow.page.asked import asked
from onceflow.page.boards import board, boards, verify_run, verify_runs
from onceflow.page.jobs import FollowedHome
from onceflow.protocol.epoch_log import EpochLog
from onceflow.protocol.home import JobFolder, Query, chosen
from onceflow.snapshots.epoch_view import look
from onceflow.snapshots.lineages import lineages as _lineages
from onceflow.snapshots.listings import listed, states_told
from onceflow.store.names import check_name

__all__ = [
    "board",
    "boards",
    "epoch",
    "job",
    "jobs",
    "ledgers",
    "lineages",
    "savepoints",
    "state",
    "verify_run",
    "verify_runs",
]

Home = str | os.PathLike[str]
Row = dict[str, Any]
Logs = dict[Path, EpochLog]  # by the folder of the query


def jobs(home: Home) -> list[Row]:
    """A summary of each job."""
    found = FollowedHome(home)
    found.read()
    return [one.summary() for one in found.jobs]


def job(home: Home, name: str) -> Row:
    """The summary of a job, its queries, what happened to it, and the jobs that it is linked to."""
    found = FollowedHome(home)
    found.read()
    return found.job(name).details(found.jobs)


def epoch(home: Home, job: str, number: int) -> list[Row]:
    """As `onceflow epoch show --json`."""
    return look(_folder(home, job), number)


def state(home: Home, job: str) -> list[Row]:
    """As `onceflow state list --json`. A query whose state cannot be read has an `error`."""
    folder = _folder(home, job)
    found: list[Row] = []
    for query in folder.queries():
        try:
            found += states_told(folder, query=query.name)
        except (OnceflowError, OSError) as error:
            none: list[Row] = []
            found.append({
                "query": query.name, "lineage": query.lineage, "epoch": None, "decided": None,
                "retained": None, "stores": none, "keyed": none, "error": _told(error),
            })  # fmt: skip
    return found


def ledgers(home: Home, job: str, *, deadline: float = 5.0) -> list[Row]:
    """As `onceflow ledger --json`. A target that does not answer within `deadline` seconds is told
    as such, and keeps nobody waiting."""
    return asked(_folder(home, job), deadline)


def lineages(home: Home, job: str, logs: Logs | None = None) -> list[Row]:
    """As `onceflow lineages --json`. `logs`: those that were read before, which are read on."""
    kept = {} if logs is None else logs

    def read(query: Query) -> EpochLog:
        log = kept.pop(query.folder, None) or query.epoch_log()
        log.read()  # one that cannot be read is begun anew next time
        log.forget()
        kept[query.folder] = log
        return log

    return _lineages(_folder(home, job), read)


def savepoints(home: Home, job: str) -> Row:
    """As `onceflow savepoint list --json`."""
    return listed(_folder(home, job))


def _folder(home: Home, job: str) -> JobFolder:
    return chosen(home, check_name("job", job))[0]


def _told(error: OnceflowError | OSError) -> str:
    return error.message if isinstance(error, JobError) else str(error)
