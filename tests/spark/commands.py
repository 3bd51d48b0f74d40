"""`onceflow` as a process: its events, and the processes that it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ONCEFLOW = [sys.executable, "-c", "from onceflow.cli import main; main()"]
SECONDS = 120  # until a condition must hold; a start of Spark takes long on a busy machine
Event = dict[str, Any]


def environment(**more: str) -> dict[str, str]:
    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    kept = {k: v for k, v in os.environ.items() if k not in ("ONCEFLOW_HOME", "SPARK_MASTER")}
    return {**kept, "JDK_JAVA_OPTIONS": quick, "NO_COLOR": "1", **more}


def onceflow(*arguments: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A command from start to end."""
    return subprocess.run(
        [*ONCEFLOW, *map(str, arguments)],
        check=False,
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def patiently(condition: Callable[[], object]) -> None:
    """Wait for a condition that is expensive to check."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


class Run:
    """`onceflow run … --json` in the background. Leaving the block ends it."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self.events: list[Event] = []
        self.process = subprocess.Popen(
            [*ONCEFLOW, "run", *map(str, arguments), "--json"],
            cwd=cwd,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its driver and the JVM end with it
        self.process.wait()
        self._reader.join(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def of(self, kind: str) -> list[Event]:
        return [event for event in list(self.events) if event["event"] == kind]

    def hear(self, kind: str, times: int = 1) -> Event:
        """Wait for the event of this kind that comes as number `times`."""
        self.wait(lambda: len(self.of(kind)) >= times or self.process.poll() is not None)
        assert len(self.of(kind)) >= times, f"no {kind!r}, but {self.events[-3:]}"
        return self.of(kind)[times - 1]

    def reach(self, epoch: int) -> None:
        """Wait until each query has decided this epoch."""

        def reached() -> bool:
            queries = [q for event in self.of("progress")[-1:] for q in event["queries"]]
            return bool(queries) and all(
                q["epoch"] is not None and q["epoch"] >= epoch for q in queries
            )

        self.wait(reached)

    def wait(self, condition: Callable[[], object]) -> None:
        patiently(condition)

    def driver(self) -> int:
        return int(self.of("started")[-1]["pid"])

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return code


def jvm_of(driver: int) -> int:
    """The JVM that is a child of a driver."""
    (found,) = [
        pid for pid, (parent, name) in _processes().items() if (parent, name) == (driver, "java")
    ]
    return found


def running(pids: Iterable[int]) -> list[int]:
    """Those that run; a process that waits to be reaped does not."""
    return [pid for pid in pids if pid in _processes()]


def _processes() -> dict[int, tuple[int, str]]:
    """pid -> (parent, name), without zombies."""
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent, *_ = rest.split()
        if state != "Z":
            found[int(path.name)] = (int(parent), name)
    return found
