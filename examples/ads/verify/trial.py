"""The whole application at once, under faults, and a verdict.

1. start    both services, the generator's feed, the three jobs: each reads what the one before
            it writes
2. strike   fault after fault, now this job, now that one, now a service. While one is struck the
            others go on; what falls with it is started again. Each fault must be survived: a new
            epoch of every query of the job
3. drain    the stream ends; one job after the other uses up its input and is stopped
4. judge    every output against the truth of the generator, charges against committed clicks;
            and all that `onceflow verify` looks for: torn epochs, what a reader saw that went
            away, what is left behind
"""

from __future__ import annotations

import json
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
from onceflow.harness import nemesis
from onceflow.harness.checker import Violation, check
from onceflow.harness.disk import can_mount, disk_of
from onceflow.harness.drivers import Drivers
from onceflow.harness.play import Play, Struck, Stuck
from onceflow.harness.result import CaseResult, Result
from onceflow.harness.runner import note, prepare
from onceflow.harness.schedule import Fault
from onceflow.protocol.home import now

Event = dict[str, Any]

_DAMAGED = 7  # the exit code of a driver that found a file damaged
_SPREADS = ("full-disk", "truncate", "flip")  # what strikes one may strike those who read it
_FORGIVEN_FOR = 15.0  # seconds after that, in which it is noticed
_MOST_ENDS = 6  # of lives in a row that came to no epoch
_ORPHANS_WITHIN = 60.0
# Three Sparks at once start their Python workers slowly on a busy machine.
_PATIENT = {"spark.python.authenticate.socketTimeout": "60s"}


@dataclass(frozen=True)
class Settings:
    """What was asked for."""

    folder: Path
    seed: int
    faults: int
    kinds: tuple[str, ...] = ()  # all, if none is named
    points: tuple[str, ...] = ()
    command: str = ""  # that replays it


class _OverError(Exception):
    """A job does not go on, which is noted: the trial ends here."""


class Trial:
    """One run. What happens is told to `tell`, an event at a time."""

    def __init__(self, settings: Settings, tell: Callable[[Event], None]) -> None:
        self.settings, self._show = settings, tell
        self._began = time.monotonic()
        self.result = Result(settings.seed, settings.command, "local", now())
        self.result.kinds = services.KINDS
        self.places = Places(settings.folder / "ads")
        self._lines = Lines(settings.seed)
        self._stage: list[Play] = []  # the jobs that go on
        self._ends: dict[str, tuple[Any, int]] = {}  # job -> its epochs, and lives that ended there
        self._striking = ""  # the kind of the fault that strikes now
        self._spread = float("-inf")  # when one last did that strikes others, too
        self._tending = False

    def run(self) -> Result:
        prepare(self.settings.folder, seed=self.settings.seed)
        try:
            with ExitStack() as stack:
                self._run(stack)
        except KeyboardInterrupt:
            self.result.interrupted = True
        self.result.seconds = self._seconds()
        self._tell("verdict", **self.result.as_json())
        return self.result

    def _run(self, stack: ExitStack) -> None:
        settings, folder = self.settings, self.settings.folder
        kinds = self._possible()
        faults = plan.faults(settings.seed, settings.faults, kinds, settings.points)
        listed = [fault.as_json() for fault in faults]
        said = {"seed": settings.seed, "cases": list(plan.CASES), "faults": listed}
        (folder / "schedule.json").write_text(json.dumps(said, indent=1) + "\n")
        self._tell("begin", folder=str(folder), faults=len(faults), cases=list(plan.CASES),
                   seed=settings.seed, left_out=self.result.left_out)  # fmt: skip
        if any(fault.kind == "full-disk" for fault in faults):
            stack.enter_context(disk_of(self.places.folder, len(plan.CASES) * len(faults)))
        self.places.create()
        self._services = stack.enter_context(Services(self.places, folder / "services.log"))
        self._drivers = Drivers(folder, "local[2,4]", _PATIENT, job=JOBS)
        stack.callback(self._drivers.close)
        environment = {"ADS_ORDERS": self._services.url}
        self._plays = [
            Play(case, self._drivers, began=self._began, tell=self._tender(number), pause=PAUSE)
            for number, case in enumerate(cases(self.places, self._lines, environment))
        ]
        results = [
            CaseResult(p.case.name, p.case.sinks, began=self._seconds()) for p in self._plays
        ]
        results.append(CaseResult("budget", "sqlite", began=self._seconds()))
        self.result.cases += results
        try:
            self._perform(faults)
            self._judge(results)
        except (KeyboardInterrupt, SetupError, JobError):
            raise
        except Exception as error:  # a check that crashed has not passed
            results[0].unknown = f"{type(error).__name__}: {error}"
        finally:
            for play in self._stage:
                play.abandon()
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
            for play in self._plays:
                self._stage.append(play)
                with _stuck(play):
                    play.feed_it()
                    play.start_life()
            for play in self._plays:
                with _stuck(play):
                    play.wait_for_epochs(1)
            # 2. strike
            for fault in faults:
                play = self._plays[fault.case]
                with _stuck(play):
                    play.strike(fault, self._strike)
            # 3. drain
            for play in self._plays:
                with _stuck(play):
                    play.drain()
                self._finish(play)
                if play is self._plays[0]:
                    self._services.charge_all(self._plays[-1])
        except _OverError:
            stage, self._stage = self._stage, []
            for play in stage:
                play.finish()

    def _finish(self, play: Play) -> None:
        self._stage.remove(play)
        play.finish()

    def _strike(self, play: Play, fault: Fault, struck: Struck) -> None:
        self._tell("fault", number=fault.number, kind=fault.kind,
                   what=f"{play.case.name}: {fault.what}")  # fmt: skip
        if fault.kind in services.KINDS:
            self._services.strike(play, fault, struck)
            return
        self._striking = fault.kind
        with ExitStack() as stack:
            if fault.kind == "full-disk":  # nobody can read SQLite without any space
                for other in self._stage:
                    if other is not play:
                        stack.enter_context(other.observer.looking_away())
            nemesis.strike(play, fault, struck)
        self._striking = ""
        if fault.kind in _SPREADS:
            self._spread = time.monotonic()

    # -------------------------------------------------------------- meanwhile

    def _tender(self, number: int) -> Callable[[], None]:
        """What is done a few times a second while a play waits for something."""

        def tend() -> None:
            play = self._plays[number]
            if not self._tending:
                self._tending = True
                try:
                    self._tend_others(play)
                finally:
                    self._tending = False
            self._progress(play)

        return tend

    def _tend_others(self, play: Play) -> None:
        spreads = self._striking in _SPREADS
        for other in self._stage:
            if other is not play and other.driver is not None:
                if spreads:
                    other.hear()
                else:
                    self._tend(other)
        if not spreads:
            self._services.tend(may_end=self._has_spread())

    def _tend(self, play: Play) -> None:
        """One that nobody waits for now."""
        life, before = play.life, play.observer.progress()
        with _stuck(play):
            if life is not None and life.over:
                self._tell("ended", job=play.case.name, code=life.code, why=play.complaint())
                seen, ends = self._ends.get(play.case.name, (before, 0))
                self._ends[play.case.name] = before, ends + 1 if seen == before else 1
                if seen == before and ends > _MOST_ENDS:
                    raise Stuck(f"{ends} starts came to no epoch: {play.complaint()}")
                if life.code == _DAMAGED and self._has_spread():
                    play.life = None  # it has found what was damaged, and that was put back
            play.tend()

    def _has_spread(self) -> bool:
        return time.monotonic() - self._spread < _FORGIVEN_FOR

    # -------------------------------------------------------------- the verdict

    def _judge(self, results: list[CaseResult]) -> None:
        drained = all(play.drained for play in self._plays)
        if drained:
            self._wait_for_orphans()
        self._tell("truth", says="every output beside the truth of the generator")
        for play, result in zip(self._plays, results, strict=False):
            result.violations += play.violations
            result.violations += check(
                play.case.name, self.places.folder / "home", play.observer, None,
                stopped=play.drained, guarantees=play.guarantees,
            )  # fmt: skip
            for name, targets in play.forks.items():
                result.violations += forked(name, targets, self.places, self._lines.truth)
        results[-1].violations += self._services.violations
        for result in results:
            found = judge(result.job, self.places, self._lines.truth)
            # What did not come to its end has not lost what is still to come.
            result.violations += [v for v in found if drained or v.kind != "lost"]

    def _wait_for_orphans(self) -> None:
        play = self._plays[-1]
        if not play.wait(lambda: not self._drivers.left(), _ORPHANS_WITHIN):
            pids = ", ".join(map(str, self._drivers.left()))
            said = f"processes {pids} go on after their driver"
            play.violations.append(Violation("left", "drivers", said))

    def _note(self, results: list[CaseResult]) -> None:
        found = [
            fault
            for play, result in zip(self._plays, results, strict=False)
            for fault in note(play, result, self._began)
        ]
        self.result.faults += sorted(found, key=lambda fault: fault["number"])
        for play, result in zip(self._plays[1:], results[1:], strict=False):
            heads = play.feed.heads() if play.feed is not None else {}
            result.rows_in = sum(map(sum, heads.values()))
        budget = results[-1]
        budget.seconds = round(self._seconds() - budget.began, 1)
        budget.rows_out = len(outputs.charges(self.places))
        for result in results:
            self._tell("case", job=result.job, sinks=result.sinks)
            self._tell("case-ended", job=result.job, sinks=result.sinks, seconds=result.seconds,
                       rows_in=result.rows_in, rows_out=result.rows_out, epochs=result.epochs,
                       violations=[str(v) for v in result.violations],
                       unknown=result.unknown)  # fmt: skip

    # -------------------------------------------------------------- telling

    def _progress(self, play: Play) -> None:
        fed = self._plays[0].feed.rows if self._plays[0].feed else 0
        self._tell("progress", job=play.case.name, sinks=play.case.sinks,
                   faults=sum(s.hit for p in self._plays for s in p.struck),
                   of=self.settings.faults, rows_in=fed,
                   rows_out=sum(p.observer.published for p in self._plays),
                   lag=max(0, fed - _read(self._plays[0])),
                   violations=sum(len(p.violations) + p.observer.violations for p in self._plays)
                   + len(self._services.violations))  # fmt: skip

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, event: str, **fields: Any) -> None:
        self._show({"event": event, "at_s": round(self._seconds(), 1), **fields})


def _read(play: Play) -> int:
    """How many rows all queries have read."""
    last = [play.observer.last(query) for query in play.case.queries]
    return sum(
        sum(decided.read_to(source))
        for decided in last
        if decided is not None
        for source in decided.end
        if source in play.case.logs
    )


@contextmanager
def _stuck(play: Play) -> Iterator[None]:
    """A job that does not go on ends the trial, and is named."""
    try:
        yield
    except Stuck as stuck:
        play.violations.append(Violation("stuck", play.case.name, str(stuck)))
        raise _OverError from stuck
