"""Carries out the faults of a schedule on a play. What each one is, `schedule.KINDS` says."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from onceflow.harness import server_faults, snapshot_faults
from onceflow.harness.checker import Violation
from onceflow.harness.drivers import Driver, Life
from onceflow.harness.play import Play, Struck
from onceflow.harness.reaching import REACH_WITHIN, at_work, disarm, end_now, epoch, stand_still
from onceflow.harness.schedule import Fault, opens
from onceflow.harness.targets import body
from onceflow.service.error_report import describe_exit
from onceflow.service.process_tree import processes

_END_WITHIN = 120.0  # seconds until a driver has ended whose JVM is gone, or that was fenced
_AWAKE_FOR = 8.0  # seconds that a zombie has before its successor goes on
_DAMAGED = 7


def strike(play: Play, fault: Fault, struck: Struck) -> None:
    """Returns when the fault has struck, or could not. The play waits for the recovery."""
    _ACTS[fault.kind](play, fault, struck)


# ---------------------------------------------------------------- kills


def _kill_driver(play: Play, fault: Fault, struck: Struck) -> None:
    at_work(play, fault)
    assert play.driver is not None
    os.kill(play.driver.pid, signal.SIGKILL)
    _killed(play, struck, f"driver {play.driver.pid}")


def _kill_jvm(play: Play, fault: Fault, struck: Struck) -> None:
    at_work(play, fault)
    driver = play.driver
    assert driver is not None
    assert driver.jvm is not None
    os.kill(driver.jvm, signal.SIGKILL)
    play.hit(struck, f"JVM {driver.jvm}, after epoch {epoch(play)}")
    if not play.wait(lambda: driver.exit_code is not None, _END_WITHIN):
        play.violations.append(
            Violation("stuck", play.case.name, f"driver {driver.pid} does not notice its JVM's end")
        )
        driver.end()


def _kill_worker(play: Play, fault: Fault, struck: Struck) -> None:
    at_work(play, fault)
    assert play.driver is not None
    workers = play.driver.workers()
    play.driver.spent = True
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if workers:
        play.hit(struck, f"{len(workers)} Python workers, after epoch {epoch(play)}")
        play.wait_for_epochs(1)  # it may be one that needed them no more; the next one does
    else:
        struck.what = "there were no Python workers"


def _kill_executor(play: Play, fault: Fault, struck: Struck) -> None:
    at_work(play, fault)
    pids = executors(play)
    if pids:
        os.kill(pids[0], signal.SIGKILL)
        play.hit(struck, f"executor {pids[0]}, after epoch {epoch(play)}")
    else:
        struck.what = "there was no executor"


def executors(play: Play) -> list[int]:
    """The executors that work for the driver of the play now."""
    found = []
    assert play.driver is not None
    for pid, (_, _, name) in processes().items():
        if name == "java":
            with suppress(OSError):
                said = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "--driver-url" in said and play.driver.serves(
                    said[said.index("--driver-url") + 1]
                ):
                    found.append(pid)
    return found


def _kill_point(play: Play, fault: Fault, struck: Struck) -> None:
    driver = _arm(play, fault, "kill")
    if play.wait(lambda: driver.exit_code is not None, REACH_WITHIN):
        _killed(play, struck, f"driver {driver.pid} at {fault.point}")
    else:
        disarm(play, fault, struck)


def _raise_point(play: Play, fault: Fault, struck: Struck) -> None:
    _arm(play, fault, "raise")
    life = play.life
    assert life is not None
    if play.wait(lambda: life.over, REACH_WITHIN):
        play.hit(struck, f"at {fault.point}, after epoch {epoch(play)}")
        if life.error.get("kind") != "InjectedFault":
            struck.hit, struck.what = False, f"it ended before: {play.complaint()}"
    else:
        disarm(play, fault, struck)


def _arm(play: Play, fault: Fault, action: str) -> Driver:
    """In the life that runs; a point of opening needs a new one."""
    spec = f"{fault.point}:{action}:{fault.visit}"
    if opens(fault.point):
        life = play.life
        assert play.driver is not None
        assert life is not None
        play.driver.order(do="arm", fault=f"epoch.checked:{action}")
        if not play.wait(lambda: life.over, REACH_WITHIN):
            end_now(play)
        play.start_life(fault=spec)
    else:
        assert play.driver is not None
        play.driver.order(do="arm", fault=spec)
    assert play.driver is not None
    return play.driver


def _lost_commit(play: Play, fault: Fault, struck: Struck) -> None:
    at_work(play, fault)
    end_now(play)
    names = []
    for query in play.observer.lineages.folder().glob("*/commits"):
        numbers = [int(path.name) for path in query.iterdir() if path.name.isdigit()]
        for folder in ("commits", "offsets")[: 2 if fault.file == "offsets" else 1] * bool(numbers):
            (query.parent / folder / str(max(numbers))).unlink(missing_ok=True)
            (query.parent / folder / f".{max(numbers)}.crc").unlink(missing_ok=True)
            names.append(f"{query.parent.name}/{folder}/{max(numbers)}")
    if names:
        play.hit(struck, f"{', '.join(names)} deleted, after epoch {epoch(play)}")
    else:
        struck.what = "nothing was committed yet"


def _killed(play: Play, struck: Struck, what: str) -> None:
    driver = play.driver
    assert driver is not None
    play.wait(lambda: driver.exit_code is not None, 10)
    code = driver.exit_code
    if code == -signal.SIGKILL:
        play.hit(struck, f"{what}, after epoch {epoch(play)}")
    else:
        how = "was not killed" if code is None else f"{describe_exit(code)} before it was killed"
        struck.what = f"the driver {how}"


# ---------------------------------------------------------------- the zombie


def _zombie(play: Play, fault: Fault, struck: Struck) -> None:
    """Frozen in the middle of a step; it wakes up when its successor has freed old names."""
    zombie, life = play.driver, play.life
    assert zombie is not None
    assert life is not None
    folder = stand_still(play, fault, struck)
    if folder is None:
        return
    zombie.signal_all(signal.SIGSTOP)
    play.hit(struck, f"driver {zombie.pid} at {fault.point}, after epoch {epoch(play)}")
    play.driver = play.life = None
    play.host = f"host-{fault.number}"  # on another machine: it can't end it
    successor = _succeed(play, fault, struck, folder)
    (folder / "resume").touch()
    zombie.signal_all(signal.SIGCONT)
    if fault.wakes:  # while its successor stands still; before a fence it may well go on
        before = play.observer.progress()
        _wait_beside(play, life, lambda: play.observer.progress() != before, _AWAKE_FOR)
        (successor / "resume").touch()
        play.mended(struck)
    ended = _wait_beside(play, life, lambda: False, _END_WITHIN)
    struck.what += f"; it woke up and ended as {life.error.get('kind', '-')}" if ended else ""
    if not ended:
        play.violations.append(
            Violation("stuck", play.case.name, f"driver {zombie.pid} goes on after its successor")
        )
        zombie.end()
    play.drivers.give_back(zombie)


def _succeed(play: Play, fault: Fault, struck: Struck, folder: Path) -> Path:
    """A successor, up to the point at which the zombie is to wake up."""
    pausing = folder / "successor"
    pausing.mkdir()
    if fault.wakes:
        play.start_life(fault=f"{fault.wakes}:pause:1:{pausing}", take_over=True)
        life = play.life
        assert life is not None
        play.wait(lambda: (pausing / "paused").exists() or life.over, _END_WITHIN)
    else:
        play.start_life(take_over=True)
        play.recover(struck)
        play.wait_for_epochs(8 if fault.visit % 2 else 0)  # keep_epochs is 3: long pruned, or not
    return pausing


def _wait_beside(play: Play, life: Life, enough: Callable[[], bool], within: float) -> bool:
    """Listen to the zombie, too: has its life ended?"""

    def heard() -> bool:
        life.hear()
        return life.over or enough()

    play.wait(heard, within)
    return life.over


# ---------------------------------------------------------------- tasks


def _wire(play: Play, struck: Struck, name: str) -> None:
    wires = play.case.folder / "tripwires"
    (wires / name).touch()
    if play.wait((wires.with_name("tripwires.hit") / name).exists, REACH_WITHIN):
        play.hit(struck, f"a task after epoch {epoch(play)}")
        (wires.with_name("tripwires.hit") / name).unlink()
    else:
        (wires / name).unlink(missing_ok=True)
        struck.what = "no task found it"


def _fail_task(play: Play, fault: Fault, struck: Struck) -> None:
    if not fault.point:
        _wire(play, struck, f"fail-{fault.number}")
        return
    driver, folder = play.driver, play.case.folder / f"fault-{fault.number}"
    assert driver is not None
    folder.mkdir()
    driver.order(do="arm-tasks", fault=f"{fault.point}:{fault.file}:{folder}")
    if play.wait((folder / fault.point).exists, REACH_WITHIN):
        play.hit(struck, f"a task at {fault.point}, by {fault.file}, after epoch {epoch(play)}")
    else:
        struck.what = f"no task came to {fault.point}"
    driver.order(do="arm-tasks", fault="")


def _slow_task(play: Play, fault: Fault, struck: Struck) -> None:
    _wire(play, struck, f"slow-{2 + fault.after:.1f}")


# ---------------------------------------------------------------- files


def _damage(play: Play, fault: Fault, struck: Struck) -> None:
    """The right outcome is a clear error. Then the file is put back."""
    at_work(play, fault)
    end_now(play)
    path = _victim(play, fault.file)
    if path is None:
        struck.what = f"there was no {fault.file} to damage"
        return
    with play.observer.looking_away():
        good = path.read_bytes()
        at = len(good) * 2 // 3
        path.write_bytes(good[:at] if fault.kind == "truncate" else _flipped(good, at))
        play.hit(struck, f"{path.relative_to(play.case.folder)}, after epoch {epoch(play)}")
        play.start_life()
        life = play.life
        assert life is not None
        by_opening = fault.file not in ("manifest", "run")
        noticed = play.wait(lambda: life.over or (by_opening and life.started), _END_WITHIN)
        if not noticed or life.code != _DAMAGED:
            said = play.complaint() if life.error else "it started"
            play.violations.append(Violation("unnoticed", play.case.name, f"{struck.what}: {said}"))
        else:
            struck.what += f"; {life.error['kind']}, exit code {life.code}"
        if not life.over:
            end_now(play)
        path.write_bytes(good)
        play.life = None
        play.mended(struck)


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def _victim(play: Play, what: str) -> Path | None:
    """A file that opening reads: the newest entry of the epoch log, the newest commit of a target,
    the document of the lineage. Or one that the next epoch reads: of keyed state."""
    lineage = play.observer.lineages.folder()
    if what in ("manifest", "run"):
        return _keyed_victim(play, lineage, what)
    if what == "lineage":
        found = list(lineage.glob("lineage.json"))
    elif what == "commit":
        folders = [Path(t.path) / "_commits" for t in play.case.targets if t.is_folder]
        found = [path for folder in folders for path in folder.glob("0*.json")]
    else:
        found = list(lineage.glob("*/onceflow/log/0*.json"))
    if not found and what == "commit":
        return _victim(play, "decision")
    return max(found, key=lambda path: path.name, default=None)


def _keyed_victim(play: Play, lineage: Path, what: str) -> Path | None:
    """Of the state that the next epoch begins with."""
    with play.observer.looking_away():
        play.observer.poll()
    for query in play.case.queries:
        decided = play.observer.last(query)
        for step, said in decided.keyed.items() if decided is not None else ():
            folder = lineage / query / "onceflow" / "keyed" / step
            manifest = folder / str(said["manifest"])
            if what == "manifest":
                return manifest
            names = [str(entry["run"]["name"]) for entry in body(manifest)["entries"]]
            return folder / names[0] if names else None
    return None


def _full_disk(play: Play, fault: Fault, struck: Struck) -> None:
    at_work(play, fault)
    ballast = play.case.folder / "ballast"
    life, feed = play.life, play.feed
    assert life is not None
    assert feed is not None
    retried = feed.retried
    with play.observer.looking_away():  # SQLite cannot read a database without any space
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while shutil.disk_usage(play.case.folder).free:
                file.write(b"\0" * 65536)
        play.hit(struck, "")
        play.wait(lambda: life.over, 10.0)
        ballast.unlink()
    play.mended(struck)
    struck.hit = life.over or feed.retried > retried
    ended = play.complaint() if life.over else "the driver waited"
    struck.what = f"{ended}; {feed.retried - retried} appends tried again"


_ACTS: dict[str, Callable[[Play, Fault, Struck], None]] = {
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
