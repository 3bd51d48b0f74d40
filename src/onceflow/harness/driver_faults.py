"""Carries out faults on a running case. `fault_schedule.KINDS` says what each kind does."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from onceflow.harness import server_faults, snapshot_faults
from onceflow.harness.case_runner import CaseRunner, FaultOutcome
from onceflow.harness.drivers import Driver, Life
from onceflow.harness.fault_moments import (
    REACH_WITHIN,
    disarm,
    end_driver,
    pause_driver,
    wait_at_random,
)
from onceflow.harness.fault_schedule import Fault, opens
from onceflow.harness.targets import body
from onceflow.service.error_report import describe_exit
from onceflow.service.process_tree import processes

_END_WITHIN = 120.0  # seconds until a driver without a JVM, or a fenced one, has ended
_AWAKE_FOR = 8.0  # seconds for a zombie, before its successor continues
_DAMAGED = 7


def strike(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    """Carry out a fault. Returns when it has struck or missed; the caller waits for recovery."""
    _ACTS[fault.kind](runner, fault, outcome)


# ---------------------------------------------------------------- kills


def _kill_driver(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    wait_at_random(runner, fault)
    os.kill(runner.driver.pid, signal.SIGKILL)
    _killed(runner, outcome, f"driver {runner.driver.pid}")


def _kill_jvm(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    wait_at_random(runner, fault)
    driver = runner.driver
    assert driver.jvm is not None
    os.kill(driver.jvm, signal.SIGKILL)
    runner.hit(outcome, f"JVM {driver.jvm}")
    if not runner.wait(lambda: driver.exit_code is not None, _END_WITHIN):
        runner.violate(f"driver {driver.pid} does not notice its JVM's end")
        driver.end()


def _kill_worker(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    wait_at_random(runner, fault)
    workers = runner.driver.workers()
    runner.driver.spent = True
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if workers:
        runner.hit(outcome, f"{len(workers)} Python workers")
        runner.wait_for_epochs(1)  # this one may not need them; the next one does
    else:
        outcome.what = "there were no Python workers"


def _kill_executor(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    wait_at_random(runner, fault)
    pids = executors(runner)
    if pids:
        os.kill(pids[0], signal.SIGKILL)
        runner.hit(outcome, f"executor {pids[0]}")
    else:
        outcome.what = "there was no executor"


def executors(runner: CaseRunner) -> list[int]:
    """The executors that work for the current driver."""
    found = []
    for pid, (_, _, name) in processes().items():
        if name == "java":
            with suppress(OSError):
                said = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "--driver-url" in said and runner.driver.serves(
                    said[said.index("--driver-url") + 1]
                ):
                    found.append(pid)
    return found


def _kill_point(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    driver = _arm(runner, fault, "kill")
    if runner.wait(lambda: driver.exit_code is not None, REACH_WITHIN):
        _killed(runner, outcome, f"driver {driver.pid} at {fault.point}")
    else:
        disarm(runner, fault, outcome)


def _raise_point(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    _arm(runner, fault, "raise")
    life = runner.life
    if runner.wait(lambda: life.over, REACH_WITHIN):
        runner.hit(outcome, f"at {fault.point}")
        if life.error.get("kind") != "InjectedFault":
            outcome.hit, outcome.what = False, f"it ended before: {runner.complaint()}"
    else:
        disarm(runner, fault, outcome)


def _arm(runner: CaseRunner, fault: Fault, action: str) -> Driver:
    """Arm a point in the running life; a point of opening needs a new life."""
    spec = f"{fault.point}:{action}:{fault.visit}"
    if opens(fault.point):
        life = runner.life
        runner.driver.order(do="arm", fault=f"epoch.checked:{action}")
        if not runner.wait(lambda: life.over, REACH_WITHIN):
            end_driver(runner)
        runner.start_life(fault=spec)
    else:
        runner.driver.order(do="arm", fault=spec)
    return runner.driver


def _lost_commit(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    wait_at_random(runner, fault)
    end_driver(runner)
    names = []
    for query in runner.observer.lineages.folder().glob("*/commits"):
        numbers = [int(path.name) for path in query.iterdir() if path.name.isdigit()]
        for folder in ("commits", "offsets")[: 2 if fault.file == "offsets" else 1] * bool(numbers):
            (query.parent / folder / str(max(numbers))).unlink(missing_ok=True)
            (query.parent / folder / f".{max(numbers)}.crc").unlink(missing_ok=True)
            names.append(f"{query.parent.name}/{folder}/{max(numbers)}")
    if names:
        runner.hit(outcome, f"{', '.join(names)} deleted")
    else:
        outcome.what = "nothing was committed yet"


def _killed(runner: CaseRunner, outcome: FaultOutcome, what: str) -> None:
    driver = runner.driver
    runner.wait(lambda: driver.exit_code is not None, 10)
    code = driver.exit_code
    if code == -signal.SIGKILL:
        runner.hit(outcome, f"{what}")
    else:
        how = "was not killed" if code is None else f"{describe_exit(code)} before it was killed"
        outcome.what = f"the driver {how}"


# ---------------------------------------------------------------- the zombie


def _zombie(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    """Freeze the driver in the middle of a step; continue it after its successor has taken over."""
    zombie, life = runner.driver, runner.life
    folder = pause_driver(runner, fault, outcome)
    if folder is None:
        return
    zombie.signal_all(signal.SIGSTOP)
    runner.hit(outcome, f"driver {zombie.pid} at {fault.point}")
    runner.let_go()
    # As on another machine: the successor can't end the zombie.
    runner.host = f"host-{fault.number}"
    successor = _succeed(runner, fault, outcome, folder)
    (folder / "resume").touch()
    zombie.signal_all(signal.SIGCONT)
    if fault.wakes:  # while its successor waits; before the fence the zombie may publish
        before = runner.observer.progress()
        _wait_beside(runner, life, lambda: runner.observer.progress() != before, _AWAKE_FOR)
        (successor / "resume").touch()
        runner.start_recovery_clock(outcome)
    ended = _wait_beside(runner, life, lambda: False, _END_WITHIN)
    outcome.what += f"; it continued and ended as {life.error.get('kind', '-')}" if ended else ""
    if not ended:
        runner.violate(f"driver {zombie.pid} continues after its successor")
        zombie.end()
    runner.drivers.give_back(zombie)


def _succeed(runner: CaseRunner, fault: Fault, outcome: FaultOutcome, folder: Path) -> Path:
    """Start a successor and wait until it is where the zombie continues."""
    pausing = folder / "successor"
    pausing.mkdir()
    if fault.wakes:
        runner.start_life(fault=f"{fault.wakes}:pause:1:{pausing}", take_over=True)
        life = runner.life
        runner.wait(lambda: (pausing / "paused").exists() or life.over, _END_WITHIN)
    else:
        runner.start_life(take_over=True)
        runner.recover(outcome)
        # keep_epochs is 3: the old names are removed, or not yet.
        runner.wait_for_epochs(8 if fault.visit % 2 else 0)
    return pausing


def _wait_beside(runner: CaseRunner, life: Life, enough: Callable[[], bool], within: float) -> bool:
    """Wait, and read the events of the zombie meanwhile. Has its life ended?"""

    def heard() -> bool:
        life.read_events()
        return life.over or enough()

    runner.wait(heard, within)
    return life.over


# ---------------------------------------------------------------- tasks


def _wire(runner: CaseRunner, outcome: FaultOutcome, name: str) -> None:
    wires = runner.case.folder / "tripwires"
    (wires / name).touch()
    if runner.wait((wires.with_name("tripwires.hit") / name).exists, REACH_WITHIN):
        runner.hit(outcome, "a task")
        (wires.with_name("tripwires.hit") / name).unlink()
    else:
        (wires / name).unlink(missing_ok=True)
        outcome.what = "no task found it"


def _fail_task(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    if not fault.point:
        _wire(runner, outcome, f"fail-{fault.number}")
        return
    driver, folder = runner.driver, runner.case.folder / f"fault-{fault.number}"
    folder.mkdir()
    driver.order(do="arm-tasks", fault=f"{fault.point}:{fault.file}:{folder}")
    if runner.wait((folder / fault.point).exists, REACH_WITHIN):
        runner.hit(outcome, f"a task at {fault.point}, by {fault.file}")
    else:
        outcome.what = f"no task came to {fault.point}"
    driver.order(do="arm-tasks", fault="")


def _slow_task(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    _wire(runner, outcome, f"slow-{2 + fault.after:.1f}")


# ---------------------------------------------------------------- files


def _damage(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    """The driver must end with exit code 7. Then the file is put back."""
    wait_at_random(runner, fault)
    end_driver(runner)
    path = _victim(runner, fault.file)
    if path is None:
        outcome.what = f"there was no {fault.file} to damage"
        return
    with runner.observer.looking_away():
        good = path.read_bytes()
        at = len(good) * 2 // 3
        path.write_bytes(good[:at] if fault.kind == "truncate" else _flipped(good, at))
        runner.hit(outcome, f"{path.relative_to(runner.case.folder)}")
        runner.start_life()
        life = runner.life
        by_opening = fault.file not in ("manifest", "run")
        noticed = runner.wait(lambda: life.over or (by_opening and life.started), _END_WITHIN)
        if not noticed or life.code != _DAMAGED:
            said = runner.complaint() if life.error else "it started"
            runner.violate(f"{outcome.what}: {said}", "unnoticed")
        else:
            outcome.what += f"; {life.error['kind']}, exit code {life.code}"
        if not life.over:
            end_driver(runner)
        path.write_bytes(good)
        runner.forget_life()
        runner.start_recovery_clock(outcome)


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def _victim(runner: CaseRunner, what: str) -> Path | None:
    """A file that opening reads (the newest entry of the epoch log, the newest commit of a target,
    the document of the lineage), or a file of keyed state, which the next epoch reads."""
    lineage = runner.observer.lineages.folder()
    if what in ("manifest", "run"):
        return _keyed_victim(runner, lineage, what)
    if what == "lineage":
        found = list(lineage.glob("lineage.json"))
    elif what == "commit":
        folders = [Path(t.path) / "_commits" for t in runner.case.targets if t.is_folder]
        found = [path for folder in folders for path in folder.glob("0*.json")]
    else:
        found = list(lineage.glob("*/onceflow/log/0*.json"))
    if not found and what == "commit":
        return _victim(runner, "decision")
    return max(found, key=lambda path: path.name, default=None)


def _keyed_victim(runner: CaseRunner, lineage: Path, what: str) -> Path | None:
    """A file of the state that the next epoch reads."""
    with runner.observer.looking_away():
        runner.observer.poll()
    for query in runner.case.queries:
        decided = runner.observer.last(query)
        for step, said in decided.keyed.items() if decided is not None else ():
            folder = lineage / query / "onceflow" / "keyed" / step
            manifest = folder / str(said["manifest"])
            if what == "manifest":
                return manifest
            names = [str(entry["run"]["name"]) for entry in body(manifest)["entries"]]
            return folder / names[0] if names else None
    return None


def _full_disk(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    wait_at_random(runner, fault)
    ballast = runner.case.folder / "ballast"
    life, feed = runner.life, runner.feed
    retried = feed.retried
    with runner.observer.looking_away():  # SQLite cannot read a database on a full disk
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while shutil.disk_usage(runner.case.folder).free:
                file.write(b"\0" * 65536)
        runner.hit(outcome, "")
        runner.wait(lambda: life.over, 10.0)
        ballast.unlink()
    runner.start_recovery_clock(outcome)
    outcome.hit = life.over or feed.retried > retried
    ended = runner.complaint() if life.over else "the driver waited"
    outcome.what = f"{ended}; {feed.retried - retried} appends repeated"


_ACTS: dict[str, Callable[[CaseRunner, Fault, FaultOutcome], None]] = {
    "kill-driver": _kill_driver,
    "kill-jvm": _kill_jvm,
    "kill-worker": _kill_worker,
    "kill-executor": _kill_executor,
    "kill-point": _kill_point,
    "lost-commit": _lost_commit,
    "raise-point": _raise_point,
    "zombie": _zombie,
    "fail-task": _fail_task,
    "slow-task": _slow_task,
    "truncate": _damage,
    "flip": _damage,
    "full-disk": _full_disk,
    **snapshot_faults.ACTS,
    **server_faults.ACTS,
}
