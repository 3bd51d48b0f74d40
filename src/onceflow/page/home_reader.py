"""One reader for all who look at a page: a file is read once, however many they are.

Nothing is read while nobody asks. The jobs of a home are read at most once a second, and other
answers are kept for some seconds. Files are read in a few threads, so that the event loop never
waits for a disk. Ledgers and plans ask targets, so they have threads and a deadline of their own.

Answers have the shapes of `shapes.py`. A damaged or incomplete file is part of the answer and no
error; `JobError` means that something does not exist, or that a name cannot be one. No Spark is
loaded, and Arrow only for the state of keyed steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread

from onceflow.errors import JobError, OnceflowError
from onceflow.page import ledger_lookup
from onceflow.page.boards import BoardCache, boards
from onceflow.page.job_cache import HomeCache
from onceflow.page.ledger_lookup import DeadlineThreads
from onceflow.page.shapes import (
    Board,
    BoardSummary,
    Job,
    JobSummary,
    Run,
    RunSummary,
)
from onceflow.page.verify_runs import verify_run, verify_runs
from onceflow.protocol.epoch_log import EpochLog
from onceflow.protocol.home import JobFolder, Query, select_jobs
from onceflow.service.ledger_view import LedgerRow
from onceflow.snapshots.epochs import describe_epoch
from onceflow.snapshots.lineages import describe_lineages as _lineages
from onceflow.snapshots.listings import describe_states, list_savepoints
from onceflow.snapshots.shapes import Epoch, Lineage, Savepoints, State
from onceflow.store.names import check_name

T = TypeVar("T")
Home = str | os.PathLike[str]
Logs = dict[Path, EpochLog]  # by the folder of the query

EVERY = 1.0  # seconds
_THREADS = {"files": 4, "ledgers": 4, "plans": 4}  # for each kind of work
_LEDGERS_WITHIN = 5.0  # seconds in which the targets must answer
_PLAN_WITHIN = 10.0
_PLAN_KEPT = 2.0
_REMEMBERED = 64  # answers


class HomeReader:
    """What a home holds, for any number of viewers on one event loop."""

    def __init__(self, home: Home, *, every: float = EVERY) -> None:
        self.home = Path(os.path.abspath(home))
        self.reads = 0  # how often the jobs of the home were read
        self._every = every
        self._jobs = HomeCache(self.home)
        self._reading = _Reading(self._jobs)
        self._boards: dict[str, BoardCache] = {}
        self._lock = threading.Lock()  # of the caches above
        self._logs: dict[str, Logs] = {}  # job -> logs of its lineages, once somebody asked
        self._logs_lock = threading.Lock()
        self._answers: dict[Any, _Answer] = {}
        self._threads: dict[str, anyio.CapacityLimiter] = {}
        self._planning = DeadlineThreads(2 * _THREADS["plans"])

    # ------------------------------------------------------------ jobs

    async def jobs(self) -> list[JobSummary]:
        return await self.of_jobs("jobs", lambda home, now: [job.summary(now) for job in home.jobs])

    async def job(self, name: str) -> Job:
        """`JobError` if there is none of that name."""
        return await self.of_jobs(
            ("job", name), lambda home, now: home.job(name).details(home.jobs, now)
        )

    async def of_jobs(self, key: Any, make: Callable[[HomeCache, float], T]) -> T:
        """What `make` says of the jobs as they were read last; made once for each reading."""

        def read() -> T:
            with self._lock:
                if time.monotonic() - self._reading.at >= self._every:
                    self._jobs.read()
                    for gone in [job for job in list(self._logs) if job not in self._jobs]:
                        self._logs.pop(gone, None)
                    self.reads += 1
                    self._reading = _Reading(self._jobs, time.monotonic())
                return self._reading.once(key, make)

        return await self.in_thread(read)

    async def epoch(self, job: str, number: int) -> list[Epoch]:
        return await self.in_thread(partial(epoch, self.home, job, number))

    async def state(self, job: str) -> list[State]:
        return await self._kept(("state", job), 3.0, partial(state, self.home, job))

    async def ledgers(self, job: str) -> list[LedgerRow]:
        """Asks the targets, which may be servers."""
        return await self._kept(
            ("ledgers", job), 2.0, partial(ledgers, self.home, job), by="ledgers"
        )

    async def plan(self, key: Any, make: Callable[[], T]) -> T:
        """The result of `make`, which asks the targets of a job; made once for all who ask for the
        same at the same time or soon after. `ServerSilent`: the targets do not answer in time."""

        def within() -> tuple[T | None, OnceflowError | None]:
            try:
                return self._planning.within(_PLAN_WITHIN, make), None
            except OnceflowError as error:  # a refusal is an answer too, and is kept
                return None, error

        found, error = await self._kept(("plan", key), _PLAN_KEPT, within, by="plans")
        if error is not None:
            raise error
        return cast(T, found)

    async def lineages(self, job: str) -> list[Lineage]:
        def read() -> list[Lineage]:
            with self._logs_lock:
                logs = self._logs.get(job, {})
                found = lineages(self.home, job, logs)  # raises if there is no such job
                self._logs[job] = logs
                return found

        return await self._kept(("lineages", job), 1.0, read)

    async def savepoints(self, job: str) -> Savepoints:
        return await self._kept(("savepoints", job), 3.0, partial(savepoints, self.home, job))

    def forget(self) -> None:
        """Drop kept answers: something was changed that viewers must see at once."""
        self._answers.clear()

    # ------------------------------------------------------------ boards, runs of verify

    async def boards(self) -> list[BoardSummary]:
        return await self._kept("boards", 1.0, partial(boards, self.home))

    async def board(self, name: str) -> Board:
        def read() -> Board:
            with self._lock:
                found = self._boards.pop(name, None) or BoardCache(self.home, name)
                answer = found.read()  # raises if there is no such board: it is not kept then
                self._boards[name] = found
                return answer

        return await self.in_thread(read)

    async def verify_runs(self) -> list[RunSummary]:
        return await self._kept("verify", 2.0, partial(verify_runs, self.home))

    async def verify_run(self, run: str) -> Run:
        return await self._kept(("verify", run), 2.0, partial(verify_run, self.home, run))

    # ------------------------------------------------------------ threads

    async def _kept(
        self, key: Any, seconds: float, ask: Callable[[], T], *, by: str = "files"
    ) -> T:
        """An answer that is at most so old, or the one that somebody waits for right now."""
        if len(self._answers) > _REMEMBERED:
            self._answers.clear()
        answer = self._answers.setdefault(key, _Answer())
        return await self.in_thread(lambda: answer.get(seconds, ask), by=by)

    async def in_thread(self, work: Callable[[], T], *, by: str = "files") -> T:
        """Run `work` off the event loop, in one of the few threads of its kind."""
        if by not in self._threads:
            self._threads[by] = anyio.CapacityLimiter(_THREADS[by])
        return await anyio.to_thread.run_sync(work, limiter=self._threads[by])


class _Reading:
    """The jobs as they were read at one moment; each answer is made when it is first asked for."""

    def __init__(self, home: HomeCache, at: float = float("-inf")) -> None:
        self._home = home
        self.at = at
        self._now = time.time()
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[HomeCache, float], T]) -> T:
        if key not in self._made:
            self._made[key] = make(self._home, self._now)
        return cast(T, self._made[key])


@dataclass
class _Answer:
    """One kept answer. Those who ask at the same time share it."""

    value: Any = None
    until: float = float("-inf")
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, seconds: float, ask: Callable[[], Any]) -> Any:
        with self.lock:
            if time.monotonic() > self.until:
                self.value = ask()
                self.until = time.monotonic() + seconds
            return self.value


# ---------------------------------------------------------------- read anew


def epoch(home: Home, job: str, number: int) -> list[Epoch]:
    """As `onceflow epoch show --json`."""
    return describe_epoch(_folder(home, job), number)


def state(home: Home, job: str) -> list[State]:
    """As `onceflow state list --json`. A query whose state cannot be read has an `error`."""
    folder = _folder(home, job)
    found: list[State] = []
    for query in folder.queries():
        try:
            found += describe_states(folder, query=query.name)
        except (OnceflowError, OSError) as error:
            found.append({
                "query": query.name, "lineage": query.lineage, "epoch": None, "decided": None,
                "retained": None, "stores": [], "keyed": [],
                "error": error.message if isinstance(error, JobError) else str(error),
            })  # fmt: skip
    return found


def ledgers(home: Home, job: str, *, deadline: float = _LEDGERS_WITHIN) -> list[LedgerRow]:
    """As `onceflow ledger --json`, but a target that does not answer keeps nobody waiting."""
    return ledger_lookup.ledgers(_folder(home, job), deadline)


def lineages(home: Home, job: str, logs: Logs | None = None) -> list[Lineage]:
    """As `onceflow lineages --json`. `logs`: logs that were read before; only their new entries
    are read."""
    kept = {} if logs is None else logs

    def read(query: Query) -> EpochLog:
        log = kept.pop(query.folder, None) or query.epoch_log()
        log.read()  # if this raises, the log is not kept
        log.forget()
        kept[query.folder] = log
        return log

    return _lineages(_folder(home, job), read)


def savepoints(home: Home, job: str) -> Savepoints:
    """As `onceflow savepoint list --json`."""
    return list_savepoints(_folder(home, job))


def _folder(home: Home, job: str) -> JobFolder:
    return select_jobs(home, check_name("job", job))[0]
