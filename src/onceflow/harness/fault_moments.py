"""The moment of a fault: a random time in a life, or a named fault point."""

from __future__ import annotations

from pathlib import Path

from onceflow.harness.case_runner import CaseRunner, FaultOutcome
from onceflow.harness.fault_schedule import Fault

REACH_WITHIN = 40.0  # seconds until a driver reaches an armed point, or a task finds a wire


def wait_at_random(runner: CaseRunner, fault: Fault) -> None:
    """Wait for the random time of the fault."""
    runner.wait(lambda: False, fault.after)


def end_driver(runner: CaseRunner) -> None:
    """Kill the driver, its JVM and its workers, so that nobody writes files."""
    runner.driver.end()
    runner.turn()


def pause_driver(
    runner: CaseRunner, fault: Fault, outcome: FaultOutcome, *, then: str = ""
) -> Path | None:
    """The driver waits at the point until `resume` appears in the folder that is returned. None if
    it was not there in time. `then`: a fault to arm at a later point."""
    folder = runner.case.folder / f"fault-{fault.number}"
    folder.mkdir()
    runner.driver.order(do="arm", fault=f"{fault.point}:pause:{fault.visit}:{folder},{then}")
    if runner.wait((folder / "paused").exists, REACH_WITHIN):
        return folder
    disarm(runner, fault, outcome)
    return None


def disarm(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    runner.driver.order(do="arm", fault="")
    outcome.what = f"visit {fault.visit} of {fault.point} was not reached in {REACH_WITHIN:.0f} s"
