"""Children of the demo: what they say, who belongs to them, and how to end all or some of them."""

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onceflow.service.error_report import describe_exit
from onceflow.service.process_tree import GONE_WITHIN, adopt_orphans, family, wait_for

Event = dict[str, Any]
RUN = "onceflow run"  # what the first process of a job is called
DRIVER, JVM, WORKER = "driver", "JVM", "worker"
_CHILD = [sys.executable, "-u", "-m", "onceflow.demo.child"]


@dataclass(frozen=True)
class Ended:
    """A process that was ended. `how` is empty where only its parent is told."""

    pid: int
    what: str
    how: str


class Child:
    """`arguments` (of `onceflow.demo.child`) in the background, in a session of its own: Ctrl-C is
    for us. Leaving the block ends it and all that it started. Start it in the main thread: it ends
    with the thread that has started it.
    """

    def __init__(
        self,
        what: str,
        arguments: list[str],
        *,
        folder: Path,
        said: Path,
        environment: Mapping[str, str],
    ) -> None:
        """`what` it is called; `said`: the file of what it says on standard error."""
        adopt_orphans()
        said.parent.mkdir(exist_ok=True)
        self.what, self._said = what, said
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._orphans: dict[int, str] = {}  # pid -> when it was born: another may get its number
        with said.open("ab") as errors:
            self._process = subprocess.Popen(
                [*_CHILD, str(os.getpid()), *arguments],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join(GONE_WITHIN)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._said.exists() and self._said.stat().st_size == 0:
            self._said.unlink()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # the half line of a process that was killed
                self._events.put(json.loads(line))

    # -------------------------------------------------------------- hearing

    @property
    def pid(self) -> int:
        return self._process.pid

    def events(self) -> Iterator[Event]:
        """What it has said since."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def ended(self) -> bool:
        """It has ended, and all that it said can be heard."""
        self._reap()
        return self._process.poll() is not None and not self._reader.is_alive()

    def gone(self) -> bool:
        """Its first process has ended."""
        return self._process.poll() is not None

    @property
    def code(self) -> int:
        return self._process.wait()

    def how_it_ended(self) -> str:
        return f"{self.what} {describe_exit(self.code)}; what it said is in {self._said}"

    def family(self, driver: int | None = None) -> dict[int, str]:
        """pid -> what, of all that it has started, parents first; empty where there is no /proc."""
        return {
            pid: DRIVER if pid == driver else what
            for pid, what in family({self._process.pid}).items()
        }

    # -------------------------------------------------------------- ending

    def stop(self) -> None:
        """SIGTERM. A job stops at the end of the running epoch."""
        self._process.terminate()

    def kill(self, driver: int | None = None) -> list[Ended]:
        """`kill -9` of it and of all that it has started, all at once."""
        if self._process.returncode is not None:
            return self._kill_orphans()
        alive = self.family(driver)
        self._process.kill()  # first: it would start the driver again
        if driver is not None:
            _signal_group(driver, signal.SIGKILL)
        ended = [Ended(self._process.pid, self.what, "")]
        while alive:
            for pid in alive:
                _signal(pid, signal.SIGKILL)
            self._process.wait()
            # Parents first: their end makes us the parent of their children.
            ended += [Ended(pid, what, wait_for(pid)) for pid, what in alive.items()]
            alive = family({process.pid for process in ended})  # born meanwhile
        ended[0] = replace(ended[0], how=describe_exit(self._process.wait()))
        return [*ended, *self._kill_orphans()]

    def kill_alone(self, pid: int, what: str) -> Ended:
        """`kill -9` of one process of the family. What it leaves ends by itself, or is started
        again by its parent; if all else fails it is ended with the rest."""
        self._orphans |= {one: _born(one) for one in self.family()}
        _signal(pid, signal.SIGKILL)
        how = describe_exit(self._process.wait()) if pid == self._process.pid else ""
        return Ended(pid, what, how)

    def _kill_orphans(self) -> list[Ended]:
        """What a kill of one process has left, if it is still there."""
        self._reap()
        left, self._orphans = list(self._orphans), {}
        for pid in left:
            _signal(pid, signal.SIGKILL)
        return [Ended(pid, WORKER, wait_for(pid)) for pid in left]

    def _reap(self) -> None:
        """Orphans that have ended wait for us, who have adopted them, to hear of it."""
        for pid, born in list(self._orphans.items()):
            with contextlib.suppress(ChildProcessError):  # not ours yet, or not any more
                os.waitpid(pid, os.WNOHANG)
            if _born(pid) != born:
                del self._orphans[pid]


@contextlib.contextmanager
def frozen(driver: int) -> Iterator[None]:
    """The driver and its JVM stand still, so that what is seen of them stays true."""
    _signal_group(driver, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal_group(driver, signal.SIGCONT)


def _born(pid: int) -> str:
    """When the kernel started the process, in ticks; empty: it is gone, or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
