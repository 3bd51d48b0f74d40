"""A run whose processes die, hang or are replaced: it goes on, or says why not."""

from __future__ import annotations

import os
import signal
import socket
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Event, Run, jvm_of, patiently, running
from story import Story
from test_cli import story_file, write
from waiting import wait_for

from onceflow.jobs.stop_request import StopResult, stop
from onceflow.protocol.home import JobFolder
from onceflow.service import supervisor
from onceflow.service.supervisor import Supervisor


@pytest.fixture
def story(tmp_path: Path) -> Story:
    story = Story(str(tmp_path), "stateful", "files")
    story.write_input(range(1))
    write(tmp_path / "it.py", story_file(story))
    return story


@pytest.mark.kill
def test_a_run_outlives_its_jvm_and_its_driver(story: Story) -> None:
    with Run("it.py", "--home", story.home, cwd=story.path) as run:
        run.reach(epoch=0)
        first = run.driver()
        jvm = jvm_of(first)
        os.kill(jvm, signal.SIGKILL)
        assert f"JVM (process {jvm}) was ended by SIGKILL" in run.hear("restarting")["message"]
        run.hear("started", times=2)
        assert run.of("restarting")[0]["in_s"] == 0  # it had published: no pause

        story.write_input(range(1, 3))
        patiently(lambda: story.published() == story.expected(3))
        second, jvm = run.driver(), jvm_of(run.driver())
        os.kill(second, signal.SIGKILL)
        assert run.hear("restarting", times=2)["message"] == "the driver was ended by SIGKILL"
        run.hear("started", times=3)
        assert not running([first, second, jvm])

        story.write_input(range(3, 5))
        patiently(lambda: story.published() == story.expected(5))
        run.stop()
        assert run.ended() == 0
        assert [event["event"] for event in run.said[-2:]] == ["stopping", "ended"]
    story.check()


@pytest.mark.kill
def test_a_paused_driver_is_replaced_and_a_killed_supervisor_takes_all_with_it(
    story: Story,
) -> None:
    with Run("it.py", "--home", story.home, cwd=story.path) as paused:
        paused.reach(epoch=0)
        sleeper, jvm = paused.driver(), jvm_of(paused.driver())
        os.kill(sleeper, signal.SIGSTOP)
        story.write_input(range(1, 3))
        with Run("it.py", "--home", story.home, "--take-over", cwd=story.path) as leader:
            patiently(lambda: story.published() == story.expected(3))
            assert paused.ended() == 5
            assert f"is led by process {leader.driver()} on" in paused.hear("error")["message"]
            assert not running([sleeper, jvm])

            pids = [leader.driver(), jvm_of(leader.driver())]
            os.kill(leader.pid, signal.SIGKILL)
            wait_for(lambda: not running(pids))
    assert story.published() == story.expected(3)


# ---------------------------------------------------------------- without Spark


class Heard:
    """A screen that remembers, and may act on what it is shown."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def show(self, event: Event) -> None:
        self.events.append(event)

    def tick(self) -> None: ...

    def close(self) -> None: ...

    def kinds(self) -> list[str]:
        return [event["event"] for event in self.events]


def job_that(path: Path, text: str) -> list[str]:
    write(path / "it.py", textwrap.dedent(text))
    return [str(path / "it.py"), f"--home={path / 'home'}"]


def test_a_driver_that_only_dies_is_given_up_after_five_starts(tmp_path: Path) -> None:
    screen = Heard()
    dies = job_that(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert Supervisor(dies, screen, first_pause=0.01).run() == 128 + signal.SIGKILL
    assert screen.kinds() == ["starting", "restarting"] * 4 + ["starting", "error"]
    pauses = [event["in_s"] for event in screen.events if event["event"] == "restarting"]
    assert pauses == [0.01, 0.02, 0.04, 0.08]


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The place of a Spark master that does not listen yet."""
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE", 0.04)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        yield place


def of(place: socket.socket) -> str:
    return f"--master=spark://127.0.0.1:{place.getsockname()[1]}"


def test_a_server_that_is_away_is_waited_for_and_other_failures_still_end_the_run(
    tmp_path: Path, master: socket.socket
) -> None:
    class Late(Heard):
        """The master comes back before the seventh start."""

        def show(self, event: Event) -> None:
            super().show(event)
            if self.kinds().count("restarting") == 6:
                master.listen()

    screen = Late()
    dies = job_that(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    run = Supervisor([*dies, of(master)], screen, first_pause=0.01)
    assert run.run() == 128 + signal.SIGKILL
    again = [event for event in screen.events if event["event"] == "restarting"]
    assert [event["kind"] for event in again] == ["MasterSilent"] * 6 + ["DriverDied"] * 4
    assert [event["away"] for event in again] == [True] * 6 + [False] * 4
    assert [event["in_s"] for event in again] == [0.01, 0.02] + [0.04] * 8


def test_with_once_a_server_that_is_away_is_given_up_after_five_starts(
    tmp_path: Path, master: socket.socket
) -> None:
    screen = Heard()
    run = Supervisor([*job_that(tmp_path, ""), of(master), "--once"], screen, first_pause=0.01)
    assert run.run() == 4
    assert screen.kinds() == ["starting", "restarting"] * 4 + ["starting", "error"]


def test_sigterm_ends_the_waiting_for_a_server_at_once(
    tmp_path: Path, master: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE", 3600)

    class Impatient(Heard):
        def show(self, event: Event) -> None:
            super().show(event)
            if event["event"] == "restarting":
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()

    screen = Impatient()
    run = Supervisor([*job_that(tmp_path, ""), of(master)], screen, first_pause=3600)
    assert run.run() == 0
    assert screen.kinds() == ["starting", "restarting", "stopping"]


def test_a_driver_that_a_retry_cannot_mend_is_not_started_again(tmp_path: Path) -> None:
    screen = Heard()
    assert Supervisor(job_that(tmp_path, "1 / 0"), screen).run() == 2
    assert screen.kinds() == ["starting", "error"]


def test_a_signal_ends_a_pause_between_two_starts(tmp_path: Path) -> None:
    class Impatient(Heard):
        def show(self, event: Event) -> None:
            super().show(event)
            if event["event"] == "restarting":
                os.kill(os.getpid(), signal.SIGINT)

    screen = Impatient()
    dies = job_that(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert Supervisor(dies, screen, first_pause=60).run() == 0
    assert screen.kinds() == ["starting", "restarting", "stopping"]


def test_a_driver_that_was_asked_to_stop_is_not_started_again_if_it_dies(tmp_path: Path) -> None:
    screen = Heard()
    told = """
        import os, signal, sys
        events = int(sys.argv[sys.argv.index("--events") + 1])
        os.write(events, b'{"event": "stopping", "at_once": false}\\n')
        os.kill(os.getpid(), signal.SIGKILL)
        """
    run = Supervisor(job_that(tmp_path, told), screen, first_pause=0.01)
    assert run.run() == 128 + signal.SIGKILL
    assert screen.kinds() == ["starting", "stopping"]


def test_a_run_that_waits_for_a_server_is_stopped_by_a_request(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "home", "it")
    folder.open_lineage("4.2.1")
    answers: list[StopResult] = []
    ask = threading.Thread(
        target=lambda: answers.append(stop(folder, timeout=60, tell=lambda _: None))
    )

    class Impatient(Heard):
        def show(self, event: Event) -> None:
            super().show(event)
            if event["event"] == "restarting":
                waits = lambda: list(folder.folder.glob("stop/*.lock"))  # noqa: E731
                threading.Thread(target=lambda: (wait_for(waits), ask.start())).start()

    screen = Impatient()
    told = """
        import os, signal, sys
        events = int(sys.argv[sys.argv.index("--events") + 1])
        os.write(events, b'{"event": "session", "job": "it"}\\n')
        os.kill(os.getpid(), signal.SIGKILL)
        """
    assert Supervisor(job_that(tmp_path, told), screen, first_pause=3600).run() == 0
    assert screen.kinds() == ["starting", "session", "restarting", "stopping"]
    ask.join(60)
    assert answers == [StopResult(True, None, {})]


def test_what_the_job_prints_is_kept_apart_from_events(tmp_path: Path) -> None:
    screen = Heard()
    prints = """
        import subprocess, sys
        print("to stdout")
        print("no newline", end="", file=sys.stderr)
        subprocess.run(["echo", " of a child"])
        print('{"event": "ended", "queries": []}')
        """
    Supervisor(job_that(tmp_path, prints), screen).run()
    said = [event["text"] for event in screen.events if event["event"] == "output"]
    assert said == ["to stdout", "no newline of a child", '{"event": "ended", "queries": []}']
    assert screen.kinds().count("ended") == 0


def test_a_run_whose_reader_is_gone_stops(tmp_path: Path) -> None:
    class Gone(Heard):
        def show(self, event: Event) -> None:
            if event["event"] == "output":
                raise BrokenPipeError
            super().show(event)

    waits = job_that(tmp_path, "import time\nprint('here')\ntime.sleep(3600)")
    assert Supervisor(waits, Gone()).run() == 128 + signal.SIGPIPE


def test_a_second_signal_ends_a_driver_that_does_not_stop(tmp_path: Path) -> None:
    stubborn = """
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: print("no"))
        print("here")
        while True:
            time.sleep(3600)
        """

    class Insisting(Heard):
        def show(self, event: Event) -> None:
            super().show(event)
            if event["event"] == "output":
                os.kill(os.getpid(), signal.SIGINT)

    screen = Insisting()
    code = Supervisor(job_that(tmp_path, stubborn), screen).run()
    assert code == 128 + signal.SIGKILL
    stops = [event["at_once"] for event in screen.events if event["event"] == "stopping"]
    assert stops == [False, True]


def test_the_supervisor_gives_back_the_signals_it_took(tmp_path: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    Supervisor(job_that(tmp_path, "x = 1"), Heard()).run()
    after = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert before == after
