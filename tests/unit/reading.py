"""A home as the page reads it, each time anew: for tests of the page."""

from __future__ import annotations

from pathlib import Path

from onceflow.page.boards import BoardCache, boards
from onceflow.page.home_reader import epoch, ledgers, lineages, savepoints, state
from onceflow.page.job_cache import HomeCache
from onceflow.page.shapes import Board, Job, JobSummary
from onceflow.page.verify_runs import verify_run, verify_runs

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


def board(home: Path, name: str) -> Board:
    return BoardCache(home, name).read()


def jobs(home: Path) -> list[JobSummary]:
    found = HomeCache(home)
    found.read()
    return [one.summary() for one in found.jobs]


def job(home: Path, name: str) -> Job:
    found = HomeCache(home)
    found.read()
    return found.job(name).details(found.jobs)
