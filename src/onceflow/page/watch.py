"""One reader for all who look at a page: however many they are, a file is read once.

Nothing is read while nobody asks, and the jobs of a home at most once a second; what was read is
kept as values and, for those who want JSON, as bytes. Files are read in threads, of which there are
few, so that the loop that serves requests never waits for a disk or for a target. Ledgers and
plans, which ask targets, have threads of their own each, and a deadline.
"""

from __future__ import annotations

import json
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

from onceflow.errors import OnceflowError
from onceflow.page import metrics, model
from onceflow.page.asked import Asking
from onceflow.page.boards import FollowedBoard
from onceflow.page.jobs import FollowedHome

Row = dict[str, Any]
T = TypeVar("T")

EVERY = 1.0  # seconds
_THREADS = {"files": 4, "ledgers": 4, "plans": 4}  # for each kind of work
_PLAN_WITHIN = 10.0  # seconds in which the targets must have answered
_PLAN_KEPT = 2.0
_REMEMBERED = 64  # answers


class Watch:
    """What a home holds, for any number of viewers on one event loop."""

    def __init__(self, home: str | os.PathLike[str], *, every: float = EVERY) -> None:
        self.home = Path(os.path.abspath(home))
        self.reads = 0  # how often the jobs of the home were looked at
        self._every = every
        self._jobs = FollowedHome(self.home)
        self._boards: dict[str, FollowedBoard] = {}
        self._lock = threading.Lock()  # of all that follows files
        self._logs: dict[str, model.Logs] = {}  # of all lineages of a job, once they were asked for
        self._logs_lock = threading.Lock()
        self._look = _Look(self._jobs)
        self._answers: dict[Any, _Answer] = {}
        self._threads: dict[str, anyio.CapacityLimiter] = {}
        self._planning = Asking(2 * _THREADS["plans"])

    # ------------------------------------------------------------ jobs

    async def jobs(self) -> list[Row]:
        return await self._of_look(lambda look: look.jobs())

    async def job(self, name: str) -> Row:
        """`JobError` if there is none of that name."""
        return await self._of_look(lambda look: look.job(name))

    async def jobs_json(self) -> bytes:
        return await self._of_look(lambda look: look.as_json("jobs", look.jobs))

    async def job_json(self, name: str) -> bytes:
        return await self._of_look(lambda look: look.as_json(("job", name), lambda: look.job(name)))

    async def metrics(self) -> bytes:
        """In Prometheus' text format."""
        return await self._of_look(lambda look: look.metrics())

    async def _of_look(self, ask: Callable[[_Look], T]) -> T:
        def read() -> T:
            with self._lock:
                if time.monotonic() - self._look.at >= self._every:
                    self._jobs.read()
                    for gone in [job for job in list(self._logs) if job not in self._jobs]:
                        self._logs.pop(gone, None)
                    self.reads += 1
                    self._look = _Look(self._jobs, time.monotonic())
                return ask(self._look)

        return await self.in_thread(read)

    # ------------------------------------------------------------ the rest of the model

    async def epoch(self, job: str, number: int) -> list[Row]:
        return await self.in_thread(partial(model.epoch, self.home, job, number))

    async def state(self, job: str) -> list[Row]:
        return await self._kept(("state", job), 3.0, partial(model.state, self.home, job))

    async def ledgers(self, job: str) -> list[Row]:
        """Asks the targets, perhaps servers, which have a deadline."""
        ask = partial(model.ledgers, self.home, job)
        return await self._kept(("ledgers", job), 2.0, ask, by="ledgers")

    async def plan(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` says, which asks the targets of a job: asked once for all who ask for the
        same together, and for a while after. `ServerSilent`: they do not answer in time."""

        def look() -> tuple[T | None, OnceflowError | None]:
            try:
                return self._planning.within(_PLAN_WITHIN, make), None
            except OnceflowError as error:  # a refusal is an answer, and kept as one
                return None, error

        found, error = await self._kept(("plan", key), _PLAN_KEPT, look, by="plans")
        if error is not None:
            raise error
        return cast(T, found)

    async def lineages(self, job: str) -> list[Row]:
        def read() -> list[Row]:
            with self._logs_lock:
                logs = self._logs.get(job, {})
                found = model.lineages(self.home, job, logs)  # raises if there is none of that name
                self._logs[job] = logs
                return found

        return await self._kept(("lineages", job), 1.0, read)

    async def savepoints(self, job: str) -> Row:
        return await self._kept(("savepoints", job), 3.0, partial(model.savepoints, self.home, job))

    def forget(self) -> None:
        """Something was done that must be seen at once."""
        self._answers.clear()

    async def boards(self) -> list[Row]:
        return await self._kept("boards", 1.0, partial(model.boards, self.home))

    async def board(self, name: str) -> Row:
        def read() -> Row:
            with self._lock:
                found = self._boards.pop(name, None) or FollowedBoard(self.home, name)
                told = found.read()  # raises if there is none: it is not kept then
                self._boards[name] = found
                return told

        return await self.in_thread(read)

    async def verify_runs(self) -> list[Row]:
        return await self._kept("verify", 2.0, partial(model.verify_runs, self.home))

    async def verify_run(self, run: str) -> Row:
        return await self._kept(("verify", run), 2.0, partial(model.verify_run, self.home, run))

    # ------------------------------------------------------------ threads

    async def _kept(
        self, key: Any, seconds: float, ask: Callable[[], T], *, by: str = "files"
    ) -> T:
        """The answer of somebody who asked just before, or that of one who asks right now."""
        if len(self._answers) > _REMEMBERED:
            self._answers.clear()
        answer = self._answers.setdefault(key, _Answer())
        return await self.in_thread(lambda: answer.get(seconds, ask), by=by)

    async def in_thread(self, work: Callable[[], T], *, by: str = "files") -> T:
        """Off the loop, by one of the few threads of a kind."""
        if by not in self._threads:
            self._threads[by] = anyio.CapacityLimiter(_THREADS[by])
        return await anyio.to_thread.run_sync(work, limiter=self._threads[by])


class _Look:
    """The jobs as they were at one moment; each thing is made when it is first asked for."""

    def __init__(self, home: FollowedHome, at: float = float("-inf")) -> None:
        self._home = home
        self.at = at
        self._now = time.time()
        self._kept: dict[Any, Any] = {}

    def jobs(self) -> list[Row]:
        return self._once("jobs", lambda: [job.summary(self._now) for job in self._home.jobs])

    def job(self, name: str) -> Row:
        found = self._home.job(name)
        return self._once(("job", name), lambda: found.details(self._home.jobs, self._now))

    def metrics(self) -> bytes:
        return self._once("metrics", lambda: metrics.exposition(self._home.jobs).encode())

    def as_json(self, key: Any, make: Callable[[], Any]) -> bytes:
        return self._once(("json", key), lambda: json.dumps(make()).encode())

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[no-any-return]


@dataclass
class _Answer:
    """One thing that is asked for again and again: those who ask together get one answer."""

    value: Any = None
    until: float = float("-inf")
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, seconds: float, ask: Callable[[], Any]) -> Any:
        with self.lock:
            if time.monotonic() > self.until:
                self.value = ask()
                self.until = time.monotonic() + seconds
            return self.value
