"""Driver processes: Spark starts ahead of time, and a driver that raised can run another life."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from onceflow.errors import SetupError
from onceflow.harness.processes import WORKER, Child, Event
from onceflow.jobs.job import import_root
from onceflow.service.process_tree import processes, scratch_environment
from onceflow.spark.session import AGEING

_START_WITHIN = 120.0  # seconds, for a JVM on a busy machine
_TURN = 0.02


def _imports(job: Path | None) -> dict[str, str]:
    """PYTHONPATH for Python workers, as `onceflow run` sets it."""
    if job is None:
        return {}
    paths = [str(import_root(job)), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Life:
    """One life of a driver, from the order to its end, as the driver tells it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.started = False
        self.code: int | None = None  # once it has ended; -9 if the process was killed
        self.error: Event = {}
        self.guarantees: dict[str, str] = {}  # of each query/output

    @property
    def over(self) -> bool:
        return self.code is not None

    @property
    def complaint(self) -> str:
        return f"{self.error['kind']}: {self.error['message']}" if self.error else "it said nothing"

    def read_events(self) -> None:
        """Take in what the driver has said."""
        gone = self.driver.has_ended()
        for event in self.driver.events():
            match event["event"]:
                case "started":
                    self.started = True
                    for query, said in event["queries"].items():
                        for output, what in said["outputs"].items():
                            self.guarantees[f"{query}/{output}"] = what["guarantee"]
                case "error":
                    self.error = event
                case "life":
                    self.code = event["code"]
        if gone and self.code is None:
            self.code = self.driver.exit_code

    def wait(self, seconds: float) -> int:
        """Wait for its end; returns the exit code. Nobody else may read its events."""
        deadline = time.monotonic() + seconds
        while not self.over:
            if time.monotonic() > deadline:
                raise TimeoutError(f"driver {self.driver.pid} still runs after {seconds:.0f} s")
            time.sleep(_TURN)
            self.read_events()
        assert self.code is not None
        return self.code


class Driver(Child):
    """A process of `harness/driver.py`, which runs one life after the other."""

    def __init__(
        self, master: str, settings: dict[str, str], scratch: Path, number: int, job: Path | None
    ) -> None:
        self.jvm: int | None = None
        self.ready = False
        self.spark = ""  # version
        self.address = ""  # host:port of its scheduler
        self.spent = False  # its Spark may still hand out Python workers that were killed
        log = scratch / f"driver-{number}.log"
        super().__init__(
            "driver",
            ["onceflow.harness.driver", "--master", master, "--settings", json.dumps(settings),
             "--log", str(log)],
            log=log, environment={**scratch_environment(scratch), **_imports(job)},
            options=("-P",),
        )  # fmt: skip

    def _note(self, event: Event) -> None:
        if event["event"] == "ready":
            self.jvm, self.address, self.spark = event["jvm"], event["address"], event["spark"]
            self.ready = True

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def live(
        self, job: str, folder: Path, environment: dict[str, str], *, take_over: bool = False,
        every: str | None = None, once: bool = False, fork: str | None = None,
    ) -> Life:  # fmt: skip
        """Run the job, with its home in the folder."""
        list(self.events())  # of an earlier life
        self.order(
            do="live", job=job, folder=str(folder), environment=environment, take_over=take_over,
            every=every, once=once, fork=fork,
        )  # fmt: skip
        return Life(self)

    def workers(self) -> list[int]:
        """Its Python workers."""
        return [pid for pid, what in self.descendants().items() if what == WORKER]

    def serves(self, url: str) -> bool:
        """Is this the address at which executors reach its JVM?"""
        return self.address != "" and self.address in url


class Drivers:
    """A pool of drivers. One is always started ahead; `close` ends them all."""

    def __init__(
        self, folder: Path, master: str, settings: dict[str, str], *, job: Path | None = None
    ) -> None:
        """`job`: the file of the job, where its Python workers find what it imports."""
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
        """A spare driver. It may not be ready yet."""
        self._spares = [driver for driver in self._spares if driver.exit_code is None]
        self._spares.sort(key=lambda driver: not driver.ready)
        return self._spares.pop(0) if self._spares else self._start()

    def keep_one_ahead(self) -> None:
        self._reap()
        if not self._spares:
            self._spares.append(self._start())

    def give_back(self, driver: Driver) -> None:
        """Take back a driver whose life is over. One that is spent is ended."""
        if driver.spent:
            driver.end()
        elif driver.exit_code is None:
            self._spares.append(driver)

    def wait_until_ready(self, driver: Driver) -> None:
        deadline = time.monotonic() + _START_WITHIN
        while not driver.ready:
            if driver.exit_code is not None or time.monotonic() > deadline:
                said = driver.log.read_text(errors="replace").strip().splitlines()
                raise SetupError(
                    f"Spark did not start: {said[-1] if said else 'it said nothing'}",
                    hint="onceflow doctor looks at Java and Spark",
                )
            time.sleep(_TURN)

    @property
    def spark(self) -> str:
        """Its version."""
        return next((driver.spark for driver in self._started if driver.spark), "")

    def left(self) -> list[int]:
        """Processes that continue although their driver has ended."""
        dead = {driver.pid for driver in self._started if driver.exit_code is not None}
        return [pid for pid, (_, session, _) in processes().items() if session in dead]

    def _reap(self) -> None:
        """Wait for orphans of killed drivers, which we have adopted."""
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
        """Kill all drivers and what they started."""
        for driver in self._started:
            driver.end()
        self._reap()
        shutil.rmtree(self.scratch, ignore_errors=True)
