"""The demo without Spark: its folder, its feed, whom it kills, what it says, how it ends all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from onceflow.cli.demo import DemoReport, next_commands
from onceflow.cli.display import Plain
from onceflow.demo import application
from onceflow.demo.app_processes import RUN, AppProcess, JobProcess, SilentProcess, Surroundings
from onceflow.demo.feed import Feed
from onceflow.demo.folder import prepare
from onceflow.demo.strikes import SEEN, Chaos, Plan
from onceflow.errors import JobError, LeaseHeld
from onceflow.harness.epoch_logs import positions
from onceflow.harness.processes import DRIVER, WORKER, Child, Ended, frozen
from onceflow.harness.repeated import Repeated
from onceflow.log.embedded import EmbeddedLog
from onceflow.protocol.lease import Lease

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who belongs to whom")


# ---------------------------------------------------------------- the folder


def test_the_folder_of_a_demo_is_begun_anew_and_keeps_what_is_not_the_demos(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "demo"
    prepare(folder, seed=1)
    shipped = {path.name for path in application.shipped().glob("*.py")}
    assert {path.name for path in (folder / "ads").iterdir()} >= shipped
    EmbeddedLog.create(folder / "raw" / "eu")
    (folder / "ads" / "__pycache__").mkdir()
    (folder / "home" / "old").mkdir()
    (folder / "serving.db-wal").touch()
    (folder / "notes.txt").write_text("mine")
    prepare(folder, seed=3)
    assert sorted(p.name for p in folder.iterdir()) == ["ads", "demo.json", "home", "notes.txt"]
    assert list((folder / "home").iterdir()) == []
    assert json.loads((folder / "demo.json").read_text())["seed"] == 3


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with pytest.raises(JobError, match="that no demo made"):
        prepare(tmp_path, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="not a folder"):
        prepare(tmp_path / "file", seed=1)


def test_a_job_file_that_was_changed_and_a_job_that_runs_are_not_replaced(tmp_path: Path) -> None:
    prepare(tmp_path, seed=1)
    job = tmp_path / "ads" / "aggregation.py"
    before = job.read_text()
    job.write_text(before + "# mine\n")
    with pytest.raises(JobError, match=r"aggregation\.py was changed"):
        prepare(tmp_path, seed=1)
    job.write_text(before)
    (tmp_path / "ads" / "mine.py").touch()
    with pytest.raises(JobError, match=r"mine\.py was changed"):
        prepare(tmp_path, seed=1)
    (tmp_path / "ads" / "mine.py").unlink()
    (tmp_path / "home" / "load").mkdir()
    (tmp_path / "home" / "load" / "job.json").touch()
    lease = Lease(tmp_path / "home" / "load" / "lease", "load")
    lease.acquire()
    lease.next_term(0)
    with pytest.raises(LeaseHeld, match="is led by process"):
        prepare(tmp_path, seed=1)
    lease.release()
    prepare(tmp_path, seed=1)


def test_the_application_of_a_folder_is_loaded_from_that_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(tmp_path / name, seed=1)
        app = application.Application(tmp_path / name)
        assert Path(str(app.module("world").__file__)).parent == tmp_path / name / "ads"


# ---------------------------------------------------------------- feeding


class Numbers:
    """A stream of one line a chunk: its number."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self._made = 0

    def send(self, chunks: int) -> dict[str, list[int]]:
        self.batches.append(list(range(self._made + 1, self._made + chunks + 1)))
        self._made += chunks
        return {"eu": self.batches[-1]}

    def close(self) -> dict[str, list[int]]:
        return {"eu": [-1], "us": [-2]}


class Seen:
    def __init__(self) -> None:
        self.lines: list[int] = []

    def add(self, lines: dict[str, list[int]]) -> None:
        self.lines += [line for some in lines.values() for line in some]


def test_what_is_due_is_sent_and_goes_to_the_truth() -> None:
    truth, stream, now = Seen(), Numbers(), [100.0]
    feed = Feed(stream, truth, chunks_per_s=10, clock=lambda: now[0])
    assert feed.rows_per_s() == 0
    for at in (100.0, 100.05, 100.1, 100.1, 101.0):
        now[0] = at
        feed.turn()
    assert truth.lines == list(range(1, 12))
    now[0] = 102.0
    assert feed.rows_per_s() == 11 / 2
    feed.close()
    assert (feed.chunks, feed.rows, truth.lines[-2:]) == (11, 13, [-1, -2])
    now[0] = 200.0
    assert feed.rows_per_s() == 0


def test_a_feed_that_was_held_up_makes_up_for_it_in_parts() -> None:
    stream, now = Numbers(), [0.0]
    feed = Feed(stream, Seen(), chunks_per_s=60, clock=lambda: now[0])
    feed.turn()
    now[0] = 10.0
    while feed.chunks < 601:
        feed.turn()
    feed.turn()
    assert [line for batch in stream.batches for line in batch] == list(range(1, 602))
    assert max(map(len, stream.batches)) < 600


def test_what_goes_wrong_beside_the_play_is_raised_in_it() -> None:
    turns: list[None] = []

    def turn() -> None:
        turns.append(None)
        raise OSError("no space")

    with Repeated(turn, every=0.001) as steady:
        patiently(lambda: turns)
        steady.stop()
        with pytest.raises(OSError, match="no space"):
            steady.raise_failure()


def test_offsets_of_logs_and_topics_are_told_alike() -> None:
    log = {"log": "x", "path": "/a/raw/eu", "commit": 9, "at": 17, "next": [4, 5]}
    assert list(positions(log)) == [("/a/raw/eu", (4, 5))]
    topics = {"ads.raw.eu": {"1": 5, "0": 4}, "ads.raw.us": {"0": 6, "1": 7}}
    assert list(positions(topics)) == [("ads.raw.eu", (4, 5)), ("ads.raw.us", (6, 7))]
    assert list(positions(7)) == []


# ---------------------------------------------------------------- processes

FAMILY = """
import json, os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
def say(**event): print(json.dumps(event), flush=True)
if sys.argv[1:] == ["driver"]:
    workers = [subprocess.Popen(sleep), subprocess.Popen(sleep, process_group=0)]
    say(event="ready", workers=[worker.pid for worker in workers])
else:  # the supervisor, whose driver has a session of its own
    driver = subprocess.Popen([sys.executable, __file__, "driver"], start_new_session=True)
    say(event="started", pid=driver.pid)
time.sleep(600)
"""


def child(tmp_path: Path, *arguments: str) -> Child:
    return Child(RUN, list(arguments), folder=tmp_path, log=tmp_path / "said" / "child.err",
                 environment=os.environ)  # fmt: skip


def family(tmp_path: Path) -> Child:
    (tmp_path / "supervisor.py").write_text(FAMILY)
    return child(tmp_path, "supervisor")


def heard(run: Child, kind: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for event in run.events():
            if event["event"] == kind:
                return event
        time.sleep(0.01)
    raise AssertionError(f"no {kind}")


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def patiently(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@LINUX
def test_a_kill_ends_the_whole_family_and_tells_that_it_was_the_signal(tmp_path: Path) -> None:
    with family(tmp_path) as run:
        driver = heard(run, "started")["pid"]
        heard(run, "ready")
        ended = run.kill(driver)
        assert [process.what for process in ended] == [RUN, DRIVER, WORKER, WORKER]
        assert {process.how for process in ended} == {"was ended by SIGKILL"}
        assert not any(alive(process.pid) for process in ended)
        assert run.kill(driver) == []
    assert not (tmp_path / "said" / "child.err").exists()


@LINUX
def test_leaving_the_block_ends_the_whole_family_too(tmp_path: Path) -> None:
    with family(tmp_path) as run:
        driver = heard(run, "started")["pid"]
        heard(run, "ready")
    assert not alive(driver)


@LINUX
def test_what_a_kill_of_one_process_leaves_is_ended_with_the_rest(tmp_path: Path) -> None:
    with family(tmp_path) as run:
        driver = heard(run, "started")["pid"]
        workers = heard(run, "ready")["workers"]
        assert run.descendants(driver) == {driver: DRIVER, **dict.fromkeys(workers, WORKER)}
        run.kill_alone(driver, DRIVER)
        patiently(lambda: driver not in run.descendants())  # its parent may leave it unreaped
        assert run.exit_code is None
        assert all(map(alive, workers))
    assert not any(map(alive, [driver, *workers]))


@LINUX
def test_a_child_ends_with_the_demo_however_that_ends(tmp_path: Path) -> None:
    demo = (
        "import os, pathlib, time\n"
        "from onceflow.harness.processes import Child\n"
        "here = pathlib.Path.cwd()\n"
        "run = Child('x', ['supervisor'], folder=here, log=here / 'err', environment=os.environ)\n"
        "print(run.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "supervisor.py").write_text("import time; time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-c", demo], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        patiently(lambda: b"onceflow.harness.child" in Path(f"/proc/{pid}/cmdline").read_bytes())
        process.kill()
    patiently(lambda: not alive(pid) or " Z " in Path(f"/proc/{pid}/stat").read_text())


@LINUX
def test_a_frozen_driver_stands_still_and_goes_on(tmp_path: Path) -> None:
    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    with family(tmp_path) as run:
        driver = heard(run, "started")["pid"]
        heard(run, "ready")
        with frozen(driver):
            patiently(lambda: state(driver) == "T")
        patiently(lambda: state(driver) != "T")


def test_a_child_that_ends_by_itself_says_how(tmp_path: Path) -> None:
    (tmp_path / "supervisor.py").write_text("import sys; sys.exit('no, thanks')")
    with child(tmp_path, "supervisor") as run:
        patiently(run.has_ended)
        said = tmp_path / "said" / "child.err"
        assert run.how_it_ended() == f"{RUN} ended with exit code 1; what it said is in {said}"
        assert said.read_text() == "no, thanks\n"


# ---------------------------------------------------------------- whom it kills


class Epochs:
    """Of a job that is always in the middle of its seventh epoch."""

    def under_way(self) -> tuple[str, int]:
        return "eu", 7

    def leader(self) -> Any:
        return SimpleNamespace(pid=2**22 + 1)  # nobody

    def last(self, query: str) -> Any:
        return SimpleNamespace(epoch=6)


class FakeJob(JobProcess):
    """A job that is told to be killed, and comes back when the test says so."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, Surroundings(folder, lambda *_, **__: None))
        self.job_progress = Epochs()  # type: ignore[assignment]
        self.works()

    def works(self) -> None:
        self.running, self.progress = True, [{"epochs": SEEN}]

    def kill(self) -> list[Ended]:
        self.running, self.progress = False, []
        return [Ended(1, RUN, ""), Ended(2, DRIVER, "")]

    def alone(self, what: str) -> list[tuple[int, str]]:
        return [(3, what), (4, what)]

    def kill_alone(self, pid: int, what: str) -> list[Ended]:
        self.running = False
        return [Ended(pid, what, "")]


class FakeService(SilentProcess):
    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, name, [], Surroundings(folder, lambda *_, **__: None))
        self.running = True

    def kill(self) -> list[Ended]:
        self.running = False
        return [Ended(5, self.what, "")]


def fakes(folder: Path) -> tuple[list[JobProcess], list[AppProcess]]:
    jobs: list[JobProcess] = [
        FakeJob(name, folder) for name in ("aggregation", "attribution", "load")
    ]
    return jobs, [FakeService("orders", folder), FakeService("budget", folder)]


def test_jobs_are_killed_one_after_the_other_when_all_work(tmp_path: Path) -> None:
    jobs, services = fakes(tmp_path)
    plan = Plan(jobs, services[1], kills=4, seed=1)
    killed = []
    while not plan.over:
        struck = plan.strike()
        assert struck is not None
        killed.append(struck.part)
        if struck.part != "budget":
            assert (struck.query, struck.epoch, struck.decided) == ("eu", 7, False)
            down = next(job for job in jobs if job.name == struck.part)
            if not plan.over and len(killed) > 1:
                assert plan.strike() is None  # it starts again
            assert isinstance(down, FakeJob)
            down.works()
    assert killed == ["aggregation", "budget", "attribution", "load", "aggregation"]
    assert plan.strike() is None


def test_a_plan_without_kills_is_over(tmp_path: Path) -> None:
    jobs, services = fakes(tmp_path)
    plan = Plan(jobs, services[1], kills=0, seed=1)
    assert plan.over
    assert plan.strike() is None


def chaos(folder: Path, seed: int) -> list[tuple[str, str]]:
    """Who is killed in five minutes, if everything works again ten seconds later."""
    jobs, services = fakes(folder)
    now, found, back = [0.0], [], dict[str, float]()
    strikes = Chaos(jobs, services, seed=seed, clock=lambda: now[0])
    last = 0.0
    while now[0] < 300:
        now[0] += 0.5
        for part in (*jobs, *services):
            if back.get(part.name, 0.0) <= now[0]:
                part.works() if isinstance(part, FakeJob) else setattr(part, "running", True)
        struck = strikes.strike()
        if struck is not None:
            assert now[0] - last >= 2
            last, back[struck.part] = now[0], now[0] + 10
            found.append((struck.part, struck.what))
    return found


def test_chaos_kills_everything_by_chance_and_the_same_again_with_the_same_seed(
    tmp_path: Path,
) -> None:
    first = chaos(tmp_path, 1)
    assert first == chaos(tmp_path, 1) != chaos(tmp_path, 2)
    assert {part for part, _ in first} == {"aggregation", "attribution", "load", "orders", "budget"}
    assert {what for _, what in first} == {"all", RUN, DRIVER, "JVM", WORKER}
    assert len(first) > 30


def test_chaos_kills_nothing_that_has_come_to_nothing(tmp_path: Path) -> None:
    jobs, services = fakes(tmp_path)
    for job in jobs:
        job.progress = [{"epochs": 0}]
    for service in services:
        service.running = False
    now = [0.0]
    strikes = Chaos(jobs, services, seed=1, clock=lambda: now[0])
    for at in range(100):
        now[0] = float(at)
        assert strikes.strike() is None
    assert not strikes.over


# ---------------------------------------------------------------- what it says

JOB = {"state": "runs", "epoch": 3, "rows_in_per_s": 900, "lag_s": 1.25}
PROGRESS = {
    "event": "progress", "seconds": 61.25, "doing": "running", "rows": 1200, "rows_per_s": 2012,
    "jobs": {"aggregation": JOB, "load": {**JOB, "state": "starts", "lag_s": None}},
}  # fmt: skip
KILLED = {
    "event": "killed", "seconds": 9.0, "part": "aggregation", "what": "all", "query": "eu",
    "epoch": 7, "says": "",
}  # fmt: skip


@pytest.mark.parametrize("decided", [True, False])
def test_a_kill_is_told_with_who_was_killed_and_what_becomes_of_the_epoch(
    decided: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [RUN, DRIVER, "JVM", WORKER, WORKER]
    processes = [{"pid": pid, "what": what, "how": ""} for pid, what in enumerate(names, 11)]
    Plain(DemoReport()).show({**KILLED, "processes": processes, "decided": decided})
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "  9.0 s  kill -9 of aggregation: onceflow run 11, driver 12, JVM 13, 2 Python workers"
    )
    fate = "decided, so it will be published" if decided else "not decided, so it runs again"
    assert second.strip() == f"in the middle of epoch 7 of query eu: {fate}"


def test_what_to_try_next_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", "/opt/a java")
    commands = [c["command"] for c in next_commands(tmp_path / "it's here")]
    assert commands[0] == f"cd '{tmp_path}/it'\"'\"'s here'"
    assert commands[1:3] == [
        f"source {sys.prefix}/bin/activate", "export JAVA_HOME='/opt/a java'",
    ]  # fmt: skip
    assert "onceflow serve --home home" in commands
    with_servers = [c["command"] for c in next_commands(tmp_path, kafka=True)]
    assert not [c for c in with_servers if "serving.db" in c]


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    path, modules = list(sys.path), _loaded()
    yield
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    sys.path[:] = path
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(modules)  # other tests have imported from them


def _loaded() -> dict[str, ModuleType]:
    """The modules of an application, this one's or another's."""
    return {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "ads"}
