"""Ask a driver to stop at an epoch's end, from any machine that sees the home of its job.

<home>/<job>/stop/<lock>.json         asks the driver that holds this lock to stop
<home>/<job>/stop/<lock>.done.json    that driver's answer

A request names the lock of one start, which no other start has, so it never stops a later one. The
driver looks for it twice a second, stops as by `Handle.stop`, answers, removes the request, and
only then gives its lease back. The next start removes what older starts left.

A run that waits to start its driver again (a server is away) has no driver. For that time it holds
a lock of its own, `stop/<lock>`, and a request names that lock.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.errors import NotStopped
from onceflow.protocol.home import JobFolder, now
from onceflow.protocol.lease import Holder, Lease, host_name
from onceflow.store.posix import LocalStore, make_dirs, seal, unseal

_FOLDER, _KIND, _DONE = "stop", "stop", ".done.json"
_LOOK_EVERY = 0.5  # seconds, by the driver
_POLL = 0.1  # seconds, by the command that waits
_TELL_EVERY = 5.0  # seconds


def who() -> str:
    """The user and the machine of a command, as snapshots record them."""
    try:
        return f"{getpass.getuser()}@{host_name()}"
    except (KeyError, OSError):  # a user without a name
        return host_name()


class StopRequest:
    """A request to stop one start of a job, for its driver and for the command that asks."""

    def __init__(self, folder: Path, lock: str) -> None:
        self._store = LocalStore(folder / _FOLDER)
        self._lock = lock.removesuffix(".lock")
        self._path = folder / _FOLDER / f"{self._lock}.json"
        self._look_at = 0.0

    # -------------------------------------------------------------- the command

    def ask(self) -> None:
        self._store.put_if_absent(
            self._path.name, seal(_KIND, self._lock, {"at": now(), "by": who()})
        )

    def answer(self) -> dict[str, Any] | None:
        """The driver's answer. None if it has not stopped yet."""
        name = self._lock + _DONE
        data = self._store.read(name)
        if data is None:
            return None
        return unseal(data, _KIND, self._lock, self._store.where(name))

    # -------------------------------------------------------------- the driver

    def begin(self) -> None:
        """Remove requests to other starts."""
        for name in self._store.list():
            if not name.startswith(self._lock):
                self._store.delete(name)
        self._store.sweep()

    def heard(self) -> bool:
        """Is there a request? Cheap, so it may be called often."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_EVERY
        return self._path.exists()

    def say(self, queries: Mapping[str, int | None], failure: BaseException | None) -> bool:
        """Answer that all queries have stopped. False if there is no request."""
        if not self._path.exists():
            return False
        said = {
            "at": now(), "queries": dict(queries),
            "failure": None if failure is None else str(failure),
        }  # fmt: skip
        self._store.put_if_absent(self._lock + _DONE, seal(_KIND, self._lock, said))
        self._store.delete(self._path.name)
        return True


class WaitingRun:
    """A run that waits to start its driver again. It can be asked to stop until this is closed."""

    def __init__(self, folder: Path) -> None:
        make_dirs(folder / _FOLDER)
        self._path = folder / _FOLDER / f"{uuid.uuid4().hex}.lock"
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._request = StopRequest(folder, self._path.name)

    def heard(self) -> bool:
        return self._request.heard()

    def close(self) -> bool:
        """End the wait. True if there was a request, which is answered now."""
        asked = self._request.say({}, None)
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        return asked


def lock_of_waiting_run(folder: Path) -> str | None:
    """The lock of a run that waits to start its driver again, if there is one."""
    for path in sorted((folder / _FOLDER).glob("*.lock")):
        if _locked(path):
            return path.name
    return None


def _locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)  # reading needs no right to write
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@dataclass(frozen=True)
class StopResult:
    """The state of a job that no longer runs."""

    ran: bool
    holder: Holder | None  # the driver that was stopped
    queries: dict[str, int | None]  # the epoch that each decided last


def stop(folder: JobFolder, *, timeout: float, tell: Callable[[str], None]) -> StopResult:
    """Ask the driver of a job to stop at an epoch's end, and wait. `NotStopped` if it does not.

    `tell` is called with a line that says what the command waits for.
    """
    lease = Lease(folder.folder / "lease", folder.name)
    holder = lease.holder()
    if holder is not None and not leads(lease, holder):
        holder = None
    lock = holder.lock if holder is not None else lock_of_waiting_run(folder.folder)
    if lock is None:
        return StopResult(False, None, decided(folder))
    who = str(holder) if holder is not None else "the run, which waits to start its driver again,"
    request = StopRequest(folder.folder, lock)
    request.ask()
    tell(f"asked {who} to stop" + ("; waiting for the end of its epoch" if holder else ""))
    begun = told_at = time.monotonic()
    while leads(lease, holder) if holder is not None else _locked(folder.folder / _FOLDER / lock):
        waited = time.monotonic() - begun
        if waited > timeout:
            raise _too_long(folder, holder, waited)
        if time.monotonic() - told_at > _TELL_EVERY:
            told_at = time.monotonic()
            tell(f"still waiting after {waited:.0f} s; {_says(decided(folder))}")
        time.sleep(_POLL)
    answer = request.answer()
    if answer is None:
        raise NotStopped(
            f"{who} ended without an answer: it failed, was killed, was replaced or continued",
            hint=f"onceflow status {folder.name} says whether it runs again; if so, stop it again",
        )
    if answer["failure"] is not None:
        raise NotStopped(
            f"{who} has ended, but failed while it stopped: {answer['failure']}",
            hint="nothing is lost; the next start publishes what was decided",
        )
    return StopResult(True, holder, answer["queries"] or decided(folder))


def leads(lease: Lease, holder: Holder) -> bool:
    """Does the driver run and hold its lease? (A returned lease shows on every machine.)"""
    return (lease.folder / holder.lock).exists() and lease.alive(holder)


def decided(folder: JobFolder) -> dict[str, int | None]:
    """Query -> the epoch that it decided last."""
    last = {query.name: query.epoch_log().read().last for query in folder.queries()}
    return {name: None if d is None else d.epoch for name, d in last.items()}


def _says(queries: Mapping[str, int | None]) -> str:
    return "decided last: " + ", ".join(
        f"{name} {'nothing' if epoch is None else f'epoch {epoch:,}'}"
        for name, epoch in queries.items()
    )


def _too_long(folder: JobFolder, holder: Holder | None, waited: float) -> NotStopped:
    longer = f"wait longer: onceflow stop {folder.name} --timeout {max(600, round(4 * waited))}"
    if holder is None:
        return NotStopped(f"the run has not ended within {waited:.0f} s", hint=longer)
    end = f"kill -9 {holder.pid}"
    if holder.host != host_name():
        end += f" on {holder.host}"
    return NotStopped(
        f"{holder} has not stopped within {waited:.0f} s; it will when its epoch ends",
        hint=f"{longer}; or end it at once, which loses nothing: {end}",
    )
