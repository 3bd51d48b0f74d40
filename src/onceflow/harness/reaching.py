"""How a fault comes to its moment: some time in a life, or a named fault point."""

from __future__ import annotations

from pathlib import Path

from onceflow.harness.play import Play, Struck
from onceflow.harness.schedule import Fault

REACH_WITHIN = 40.0  # seconds until an armed point is reached, or a wire is found


def at_work(play: Play, fault: Fault) -> None:
    """Some moment in the middle of a life: the play has seen an epoch of it."""
    play.wait(lambda: False, fault.after)


def end_now(play: Play) -> None:
    """The driver, its JVM and its workers: what comes next is done to files at rest."""
    assert play.driver is not None
    play.driver.end()
    play.turn()


def epoch(play: Play) -> str:
    return ", ".join(str(epoch) for epoch in play.observer.progress().values()) or "none"


def stand_still(play: Play, fault: Fault, struck: Struck, *, then: str = "") -> Path | None:
    """The driver waits at the point until `resume` appears in this folder. None: it did not get
    there in time. `then`: what is armed at a point behind it."""
    folder = play.case.folder / f"fault-{fault.number}"
    folder.mkdir()
    assert play.driver is not None
    play.driver.order(do="arm", fault=f"{fault.point}:pause:{fault.visit}:{folder},{then}")
    if play.wait((folder / "paused").exists, REACH_WITHIN):
        return folder
    disarm(play, fault, struck)
    return None


def disarm(play: Play, fault: Fault, struck: Struck) -> None:
    assert play.driver is not None
    play.driver.order(do="arm", fault="")
    struck.what = f"visit {fault.visit} of {fault.point} was not reached in {REACH_WITHIN:.0f} s"
