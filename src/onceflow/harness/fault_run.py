"""A run under faults: its folder, its schedule, its events and its result."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onceflow.errors import JobError
from onceflow.harness.case_runner import CaseRunner
from onceflow.harness.drivers import Drivers
from onceflow.harness.fault_schedule import Fault
from onceflow.harness.result import CaseResult, Result
from onceflow.protocol.home import now

Event = dict[str, Any]

_MARK = "verify.json"
_ORPHANS_WITHIN = 60.0  # seconds until a JVM notices that its driver has ended


class FaultRun(ABC):
    """One run. It calls `tell` with each event."""

    def __init__(
        self, folder: Path, tell: Callable[[Event], None], *, seed: int, command: str, master: str
    ) -> None:
        """`command`: that repeats the schedule."""
        self._folder, self._show = folder, tell
        self._began = time.monotonic()
        self.result = Result(seed, command, master, now())

    def run(self) -> Result:
        prepare(self._folder, seed=self.result.seed)
        try:
            self._run()
        except KeyboardInterrupt:
            self.result.interrupted = True
        self.result.seconds = self._seconds()
        self._tell("verdict", **self.result.as_json())
        return self.result

    @abstractmethod
    def _run(self) -> None:
        """Run all cases, and fill in the result."""

    def _write_schedule(self, cases: Sequence[str], faults: Sequence[Fault]) -> None:
        listed = [fault.as_json() for fault in faults]
        said = {"seed": self.result.seed, "cases": [*cases], "faults": listed}
        (self._folder / "fault_schedule.json").write_text(json.dumps(said, indent=1) + "\n")

    def _wait_for_orphans(self, runner: CaseRunner, drivers: Drivers) -> None:
        if not runner.wait(lambda: not drivers.left(), _ORPHANS_WITHIN):
            pids = ", ".join(map(str, drivers.left()))
            runner.violate(f"processes {pids} continue after their driver", "left")

    def _take_in(self, runner: CaseRunner, result: CaseResult) -> None:
        """Take the faults and the numbers of a case into the result."""
        result.seconds = round(self._seconds() - result.began, 1)
        result.guarantees = runner.guarantees
        result.rows_in = runner.rows_fed
        result.rows_out = runner.observer.published
        result.epochs = sum(epoch + 1 for epoch in runner.observer.progress().values())
        result.polls = runner.observer.polls
        result.samples = _thinned([(t - self._began, n) for t, n in runner.observer.samples])
        self.result.faults += [
            {
                **outcome.fault.as_json(), "job": result.job, "sinks": result.sinks,
                "at_s": round(outcome.at, 2), "hit": outcome.hit, "what": outcome.what,
                "recovery_s": outcome.recovery, "start_up_s": outcome.start_up,
            }
            for outcome in runner.outcomes
        ]  # fmt: skip

    # -------------------------------------------------------------- telling

    def _tell_end(self, result: CaseResult) -> None:
        self._tell("case-ended", job=result.job, sinks=result.sinks, seconds=result.seconds,
                   rows_in=result.rows_in, rows_out=result.rows_out, epochs=result.epochs,
                   violations=[str(v) for v in result.violations],
                   unknown=result.unknown)  # fmt: skip

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, event: str, **fields: Any) -> None:
        self._show({"event": event, "at_s": round(self._seconds(), 1), **fields})


def prepare(folder: Path, **facts: int) -> None:
    """Make a new folder, or use an empty one."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise JobError(f"{folder} is not empty", hint="name a new folder: --keep FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text(json.dumps(facts) + "\n")


def _thinned(samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Enough for a chart: each change, and the last sample."""
    found: list[tuple[float, int]] = []
    for at, rows in samples:
        if not found or rows != found[-1][1]:
            found.append((round(at, 2), rows))
    if samples:
        found.append((round(samples[-1][0], 2), samples[-1][1]))
    return found
