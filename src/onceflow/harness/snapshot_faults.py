"""What people do to a job in the middle of its faults: savepoints, going back, forks.

Each is a command of `onceflow` in a process of its own. One that is killed on its way is run again
with the same arguments, and must come to its end then.
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

from onceflow.harness.checker import Violation
from onceflow.harness.play import Play, Struck
from onceflow.harness.reaching import REACH_WITHIN, at_work, end_now, epoch
from onceflow.harness.schedule import Fault
from onceflow.harness.targets import Target
from onceflow.protocol.home import JobFolder
from onceflow.snapshots.epochs import decisions

_ENDS_WITHIN = 120.0  # seconds, for a command, and for one life of a fork
# The command line as it is, in which a fault can be armed.
_ONCEFLOW = """
from onceflow import faults
from onceflow.cli import main
from onceflow.harness.within import within
faults.arm_from_environment()
with within():
    main()
"""
# Why a command may refuse, and nothing is wrong.
_REFUSALS = (
    "the job went back behind it since",
    "are no longer retained, so they cannot be run again",
    "is not retained",
    "no retained epoch of",
    "does not keep any more what epoch",
)


@dataclass
class _Done:
    """How a command ended."""

    command: str
    code: int = 0
    killed: bool = False  # at its fault point, and run again
    answer: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def again(self) -> str:
        return ", killed on its way and run again" if self.killed else ""

    @property
    def refused(self) -> bool:
        return any(said in self.error for said in _REFUSALS)


def _run(play: Play, *command: str, point: str = "") -> _Done:
    """A command of `onceflow`; if it is killed at the point it is run again."""
    done = _once(play, command, f"{point}:kill" if point else "")
    if point and done.code == -signal.SIGKILL:
        done = replace(_once(play, command, ""), killed=True)
    return done


def _once(play: Play, command: tuple[str, ...], fault: str) -> _Done:
    servers = play.case.servers
    brought = servers.for_commands() if servers is not None else {}
    play.commands += 1
    said = play.case.folder / f"command-{play.commands}"
    with said.with_suffix(".out").open("wb") as out, said.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _ONCEFLOW, *command, "--home", "home", "--json"],
            cwd=play.case.folder, env={**os.environ, **brought, **play.environment(fault)},
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
    try:
        ended = play.wait(lambda: process.poll() is not None, _ENDS_WITHIN)
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


def _failed(play: Play, struck: Struck, done: _Done) -> bool:
    """Did it not come to its end? A refusal with a good reason is no fault."""
    if not done.error:
        return False
    struck.what = f"{done.command}{done.again}: {done.error}"
    if not done.refused:
        play.violations.append(Violation("stuck", play.case.name, struck.what))
    return True


# ---------------------------------------------------------------- savepoints


def _savepoint(play: Play, fault: Fault, struck: Struck) -> None:
    at_work(play, fault)
    name, stops = f"s{fault.number}", fault.ends == "stop"
    stop = ["--stop"] if stops else []
    done = _run(
        play, "savepoint", "create", play.case.name, "--name", name, *stop, point=fault.point
    )
    made = done.killed and f"there is a savepoint '{name}' already" in done.error
    if not made and _failed(play, struck, done):
        return
    play.savepoints.append(name)
    play.hit(struck, f"{name}, after epoch {epoch(play)}{done.again}")
    if stops:
        _hear_the_end(play)


def _hear_the_end(play: Play) -> None:
    life = play.life
    assert life is not None
    if not play.wait(lambda: life.over, _ENDS_WITHIN):
        said = "the driver goes on after it was stopped"
        play.violations.append(Violation("stuck", play.case.name, said))
        end_now(play)


# ---------------------------------------------------------------- going back


def _rollback(play: Play, fault: Fault, struck: Struck) -> None:
    _go_back(play, fault, struck, "")


def _restore(play: Play, fault: Fault, struck: Struck) -> None:
    """A job without a savepoint goes back to an epoch."""
    _go_back(play, fault, struck, _chosen(play.savepoints, fault))


def _go_back(play: Play, fault: Fault, struck: Struck, savepoint: str) -> None:
    if set(play.guarantees.values()) - {"exactly-once"}:
        struck.what = "an output promises less, and cannot go back"
        return
    play.wait_for_epochs(fault.visit - 1)  # to go back over
    at_work(play, fault)
    if not _end_driver(play, fault, struck):
        return
    to = ["restore", play.case.name, savepoint]
    if not savepoint:
        to = ["rollback", play.case.name, "--to", _epoch_or_time(play, fault)]
    choices = {target.output: _choice(play, fault, target) for target in play.case.targets}
    said = [f"--published={output}={choice}" for output, choice in choices.items()]
    play.observer.restoring(choices)
    in_command = fault.point if fault.point.startswith("restore.") else ""
    before = epoch(play)
    done = _run(play, *to, *said, point=in_command)
    if _failed(play, struck, done):
        return
    play.observer.look()
    play.hit(
        struck, f"{' '.join(to)}, {', '.join(sorted({*choices.values()}))}, from epoch {before} "
        f"back to {epoch(play)}{done.again}",
    )  # fmt: skip
    if fault.point and not in_command:
        _break_start(play, fault, struck)


def _end_driver(play: Play, fault: Fault, struck: Struck) -> bool:
    """A restore is refused while the job runs. False: it did not stop as it was asked to."""
    life, driver = play.life, play.driver
    assert life is not None
    assert driver is not None
    if fault.ends == "stop":
        done = _run(play, "stop", play.case.name)
        if _failed(play, struck, done):
            return False
        _hear_the_end(play)
    elif fault.ends:
        driver.order(do="arm", fault=f"{fault.ends}:raise")
        if not play.wait(lambda: life.over, REACH_WITHIN):
            end_now(play)
    else:
        end_now(play)
    return True


def _choice(play: Play, fault: Fault, target: Target) -> str:
    """What the output can do: a topic takes nothing back, other rows are not skipped."""
    if target.kind == "kafka":
        return "skip"
    return fault.file if play.case.repeats else "rewind"


def _chosen(names: list[str], fault: Fault) -> str:
    """The newest is the first."""
    return names[-1 - (fault.visit - 1) % len(names)] if names else ""


def _epoch_or_time(play: Play, fault: Fault) -> str:
    """A retained epoch; for several queries, which count their own, the time of one."""
    queries = JobFolder(play.case.folder / "home", play.case.name).queries()
    kept = decisions(queries[0])
    chosen = kept[-1 - (fault.visit - 1) % len(kept)] if kept else None
    if chosen is None:
        return "0"
    return str(chosen.epoch) if len(queries) == 1 else chosen.at


def _break_start(play: Play, fault: Fault, struck: Struck) -> None:
    """The first start in the new lineage fails on its way."""
    play.start_life(fault=f"{fault.point}:raise")
    life = play.life
    assert life is not None
    play.wait(lambda: life.over or life.started, _ENDS_WITHIN)
    if life.error.get("kind") == "InjectedFault":
        struck.what += f"; its start fails at {fault.point}"
        play.mended(struck)


# ---------------------------------------------------------------- forks


def _fork(play: Play, fault: Fault, struck: Struck) -> None:
    """Its targets are its own. What they hold is compared in the end."""
    at_work(play, fault)
    name, savepoint = f"fork-{fault.number}", _chosen(play.savepoints, fault)
    folder = play.case.folder
    moved = {target.output: _moved(folder, target, fault, name) for target in play.case.targets}
    named = [f"--output={output}={to}" for output, (to, _) in moved.items()]
    from_ = ["--from", savepoint] if savepoint and fault.visit % 2 else []
    done = _run(play, "fork", play.case.name, "--as", name, *from_, *named, point=fault.point)
    made = done.killed and f"there is a job {name} already" in done.error
    if not made and _failed(play, struck, done):
        return
    play.hit(struck, f"{name}{' of ' + savepoint if from_ else ''}{done.again}")
    play.forks[name] = [target for _, target in moved.values()]
    _run_fork(play, name, struck)


def _moved(folder: Path, target: Target, fault: Fault, name: str) -> tuple[str, Target]:
    """Where an output of the fork goes, as `onceflow fork` and as the checker are told."""
    if target.kind == "kafka":
        table = f"{target.table}-{name}"
        return table, replace(target, table=table)
    if target.kind == "postgres":
        table = f"fork_{fault.number}"
        return table, replace(target, table=f"{target.table.partition('.')[0]}.{table}")
    path = str(folder / "forks" / name / target.output.replace("/", "-"))
    return path, replace(target, path=path)


def _run_fork(play: Play, name: str, struck: Struck) -> None:
    """Until it has used up the input, by a driver of its own, while its parent goes on."""
    driver = play.drivers.take()
    play.wait(lambda: driver.ready or driver.exit_code is not None, _ENDS_WITHIN)
    play.drivers.wait_until_ready(driver)
    life = driver.live(
        play.case.job, play.case.folder, play.environment(), once=True, every="0ms", fork=name
    )

    def over() -> bool:
        life.hear()
        return life.over

    if not play.wait(over, _ENDS_WITHIN) or life.code:
        said = life.complaint if life.error else "it goes on and on"
        play.violations.append(Violation("stuck", play.case.name, f"{name}: {said}"))
        driver.end()
    else:
        struck.what += ", run once"
        play.mended(struck)
    play.drivers.give_back(driver)


ACTS: dict[str, Callable[[Play, Fault, Struck], None]] = {
    "savepoint": _savepoint,
    "rollback": _rollback,
    "restore": _restore,
    "fork": _fork,
}
