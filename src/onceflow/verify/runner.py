"""`onceflow verify` as a whole: cases one after another, a verdict, and nothing left running."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.errors import JobError, SetupError
from onceflow.home import now
from onceflow.verify import schedule
from onceflow.verify.checker import ALLOWED, Violation, check
from onceflow.verify.disk import can_mount, disk_of
from onceflow.verify.drivers import Drivers
from onceflow.verify.feed import BuiltIn
from onceflow.verify.jobs import FILE, JOBS, Truth
from onceflow.verify.nemesis import strike
from onceflow.verify.play import Case, Play
from onceflow.verify.result import CaseResult, Result
from onceflow.verify.schedule import Fault

Event = dict[str, Any]

_MARK = "verify.json"
_ORPHANS_WITHIN = 60.0  # seconds until a JVM has noticed that its driver is gone


@dataclass(frozen=True)
class Settings:
    """What was asked for."""

    folder: Path
    seed: int
    faults: int
    kinds: tuple[str, ...]
    cases: tuple[tuple[str, str], ...]  # job, sinks
    points: tuple[str, ...] = ()
    part: tuple[int, int] = (1, 1)  # (2, 4): of the schedule's cases, the second of every four
    duration: float | None = None  # seconds; no fault begins later
    master: str = "local"
    command: str = ""  # that replays it
    job: str | None = None  # JOB.py[:name], instead of the built-in ones
    recorded: str | None = None  # a log with its input
    guarantee: str = ""  # of the outputs of the built-in jobs
    mutant: str = ""  # a wrong protocol, for our tests


@dataclass(frozen=True)
class Plot:
    """A case, and how its truth is had once it is played."""

    case: Case
    truth: Callable[[Play], dict[str, Truth]]
    in_order: str = ""
    says: str = "comparing with the truth"  # while it is had


class Runner:
    """Runs all cases. What happens is told to `tell`, an event at a time."""

    def __init__(
        self, settings: Settings, tell: Callable[[Event], None], drivers: Drivers | None = None
    ) -> None:
        """`drivers`: some that are there already, and stay."""
        self.settings, self._show, self._drivers = settings, tell, drivers
        self._planned, self._cases = settings.faults, len(settings.cases)
        self._began = time.monotonic()
        self.result = Result(settings.seed, settings.command, settings.master, now())

    def run(self) -> Result:
        prepare(self.settings.folder, seed=self.settings.seed)
        kinds = self._possible(self.settings.kinds)
        try:
            with self._started() as drivers:
                self._run(list(self._plots(drivers)), kinds, drivers)
        except KeyboardInterrupt:
            self.result.interrupted = True
        self.result.seconds = self._seconds()
        self._tell("verdict", **self.result.as_json())
        return self.result

    def _run(self, plots: list[Plot], kinds: list[str], drivers: Drivers) -> None:
        sinks = [tuple(target.kind for target in plot.case.targets) for plot in plots]
        faults = schedule.plan(
            self.settings.seed, sinks, count=self.settings.faults, kinds=kinds,
            at=self.settings.points,
        )  # fmt: skip
        names = [f"{plot.case.name} to {plot.case.sinks}" for plot in plots]
        self._write_down(names, faults)
        part, parts = self.settings.part
        faults = [fault for fault in faults if fault.case % parts == part - 1]
        played = range(part - 1, len(plots), parts)
        self._planned, self._cases = len(faults), len(played)
        self._tell("begin", folder=str(self.settings.folder), faults=len(faults),
                   cases=[names[number] for number in played],
                   seed=self.settings.seed, left_out=self.result.left_out)  # fmt: skip
        for number in played:
            plot, mine = plots[number], [fault for fault in faults if fault.case == number]
            small = any(fault.kind == "full-disk" for fault in mine)
            with disk_of(plot.case.folder) if small else contextlib.nullcontext():
                self._play(plot, mine, drivers)
        self.result.spark = drivers.spark

    # -------------------------------------------------------------- before

    def _possible(self, kinds: tuple[str, ...]) -> list[str]:
        """Those that this machine and this master can have; the rest is said."""
        found = list(kinds)
        for kind in kinds:
            why = ""
            if kind in schedule.CLUSTER and self.settings.master != "cluster":
                why = "only with --master cluster"
            elif kind in schedule.NEED_BUILT_IN and self.settings.job is not None:
                why = "only in the built-in jobs, which have a place for it"
            elif kind == "full-disk" and not can_mount(self.settings.folder):
                why = "a tmpfs cannot be mounted here (it needs root)"
            if why:
                found.remove(kind)
                self.result.left_out.append(f"{kind}: {why}")
        if not found:
            raise JobError(
                f"no fault is left: {'; '.join(self.result.left_out)}", hint="name others: --fault"
            )
        return found

    def _write_down(self, cases: list[str], faults: list[Fault]) -> None:
        listed = [fault.as_json() for fault in faults]
        said = {"seed": self.settings.seed, "cases": cases, "faults": listed}
        (self.settings.folder / "schedule.json").write_text(json.dumps(said, indent=1) + "\n")

    @contextlib.contextmanager
    def _started(self) -> Iterator[Drivers]:
        if self._drivers is not None:
            yield self._drivers
            return
        with contextlib.ExitStack() as stack:
            master: str = "local[2,4]"
            settings: dict[str, str] = {}
            if self.settings.master == "cluster":
                from onceflow.verify.cluster import cluster

                master, settings = stack.enter_context(cluster(self.settings.folder))
            drivers = Drivers(self.settings.folder, master, settings)
            stack.callback(drivers.close)
            yield drivers

    # -------------------------------------------------------------- one case

    def _plots(self, drivers: Drivers) -> Iterator[Plot]:
        if self.settings.job is not None:
            yield self._own(self.settings.job, drivers)
        for number, (name, sinks) in enumerate(self.settings.cases):
            yield self._built_in(number, name, sinks)

    def _own(self, spec: str, drivers: Drivers) -> Plot:
        from onceflow.verify.own import own_case, truth_of

        driver = drivers.take()
        drivers.wait_until_ready(driver)
        case = own_case(
            spec, self.settings.folder / "job", seed=self.settings.seed,
            recorded=self.settings.recorded, driver=driver,
        )  # fmt: skip
        drivers.give_back(driver)
        says = "two undisturbed runs over the same input, for the truth"
        return Plot(case, truth_of, says=says)

    def _built_in(self, number: int, name: str, sinks: str) -> Plot:
        job = JOBS[name]
        folder = self.settings.folder / f"{number:02d}-{name}-{sinks}"
        source = BuiltIn(self.settings.seed * 1000 + number)
        environment = {
            "ONCEFLOW_VERIFY_SINKS": sinks, "ONCEFLOW_MUTANT": self.settings.mutant,
            "ONCEFLOW_VERIFY_GUARANTEE": self.settings.guarantee,
        }  # fmt: skip
        case = Case(
            job=f"{FILE}:{name}", name=name, sinks=sinks, folder=folder,
            targets=job.targets(sinks, folder), source=source, queries=("result",),
            logs=dict.fromkeys(job.sources, "in"), environment=environment,
        )  # fmt: skip

        def truth(play: Play) -> dict[str, Truth]:
            assert play.feed is not None
            return job.true(source.rows(play.feed.commits))

        return Plot(case, truth, job.in_order)

    def _play(self, plot: Plot, faults: list[Fault], drivers: Drivers) -> None:
        case = plot.case
        result = CaseResult(case.name, case.sinks, began=self._seconds())
        self.result.cases.append(result)
        self._tell("case", job=case.name, sinks=case.sinks, faults=len(faults))
        play = Play(case, drivers, began=self._began, tell=lambda: self._progress(play))

        def struck_by(play: Play, fault: Fault, struck: Any) -> None:
            self._tell("fault", number=fault.number, kind=fault.kind, what=fault.what)
            strike(play, fault, struck)

        try:
            until = self.settings.duration
            if until is not None:  # each case has its share of it
                until *= len(self.result.cases) / max(1, self._cases)
            in_time = (f for f in faults if until is None or self._seconds() < until)
            play.perform(in_time, struck_by)
            if not play.violations:
                self._wait_for_orphans(play, drivers)
            assert play.feed is not None
            result.violations = [*play.violations]
            self._tell("truth", says=plot.says)
            wrong = check(
                case.name, case.folder / "home", play.observer, plot.truth(play),
                in_order=plot.in_order, stopped=play.drained, guarantees=play.guarantees,
            )  # fmt: skip
            for violation in wrong:
                promised = play.guarantees.get(violation.where, "")
                allowed = ALLOWED.get(promised) == violation.kind
                (result.allowed if allowed else result.violations).append(violation)
        except (KeyboardInterrupt, SetupError, JobError):
            raise
        except Exception as error:  # a checker that crashed has not passed
            result.unknown = f"{type(error).__name__}: {error}"
        finally:
            self._note(play, result)
        self._tell("case-ended", job=case.name, sinks=case.sinks, seconds=result.seconds,
                   rows_in=result.rows_in, rows_out=result.rows_out, epochs=result.epochs,
                   violations=[str(v) for v in result.violations],
                   unknown=result.unknown)  # fmt: skip

    def _note(self, play: Play, result: CaseResult) -> None:
        result.seconds = round(self._seconds() - result.began, 1)
        result.guarantees = play.guarantees
        result.rows_in = play.feed.rows if play.feed else 0
        result.rows_out = play.observer.published
        result.epochs = sum(epoch + 1 for epoch in play.observer.progress().values())
        result.polls = play.observer.polls
        result.samples = _thinned([(t - self._began, rows) for t, rows in play.observer.samples])
        for struck in play.struck:
            self.result.faults.append({
                **struck.fault.as_json(), "job": result.job, "sinks": result.sinks,
                "at_s": round(struck.at, 2), "hit": struck.hit, "what": struck.what,
                "recovery_s": struck.recovery, "start_up_s": struck.start_up,
            })  # fmt: skip

    def _wait_for_orphans(self, play: Play, drivers: Drivers) -> None:
        if not play.wait(lambda: not drivers.left(), _ORPHANS_WITHIN):
            pids = ", ".join(map(str, drivers.left()))
            said = f"processes {pids} go on after their driver"
            play.violations.append(Violation("left", play.case.name, said))

    # -------------------------------------------------------------- telling

    def _progress(self, play: Play) -> None:
        fed = play.feed.rows if play.feed else 0
        struck = [f for f in self.result.faults if f["hit"]]
        self._tell("progress", job=play.case.name, sinks=play.case.sinks,
                   faults=len(struck) + sum(s.hit for s in play.struck), of=self._planned,
                   rows_in=fed, rows_out=play.observer.published,
                   lag=fed - play.rows_read(),
                   violations=len(self.result.violations) + len(play.violations)
                   + play.observer.violations)  # fmt: skip

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, event: str, **fields: Any) -> None:
        self._show({"event": event, "at_s": round(self._seconds(), 1), **fields})


def _thinned(samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Enough for a picture: where the number changed, and the last one."""
    found: list[tuple[float, int]] = []
    for at, rows in samples:
        if not found or rows != found[-1][1]:
            found.append((round(at, 2), rows))
    if samples:
        found.append((round(samples[-1][0], 2), samples[-1][1]))
    return found


# ---------------------------------------------------------------- the folder


def prepare(folder: Path, **facts: int) -> None:
    """A new or empty folder of our own."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise JobError(f"{folder} is not empty", hint="name a new folder: --keep FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text(json.dumps(facts) + "\n")
