"""The lease of a job: which driver leads it, and with which term.

A driver takes a term by put-if-absent of `lease/<term>.json`, which names its holder; the highest
term leads. Each holder locks a file of its own, and the kernel releases the lock when the process
ends: so others see whether it is alive. The lease keeps two drivers from working at the same time
by accident. It does not make that safe: a paused driver may wake up after it has lost the lease.
The terms in the epoch log and in every ledger make it safe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from onceflow.errors import Fenced, LeaseHeld
from onceflow.protocol.home import now
from onceflow.store.posix import LocalStore, make_dirs, seal, unseal

_KIND = "lease"


def host_name() -> str:
    return os.environ.get("ONCEFLOW_HOST") or socket.gethostname()


@dataclass(frozen=True)
class Holder:
    """The driver that took a term."""

    term: int
    pid: int
    host: str
    started: str  # when the process began, so that a reused pid is not mistaken for it
    since: str
    lock: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} (term {self.term})"


class Lease:
    """The right of this process to lead one job. Hold it as long as a query runs."""

    def __init__(self, folder: Path, job: str) -> None:
        self.folder = folder
        self.job = job
        self._store = LocalStore(folder)
        self._lock = f"{uuid.uuid4().hex}.lock"
        self._fd: int | None = None
        self._known: Holder | None = None

    @property
    def lock(self) -> str:
        """The name of our lock file, unique for each start: see `Holder.lock`."""
        return self._lock

    def acquire(self, *, take_over: bool = False) -> None:
        """Refuse while another driver leads. With `take_over`, end that driver instead."""
        make_dirs(self.folder)
        holder = self.holder()
        if holder is not None and self.alive(holder):
            if not take_over:
                raise self._held(holder)
            self._end(holder)
        self._known = holder
        while self._fd is None:
            self._fd = self._try_lock()

    def _try_lock(self) -> int | None:
        """None if a driver that prunes took the new file for that of a dead driver: try again."""
        path = self.folder / self._lock
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)
        return None

    def next_term(self, above: int) -> int:
        """Take a term above every term seen, atomically."""
        assert self._fd is not None
        while True:
            highest = self.holder()
            if highest is not None and highest != self._known:
                raise self._held(highest)  # another driver was faster
            term = max(above, highest.term if highest else 0) + 1
            holder = Holder(
                term, os.getpid(), host_name(), _started(os.getpid()), now(), self._lock
            )
            if self._store.put_if_absent(_name(term), seal(_KIND, self.job, asdict(holder))):
                break
        newest = self.holder()
        if newest != holder:  # a newer driver had freed the name: we won nothing
            raise Fenced(f"job {self.job} is led by {newest}", hint="start again")
        self._known = holder
        self._prune(term)
        return term

    def holder(self) -> Holder | None:
        """The driver that took the highest term, dead or alive."""
        while True:
            terms = [_term(name) for name in self._store.list() if _term(name)]
            if not terms:
                return None
            data = self._store.read(_name(max(terms)))
            if data is not None:
                where = self._store.where(_name(max(terms)))
                return Holder(**unseal(data, _KIND, self.job, where))

    def alive(self, holder: Holder) -> bool:
        """Is this driver alive? One on another machine cannot be checked and counts as alive."""
        return holder.host != host_name() or not self._dead(holder.lock)

    def _dead(self, lock: str, *, remove: bool = False) -> bool:
        """Is the lock free? A shared lock, so that two processes that check do not see each
        other."""
        try:
            fd = os.open(self.folder / lock, os.O_RDONLY)  # readers without write access check, too
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if remove:  # while we hold it: nobody can lock a file that is about to go
                (self.folder / lock).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def release(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / self._lock).unlink()
            os.close(self._fd)
            self._fd = None

    def _held(self, holder: Holder) -> LeaseHeld:
        return LeaseHeld(
            f"job {self.job} is led by {holder}",
            hint="stop it there, or start with --take-over (take_over=True) to end and replace it",
        )

    def _end(self, holder: Holder) -> None:
        """Kill the holder if we can. If we cannot, the fence shuts it out."""
        if holder.host != host_name() or holder.pid == os.getpid():
            return
        if holder.started and _started(holder.pid) != holder.started:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(holder.pid, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while self.alive(holder) and time.monotonic() < deadline:
                time.sleep(0.02)

    def _prune(self, term: int) -> None:
        for name in self._store.list():
            if 0 < _term(name) < term:
                self._store.delete(name)
            elif name.endswith(".lock") and name != self._lock:
                self._dead(name, remove=True)
        self._store.sweep()


def _name(term: int) -> str:
    return f"{term:012d}.json"


def _term(name: str) -> int:
    stem = name.removesuffix(".json")
    return int(stem) if stem != name and stem.isdecimal() else 0


def _started(pid: int) -> str:
    """When the kernel started the process, in ticks; empty where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
