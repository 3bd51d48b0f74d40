"""Child processes of a run: what they say, what belongs to them, and how they are ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.service.error_report import describe_exit
from onceflow.service.process_tree import GONE_WITHIN, adopt_orphans, descendants, wait_for

Event = dict[str, Any]
DRIVER, JVM, WORKER = "driver", "JVM", "worker"


@dataclass(frozen=True)
class Ended:
    """A process that was ended. `how` is empty where only its parent is told."""

    pid: int
    what: str
    how: str


class Child:
    """A Python process in the background, in a session of its own: Ctrl-C reaches only us.

    It writes events to standard output, one JSON document a line. Leaving the block ends it and
    all that it started. Start it in the main thread: it ends with the thread that started it.
    """

    def __init__(
        self,
        what: str,
        arguments: list[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        """`what`: its name for people. `arguments`: of `onceflow.harness.child`. `log` gets its
        standard error. It imports modules from `folder`. `options`: of Python."""
        adopt_orphans()
        log.parent.mkdir(exist_ok=True)
        self.what, self.log = what, log
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._orphans: dict[int, str] = {}  # pid -> when it was born: another may get its number
        run = [sys.executable, *options, "-u", "-m", "onceflow.harness.child", str(os.getpid())]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*run, *arguments],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # the half line of a process that was killed
                event = json.loads(line)
                self._note(event)
                self._events.put(event)

    def _note(self, event: Event) -> None:
        """Called by the thread that reads, before anybody else sees the event."""

    # -------------------------------------------------------------- hearing

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As `subprocess` gives it, -9 for `kill -9`; None while the process runs."""
        return self._process.poll()

    def events(self) -> Iterator[Event]:
        """What it has said since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def has_ended(self) -> bool:
        """The process has ended, and all that it said can be heard."""
        self._reap()
        return self.exit_code is not None and not self._reader.is_alive()

    def how_it_ended(self) -> str:
        return f"{self.what} {describe_exit(self._process.wait())}; what it said is in {self.log}"

    def descendants(self, driver: int | None = None) -> dict[int, str]:
        """pid -> what, of all that it has started, parents first; empty where there is no /proc."""
        return {
            pid: DRIVER if pid == driver else what for pid, what in descendants({self.pid}).items()
        }

    # -------------------------------------------------------------- ending

    def stop(self) -> None:
        """SIGTERM. A job stops at the end of the running epoch."""
        self._process.terminate()

    def end(self) -> None:
        """Kill it and all that it started, and release what we hold of it."""
        self.kill()
        self._reader.join(GONE_WITHIN)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if self.log.exists() and self.log.stat().st_size == 0:
            self.log.unlink()

    def kill(self, driver: int | None = None) -> list[Ended]:
        """`kill -9` of it and of all that it has started, all at once."""
        runs = self.exit_code is None
        alive, ended = self.descendants(driver), list[Ended]()
        if runs:
            self._process.kill()  # first: it would start the driver again
            if driver is not None:
                signal_group(driver, signal.SIGKILL)
            ended.append(Ended(self.pid, self.what, describe_exit(self._process.wait())))
        while alive:
            for pid in alive:
                _signal(pid, signal.SIGKILL)
            # Parents first: their end makes us the parent of their children.
            ended += [Ended(pid, what, wait_for(pid)) for pid, what in alive.items()]
            alive = descendants({self.pid, *(process.pid for process in ended)})  # born meanwhile
        return [*ended, *self._kill_orphans()]

    def kill_alone(self, pid: int, what: str) -> Ended:
        """`kill -9` of one of these processes. What it leaves ends by itself, or is started
        again by its parent; if all else fails it is ended with the rest."""
        self._orphans |= {one: _born(one) for one in self.descendants()}
        _signal(pid, signal.SIGKILL)
        return Ended(pid, what, describe_exit(self._process.wait()) if pid == self.pid else "")

    def signal_all(self, number: signal.Signals) -> None:
        """To its group, and to its descendants, of which some have groups of their own."""
        signal_group(self.pid, number)
        for pid in self.descendants():
            _signal(pid, number)

    def _kill_orphans(self) -> list[Ended]:
        """What the kill of one process has left, if it is still there."""
        self._reap()
        left, self._orphans = list(self._orphans), {}
        for pid in left:
            _signal(pid, signal.SIGKILL)
        return [Ended(pid, WORKER, wait_for(pid)) for pid in left]

    def _reap(self) -> None:
        """We have adopted the orphans, and must wait for those that have ended."""
        for pid, born in list(self._orphans.items()):
            with contextlib.suppress(ChildProcessError):  # not ours yet, or no longer ours
                os.waitpid(pid, os.WNOHANG)
            if _born(pid) != born:
                del self._orphans[pid]


@contextlib.contextmanager
def frozen(driver: int) -> Iterator[None]:
    """The driver and its JVM stand still, so that what is seen of them stays true."""
    signal_group(driver, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_group(driver, signal.SIGCONT)


def signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _born(pid: int) -> str:
    """When the kernel started the process, in ticks; empty if it is gone or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
