"""Commands on a job between its faults: savepoint, rollback, restore, fork.

Each is a command of `onceflow` in a process of its own. If a command is killed, it runs again with
the same arguments and must succeed then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onceflow.harness.case_runner import CaseRunner, FaultOutcome
from onceflow.harness.fault_moments import REACH_WITHIN, end_driver, wait_at_random
from onceflow.harness.fault_schedule import Fault
from onceflow.harness.targets import Target
from onceflow.protocol.home import JobFolder
from onceflow.snapshots.epochs import restorable_decisions

_ENDS_WITHIN = 120.0  # seconds, for a command, and for one life of a fork
# The command line, in a process in which a fault can be armed.
_ONCEFLOW = """
from onceflow import faults
from onceflow.cli import main
from onceflow.harness.within import within
faults.arm_from_environment()
with within():
    main()
"""
# Reasons for which a command may refuse.
REFUSALS = (
    "the job has gone back to an earlier epoch since",
    "are no longer retained, so they cannot be run again",
    "is not retained",
    "no retained epoch of",
    "no longer keeps what epoch",
)


@dataclass
class _Done:
    """A command and how it ended."""

    command: str
    code: int = 0
    killed: bool = False  # at its fault point, and run again
    answer: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def again(self) -> str:
        return ", killed and run again" if self.killed else ""

    @property
    def refused(self) -> bool:
        return any(said in self.error for said in REFUSALS)


def _run(runner: CaseRunner, *command: str, point: str = "") -> _Done:
    """Run a command of `onceflow`; run it again if it was killed at the point."""
    done = _once(runner, command, f"{point}:kill" if point else "")
    if point and done.code == -signal.SIGKILL:
        done = replace(_once(runner, command, ""), killed=True)
    return done


def _once(runner: CaseRunner, command: tuple[str, ...], fault: str) -> _Done:
    servers = runner.case.servers
    brought = servers.for_commands() if servers is not None else {}
    runner.commands += 1
    said = runner.case.folder / f"command-{runner.commands}"
    with said.with_suffix(".out").open("wb") as out, said.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _ONCEFLOW, *command, "--home", "home", "--json"],
            cwd=runner.case.folder, env={**os.environ, **brought, **runner.environment(fault)},
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
    try:
        ended = runner.wait(lambda: process.poll() is not None, _ENDS_WITHIN)
    finally:
        process.kill()
        code = process.wait()
    done = _Done(f"onceflow {' '.join(command)}", code)
    if not ended:
        done.error = f"it has not ended within {_ENDS_WITHIN:.0f} s"
    elif code == 0:
        done.answer = json.loads(said.with_suffix(".out").read_text())
    else:
        done.error = _complaint(said.with_suffix(".err").read_text(errors="replace"))
    return done


def _complaint(text: str) -> str:
    last = (text.strip().splitlines() or ["it said nothing"])[-1]
    try:
        said = json.loads(last)
        return f"{said['kind']}: {said['message']}"
    except (ValueError, KeyError, TypeError):
        return last


def _failed(runner: CaseRunner, outcome: FaultOutcome, done: _Done) -> bool:
    """Did the command fail? A refusal with a known reason is no violation."""
    if not done.error:
        return False
    outcome.what = f"{done.command}{done.again}: {done.error}"
    if not done.refused:
        runner.violate(outcome.what)
    return True


# ---------------------------------------------------------------- savepoints


def _savepoint(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    wait_at_random(runner, fault)
    name, stops = f"s{fault.number}", fault.ends == "stop"
    stop = ["--stop"] if stops else []
    done = _run(
        runner, "savepoint", "create", runner.case.name, "--name", name, *stop, point=fault.point
    )
    made = done.killed and f"savepoint '{name}' exists already" in done.error
    if not made and _failed(runner, outcome, done):
        return
    runner.savepoints.append(name)
    runner.hit(outcome, f"{name}{done.again}")
    if stops:
        _wait_for_the_end(runner)


def _wait_for_the_end(runner: CaseRunner) -> None:
    life = runner.life
    if not runner.wait(lambda: life.over, _ENDS_WITHIN):
        said = "the driver continues after it was stopped"
        runner.violate(said)
        end_driver(runner)


# ---------------------------------------------------------------- going back


def _rollback(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    _go_back(runner, fault, outcome, "")


def _restore(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    """Restore a savepoint; a job without one goes back to an epoch."""
    _go_back(runner, fault, outcome, _chosen(runner.savepoints, fault))


def _go_back(runner: CaseRunner, fault: Fault, outcome: FaultOutcome, savepoint: str) -> None:
    if set(runner.guarantees.values()) - {"exactly-once"}:
        outcome.what = "an output promises less, and cannot go back"
        return
    runner.wait_for_epochs(fault.visit - 1)  # so that there is an epoch to go back to
    wait_at_random(runner, fault)
    if not _end_driver(runner, fault, outcome):
        return
    to = ["restore", runner.case.name, savepoint]
    if not savepoint:
        to = ["rollback", runner.case.name, "--to", _epoch_or_time(runner, fault)]
    choices = {target.output: _choice(runner, fault, target) for target in runner.case.targets}
    said = [f"--published={output}={choice}" for output, choice in choices.items()]
    runner.observer.restoring(choices)
    in_command = fault.point if fault.point.startswith("restore.") else ""
    before = runner.last_epochs
    done = _run(runner, *to, *said, point=in_command)
    if _failed(runner, outcome, done):
        return
    runner.observer.look()
    how = ", ".join(sorted({*choices.values()}))
    runner.hit(outcome, f"{' '.join(to)}, {how}, from epoch {before}{done.again}")
    if fault.point and not in_command:
        _break_start(runner, fault, outcome)


def _end_driver(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> bool:
    """A restore is refused while the job runs. False if the driver did not stop when asked."""
    life, driver = runner.life, runner.driver
    if fault.ends == "stop":
        done = _run(runner, "stop", runner.case.name)
        if _failed(runner, outcome, done):
            return False
        _wait_for_the_end(runner)
    elif fault.ends:
        driver.order(do="arm", fault=f"{fault.ends}:raise")
        if not runner.wait(lambda: life.over, REACH_WITHIN):
            end_driver(runner)
    else:
        end_driver(runner)
    return True


def _choice(runner: CaseRunner, fault: Fault, target: Target) -> str:
    """rewind or skip: some targets take nothing back, and random rows cannot be skipped."""
    if target.kind == "kafka" or not target.rewinds:
        return "skip"
    return fault.file if runner.case.repeats else "rewind"


def _chosen(names: list[str], fault: Fault) -> str:
    """The savepoint of the fault, counted from the newest."""
    return names[-1 - (fault.visit - 1) % len(names)] if names else ""


def _epoch_or_time(runner: CaseRunner, fault: Fault) -> str:
    """A retained epoch; for several queries the time of one, because each counts its own."""
    queries = JobFolder(runner.case.folder / "home", runner.case.name).queries()
    kept = restorable_decisions(queries[0])
    chosen = kept[-1 - (fault.visit - 1) % len(kept)] if kept else None
    if chosen is None:
        return "0"
    return str(chosen.epoch) if len(queries) == 1 else chosen.at


def _break_start(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    """The first start in the new lineage fails at the point."""
    runner.start_life(fault=f"{fault.point}:raise")
    life = runner.life
    runner.wait(lambda: life.over or life.started, _ENDS_WITHIN)
    if life.error.get("kind") == "InjectedFault":
        outcome.what += f"; its start fails at {fault.point}"
        runner.start_recovery_clock(outcome)


# ---------------------------------------------------------------- forks


def _fork(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    """A fork has targets of its own, which are compared in the end."""
    wait_at_random(runner, fault)
    name, savepoint = f"fork-{fault.number}", _chosen(runner.savepoints, fault)
    folder = runner.case.folder
    moved = {target.output: _moved(folder, target, fault, name) for target in runner.case.targets}
    named = [f"--output={output}={to}" for output, (to, _) in moved.items()]
    from_ = ["--from", savepoint] if savepoint and fault.visit % 2 else []
    done = _run(runner, "fork", runner.case.name, "--as", name, *from_, *named, point=fault.point)
    made = done.killed and f"job {name} exists already" in done.error
    if not made and _failed(runner, outcome, done):
        return
    runner.hit(outcome, f"{name}{' of ' + savepoint if from_ else ''}{done.again}")
    runner.forks[name] = [target for _, target in moved.values()]
    _run_fork(runner, name, outcome)


def _moved(folder: Path, target: Target, fault: Fault, name: str) -> tuple[str, Target]:
    """The target of an output of the fork, for `onceflow fork` and for the checker."""
    if target.kind == "kafka":
        table = f"{target.table}-{name}"
        return table, replace(target, table=table)
    if target.kind == "postgres":
        table = f"fork_{fault.number}"
        return table, replace(target, table=f"{target.table.partition('.')[0]}.{table}")
    path = str(folder / "forks" / name / target.output.replace("/", "-"))
    return path, replace(target, path=path)


def _run_fork(runner: CaseRunner, name: str, outcome: FaultOutcome) -> None:
    """Run the fork to the end of the input, by another driver, while its parent continues."""
    driver = runner.drivers.take()
    runner.wait(lambda: driver.ready or driver.exit_code is not None, _ENDS_WITHIN)
    runner.drivers.wait_until_ready(driver)
    life = driver.live(
        runner.case.job, runner.case.folder, runner.environment(), once=True, every="0ms", fork=name
    )

    def over() -> bool:
        life.read_events()
        return life.over

    if not runner.wait(over, _ENDS_WITHIN) or life.code:
        said = life.complaint if life.error else "it does not end"
        runner.violate(f"{name}: {said}")
        driver.end()
    else:
        outcome.what += ", run once"
        runner.start_recovery_clock(outcome)
    runner.drivers.give_back(driver)


ACTS: dict[str, Callable[[CaseRunner, Fault, FaultOutcome], None]] = {
    "savepoint": _savepoint,
    "rollback": _rollback,
    "restore": _restore,
    "fork": _fork,
}
