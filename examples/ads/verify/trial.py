"""The whole application under faults, and a verdict.

1. start    both services, the generator's feed, and the three jobs; each reads the logs that the
            one before it writes
2. strike   one fault after the other, at a job or a service. The others continue meanwhile, and
            one that fails with the struck job is started again. After each fault every query of the
            job must decide a new epoch
3. drain    the stream ends; one job after the other reads the rest of its input and stops
4. judge    every output against the expected result of the generator, charges against committed
            clicks; and the checks of `onceflow verify`: torn epochs, rows that went away, files
            and processes that remain
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ads import outputs
from ads.places import Places
from ads.verify import plan, services
from ads.verify.cases import JOBS, PAUSE, Lines, cases
from ads.verify.judge import forked, judge
from ads.verify.services import Services
from onceflow.errors import JobError, SetupError
from onceflow.harness import driver_faults
from onceflow.harness.case_runner import CaseRunner, FaultOutcome, StuckJob
from onceflow.harness.checker import check
from onceflow.harness.drivers import Drivers
from onceflow.harness.fault_run import Event, FaultRun
from onceflow.harness.fault_schedule import Fault
from onceflow.harness.result import CaseResult
from onceflow.harness.small_disk import can_mount, disk_of

_DAMAGED = 7  # the exit code of a driver that found a damaged file
# Faults that may also strike the jobs that read the struck one.
_SPREADS = ("full-disk", "truncate", "flip")
_FORGIVEN_FOR = 15.0  # seconds after such a fault in which other jobs may fail too
_MOST_ENDS = 6  # lives in a row that decided no epoch
# Three Sparks at once start their Python workers slowly on a busy machine.
_PATIENT = {"spark.python.authenticate.socketTimeout": "60s"}


@dataclass(frozen=True)
class Settings:
    """The options of a run."""

    folder: Path
    seed: int
    faults: int
    kinds: tuple[str, ...] = ()  # all, if none is named
    points: tuple[str, ...] = ()
    command: str = ""  # that repeats the schedule


class _OverError(Exception):
    """A job makes no progress. The violation is noted, and the trial ends."""


class Trial(FaultRun):
    """One run. It calls `tell` with each event."""

    def __init__(self, settings: Settings, tell: Callable[[Event], None]) -> None:
        super().__init__(
            settings.folder, tell, seed=settings.seed, command=settings.command, master="local"
        )
        self.settings = settings
        self.result.kinds = services.KINDS
        self.places = Places(settings.folder / "ads")
        self._lines = Lines(settings.seed)
        self._stage: list[CaseRunner] = []  # the jobs that run
        # job -> its epochs, and how many lives ended there
        self._ends: dict[str, tuple[Any, int]] = {}
        self._striking = ""  # the kind of the fault that strikes now
        self._spread = float("-inf")  # when such a fault last struck
        self._tending = False

    def _run(self) -> None:
        with ExitStack() as stack:
            self._run_in(stack)

    def _run_in(self, stack: ExitStack) -> None:
        settings, folder = self.settings, self.settings.folder
        kinds = self._possible()
        faults = plan.faults(settings.seed, settings.faults, kinds, settings.points)
        self._write_schedule(list(plan.CASES), faults)
        self._tell("begin", folder=str(folder), faults=len(faults), cases=list(plan.CASES),
                   seed=settings.seed, left_out=self.result.left_out)  # fmt: skip
        if any(fault.kind == "full-disk" for fault in faults):
            stack.enter_context(disk_of(self.places.folder, len(plan.CASES) * len(faults)))
        self.places.create()
        self._services = stack.enter_context(Services(self.places, folder / "services.log"))
        self._drivers = Drivers(folder, "local[2,4]", _PATIENT, job=JOBS)
        stack.callback(self._drivers.close)
        environment = {"ADS_ORDERS": self._services.url}
        self._runners = [
            CaseRunner(
                case, self._drivers, began=self._began, tell=self._tender(number), pause=PAUSE
            )
            for number, case in enumerate(cases(self.places, self._lines, environment))
        ]
        results = [
            CaseResult(p.case.name, p.case.sinks, began=self._seconds()) for p in self._runners
        ]
        results.append(CaseResult("budget", "sqlite", began=self._seconds()))
        self.result.cases += results
        try:
            self._perform(faults)
            self._judge(results)
        except (KeyboardInterrupt, SetupError, JobError):
            raise
        except Exception as error:  # a check that failed gives no verdict
            results[0].unknown = f"{type(error).__name__}: {error}"
        finally:
            for runner in self._stage:
                runner.abandon()
            self._note(results)
        self.result.spark = self._drivers.spark

    def _possible(self) -> list[str]:
        kinds = list(self.settings.kinds or (*plan.KINDS, *services.KINDS))
        if "full-disk" in kinds and not can_mount(self.settings.folder):
            kinds.remove("full-disk")
            said = "full-disk: a tmpfs cannot be mounted here (it needs root)"
            self.result.left_out.append(said)
        if not kinds:
            why = "; ".join(self.result.left_out)
            raise JobError(f"no fault is left: {why}", hint="name others: --fault")
        return kinds

    # -------------------------------------------------------------- the acts

    def _perform(self, faults: list[Fault]) -> None:
        try:
            # 1. start
            for runner in self._runners:
                self._stage.append(runner)
                with _stuck(runner):
                    runner.feed_it()
                    runner.start_life()
            for runner in self._runners:
                with _stuck(runner):
                    runner.wait_for_epochs(1)
            # 2. strike
            for fault in faults:
                runner = self._runners[fault.case]
                with _stuck(runner):
                    runner.strike(fault, self._strike)
            # 3. drain
            for runner in self._runners:
                with _stuck(runner):
                    runner.drain()
                self._finish(runner)
                if runner is self._runners[0]:
                    self._services.charge_all(self._runners[-1])
        except _OverError:
            stage, self._stage = self._stage, []
            for runner in stage:
                runner.finish()

    def _finish(self, runner: CaseRunner) -> None:
        self._stage.remove(runner)
        runner.finish()

    def _strike(self, runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
        self._tell("fault", number=fault.number, kind=fault.kind,
                   what=f"{runner.case.name}: {fault.what}")  # fmt: skip
        if fault.kind in services.KINDS:
            self._services.strike(runner, fault, outcome)
            return
        self._striking = fault.kind
        with ExitStack() as stack:
            if fault.kind == "full-disk":  # nobody can read SQLite on a full disk
                for other in self._stage:
                    if other is not runner:
                        stack.enter_context(other.observer.looking_away())
            driver_faults.strike(runner, fault, outcome)
        self._striking = ""
        if fault.kind in _SPREADS:
            self._spread = time.monotonic()

    # -------------------------------------------------------------- meanwhile

    def _tender(self, number: int) -> Callable[[], None]:
        """A function that is called a few times a second while a runner waits."""

        def tend() -> None:
            runner = self._runners[number]
            if not self._tending:
                self._tending = True
                try:
                    self._tend_others(runner)
                finally:
                    self._tending = False
            self._progress(runner)

        return tend

    def _tend_others(self, runner: CaseRunner) -> None:
        spreads = self._striking in _SPREADS
        for other in self._stage:
            if other is not runner and other.has_driver:
                if spreads:
                    other.read_events()
                else:
                    self._tend(other)
        if not spreads:
            self._services.tend(may_end=self._has_spread())

    def _tend(self, runner: CaseRunner) -> None:
        """Keep a runner going that nobody waits for."""
        before = runner.observer.progress()
        with _stuck(runner):
            if runner.has_ended_life:
                life = runner.life
                self._tell("ended", job=runner.case.name, code=life.code, why=runner.complaint())
                seen, ends = self._ends.get(runner.case.name, (before, 0))
                self._ends[runner.case.name] = before, ends + 1 if seen == before else 1
                if seen == before and ends > _MOST_ENDS:
                    raise StuckJob(f"{ends} starts decided no epoch: {runner.complaint()}")
                if life.code == _DAMAGED and self._has_spread():
                    runner.forget_life()  # it has found the damaged file, which was put back
            runner.keep_running()

    def _has_spread(self) -> bool:
        return time.monotonic() - self._spread < _FORGIVEN_FOR

    # -------------------------------------------------------------- the verdict

    def _judge(self, results: list[CaseResult]) -> None:
        drained = all(runner.drained for runner in self._runners)
        if drained:
            self._wait_for_orphans(self._runners[-1], self._drivers)
        self._tell("truth", says="every output, compared with the expected result")
        for runner, result in zip(self._runners, results, strict=False):
            result.violations += runner.violations
            result.violations += check(
                runner.case.name, self.places.folder / "home", runner.observer, None,
                stopped=runner.drained, guarantees=runner.guarantees,
            )  # fmt: skip
            for name, targets in runner.forks.items():
                result.violations += forked(name, targets, self.places, self._lines.truth)
        results[-1].violations += self._services.violations
        for result in results:
            found = judge(result.job, self.places, self._lines.truth)
            # A job that did not read everything has not lost the rest.
            result.violations += [v for v in found if drained or v.kind != "lost"]

    def _note(self, results: list[CaseResult]) -> None:
        for runner, result in zip(self._runners, results, strict=False):
            self._take_in(runner, result)
        self.result.faults.sort(key=lambda fault: fault["number"])
        for runner, result in zip(self._runners[1:], results[1:], strict=False):
            result.rows_in = sum(map(sum, runner.heads().values()))
        budget = results[-1]
        budget.seconds = round(self._seconds() - budget.began, 1)
        budget.rows_out = len(outputs.charges(self.places))
        for result in results:
            self._tell("case", job=result.job, sinks=result.sinks)
            self._tell_end(result)

    # -------------------------------------------------------------- telling

    def _progress(self, runner: CaseRunner) -> None:
        fed = self._runners[0].rows_fed
        self._tell("progress", job=runner.case.name, sinks=runner.case.sinks,
                   faults=sum(s.hit for p in self._runners for s in p.outcomes),
                   of=self.settings.faults, rows_in=fed,
                   rows_out=sum(p.observer.published for p in self._runners),
                   lag=max(0, fed - _read(self._runners[0])),
                   violations=sum(len(p.violations) + p.observer.violations for p in self._runners)
                   + len(self._services.violations))  # fmt: skip


def _read(runner: CaseRunner) -> int:
    """How many rows all queries have read."""
    last = [runner.observer.last(query) for query in runner.case.queries]
    return sum(
        sum(decided.read_to(source))
        for decided in last
        if decided is not None
        for source in decided.end
        if source in runner.case.logs
    )


@contextmanager
def _stuck(runner: CaseRunner) -> Iterator[None]:
    """A stuck job is a violation and ends the trial."""
    try:
        yield
    except StuckJob as stuck:
        runner.violate(str(stuck))
        raise _OverError from stuck
