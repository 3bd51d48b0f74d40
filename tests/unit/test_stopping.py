"""Who is asked to stop, hears it, and answers; and who is not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from another import as_another, folder_for_all

from onceflow.errors import NotStopped
from onceflow.jobs import stop_request as stopping
from onceflow.jobs.stop_request import StopRequest, WaitingRun, stop
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lease import Lease


class Driver:
    """A driver without queries: its lease, and what it hears."""

    def __init__(self, folder: JobFolder) -> None:
        self.lease = Lease(folder.folder / "lease", folder.name)
        self.lease.acquire()
        self.request = StopRequest(folder.folder, self.lease.lock)
        self.request.begin()
        self.lease.next_term(0)

    def end(self, failure: BaseException | None = None, *, answer: bool = True) -> None:
        if answer:
            self.request.say({"q": 7}, failure)
        self.lease.release()

    def until_asked(self, then: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            while not self.request.heard():
                pass
            then()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    folder = JobFolder(tmp_path, "it")
    folder.open_lineage("4.2.1")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(stopping, "_POLL", 0.01)


def files(folder: JobFolder) -> list[str]:
    return sorted(p.name for p in folder.folder.glob("stop/*"))


def ask(
    folder: JobFolder, timeout: float = 30, told: list[str] | None = None
) -> stopping.StopResult:
    return stop(folder, timeout=timeout, tell=(told if told is not None else []).append)


def test_who_runs_is_stopped_and_says_where_it_stands(folder: JobFolder) -> None:
    driver, told = Driver(folder), list[str]()
    thread = driver.until_asked(driver.end)
    done = ask(folder, told=told)
    thread.join()
    assert done.queries == {"q": 7}
    assert done.holder is not None
    assert done.holder.lock == driver.lease.lock
    assert told == [f"asked {done.holder} to stop; waiting for the end of its epoch"]
    assert files(folder) == [driver.lease.lock.replace(".lock", ".done.json")]


def test_who_does_not_run_is_left_alone(folder: JobFolder) -> None:
    assert ask(folder) == stopping.StopResult(False, None, {})
    driver = Driver(folder)
    driver.end()
    assert ask(folder) == stopping.StopResult(False, None, {})
    assert files(folder) == []


def test_a_holder_on_another_machine_that_gave_its_lease_back_does_not_run(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEFLOW_HOST", "there")
    driver = Driver(folder)
    monkeypatch.setenv("ONCEFLOW_HOST", "here")
    thread = driver.until_asked(driver.end)
    assert ask(folder).queries == {"q": 7}
    thread.join()
    assert ask(folder).holder is None


def test_a_request_stops_no_later_start_and_is_removed_by_it(folder: JobFolder) -> None:
    first = Driver(folder)
    with pytest.raises(NotStopped, match=r"has not stopped within") as late:
        ask(folder, timeout=0)
    assert "onceflow stop it --timeout 600" in late.value.hint
    assert f"kill -9 {first.lease.holder().pid}" in late.value.hint  # type: ignore[union-attr]
    assert first.request.heard()
    first.end(answer=False)  # as one that was killed
    assert len(files(folder)) == 1
    second = Driver(folder)
    assert not second.request.heard()
    assert files(folder) == []
    second.end()
    assert files(folder) == []  # nobody had asked


def test_who_ends_without_a_word_or_fails_has_not_stopped(folder: JobFolder) -> None:
    driver = Driver(folder)
    thread = driver.until_asked(lambda: driver.end(answer=False))
    with pytest.raises(NotStopped, match="ended without an answer"):
        ask(folder)
    thread.join()
    driver = Driver(folder)
    thread = driver.until_asked(lambda: driver.end(ValueError("no space")))
    with pytest.raises(NotStopped, match="failed while it stopped: no space"):
        ask(folder)
    thread.join()


def test_a_run_that_waits_to_start_its_driver_again_can_be_stopped(folder: JobFolder) -> None:
    waiting, asked = WaitingRun(folder.folder), list[bool]()
    with pytest.raises(NotStopped, match="the run has not ended within"):
        ask(folder, timeout=0)
    thread = threading.Timer(0.05, lambda: asked.append(waiting.close()))
    thread.start()
    assert ask(folder) == stopping.StopResult(True, None, {})
    thread.join()
    assert asked == [True]

    waiting = WaitingRun(folder.folder)
    assert not waiting.heard()  # what was asked of another wait is no word to this one
    assert waiting.close() is False
    assert ask(folder) == stopping.StopResult(False, None, {})

    os.close(WaitingRun(folder.folder)._fd)  # as one that was killed
    assert ask(folder) == stopping.StopResult(False, None, {})
    Driver(folder).end()
    assert files(folder) == []


def test_who_may_only_read_sees_that_a_run_waits() -> None:
    with folder_for_all() as folder:
        wait = WaitingRun(folder)
        look = f"print(lock_of_waiting_run(Path({str(folder)!r})) is not None)"
        imports = (
            "from pathlib import Path; from onceflow.jobs.stop_request import lock_of_waiting_run"
        )
        assert as_another(imports, look) == "True\n"
        wait.close()
        assert as_another(imports, look) == "False\n"
