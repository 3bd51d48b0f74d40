"""The processes of the application: three jobs and two services, which may be killed at any time.

If all of a job or a service is killed, or its first process, the same command starts it again. A
driver that is killed alone is started again by `onceflow run`, its parent.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow import errors
from onceflow.demo.application import PACKAGE
from onceflow.demo.folder import HOME, SAID, SCRATCH
from onceflow.demo.job_progress import JobProgress
from onceflow.errors import OnceflowError, SetupError
from onceflow.harness.processes import WORKER, Child, Ended, Event
from onceflow.service.process_tree import scratch_environment

Tell = Callable[..., None]

RUN = "onceflow run"  # what the first process of a job is called
_ONCEFLOW = "onceflow.cli:main"
# A JVM that lives for a minute spends half of it on compiling: the quick compiler does here. (Its
# cache would be too small by default, and is swept all the time then; and the code that Spark
# generates for a plan has methods that no compiler takes by default.) Not with many more rows.
_QUICK_UP_TO = 5_000  # events a second
_QUICK = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m "
    "-XX:-DontCompileHugeMethods"
)


@dataclass(frozen=True)
class Surroundings:
    """The folder of the run, and the function that gets its events."""

    folder: Path
    tell: Tell
    rate: int = 0  # events a second


class AppProcess:
    """A service or a job, and its lives. Leaving the block ends it."""

    def __init__(self, name: str, what: str, arguments: list[str], stage: Surroundings) -> None:
        self.name, self.what = name, what
        self.lives = 0
        self.running = False  # it works, by what it has said
        self._arguments, self._stage = arguments, stage
        self._child: Child | None = None
        self._stopping = False

    @property
    def command(self) -> str:
        """As a user types it in the folder."""
        module, *rest = self._arguments
        first = ["onceflow"] if module == _ONCEFLOW else ["python", "-m", module]
        return shlex.join([*first, *(argument for argument in rest if argument != "--json")])

    def __enter__(self) -> AppProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def start(self) -> None:
        self._leave()
        self.lives += 1
        self.running = self._stopping = False
        self._stage.tell("starting", part=self.name, life=self.lives, command=self.command)
        self._child = Child(
            self.what,
            self._arguments,
            folder=self._stage.folder,
            log=self._stage.folder / SAID / f"{self.name}.err",
            environment=self._environment(),
        )

    def _environment(self) -> Mapping[str, str]:
        return os.environ

    # -------------------------------------------------------------- hearing

    def read_events(self) -> None:
        """Take in what it has said since. A process that has ended by itself ends the run."""
        if self._child is None:
            return
        over = self._child.has_ended()
        for event in self._child.events():
            self._hear(event)
        if over:
            self.running = False
            if not self._stopping or self._child.exit_code != 0:
                raise SetupError(
                    self._child.how_it_ended(), hint="onceflow doctor looks at the machine"
                )

    def _hear(self, event: Event) -> None:
        self.running = True

    def ended(self) -> bool:
        """It has ended, and all that it said can be read."""
        return self._child is None or self._child.has_ended()

    def gone(self) -> bool:
        """Its first process has ended, so it has to be started again."""
        return self._child is None or self._child.exit_code is not None

    @property
    def state(self) -> str:
        return "runs" if self.running else "is stopping" if self._stopping else "starts"

    # -------------------------------------------------------------- ending

    def stop(self) -> None:
        """SIGTERM: it finishes its work and ends."""
        self._stopping = True
        if self._child is not None:
            self._child.stop()

    def kill(self) -> list[Ended]:
        """`kill -9` of all its processes."""
        assert self._child is not None
        self.running = False
        return self._child.kill(self._driver())

    def _driver(self) -> int | None:
        return None


class SilentProcess(AppProcess):
    """A process that does not say when it is ready."""

    def start(self) -> None:
        super().start()
        self.running = True


class JobProcess(AppProcess):
    """A job, run by `onceflow run`."""

    def __init__(self, name: str, stage: Surroundings) -> None:
        arguments = [_ONCEFLOW, "run", f"ads/{name}.py", "--home", HOME, "--json"]
        super().__init__(name, RUN, arguments, stage)
        self.job_progress = JobProgress(stage.folder / HOME, name)
        self.progress: list[dict[str, Any]] = []

    def _environment(self) -> Mapping[str, str]:
        scratch = self._stage.folder / SCRATCH / self.name
        scratch.mkdir(parents=True, exist_ok=True)
        found = scratch_environment(scratch)
        if self._stage.rate <= _QUICK_UP_TO:
            found["JDK_JAVA_OPTIONS"] += f" {_QUICK}"
        # Three jobs share the machine.
        found.setdefault("SPARK_MASTER", f"local[{max(1, (os.cpu_count() or 1) // 3)}]")
        return found

    def _driver(self) -> int | None:
        leader = self.job_progress.leader()
        return leader.pid if leader is not None else None

    def has_worked(self, epochs: int = 1) -> bool:
        """Does it run, and has it decided so many epochs in this life?"""
        return self.running and any(query["epochs"] >= epochs for query in self.progress)

    def _hear(self, event: Event) -> None:
        match event["event"]:
            case "started":
                self.running, self.progress = True, []
                queries = event["queries"].items()
                self._stage.tell(
                    "started", part=self.name, driver=event["pid"],
                    term=max(query["term"] for _, query in queries),
                    resumes_after={name: query["resumes_after"] for name, query in queries},
                )  # fmt: skip
            case "progress" | "ended":
                self.progress = event["queries"]
            case "restarting":
                self.running, self.progress = False, []
                self._stage.tell("restarting", part=self.name, message=event["message"])
            case "error":
                raise _as_error(event)

    def kill(self) -> list[Ended]:
        self.progress = []
        return super().kill()

    def how_it_goes(self) -> dict[str, Any]:
        """For all its queries: the last decided epoch, rows a second, and the longest lag."""
        queries = self.progress
        epochs = [query["epoch"] for query in queries if query["epoch"] is not None]
        return {
            "state": self.state,
            "epoch": max(epochs, default=None),
            "rows_in_per_s": round(sum(query["rows_in_per_s"] for query in queries)),
            "lag_s": max((query["lag_s"] for query in queries), default=None),
        }

    def alone(self, what: str) -> list[tuple[int, str]]:
        """Its processes of this kind."""
        assert self._child is not None
        if what == RUN:
            return [(self._child.pid, what)]
        processes = self._child.descendants(self._driver())
        return [(pid, kind) for pid, kind in processes.items() if kind == what]

    def kill_alone(self, pid: int, what: str) -> list[Ended]:
        """`kill -9` of one of its processes. Without the first one it has to be started again."""
        assert self._child is not None
        self.running, self.progress = self.running and what == WORKER, []
        ended = self._child.kill_alone(pid, what)
        return [ended, *(self._child.kill() if what == RUN else [])]


def _as_error(event: Event) -> OnceflowError:
    kind = getattr(errors, event["kind"], OnceflowError)
    error: OnceflowError = kind(event["message"], hint=event["hint"])
    error.exit_code = event["exit_code"]
    return error


def services(stage: Surroundings, *, port: int) -> list[AppProcess]:
    """The order service, at a port that stays the same, and the budget service."""
    at = ["--port", str(port)]
    return [
        AppProcess("orders", "order service", [PACKAGE, "order-service", *at, "--json"], stage),
        SilentProcess("budget", "budget service", [PACKAGE, "budget", "--json"], stage),
    ]
