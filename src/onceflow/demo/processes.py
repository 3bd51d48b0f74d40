"""`onceflow run` as a child of the demo: what it says, who belongs to it, and how to end it all."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onceflow.runtime.complaint import death
from onceflow.runtime.family import (
    GONE_WITHIN,
    adopt_orphans,
    family,
    scratch_environment,
    wait_for,
)

Event = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """A process that was ended. `how` is empty where only its parent is told."""

    pid: int
    what: str
    how: str


class Run:
    """`onceflow run …` in the background. Leaving the block ends it and all that it started."""

    def __init__(self, command: list[str], folder: Path, scratch: Path) -> None:
        adopt_orphans()
        scratch.mkdir(exist_ok=True)
        self._said = folder / "run.err"
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        with self._said.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=scratch_environment(scratch),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for us
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join(GONE_WITHIN)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._said.stat().st_size == 0:
            self._said.unlink()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # the half line of a process that was killed
                self._events.put(json.loads(line))

    def events(self) -> Iterator[Event]:
        """What it has said since."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def ended(self) -> bool:
        """It has ended, and all that it said can be heard."""
        return self._process.poll() is not None and not self._reader.is_alive()

    @property
    def code(self) -> int:
        return self._process.wait()

    def how_it_ended(self) -> str:
        return f"onceflow run {death(self.code)}; what it said is in {self._said}"

    def stop(self) -> None:
        """At the end of the running epoch."""
        self._process.terminate()

    def kill(self, driver: int | None = None) -> list[Ended]:
        """`kill -9` of the supervisor, the driver, its JVM and its Python workers, all at once."""
        if self._process.returncode is not None:
            return []
        alive = family({self._process.pid})
        self._process.kill()  # first: it would start the driver again
        if driver is not None:
            _signal_group(driver, signal.SIGKILL)
        ended = [Ended(self._process.pid, "onceflow run", "")]
        while alive:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            # Parents first: their end makes us the parent of their children.
            ended += [
                Ended(pid, "driver" if pid == driver else what, wait_for(pid))
                for pid, what in alive.items()
            ]
            alive = family({process.pid for process in ended})  # born meanwhile
        ended[0] = replace(ended[0], how=death(self._process.wait()))
        return ended


@contextlib.contextmanager
def frozen(driver: int) -> Iterator[None]:
    """The driver and its JVM stand still, so that what is seen of them stays true."""
    _signal_group(driver, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal_group(driver, signal.SIGCONT)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
