"""`onceflow verify`: runs the cases one after the other, and gives the verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onceflow.errors import JobError, SetupError
from onceflow.harness import fault_schedule
from onceflow.harness.builtin_catalog import FILE, JOBS, Expected
from onceflow.harness.case_runner import Case, CaseRunner
from onceflow.harness.checker import ALLOWED, check, forked
from onceflow.harness.driver_faults import strike
from onceflow.harness.drivers import Drivers
from onceflow.harness.fault_run import Event, FaultRun
from onceflow.harness.fault_schedule import Fault
from onceflow.harness.feed import BuiltIn
from onceflow.harness.result import CaseResult
from onceflow.harness.servers import Servers, given
from onceflow.harness.small_disk import can_mount, disk_of
from onceflow.spark import jars
from onceflow.spark import packages as connector


@dataclass(frozen=True)
class Settings:
    """The options of a run."""

    folder: Path
    seed: int
    faults: int
    kinds: tuple[str, ...]
    cases: tuple[tuple[str, str], ...]  # job, sinks
    points: tuple[str, ...] = ()
    part: tuple[int, int] = (1, 1)  # (2, 4): the second of every four cases
    duration: float | None = None  # seconds after which no fault strikes
    master: str = "local"
    command: str = ""  # that repeats the schedule
    job: str | None = None  # JOB.py[:name], instead of the built-in ones
    recorded: str | None = None  # a log to use as the input
    guarantee: str = ""  # of the outputs of the built-in jobs
    brokers: int = 1  # of the Kafka that is started here
    environment: dict[str, str] = field(default_factory=dict)  # more variables for the drivers


@dataclass(frozen=True)
class PlannedCase:
    """A case, and the function that gives its expected result once it has run."""

    case: Case
    expected: Callable[[CaseRunner], dict[str, Expected]]
    in_order: str = ""
    says: str = "comparing with the expected result"  # shown meanwhile


class Verification(FaultRun):
    """Runs all cases. It calls `tell` with each event."""

    def __init__(
        self, settings: Settings, tell: Callable[[Event], None], drivers: Drivers | None = None,
        servers: Servers | None = None,
    ) -> None:  # fmt: skip
        """`drivers`, `servers`: running ones to use; they are not ended."""
        super().__init__(
            settings.folder, tell, seed=settings.seed, command=settings.command,
            master=settings.master,
        )  # fmt: skip
        self.settings, self._drivers = settings, drivers
        self._servers = servers
        self._planned, self._cases = settings.faults, len(settings.cases)

    def _run(self) -> None:
        kinds = self._possible(self.settings.kinds)
        with self._served() as servers, self._started() as drivers:
            planned_cases = list(self._planned_cases(drivers, servers))
            fitting = [planned for planned in planned_cases if self._fits(planned, kinds)]
            self._run_cases(fitting, kinds, drivers)

    def _run_cases(
        self, planned_cases: list[PlannedCase], kinds: list[str], drivers: Drivers
    ) -> None:
        faults = fault_schedule.plan(
            self.settings.seed, [_sinks(planned) for planned in planned_cases], kinds=kinds,
            count=self.settings.faults, at=self.settings.points,
        )  # fmt: skip
        cases = [planned.case for planned in planned_cases]
        names = [f"{case.name} to {case.sinks}" for case in cases]
        self._write_schedule(names, faults)
        part, parts = self.settings.part
        faults = [fault for fault in faults if fault.case % parts == part - 1]
        chosen = range(part - 1, len(planned_cases), parts)
        self._planned, self._cases = len(faults), len(chosen)
        self._tell("begin", folder=str(self.settings.folder), faults=len(faults),
                   cases=[names[number] for number in chosen],
                   seed=self.settings.seed, left_out=self.result.left_out)  # fmt: skip
        for number in chosen:
            planned = planned_cases[number]
            mine = [fault for fault in faults if fault.case == number]
            with contextlib.ExitStack() as stack:
                if any(fault.kind == "full-disk" for fault in mine):
                    stack.enter_context(disk_of(planned.case.folder, len(mine)))
                if planned.case.servers is not None:
                    lost = {fault.file for fault in mine if fault.kind == "lost-answer"}
                    stack.enter_context(planned.case.servers.behind_proxies(lost))
                    planned.case.environment.update(planned.case.servers.environment())
                self._run_case(planned, mine, drivers)
        self.result.spark = drivers.spark

    # -------------------------------------------------------------- before

    def _possible(self, kinds: tuple[str, ...]) -> list[str]:
        """The kinds that are possible here. The result names the others, with the reason."""
        found, unsaid = list(kinds), []
        for kind in kinds:
            why = ""
            of = [
                server
                for server in fault_schedule.SERVERS.get(kind, ())
                if server in self._needed()
            ]
            if kind in fault_schedule.CLUSTER and self.settings.master != "cluster":
                why = "only with --master cluster"
            elif kind in fault_schedule.NEED_BUILT_IN and self.settings.job is not None:
                why = "only in the built-in jobs"
            elif kind == "full-disk" and not can_mount(self.settings.folder):
                why = "a tmpfs cannot be mounted here (it needs root)"
            elif kind in fault_schedule.SNAPSHOTS and self.settings.guarantee in ALLOWED:
                why = "only with outputs that promise exactly-once"
            elif kind in fault_schedule.BREAK_SERVERS and any(map(given, of)):
                named = ", ".join(filter(None, map(given, of)))
                why = f"{named} names a server, which verify does not break"
            if why:
                found.remove(kind)
                self.result.left_out.append(f"{kind}: {why}")
            elif kind in fault_schedule.SERVERS and not of:
                found.remove(kind)
                unsaid.append(f"{kind}: only with --sinks {','.join(fault_schedule.SERVERS[kind])}")
        if not found:
            why = "; ".join([*self.result.left_out, *unsaid])
            raise JobError(f"no fault is left: {why}", hint="name others: --fault")
        return found

    def _needed(self) -> set[str]:
        """The kinds of servers that the cases need."""
        return {kind for job, sinks in self.settings.cases for kind in JOBS[job].servers(sinks)}

    def _fits(self, planned: PlannedCase, kinds: list[str]) -> bool:
        fits = any(fault_schedule.fits(kind, _sinks(planned)) for kind in kinds)
        if not fits:
            name = f"{planned.case.name} to {planned.case.sinks}"
            self.result.left_out.append(f"{name}: none of these faults fits it")
        return fits

    @contextlib.contextmanager
    def _served(self) -> Iterator[Servers | None]:
        if self._servers is not None or not self._needed():
            yield self._servers
            return
        brokers = self.settings.brokers
        with Servers(self.settings.folder, self._needed(), brokers=brokers) as servers:
            yield servers

    @contextlib.contextmanager
    def _started(self) -> Iterator[Drivers]:
        if self._drivers is not None:
            yield self._drivers
            return
        with contextlib.ExitStack() as stack:
            master: str = "local[2,4]"
            settings: dict[str, str] = {}
            if self.settings.master == "cluster":
                from onceflow.harness.cluster import cluster

                master, settings = stack.enter_context(cluster(self.settings.folder))
            if any(JOBS[job].topic for job, _ in self.settings.cases):
                settings = {**settings, **connector_settings()}
            job = self.settings.job
            file = None if job is None else Path(job.partition(":")[0])
            drivers = Drivers(self.settings.folder, master, settings, job=file)
            stack.callback(drivers.close)
            yield drivers

    # -------------------------------------------------------------- one case

    def _planned_cases(self, drivers: Drivers, servers: Servers | None) -> Iterator[PlannedCase]:
        if self.settings.job is not None:
            yield self._own(self.settings.job, drivers)
        for number, (name, sinks) in enumerate(self.settings.cases):
            yield self._built_in(number, name, sinks, servers)

    def _own(self, spec: str, drivers: Drivers) -> PlannedCase:
        from onceflow.harness.user_job import undisturbed_result, user_case

        case = user_case(
            spec, self.settings.folder / "job", seed=self.settings.seed,
            recorded=self.settings.recorded, drivers=drivers,
        )  # fmt: skip
        says = "two undisturbed runs over the same input, for the expected result"
        return PlannedCase(case, undisturbed_result, says=says)

    def _built_in(self, number: int, name: str, sinks: str, servers: Servers | None) -> PlannedCase:
        job = JOBS[name]
        folder = self.settings.folder / f"{number:02d}-{name}-{sinks}"
        if not job.servers(sinks):
            servers = None
        place = servers.new_place() if servers is not None else ""
        topic = None
        if job.topic and servers is not None and servers.kafka is not None:
            topic = {"topic": f"{place}-in", "servers": servers.kafka.servers}
        source = BuiltIn(self.settings.seed * 1000 + number, topic=topic)
        environment = {
            **self.settings.environment, "ONCEFLOW_VERIFY_SINKS": sinks,
            "ONCEFLOW_VERIFY_GUARANTEE": self.settings.guarantee, "ONCEFLOW_VERIFY_PLACE": place,
        }  # fmt: skip
        case = Case(
            job=f"{FILE}:{name}", name=name, sinks=sinks, folder=folder,
            targets=job.targets(sinks, folder, servers, place), source=source,
            queries=("result",), logs=dict.fromkeys(job.sources, "in"), environment=environment,
            repeats=job.repeats, keyed=job.keyed, servers=servers,
        )  # fmt: skip

        def expected(runner: CaseRunner) -> dict[str, Expected]:
            return job.expected_results(source.rows(runner.feed.commits), sinks)

        return PlannedCase(case, expected, job.in_order)

    def _run_case(self, planned: PlannedCase, faults: list[Fault], drivers: Drivers) -> None:
        case = planned.case
        result = CaseResult(case.name, case.sinks, began=self._seconds())
        self.result.cases.append(result)
        self._tell("case", job=case.name, sinks=case.sinks, faults=len(faults))
        runner = CaseRunner(case, drivers, began=self._began, tell=lambda: self._progress(runner))

        def struck_by(runner: CaseRunner, fault: Fault, outcome: Any) -> None:
            self._tell("fault", number=fault.number, kind=fault.kind, what=fault.what)
            strike(runner, fault, outcome)

        try:
            until = self.settings.duration
            if until is not None:  # each case has its share
                until *= len(self.result.cases) / max(1, self._cases)
            in_time = (f for f in faults if until is None or self._seconds() < until)
            runner.perform(in_time, struck_by)
            if not runner.violations:
                self._wait_for_orphans(runner, drivers)
            result.violations = [*runner.violations]
            self._tell("truth", says=planned.says)
            expected = planned.expected(runner)
            wrong = check(
                case.name, case.folder / "home", runner.observer, expected,
                in_order=planned.in_order, stopped=runner.drained, guarantees=runner.guarantees,
            )  # fmt: skip
            for name, targets in runner.forks.items():
                wrong += forked(name, targets, expected)
            for violation in wrong:
                promised = runner.guarantees.get(violation.where, "")
                allowed = ALLOWED.get(promised) == violation.kind
                (result.allowed if allowed else result.violations).append(violation)
        except (KeyboardInterrupt, SetupError, JobError):
            raise
        except Exception as error:  # a check that failed gives no verdict
            result.unknown = f"{type(error).__name__}: {error}"
        finally:
            self._take_in(runner, result)
        self._tell_end(result)

    # -------------------------------------------------------------- telling

    def _progress(self, runner: CaseRunner) -> None:
        fed = runner.rows_fed
        struck = [f for f in self.result.faults if f["hit"]]
        self._tell("progress", job=runner.case.name, sinks=runner.case.sinks,
                   faults=len(struck) + sum(s.hit for s in runner.outcomes), of=self._planned,
                   rows_in=fed, rows_out=runner.observer.published,
                   lag=max(0, fed - runner.rows_read()),
                   violations=len(self.result.violations) + len(runner.violations)
                   + runner.observer.violations)  # fmt: skip


def _sinks(planned: PlannedCase) -> tuple[str, ...]:
    kinds = tuple(target.kind for target in planned.case.targets)
    return (*kinds, fault_schedule.KEYED) if planned.case.keyed else kinds


def connector_settings() -> dict[str, str]:
    """Spark's Kafka connector for a new session, unless ONCEFLOW_JARS names it already."""
    if connector.named_jars():
        return {}
    return {"spark.jars": ",".join(map(str, sorted(jars.fetch("connector").glob("*.jar"))))}
