"""`onceflow` as a process: its events, and the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from waiting import wait_for

from onceflow.harness.processes import JVM, Child, Event
from onceflow.service.process_tree import descendants, processes

ONCEFLOW = [sys.executable, "-c", "from onceflow.cli import main; main()"]
SECONDS = 120  # until a condition must hold; a start of Spark takes long on a busy machine


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
    wait_for(condition, SECONDS, every=0.2)


class Run(Child):
    """`onceflow run … --json` in the background. Leaving the block ends it."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self.said: list[Event] = []  # in all its time
        super().__init__(
            "onceflow run",
            ["onceflow.cli:main", "run", *map(str, arguments), "--json"],
            folder=cwd,
            log=cwd / "onceflow-run.err",
            environment=environment(),
            options=("-P",),
        )

    def _note(self, event: Event) -> None:
        self.said.append(event)

    def of(self, kind: str) -> list[Event]:
        return [event for event in list(self.said) if event["event"] == kind]

    def hear(self, kind: str, times: int = 1) -> Event:
        """Wait for the event of this kind that comes as number `times`."""
        patiently(lambda: len(self.of(kind)) >= times or self.has_ended())
        assert len(self.of(kind)) >= times, f"no {kind!r}, but {self.said[-3:]}"
        return self.of(kind)[times - 1]

    def reach(self, epoch: int) -> None:
        """Wait until each query has decided this epoch."""

        def reached() -> bool:
            queries = [q for event in self.of("progress")[-1:] for q in event["queries"]]
            return bool(queries) and all(
                q["epoch"] is not None and q["epoch"] >= epoch for q in queries
            )

        patiently(reached)

    def driver(self) -> int:
        return int(self.of("started")[-1]["pid"])

    def ended(self) -> int:
        """Wait for its exit code."""
        patiently(self.has_ended)
        assert self.exit_code is not None
        return self.exit_code


def jvm_of(driver: int) -> int:
    """The JVM that is a child of a driver."""
    (found,) = [pid for pid, what in descendants({driver}).items() if what == JVM]
    return found


def running(pids: Iterable[int]) -> list[int]:
    """Those that run; a process that waits to be reaped does not."""
    return [pid for pid in pids if pid in processes()]
