"""Driver processes as the harness sees them: started ahead, ordered about, frozen and killed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onceflow.errors import SetupError
from onceflow.jobs.job import import_root
from onceflow.service.process_tree import adopt_orphans, family, processes, scratch_environment
from onceflow.spark.session import AGEING

Event = dict[str, Any]

_START_WITHIN = 120.0  # seconds, for a JVM on a busy machine
_GONE_WITHIN = 20.0  # after it was killed


def _imports(job: Path | None) -> dict[str, str]:
    """As `onceflow run` sets it. The driver itself finds them when it loads the job."""
    if job is None:
        return {}
    paths = [str(import_root(job)), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Driver:
    """One process of `verify/driver.py`, and what it says."""

    def __init__(
        self, master: str, settings: dict[str, str], scratch: Path, number: int, job: Path | None
    ) -> None:
        reading, writing = os.pipe()
        self.number = number
        self.log = scratch / f"driver-{number}.log"
        command = [
            sys.executable, "-P", "-u", "-m", "onceflow.harness.driver", "--master", master,
            "--settings", json.dumps(settings), "--log", str(self.log), "--events", str(writing),
        ]  # fmt: skip
        with self.log.open("ab") as said:
            self.process = subprocess.Popen(
                command,
                env={**scratch_environment(scratch), **_imports(job)},
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=[writing],
                start_new_session=True,  # Ctrl-C is for us; its JVM is in its group
            )
        os.close(writing)
        self.jvm: int | None = None
        self.ready = False
        self.spark = ""  # version
        self.address = ""  # host:port of its scheduler
        self.spent = False  # its Spark may still hand out Python workers that were killed
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self, fd: int) -> None:
        with os.fdopen(fd) as pipe:
            for line in pipe:
                with contextlib.suppress(ValueError):  # the half line of one that was killed
                    event = json.loads(line)
                    if event["event"] == "ready":
                        self.jvm, self.address = event["jvm"], event["address"]
                        self.spark, self.ready = event["spark"], True
                    self._events.put(event)

    def events(self) -> Iterator[Event]:
        """What it has said since; at the end of the process {"event": "gone", "code": …}."""
        while True:
            try:
                yield self._events.get_nowait()
            except queue.Empty:
                break

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def gone(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.process.poll()

    # -------------------------------------------------------------- what can be done to it

    def signal_all(self, number: signal.Signals) -> None:
        """To the Python process, its JVM and its workers."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        for pid in family({self.pid}):  # Python workers have groups of their own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def workers(self) -> list[int]:
        """The Python processes that work for its JVM."""
        return [pid for pid, what in family({self.pid}).items() if what == "worker"]

    def serves(self, url: str) -> bool:
        """Is this the address at which executors find its JVM?"""
        return self.address != "" and self.address in url

    def end(self) -> None:
        """It and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGCONT)
        self.signal_all(signal.SIGKILL)
        self.process.wait()
        self._reader.join(_GONE_WITHIN)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


class Drivers:
    """Drivers of one session each, one of them always ahead, all of them ended at the end."""

    def __init__(
        self, folder: Path, master: str, settings: dict[str, str], *, job: Path | None = None
    ) -> None:
        """`job`: the file of the job, where its Python workers find what it imports."""
        adopt_orphans()
        self.scratch = folder / "scratch"
        self.scratch.mkdir(parents=True)
        self._master, self._settings = master, {**AGEING, **settings}
        self._job = job
        self._started: list[Driver] = []
        self._spares = [self._start()]

    def _start(self) -> Driver:
        number = len(self._started)
        driver = Driver(self._master, self._settings, self.scratch, number, self._job)
        self._started.append(driver)
        return driver

    def take(self) -> Driver:
        """A spare one. It may not be ready yet."""
        self._spares = [driver for driver in self._spares if driver.gone() is None]
        self._spares.sort(key=lambda driver: not driver.ready)
        return self._spares.pop(0) if self._spares else self._start()

    def keep_one_ahead(self) -> None:
        self._reap()
        if not self._spares:
            self._spares.append(self._start())

    def give_back(self, driver: Driver) -> None:
        """One that lives no more and can live again, unless it is spent."""
        if driver.spent:
            driver.end()
        elif driver.gone() is None:
            self._spares.append(driver)

    def wait_until_ready(self, driver: Driver) -> None:
        deadline = time.monotonic() + _START_WITHIN
        while not driver.ready:
            if driver.gone() is not None or time.monotonic() > deadline:
                said = driver.log.read_text(errors="replace").strip().splitlines()
                raise SetupError(
                    f"Spark did not start: {said[-1] if said else 'it said nothing'}",
                    hint="onceflow doctor looks at Java and Spark",
                )
            time.sleep(0.02)

    @property
    def spark(self) -> str:
        """Its version."""
        return next((driver.spark for driver in self._started if driver.spark), "")

    def left(self) -> list[int]:
        """Processes of drivers that have ended which did not end with them."""
        dead = {driver.pid for driver in self._started if driver.gone() is not None}
        return [pid for pid, (_, session, _) in processes().items() if session in dead]

    def _reap(self) -> None:
        """What killed drivers leave is ours, and waits for us when it has ended."""
        ours = {driver.pid for driver in self._started}  # each leads a session
        found: list[int] = []
        for listed in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
                found += map(int, listed.read_text().split())
        for pid in set(found) - ours:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.getsid(pid) in ours:  # else somebody else waits for it
                    os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """When it returns, nothing of them runs: a JVM that was killed takes its time."""
        for driver in self._started:
            driver.end()
        deadline = time.monotonic() + _GONE_WITHIN
        while (left := self.left()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            self._reap()
        self._reap()
        shutil.rmtree(self.scratch, ignore_errors=True)
