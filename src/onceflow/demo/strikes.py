"""Which process is killed, and when.

A strike waits until its victim works: until a job has decided an epoch in this life, or a service
has said that it is ready. So every victim has something to lose.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from onceflow.demo.app_processes import RUN, AppProcess, JobProcess
from onceflow.harness.processes import DRIVER, JVM, WORKER, Ended, frozen

_STRIKE_WITHIN = 0.5  # seconds after an epoch was seen to begin
SEEN = 5  # epochs, so that a user has seen the job work
_PAUSE = (2.0, 5.0)  # seconds between two strikes of chaos
ALL = "all"
# Of a job: all processes, or one of them. A name that is here twice is chosen twice as often.
_OF_A_JOB = (ALL, ALL, DRIVER, DRIVER, JVM, JVM, WORKER, WORKER, RUN)
_LONELY = 3.0  # seconds for which a service is not killed


@dataclass(frozen=True)
class Strike:
    """What was killed. `query` and `epoch`: those under way, if it was a job."""

    part: str
    what: str  # "all", or the one process of it
    processes: list[Ended]
    query: str | None = None
    epoch: int | None = None
    decided: bool | None = None

    def fields(self) -> dict[str, Any]:
        return {**asdict(self), "processes": [asdict(process) for process in self.processes]}

    @property
    def says(self) -> str:
        if self.what != ALL:
            return f"kill -9 of the {self.what} of {self.part}"
        count = len(self.processes)
        return f"kill -9 of {self.part}: {count} process{'es' if count != 1 else ''}"


class Plan:
    """Kills so many whole jobs, one after the other, each when all jobs have worked for a while. It
    kills the budget service once, while the first job starts again."""

    def __init__(
        self, jobs: list[JobProcess], budget: AppProcess, *, kills: int, seed: int
    ) -> None:
        self._jobs = jobs
        self._chance = random.Random(seed)
        victims: list[AppProcess] = [jobs[number % len(jobs)] for number in range(kills)]
        self._left = [*victims[:1], budget, *victims[1:]] if victims else []
        self._within = _STRIKE_WITHIN

    @property
    def over(self) -> bool:
        return not self._left

    def strike(self) -> Strike | None:
        """Kill the next one, if it works."""
        if not self._left:
            return None
        victim = self._left[0]
        if isinstance(victim, JobProcess):
            if not all(job.has_worked(SEEN) for job in self._jobs):
                return None
            done = _in_an_epoch(victim, self._chance, self._within)
            self._within /= 2  # it came too late, because epochs are short
        else:
            done = Strike(victim.name, ALL, victim.kill()) if victim.running else None
        if done is not None:
            self._left.pop(0)
            self._within = _STRIKE_WITHIN
        return done


class Chaos:
    """Kills something every few seconds: a job in whole or in part, or a service."""

    def __init__(
        self,
        jobs: list[JobProcess],
        services: list[AppProcess],
        *,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs, self._services = jobs, services
        self._chance, self._clock = random.Random(seed), clock
        self._due: float | None = None
        self._up: dict[str, float] = {}  # service -> since when it runs

    @property
    def over(self) -> bool:
        return all(part.running for part in (*self._jobs, *self._services))

    def strike(self) -> Strike | None:
        """Kill something, if it is time."""
        now = self._clock()
        self._up = {s.name: self._up.get(s.name, now) for s in self._services if s.running}
        if self._due is None:
            self._due = now + self._pause()
        if now < self._due:
            return None
        for victim, what in self._order():
            done = self._kill(victim, what)
            if done is not None:
                self._due = self._clock() + self._pause()
                return done
        return None

    def _pause(self) -> float:
        return self._chance.uniform(*_PAUSE)

    def _order(self) -> Iterator[tuple[AppProcess, str]]:
        """Working jobs first; a service one time in four, or if no job works."""
        jobs = [job for job in self._jobs if job.has_worked()]
        services = [
            service
            for service in self._services
            if service.running and self._clock() - self._up[service.name] > _LONELY
        ]
        self._chance.shuffle(jobs)
        self._chance.shuffle(services)
        of_jobs = [(job, self._chance.choice(_OF_A_JOB)) for job in jobs]
        of_services = [(service, ALL) for service in services]
        if self._chance.random() < 0.25:
            yield from of_services
        yield from of_jobs
        if not jobs:
            yield from of_services

    def _kill(self, victim: AppProcess, what: str) -> Strike | None:
        if not isinstance(victim, JobProcess):
            return Strike(victim.name, ALL, victim.kill())
        if what == ALL:
            return _in_an_epoch(victim, self._chance, 0.0)
        found = victim.alone(what)
        if not found:
            return None
        under_way = victim.job_progress.under_way()
        pid, kind = self._chance.choice(found)
        ended = victim.kill_alone(pid, kind)
        query, epoch = under_way or (None, None)
        return Strike(victim.name, what, ended, query, epoch, None)


def _in_an_epoch(job: JobProcess, chance: random.Random, within: float) -> Strike | None:
    """Kill all of a job at a random moment of an epoch."""
    if job.job_progress.under_way() is None:
        return None
    time.sleep(within * chance.random())
    leader = job.job_progress.leader()
    if leader is None:
        return None
    with frozen(leader.pid):  # so that the epoch cannot end before the kill
        under_way = job.job_progress.under_way()
        if under_way is None:
            return None
        ended = job.kill()
    query, epoch = under_way
    last = job.job_progress.last(query)
    decided = last is not None and last.epoch >= epoch
    return Strike(job.name, ALL, ended, query, epoch, decided)
