"""How long it takes from an event to its committed count, and how many events a second go through.

    python bench/ads.py                              # about 15 minutes
    python bench/ads.py --only embedded,servers,rate

runs the whole application (`onceflow demo` without kills) and looks at it from outside: what was
sent, by the clock of this process, and what the serving table holds. An event counts as committed
when the table holds as many impressions and clicks as had been sent up to it. For orders likewise,
through all three jobs. In the end every run is judged against the truth.

embedded   2,000 events/s into logs and SQLite
servers    the same with a Kafka broker and a PostgreSQL
rate       more each time (--rates), until the jobs fall behind; and where the time goes

Beside it stand the figures that Uber told of its pipeline in 2021: one-minute windows, and
checkpoints every two minutes, twice on the way, so that results are seen after one to five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import _TICKS, _processes, progress

from onceflow.demo.run import JOBS, DemoRun, Settings

WARM_UP = 40.0  # seconds after all jobs have started that are not counted: they have a backlog then
LOOK_EVERY = 0.2
CPU_EVERY = 5.0
FEED = "the feed and the measuring"
PARTS = ("embedded", "servers", "rate")


class Watched:
    """What had been sent and what was committed, by the clock, from a thread of its own."""

    def __init__(self, demo: DemoRun) -> None:
        self._demo = demo
        self.events: list[tuple[float, int, int]] = []  # when, sent, committed
        self.orders: list[tuple[float, int, int]] = []
        self.cpu: dict[str, list[float]] = {}  # job -> seconds at the beginning and now
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        looked = 0.0
        while not self._done.wait(LOOK_EVERY):
            app, feed = self._demo._app, self._demo._feed
            asked = "SELECT coalesce(sum(impressions + clicks), 0) FROM ad_minutes"
            try:
                counted, orders = app._ask_serving(asked), app.orders_served()
            except Exception:  # the table is being made, or locked: look again
                continue
            now = time.monotonic()
            with feed.lock:
                sent = feed.truth.counted, feed.truth.ordered
            self.events.append((now, sent[0], int(counted[0][0]) if counted else 0))
            self.orders.append((now, sent[1], orders))
            if now < looked + CPU_EVERY:
                continue
            looked = now
            taken = {job: cpu_of(job) for job in JOBS} | {FEED: time.process_time()}
            for name, now_used in taken.items():
                used = self.cpu.setdefault(name, [now_used, now_used])
                used[1] = max(used[1], now_used)  # of processes that have ended nothing is known


def cpu_of(job: str) -> float:
    """Seconds of all processes of a job of ours."""
    parents, times = _processes()
    total, left = 0, [pid for pid in parents.get(os.getpid(), ()) if _runs(pid, job)]
    while left:
        pid = left.pop()
        total += times.get(pid, 0)
        left += parents.get(pid, [])
    return total / _TICKS


def _runs(pid: int, job: str) -> bool:
    try:
        return f"{job}.py".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def waits(samples: list[tuple[float, int, int]]) -> list[float]:
    """For each moment of the feeding the seconds until all that had been sent was committed."""
    times, committed = [at for at, _, _ in samples], [n for _, _, n in samples]
    found, most = [], samples[-1][1]
    for at, sent, _ in samples:
        when = bisect_left(committed, sent)
        if sent < most and at - times[0] > WARM_UP and when < len(times):
            found.append(max(0.0, times[when] - at))
    return found


def percentiles(seconds: list[float]) -> str:
    if len(seconds) < 100:
        return "too few samples"
    cuts = statistics.quantiles(seconds, n=100)
    return f"median {cuts[49]:.2f} s, p90 {cuts[89]:.2f} s, p99 {cuts[98]:.2f} s"


def behind(samples: list[tuple[float, int, int]]) -> tuple[float, float]:
    """The median wait in the first and in the last third of what counts."""
    found = waits(samples)
    third = max(1, len(found) // 3)
    return statistics.median(found[:third] or [0.0]), statistics.median(found[-third:] or [0.0])


def perform(folder: Path, *, rate: int, seconds: float, kafka: bool) -> tuple[Watched, Path]:
    watched: list[Watched] = []

    def tell(event: dict[str, Any]) -> None:
        match event["event"]:
            case "playing":
                watched[0].begin()
            case "progress":
                jobs = {name: job.get("lag_s") for name, job in event["jobs"].items()}
                progress(f"{event['doing']}: {event['rows']:,} rows sent; lag {jobs}")
            case "restarting":
                print(f"  {event['part']} is started again: {event['message']}")
            case "stopped":
                watched[0].end()
            case "verdict":
                exact = "exact" if event["exact"] else "NOT EXACT"
                print(f"  {event['compared']:,} numbers compared: {exact}")

    settings = Settings(rate=rate, seconds=seconds, kills=0, kafka=kafka)
    demo = DemoRun(folder / "play", settings, tell=tell)
    watched.append(Watched(demo))
    verdict = demo.run()
    if not verdict.exact:
        raise SystemExit("an output is wrong, so the times mean nothing")
    return watched[0], folder / "play" / "home"


def where_the_time_goes(home: Path) -> None:
    for job in JOBS:
        for path in sorted(home.glob(f"{job}/lineages/*/*/onceflow/times.jsonl")):
            steps: dict[str, list[float]] = defaultdict(list)
            for line in map(json.loads, path.read_text().splitlines()):
                for step, ms in line.get("ms", {}).items():
                    steps[step].append(ms)
            medians = {step: statistics.median(ms[3:] or ms) for step, ms in steps.items()}
            query = path.parents[1].name
            told = ", ".join(f"{step} {ms:.0f}" for step, ms in medians.items())
            print(f"  {job}/{query}: an epoch takes, in ms: {told}")


def embedded(arguments: argparse.Namespace, *, kafka: bool = False) -> None:
    where = "Kafka and PostgreSQL" if kafka else "embedded"
    print(f"{where}, {arguments.rate:,} events/s for {arguments.seconds:.0f} s")
    with tempfile.TemporaryDirectory(prefix="onceflow-bench-") as place:
        watched, home = perform(
            Path(place), rate=arguments.rate, seconds=arguments.seconds, kafka=kafka
        )
        print(f"  from event to committed count: {percentiles(waits(watched.events))}")
        print(f"  from order to attribution, all three jobs: {percentiles(waits(watched.orders))}")
        print("  Uber, 2021: one to five minutes")
        _print_cpu(watched)
        where_the_time_goes(home)


def _print_cpu(watched: Watched) -> None:
    samples = watched.events
    wall = samples[-1][0] - samples[0][0]
    for job, (first, last) in watched.cpu.items():
        print(f"  {job}: {(last - first) / wall:.2f} cores")


def rate(arguments: argparse.Namespace) -> None:
    """Until a rate at which the jobs are further behind at the end than at the beginning."""
    print("how many events a second go through without growing lag (embedded)")
    for asked in map(int, arguments.rates.split(",")):
        with tempfile.TemporaryDirectory(prefix="onceflow-bench-") as place:
            watched, home = perform(Path(place), rate=asked, seconds=arguments.seconds, kafka=False)
            first, last = behind(watched.events)
            growing = last > 1.25 * first + 1.0
            verdict = "falls behind" if growing else "keeps up"
            print(f"  {asked:,}/s: {verdict}; {first:.1f} s behind, then {last:.1f} s")
            _print_cpu(watched)
            where_the_time_goes(home)
        if growing:
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help=",".join(PARTS))
    parser.add_argument("--rate", type=int, default=2_000)
    parser.add_argument("--rates", default="2500,5000,10000,20000,40000", help="of the part rate")
    parser.add_argument("--seconds", type=float, default=100.0)
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "embedded": lambda: embedded(arguments),
        "servers": lambda: embedded(arguments, kafka=True),
        "rate": lambda: rate(arguments),
    }
    for name in arguments.only.split(","):
        if name not in parts:
            parser.error(f"there is no {name!r}: use {', '.join(PARTS)}")
        parts[name]()


if __name__ == "__main__":
    main()
