"""What the page costs: how soon it is painted, and what many viewers take from a job.

    python bench/page.py [--only paint,viewers,memory] [--ads] [--minutes 10] [--turns 5]

- paint: from the request to the first contentful paint, in Chromium on this machine, each load in
  a browser that has nothing of it yet; the median of `--loads` for each view
- viewers: examples/word_count.py runs on a steady stream, and `onceflow serve` beside it. Periods
  with viewers, who follow the live views by turns, and periods without take turns: the CPU seconds
  of the page and of the job in each, and the memory of the page. With --ads it is the reference
  application, all of it, as `onceflow demo` runs it
- memory: that of the page while viewers follow a home whose jobs decide `--epochs` epochs, far
  faster than Spark could, so that hours of a job pass in minutes (`busy_home.py`)

The viewers are in this process, whose CPU seconds are not counted. `--profile` says where the page
spends its time (functions by their own seconds), which costs some itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from busy_home import BOARD, JOBS, Board, BusyHome
from measure import cpu_seconds, progress, ratio, resident, spread

from onceflow.log import EmbeddedLog

_ONCEFLOW = "from onceflow.cli import main; main()"
_JOB = Path(__file__).parents[1] / "examples" / "word_count.py"
_WORDS = "exactly once is not less and not more than that whatever happens on the way"
_VIEWS = {
    "jobs": "/jobs",  # its page is at /
    "job": "/jobs/{job}",
    "lineages": "/jobs/{job}/lineages",
    "board": f"/boards/{BOARD}",
    "verify": "/verify",
}
_FASTER = 30.0  # epochs a second, for memory
_STAY = 10.0  # seconds that a viewer stays then
_PLAIN = "plain text"  # what Chromium itself takes
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_PROFILED = """
import cProfile, pstats, sys
from onceflow.cli import main
found = cProfile.Profile()
try:
    found.runcall(main)
finally:
    pstats.Stats(found, stream=sys.stderr).sort_stats("tottime").print_stats(25)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="paint,viewers,memory")
    parser.add_argument("--loads", type=int, default=20, help="of each view")
    parser.add_argument("--minutes", type=float, default=10.0, help="with viewers, in all")
    parser.add_argument("--turns", type=int, default=5, help="periods with and without viewers")
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--rows", type=int, default=2000, help="a second that the job is fed")
    parser.add_argument("--ads", action="store_true", help="the reference application")
    parser.add_argument("--epochs", type=int, default=10_000, help="of each query, for memory")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if "memory" in options.only:
        memory(options.epochs, options.viewers)
    if not {"paint", "viewers"} & set(options.only.split(",")):
        return
    played_by = ads if options.ads else word_count
    with stage(played_by, options.rows, profile=options.profile) as played:
        if "paint" in options.only:
            paint(played, options.loads)
        if "viewers" in options.only:
            seconds = 60 * options.minutes / options.turns
            viewers(played, options.viewers, options.turns, seconds)


# ---------------------------------------------------------------- a job and its page


@dataclass(frozen=True)
class Job:
    """A process that goes on, and what is below it: a driver, its JVM and its workers."""

    pid: int
    home: Path
    name: str  # whose views are looked at


@dataclass(frozen=True)
class Stage:
    """What is measured."""

    url: str
    page: int
    job: Job

    def views(self) -> dict[str, str]:
        return {name: path.format(job=self.job.name) for name, path in _VIEWS.items()}


@contextlib.contextmanager
def stage(
    play: Callable[[Path, int], contextlib.AbstractContextManager[Job]],
    rows: int,
    *,
    profile: bool,
) -> Iterator[Stage]:
    root = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
    code = _PROFILED if profile else _ONCEFLOW
    try:
        progress("the job starts")
        with (
            play(root, rows) as job,
            _process("serve", "--home", job.home, "--port", 0, "--read-only", code=code) as page,
        ):
            url = _heard(page, "serving")["url"].rstrip("/")
            while _epoch(url, job.name) < 20:  # the first take long, in Spark and in Python
                time.sleep(0.5)
            yield Stage(url, page.pid, job)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def word_count(root: Path, rows: int) -> Iterator[Job]:
    home, done = root / "home", threading.Event()
    log = EmbeddedLog.create(root / "data" / "lines")
    feeders = [
        threading.Thread(target=_feed, args=(log, rows, done)),
        threading.Thread(target=_board, args=(home, done)),
    ]
    for feeder in feeders:
        feeder.start()
    try:
        with _process("run", _JOB, "--home", home, "--every", "1 second", cwd=root) as run:
            _heard(run, "started")
            yield Job(run.pid, home, "word-count")
    finally:
        done.set()
        for feeder in feeders:
            feeder.join()


@contextlib.contextmanager
def ads(root: Path, rows: int) -> Iterator[Job]:
    folder = root / "demo"
    options = ("--folder", folder, "--rate", rows, "--keep", "--kills", 0, "--no-page")
    with _process("demo", *options, cwd=root) as demo:
        _heard(demo, "playing")
        yield Job(demo.pid, folder / "home", "aggregation")


@contextlib.contextmanager
def _process(
    *arguments: object, cwd: Path | None = None, code: str = _ONCEFLOW
) -> Iterator[subprocess.Popen[str]]:
    found = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments), "--json"],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield found
    finally:
        found.terminate()
        found.wait()


def _heard(process: subprocess.Popen[str], kind: str) -> Any:
    """Its event of that kind; what it says afterwards is read and forgotten."""
    assert process.stdout is not None
    for line in process.stdout:
        if (event := json.loads(line))["event"] == kind:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return event
    raise RuntimeError(f"it ended before it said {kind!r}")


def _epoch(url: str, name: str) -> int:
    with urllib.request.urlopen(f"{url}/api/jobs", timeout=30) as answer:
        return max(
            (job["epoch"] or 0 for job in json.load(answer) if job["job"] == name), default=0
        )


def _feed(log: EmbeddedLog, rows: int, done: threading.Event) -> None:
    chance, words = random.Random(1), _WORDS.split()
    while not done.wait(0.5):
        lines = [" ".join(chance.choices(words, k=6)) for _ in range(rows // 2)]
        now = pa.array([datetime.now(UTC)] * len(lines), pa.timestamp("us", "UTC"))
        log.append(pa.table({"value": lines, "event_time": now}))


def _board(home: Path, done: threading.Event) -> None:
    board = Board(home)
    while not done.wait(0.5):
        board.sample()


# ---------------------------------------------------------------- first paint


def paint(played: Stage, loads: int) -> None:
    from playwright.sync_api import sync_playwright

    named = os.environ.get("ONCEFLOW_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, _CHROMIUM)), None)
    arguments = ["--disable-gpu", "--disable-dev-shm-usage"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    paths = {**played.views(), "jobs": "/", _PLAIN: "/metrics"}
    taken: dict[str, list[float]] = {name: [] for name in paths}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        for turn in range(loads + 1):
            for name, path in paths.items():
                context = browser.new_context()
                page = context.new_page()
                page.goto(played.url + path)
                milliseconds = page.evaluate(_FIRST_PAINT)
                context.close()
                if turn:
                    taken[name].append(milliseconds)
            progress(f"load {turn} of {loads}")
        browser.close()
    print("\nfirst contentful paint, nothing cached (goal: under 300 ms)")
    for name, values in taken.items():
        print(f"  {name:10} {spread(values, 'ms')}, at most {max(values):.0f} ms")
    plain = taken.pop(_PLAIN)
    slowest = max(taken.values(), key=statistics.median)
    print(
        f"  the slowest view: {statistics.median(slowest) / 300:.2f} of the goal, "
        f"{ratio(slowest, plain):.2f} of a page of plain text"
    )


_FIRST_PAINT = """
() => new Promise((done) => {
  const look = () => {
    const [found] = performance.getEntriesByName("first-contentful-paint");
    if (found) done(found.startTime); else setTimeout(look, 10);
  };
  look();
})
"""


# ---------------------------------------------------------------- many viewers


@dataclass
class Periods:
    """What each period took, by the minute."""

    page: list[float] = field(default_factory=list)
    job: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    got: list[float] = field(default_factory=list)  # bytes of one viewer


def viewers(played: Stage, count: int, turns: int, seconds: float) -> None:
    sides = {"without": Periods(), "with": Periods()}
    asyncio.run(_look(played, count, 3.0))  # both have been at work once
    memory = [resident(played.page)]
    for turn in range(turns):
        for name, side in sides.items():
            page, job = cpu_seconds(played.page), cpu_seconds(played.job.pid)
            epoch, wall = _epoch(played.url, played.job.name), time.monotonic()
            got = 0
            if name == "with":
                got = asyncio.run(_look(played, count, seconds))
            else:
                time.sleep(seconds)
            minutes = (time.monotonic() - wall) / 60
            side.page.append((cpu_seconds(played.page) - page) / minutes)
            side.job.append((cpu_seconds(played.job.pid) - job) / minutes)
            side.epochs.append((_epoch(played.url, played.job.name) - epoch) / minutes)
            side.got.append(got / count / minutes)
            memory.append(resident(played.page))
            progress(
                f"turn {turn + 1} of {turns}, {name} viewers: page {side.page[-1]:.2f} s, "
                f"job {side.job[-1]:.2f} s of CPU a minute"
            )
    looked, not_looked = sides["with"], sides["without"]
    print(f"\n{count} viewers, {turns} periods of {seconds:.0f} s with and without them;")
    print("CPU seconds a minute")
    for name, side in sides.items():
        epochs = f"{statistics.median(side.epochs):.0f} epochs a minute"
        print(f"  {name:8} page {spread(side.page)}; job {spread(side.job)}, {epochs}")
    share, cores = ratio(looked.page, looked.job), os.cpu_count() or 1
    print(f"  page / job, with viewers: {share:.1%} (goal: at most 2 %)")
    whole = statistics.median(looked.page) / 60 / cores
    print(f"  page / CPU time of this machine, {cores} cores: {whole:.1%}")
    print(f"  job with / without viewers: {ratio(looked.job, not_looked.job):.3f}")
    print(f"  each viewer got {statistics.median(looked.got) / 1e3:.0f} kB a minute")
    told = ", ".join(f"{megabytes:.1f}" for megabytes in memory)
    print(f"  memory of the page, at first and after each period: {told} MB")


# ---------------------------------------------------------------- memory


def memory(epochs: int, viewers: int) -> None:
    """Viewers come and go all the time."""
    root = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
    found: list[tuple[int, float]] = []
    try:
        with (
            BusyHome(root / "home", per_second=_FASTER) as busy,
            _process("serve", "--home", busy.home, "--port", 0, "--read-only") as page,
        ):
            url, first = _heard(page, "serving")["url"].rstrip("/"), next(iter(JOBS))
            played = Stage(url, page.pid, Job(os.getpid(), busy.home, first))
            while _epoch(url, first) < 20:
                time.sleep(0.1)
            while busy.epochs < epochs:
                asyncio.run(_look(played, viewers, _STAY))
                found.append((busy.epochs, resident(page.pid)))
                progress(f"{busy.epochs:,} of {epochs:,} epochs: {found[-1][1]:.1f} MB")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"\nmemory of the page, {viewers} viewers, {sum(map(len, JOBS.values()))} queries")
    for share in range(1, 11):
        number, megabytes = found[len(found) * share // 10 - 1]
        print(f"  after {number:6,} epochs of each {megabytes:6.1f} MB")
    half = len(found) // 2
    then, last = (max(mb for _, mb in part) for part in (found[:half], found[half:]))
    print(f"  most in the second half / most in the first: {last / then:.3f}")


async def _look(played: Stage, count: int, seconds: float) -> int:
    """Follow the live views for a while; how many bytes came."""
    paths = [f"/live{path}" for path in played.views().values()]
    looking = [_follow(played.url, paths[n % len(paths)], seconds) for n in range(count)]
    return sum(await asyncio.gather(*looking))


async def _follow(url: str, path: str, seconds: float) -> int:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    got = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while data := await reader.read(2**16):
                got += len(data)
            raise RuntimeError(f"{path} ended")
    writer.close()
    if got < 200:
        raise RuntimeError(f"{path} said next to nothing: {got} bytes")
    return got


if __name__ == "__main__":
    main()
