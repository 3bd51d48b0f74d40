"""Runs one case: a job with its sinks, in a folder of its own, from its first life to its last.

1. feed      a producer appends to the log of the job until step 4
2. live      a driver runs the job, and a reader polls the committed rows
3. strike    one fault after the other; after each the job must decide a new epoch in time
4. drain     the input ends; the job reads the rest and stops at the end of an epoch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from onceflow.harness.checker import Violation
from onceflow.harness.drivers import Driver, Drivers, Life
from onceflow.harness.epoch_logs import Decision
from onceflow.harness.fault_schedule import Fault
from onceflow.harness.feed import Feed, Input
from onceflow.harness.observer import Observer
from onceflow.harness.servers import Servers
from onceflow.harness.targets import Target

_TURN = 0.02  # seconds
_RESUME_WITHIN = 180.0  # seconds from a fault to the next epoch, on a busy machine
_QUIET_FOR = 20.0  # seconds; after so long without an epoch none is due
_MOST_STARTS = 6  # in a row that decided no epoch
# Errors after which the process can run the job again.
_SAME_PROCESS = ("InjectedFault", "DiskFull")


class StuckJob(Exception):
    """The job makes no progress. The case ends here, with this as a violation."""


@dataclass
class FaultOutcome:
    """The outcome of one fault."""

    fault: Fault
    at: float  # seconds since the beginning of the run
    hit: bool = False
    what: str = ""  # what it hit, or why it missed
    since: float = 0.0  # when recovery began: a file was put back, a disk had space
    recovery: float | None = None  # seconds from then to the next epoch, without `start_up`
    start_up: float = 0.0  # seconds of waiting for the Spark of a driver


@dataclass(frozen=True)
class Case:
    """A job, its input and its targets."""

    job: str  # JOB.py[:name], as `onceflow run` takes it
    name: str
    sinks: str
    folder: Path
    targets: list[Target]
    source: Input
    queries: tuple[str, ...]
    logs: dict[str, str]  # source -> path of its log
    environment: dict[str, str]
    repeats: bool = False  # an epoch that runs again has the same rows, so it can be skipped
    keyed: bool = False  # it has keyed steps
    every: str | None = "0ms"  # how often an epoch begins; None: as the job says
    servers: Servers | None = None


class CaseRunner:
    """Runs one case. It calls `tell` a few times a second."""

    def __init__(
        self, case: Case, drivers: Drivers, *, began: float, tell: Callable[[], None],
        pause: float = 0.2, commits: int | None = None, ahead: bool = False,
    ) -> None:  # fmt: skip
        """`commits`: how many the input has; without it the input ends after the last fault.
        `ahead`: they are all appended before the job starts."""
        self.case, self.drivers = case, drivers
        self.observer = Observer(
            case.folder / "home", case.name, case.targets, repeats=case.repeats
        )
        self.savepoints: list[str] = []  # oldest first
        self.forks: dict[str, list[Target]] = {}  # name -> its targets
        self.commands = 0  # of `onceflow` that were run
        self.violations: list[Violation] = []
        self.outcomes: list[FaultOutcome] = []
        self._feed: Feed | None = None
        self._driver: Driver | None = None
        self._life: Life | None = None
        self.host = ""
        self.guarantees: dict[str, str] = {}
        self.drained = False
        self.began, self._tell, self._told = began, tell, 0.0
        self._waited = 0.0  # seconds of waiting for Spark
        self._pause, self._commits, self._ahead = pause, commits, ahead

    def perform(
        self, faults: Iterable[Fault], strike: Callable[[CaseRunner, Fault, FaultOutcome], None]
    ) -> None:
        """All steps. To run several cases at once, take them one by one."""
        try:
            self.feed_it()
            self.start_life()
            self.wait_for_epochs(1)
            for fault in faults:
                self.strike(fault, strike)
            self.drain()
        except StuckJob as stuck:
            self.violate(str(stuck))
        except BaseException:
            self.abandon()
            raise
        self.finish()

    def feed_it(self) -> None:
        """Step 1: from now on the input grows, and a reader polls the committed rows."""
        folder = self.case.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tripwires", "tripwires.hit"):
            (folder / name).mkdir(exist_ok=True)
        self._feed = Feed(folder, self.case.source, pause=self._pause, most=self._commits)
        self.feed.start()
        self.observer.start()
        while self._ahead and not self.feed.full.is_set():
            self.turn()

    def strike(
        self, fault: Fault, strike: Callable[[CaseRunner, Fault, FaultOutcome], None]
    ) -> None:
        """Step 3, for one fault: returns when the job has recovered."""
        outcome = FaultOutcome(fault, at=time.monotonic() - self.began)
        self.outcomes.append(outcome)
        self._waited = 0.0
        strike(self, fault, outcome)
        if outcome.hit:
            self.recover(outcome)
        else:
            self.wait_for_epochs(1)

    def violate(self, message: str, kind: str = "stuck") -> None:
        self.violations.append(Violation(kind, self.case.name, message))

    def hit(self, outcome: FaultOutcome, what: str) -> None:
        """The fault struck now. The recovery clock starts, and can be started again later."""
        outcome.hit, outcome.what = True, f"{what}, after epoch {self.last_epochs}"
        outcome.at = time.monotonic() - self.began
        self.start_recovery_clock(outcome)

    def start_recovery_clock(self, outcome: FaultOutcome) -> None:
        outcome.since, self._waited = time.monotonic(), 0.0

    def recover(self, outcome: FaultOutcome) -> None:
        """Wait for the next epoch, and note how long it took."""
        self.wait_for_epochs(1)
        if outcome.recovery is None:
            outcome.start_up = round(self._waited, 2)
            outcome.recovery = round(time.monotonic() - outcome.since - self._waited, 2)

    # -------------------------------------------------------------- lives

    @property
    def feed(self) -> Feed:
        """The producer, from step 1 on."""
        assert self._feed is not None
        return self._feed

    @property
    def driver(self) -> Driver:
        """The driver of the job, from step 2 on."""
        assert self._driver is not None
        return self._driver

    @property
    def life(self) -> Life:
        """The current life of the driver, or its last one."""
        assert self._life is not None
        return self._life

    @property
    def has_driver(self) -> bool:
        return self._driver is not None

    @property
    def has_ended_life(self) -> bool:
        return self._life is not None and self._life.over

    def forget_life(self) -> None:
        """Nobody asks why it ended."""
        self._life = None

    def let_go(self) -> None:
        """Leave the driver as it is; the next life has another."""
        self._driver = self._life = None

    def start_life(self, *, fault: str = "", take_over: bool = False) -> None:
        driver, waiting = self._working_driver(), time.monotonic()
        while not driver.ready and driver.exit_code is None:
            self.turn()
        self.drivers.wait_until_ready(driver)
        self._waited += time.monotonic() - waiting
        self.drivers.keep_one_ahead()
        self._life = driver.live(
            self.case.job, self.case.folder, self.environment(fault), take_over=take_over,
            every=self.case.every,
        )  # fmt: skip

    def _working_driver(self) -> Driver:
        """The driver, or another one if it has ended or cannot have another life."""
        if self._driver is not None and self._driver.spent:
            self._driver.end()
        if self._driver is None or self._driver.exit_code is not None:
            self._driver = self.drivers.take()
        return self._driver

    def environment(self, fault: str = "") -> dict[str, str]:
        return {**self.case.environment, "ONCEFLOW_FAULT": fault, "ONCEFLOW_HOST": self.host}

    def turn(self) -> None:
        """Wait a moment, read the events of the driver, and report progress."""
        time.sleep(_TURN)
        self.read_events()
        if time.monotonic() - self._told > 0.25:
            self._told = time.monotonic()
            self._tell()

    def keep_running(self) -> None:
        """A turn without waiting, for a case that nobody waits for: when a life has ended another
        follows as soon as a driver is ready."""
        self.read_events()
        if self._life is not None and not self._life.over:
            return
        self._clear_ended_life()
        self._life = None
        if self._working_driver().ready:
            self.start_life()

    def read_events(self) -> None:
        """Take in what the driver has said, and raise what ended the producer or the reader."""
        if self._life is not None:
            self._life.read_events()
            self.guarantees |= self._life.guarantees
        for thread in (self._feed, self.observer):
            if thread is not None:
                thread.raise_failure()

    def wait(self, condition: Callable[[], object], within: float) -> bool:
        deadline = time.monotonic() + within
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.turn()
        return True

    def wait_for_epochs(self, count: int) -> None:
        """Wait for so many new epochs of every query; start the driver again if it has ended."""
        deadline, starts = time.monotonic() + _RESUME_WITHIN, 0
        self.observer.look()
        before = seen = self.observer.progress()
        while True:
            now = self.observer.progress()
            if now != seen:
                seen, deadline = now, time.monotonic() + _RESUME_WITHIN
            if set(now) >= set(self.case.queries) and all(
                epoch >= before.get(query, -1) + count for query, epoch in now.items()
            ):
                return
            if self._life is None or self._life.over:
                self._clear_ended_life()
                starts += 1
                if starts > _MOST_STARTS:
                    raise StuckJob(f"{starts} starts decided no epoch: {self.complaint()}")
                self.start_life()
                deadline = time.monotonic() + _RESUME_WITHIN
            if time.monotonic() > deadline:
                raise StuckJob(f"no new epoch for {_RESUME_WITHIN:.0f} s: {self.complaint()}")
            self.turn()

    def _clear_ended_life(self) -> None:
        """After a life has ended: as in `onceflow run`, the next one has a new process, unless an
        injected exception ended this one. If `onceflow run` would give up, the job is stuck."""
        error = self._life.error if self._life else {}
        if not error or error["kind"] in _SAME_PROCESS:
            return
        if not error["retryable"]:
            raise StuckJob(f"the driver gave up: {self.complaint()}")
        if self._driver is not None:
            self._driver.end()

    def complaint(self) -> str:
        return self._life.complaint if self._life else "it said nothing"

    @property
    def rows_fed(self) -> int:
        return self._feed.rows if self._feed is not None else 0

    def heads(self) -> dict[str, list[int]]:
        """The next offsets of each log of the input."""
        return self._feed.heads() if self._feed is not None else {}

    @property
    def last_epochs(self) -> str:
        """The last decided epoch of each query, for people."""
        return ", ".join(map(str, self.observer.progress().values())) or "none"

    def rows_read(self) -> int:
        """How many input rows the slowest query has decided."""
        found = []
        for query in self.case.queries:
            last = self.observer.last(query)
            ends = [last.read_to(source) for source in self._read_by(last)] if last else []
            found.append(min(map(sum, ends), default=0))
        return min(found, default=0)

    # -------------------------------------------------------------- the end

    def drain(self) -> None:
        """Step 4: end the input, and wait until every query has read all of it and run the epoch
        without data that is due then."""
        while self._commits is not None and not self.feed.full.is_set():
            self.turn()
        self.feed.end()
        heads = self.heads()
        seen, moved = self.observer.progress(), time.monotonic()
        while not all(
            self._has_read(query, heads)
            and (not self._is_due(query) or time.monotonic() - moved > _QUIET_FOR)
            for query in self.case.queries
        ):
            if self.observer.progress() != seen:
                seen, moved = self.observer.progress(), time.monotonic()
            if self._life is None or self._life.over:
                self._clear_ended_life()
                self.start_life()
            if time.monotonic() - moved > _RESUME_WITHIN:
                raise StuckJob(f"the input is not read to its end: {self.complaint()}")
            self.turn()
        self.drained = True

    def _has_read(self, query: str, heads: dict[str, list[int]]) -> bool:
        last = self.observer.last(query)
        return last is not None and all(
            last.read_to(source) == heads[self.case.logs[source]] for source in self._read_by(last)
        )

    def _read_by(self, decided: Decision) -> list[str]:
        """The sources of its query, without the one that only moves when a timer is due."""
        return [source for source in decided.end if source in self.case.logs]

    def _is_due(self, query: str) -> bool:
        """Can an epoch without data follow, because the watermark moved in the last one?"""
        last = self.observer.last(query)
        if last is None or last.keyed:
            return last is None or last.is_waited_for
        if not last.stateful:
            return False
        before = self.observer.decided[query].get(last.epoch - 1)
        return last.watermark != (before.watermark if before else 0)

    def abandon(self) -> None:
        """Stop the producer and the reader before the end."""
        if self._feed is not None:
            self._feed.abandon()
        self.observer.stop()
        self.observer.close()

    def finish(self) -> None:
        """Stop the driver at the end of the epoch; end it if it does not stop."""
        driver, life = self._driver, self._life
        if driver is not None and life is not None and not life.over:
            driver.order(do="stop")
            if not self.wait(lambda: life.over, _RESUME_WITHIN):
                self.violate("the driver does not stop")
                driver.end()
            elif life.code and life.error:
                said = f"the last life ended with {life.code}: {self.complaint()}"
                self.violate(said)
        if driver is not None:
            self.drivers.give_back(driver)
        self.feed.end()
        self.observer.stop()
        self.observer.poll()
        self.observer.close()
