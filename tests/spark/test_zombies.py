"""A paused driver that continues after its successor took over decides and publishes nothing."""

from __future__ import annotations

import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from story import FILES, Story, end
from waiting import wait_for

from onceflow import faults
from onceflow.errors import Fenced, OnceflowError
from onceflow.harness.drivers import Life

ALL = os.environ.get("ONCEFLOW_TEST_ALL") == "1"

# where the first driver is paused, with which outputs and query, and when it continues: at a
# point of its successor's opening, or after the successor has published, swept and rolled up
CASES = [
    ("epoch.staged", "files", "stateful", "after"),
    ("epoch.hardened", "both", "stateful", "open.fenced"),
    ("epoch.decided", "both", "stateless", "open.ledgers-read"),
    ("epoch.decided", "files", "stateful", "open.swept"),
    ("epoch.output-published", "both", "stateful", "after"),
    ("put.written", "sqlite", "stateless", "after"),
    ("folder.moved", "log", "stateless", "open.published"),
]
SLEEPERS = [p for p in faults.POINTS if p not in ("sqlite.begun", "sqlite.written")]
WAKINGS = ("open.led", "open.fenced", "open.ledgers-read", "open.published", "open.swept", "after")


def sinks_for(point: str, turn: int) -> str:
    if point in faults.FOLDER or point in faults.SQLITE:
        return ("all", "files" if point in faults.FOLDER else "sqlite")[turn % 2]
    if point in faults.ROLL_UP:  # the only one of a Sqlite story is behind its last epoch
        return ("files", "both", "log")[turn % 3]
    return ("files", "sqlite", "both", "log")[turn % 4]


if ALL:
    CASES = [
        (point, sinks_for(point, turn), ("stateless", "stateful")[(turn // 3) % 2], waking)
        for turn, (point, waking) in enumerate(product(SLEEPERS, WAKINGS))
    ]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process acts as on another machine: it can fence a driver, but not end it."""
    monkeypatch.setenv("ONCEFLOW_HOST", "elsewhere")


@pytest.mark.parametrize(("point", "sinks", "query", "waking"), CASES)
def test_a_paused_driver_that_wakes_up_changes_nothing(  # noqa: PLR0917 - fixtures and a case
    tmp_path: Path, spark: Any, elsewhere: None, point: str, sinks: str, query: str, waking: str
) -> None:
    story = Story(str(tmp_path), query, sinks)
    story.write_input()
    # In the middle of the story: a driver that has decided the last epoch is never fenced.
    visit = 7 if point.startswith("put.") else 1 if point.startswith(("open.", "rollup.")) else 2
    sleeper = asleep(story, point, visit)

    def wake(_: str = "") -> None:
        (tmp_path / "resume").touch()
        end(sleeper)

    with story.watched():
        if waking == "after":
            story.live(take_over=True)
            before = story.published()
            wake()
            assert story.published() == before
        else:
            faults.arm(waking, wake)
            story.live(take_over=True)
    story.check()
    story.check_trace()
    if waking != "open.led":  # then it was not fenced yet, and could go on
        assert sleeper.code
        assert sleeper.error["kind"] == "Fenced", sleeper.complaint
        refuse_decisions_below_a_fence(story)


def refuse_decisions_below_a_fence(story: Story) -> None:
    highest = 0
    for entry in story.log_entries():
        assert entry["term"] >= highest, "an older term wrote after a newer one's fence"
        highest = entry["term"]


def asleep(story: Story, point: str, visit: int = 2, host: str = "first") -> Life:
    life = story.spawn(f"{point}:pause:{visit}:{story.root}", host=host)

    def paused_or_over() -> bool:
        life.read_events()
        return (story.path / "paused").exists() or life.over

    wait_for(paused_or_over, 60)
    assert not life.over, life.complaint
    return life


def test_a_driver_that_was_paused_before_anything_was_decided_removes_nothing_of_its_successor(
    tmp_path: Path, spark: Any, elsewhere: None
) -> None:
    """With nothing decided it starts over; when it continues, something is decided."""
    story = Story(str(tmp_path), "stateful", "sqlite")
    story.write_input(range(3))
    sleeper = asleep(story, "open.published", visit=1)
    story.live(take_over=True)
    (tmp_path / "resume").touch()
    assert end(sleeper)
    assert sleeper.error["kind"] == "Fenced", sleeper.complaint
    story.write_input(range(3, FILES))
    story.live(take_over=True)
    story.check()


def test_a_body_that_outlives_its_jvm_is_fenced(
    tmp_path: Path, spark: Any, elsewhere: None
) -> None:
    story = Story(str(tmp_path), "stateful", "both")
    story.write_input()
    sleeper = asleep(story, "epoch.hardened")
    assert sleeper.driver.jvm is not None
    os.kill(sleeper.driver.jvm, signal.SIGKILL)
    story.live(take_over=True)
    before = story.published()
    (tmp_path / "resume").touch()
    assert end(sleeper)
    assert story.published() == before
    story.check()
    refuse_decisions_below_a_fence(story)


def test_a_body_that_outlives_stop_is_fenced(tmp_path: Path, spark: Any, elsewhere: None) -> None:
    import threading

    import onceflow

    story = Story(str(tmp_path), "stateless", "sqlite")
    story.write_input()
    asleep, awake, decided = threading.Event(), threading.Event(), []

    def sleep(_: str) -> None:
        asleep.set()
        awake.wait(120)

    faults.arm("epoch.hardened", sleep, visit=2)
    faults.arm("epoch.decided", decided.append, visit=2)
    spark.conf.set("spark.sql.streaming.stopTimeout", "1s")
    try:
        handle = onceflow.start(story.job(), home=story.home, once=True)
        assert asleep.wait(60)
        with pytest.raises(Exception, match=r"(?i)timed? ?out"):
            handle.queries["result"].stop()
        # the successor is another process, as on another machine
        successor = story.spawn(host="second", take_over=True)
        assert end(successor) == 0, successor.complaint
        before = story.published()
        awake.set()
        wait_for(lambda: isinstance(handle.started["result"].epochs.failure, Fenced), 60)
        with pytest.raises(OnceflowError):  # fenced, or given up as hung before it woke
            handle.wait(60)
    finally:
        awake.set()
        spark.conf.set("spark.sql.streaming.stopTimeout", "30s")
    assert not decided
    assert story.published() == before
    story.check()


@pytest.mark.parametrize("point", ["sqlite.begun", "epoch.staged"])
def test_take_over_ends_a_holder_that_does_not_answer(
    tmp_path: Path, spark: Any, point: str
) -> None:
    """A holder that is stopped inside a transaction would block the table for ever."""
    story = Story(str(tmp_path), "stateless", "sqlite")
    story.write_input()
    holder = asleep(story, point, host="")
    os.kill(holder.driver.pid, signal.SIGSTOP)
    with pytest.raises(Exception, match=f"process {holder.driver.pid} on .*, since 20"):
        story.live()
    story.live(take_over=True)
    assert end(holder) == -signal.SIGKILL
    story.check()
