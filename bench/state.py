"""Keyed state in Python: what it costs, against Spark's own and as it grows.

    python bench/state.py [--only totals,slow,keys,touched,snapshot,kafka] [--turns 5]
                          [--rows 10000000] [--slow-rows 2000000] [--seconds 20]

- totals: a running sum of 200,000 keys in ten epochs, emitted for each key and epoch: `process`,
  `process_key` and Spark's JVM aggregation on RocksDB (update mode, into plain Parquet files)
- slow: the first epochs of the same rows, also by Spark's `transformWithStateInPandas` and
  `transformWithState` (RocksDB; what they emit is written nowhere), which need protobuf
- keys: the same number of rows of 1,000, 200,000 and 5 million keys
- touched: epochs that touch 1 % of 20 million keys of state, against the same rows when there is
  no other state; the memory of Python's workers
- snapshot: bytes of a savepoint that the one before did not have, when 1 % of the keys changed
- kafka: topic to topic, 10,000 rows/s, the total after each row; from append to visible

With fewer --rows there are fewer keys, in proportion.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from measure import Side, alternate, cpu_seconds, progress, ratio, spread
from state_sides import (
    Job,
    Sides,
    by_key,
    given,
    of_each_row,
    peak_anonymous,
    vectorised,
)

import onceflow
from onceflow.spark import jars

_ALL = "totals,slow,keys,touched,snapshot,kafka"
_ROWS = 10_000_000
_EPOCHS = 10
_TOUCHED = 5  # epochs of a turn
_KAFKA_KEYS = 10_000


@dataclass(frozen=True)
class Line:
    """One line of the table at the end."""

    work: str
    found: str
    bar: str
    met: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=_ALL)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rows", type=int, default=_ROWS)
    parser.add_argument("--slow-rows", type=int, help="of the sides that are slow; a fifth of all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn of kafka")
    options = parser.parse_args()
    parts = options.only.split(",")
    if wrong := sorted(set(parts) - set(_ALL.split(","))):
        parser.error(f"there is no {', '.join(wrong)}; there are {_ALL}")
    if options.rows < 10_000 or options.turns < 1:
        parser.error("at least 10,000 --rows and one of --turns")
    if "slow" in parts and not (find_spec("google") and find_spec("google.protobuf")):
        parser.error("Spark's own Python state needs protobuf: pip install 'protobuf>=6.33,<7'")
    if "kafka" in parts:
        os.environ["ONCEFLOW_JARS"] = str(jars.fetch("connector"))
    folder = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
    try:
        lines: list[Line] = []
        bench = Bench(folder, options.rows, options.turns)
        if "totals" in parts:
            lines += totals(bench)
        if "slow" in parts:
            lines += slow(bench, options.slow_rows or options.rows // 5)
        if "keys" in parts:
            lines += key_counts(bench)
        if "touched" in parts or "snapshot" in parts:
            bench.restart()
            large = Job(folder / "large", bench.scaled(20_000_000))
            large.fill(bench.spark, _EPOCHS)
            lines += touched(bench, large) if "touched" in parts else []
            lines += snapshot(bench, large) if "snapshot" in parts else []
            shutil.rmtree(large.folder)
        if "kafka" in parts:
            lines += from_kafka(bench, options.seconds)
        bench.spark.stop()
        show(lines)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show(lines: list[Line]) -> None:
    print("\n| work | found | bar | |")
    print("|---|---|---|---|")
    for line in lines:
        print(f"| {line.work} | {line.found} | {line.bar} | {'met' if line.met else 'MISSED'} |")


class Bench:
    """A session, a folder, and how much there is to do."""

    def __init__(self, folder: Path, rows: int, turns: int) -> None:
        self.folder, self.rows, self.turns = folder, rows, turns
        self.spark: Any = onceflow.get_session("local[2]")
        self.sides = Sides(self.spark, folder)

    def restart(self) -> None:
        """Other Python workers."""
        self.spark.stop()
        self.spark = onceflow.get_session("local[2]")
        self.sides = Sides(self.spark, self.folder)

    def scaled(self, keys: int) -> int:
        return max(100, keys * self.rows // _ROWS)

    def compare(self, sides: dict[str, Callable[[], object]]) -> dict[str, Side]:
        return alternate(sides, self.turns, self.sides.check)


def told(sides: dict[str, Side], rows: int) -> None:
    for side in sides.values():
        speed = [rows / wall / 1000 for wall in side.wall]
        print(f"  {side}, {spread(speed, 'k rows/s')}; in epochs {spread(side.said)}")


def times(one: Side, other: Side) -> tuple[float, str]:
    """How much longer the first took."""
    wall, cpu = ratio(one.wall, other.wall), ratio(one.cpu, other.cpu)
    epochs = ratio(one.said, other.said)
    return wall, f"{wall:.2f} by wall time, {cpu:.2f} by cpu, {epochs:.2f} without starting"


# ---------------------------------------------------------------- against Spark


def totals(bench: Bench) -> list[Line]:
    progress(f"writing {bench.rows:,} rows")
    rows = given(bench.folder / "totals", bench.rows, bench.scaled(200_000), _EPOCHS)
    sides = bench.compare(
        {
            "process": lambda: bench.sides.onceflow(rows, vectorised),
            "process_key": lambda: bench.sides.onceflow(rows, by_key),
            "JVM aggregation": lambda: bench.sides.aggregation(rows),
        }
    )
    shutil.rmtree(rows.folder)
    print(f"\ntotals: {rows.rows:,} rows, {rows.keys:,} keys, {rows.epochs} epochs")
    told(sides, rows.rows)
    wall, found = times(sides["process"], sides["JVM aggregation"])
    _, per_key = times(sides["process_key"], sides["JVM aggregation"])
    print(f"  process_key / JVM aggregation: {per_key}")
    return [Line("process / JVM aggregation", found, "at most 1.5", wall <= 1.5)]


def slow(bench: Bench, slow_rows: int) -> list[Line]:
    """Epochs as large as those of `totals`, so that a key has as many rows in one."""
    each = bench.rows // _EPOCHS
    epochs = max(2, slow_rows // each)  # the second finds state
    rows = given(bench.folder / "slow", each * epochs, bench.scaled(200_000), epochs)
    little = given(bench.folder / "little", 10_000, 2000, 2)  # would warm up for minutes else
    frames, plain = (chain([little], repeat(rows)) for _ in range(2))
    sides = bench.compare(
        {
            "transformWithStateInPandas": lambda: bench.sides.in_pandas(next(frames)),
            "process": lambda: bench.sides.onceflow(rows, vectorised),
            "transformWithState": lambda: bench.sides.in_rows(next(plain)),
            "process_key": lambda: bench.sides.onceflow(rows, by_key),
        }
    )
    shutil.rmtree(rows.folder)
    shutil.rmtree(little.folder)
    print(f"\nslow: {rows.rows:,} rows, {rows.keys:,} keys, {rows.epochs} epochs")
    told(sides, rows.rows)
    lines = []
    for mine, bar in (("process", 10), ("process_key", 3)):
        wall, found = times(sides["transformWithStateInPandas"], sides[mine])
        work = f"transformWithStateInPandas / {mine}, {rows.rows:,} rows"
        lines.append(Line(work, found, f"at least {bar}", wall >= bar))
        print(
            f"  transformWithState / {mine}: {times(sides['transformWithState'], sides[mine])[1]}"
        )
    return lines


# ---------------------------------------------------------------- as state grows


def key_counts(bench: Bench) -> list[Line]:
    progress(f"writing 3 times {bench.rows:,} rows")
    rows = {
        keys: given(bench.folder / f"keys-{keys}", bench.rows, keys, _EPOCHS)
        for keys in map(bench.scaled, (1000, 200_000, 5_000_000))
    }
    sides = bench.compare(
        {
            f"{keys:,} keys": lambda some=some: bench.sides.onceflow(some, vectorised)  # type: ignore[misc]
            for keys, some in rows.items()
        }
    )
    for some in rows.values():
        shutil.rmtree(some.folder)
    print(f"\nkeys: {bench.rows:,} rows, {_EPOCHS} epochs")
    told(sides, bench.rows)
    fewest, *_, most = sides.values()
    wall, found = times(most, fewest)
    return [Line(f"{most.name} / {fewest.name}", found, "at most 2", wall <= 2)]


def touched(bench: Bench, large: Job) -> list[Line]:
    few = large.keys // 100
    small = Job(bench.folder / "small", few)
    small.fill(bench.spark, _EPOCHS)
    jobs = {"all state": large, "no other state": small}
    found = {name: Side(name) for name in jobs}
    for turn in range(bench.turns + 1):
        for name, job in jobs.items():
            job.touch(few, epochs=_TOUCHED)
            cpu = cpu_seconds()
            seconds = statistics.mean(job.run(bench.spark, _TOUCHED))
            cpu = (cpu_seconds() - cpu) / _TOUCHED
            progress(f"turn {turn} of {bench.turns}, {name}: {seconds:.2f} s, cpu {cpu:.2f} s")
            if turn:
                found[name].wall.append(seconds)
                found[name].cpu.append(cpu)
    peaks = {name: _memory(bench, job, few) for name, job in jobs.items()}
    shutil.rmtree(small.folder)
    print(f"\ntouched: epochs of {few:,} keys, each with one row; the mean of {_TOUCHED} epochs")
    for name, job in jobs.items():
        print(f"  {job.keys:,} keys of state, {found[name]}; the largest worker had at most "
              f"{peaks[name]:.0f} MB of its own")  # fmt: skip
    print(f"  while {large.keys:,} keys were filled in, {large.keys // _EPOCHS:,} an epoch: "
          f"{large.filled_in:.0f} MB")  # fmt: skip
    wall = ratio(found["all state"].wall, found["no other state"].wall)
    cpu = ratio(found["all state"].cpu, found["no other state"].cpu)
    work = f"{few:,} of {large.keys:,} keys / the same of {few:,}"
    both = f"{peaks['all state']:.0f} MB / {peaks['no other state']:.0f} MB"
    bounded = peaks["all state"] <= 2 * peaks["no other state"]
    return [
        Line(work, f"{wall:.2f} by wall time, {cpu:.2f} by cpu", "at most 3", wall <= 3),
        Line("the same, memory of a Python worker", both, "bounded: at most 2 times", bounded),
    ]


def _memory(bench: Bench, job: Job, keys: int) -> float:
    """Of workers that have done nothing else: they keep what they once had."""
    bench.restart()
    job.touch(keys, epochs=_TOUCHED)
    with peak_anonymous() as peak:
        job.run(bench.spark, _TOUCHED)
    return peak["worker"]


def snapshot(bench: Bench, large: Job) -> list[Line]:
    before = large.savepoint("s0")
    new: list[float] = []
    for turn in range(bench.turns):
        large.touch(large.keys // 100, epochs=1)
        large.run(bench.spark, 1)
        after = large.savepoint(f"s{turn + 1}")
        new.append(sum(size for file, (_, size) in after.items() if file not in before))
        before = after
        progress(f"savepoint {turn + 1} of {bench.turns}: {new[-1] / 1e6:.1f} MB are new")
    state = sum(size for is_keyed, size in before.values() if is_keyed)
    shares = [100 * size / state for size in new]
    print(f"\nsnapshot: {large.keys:,} keys, {state / 1e6:,.1f} MB of state, 1 % of the keys in "
          f"each of {bench.turns} epochs")  # fmt: skip
    print(f"  bytes that the savepoint before did not have: {spread([n / 1e6 for n in new], 'MB')}")
    found = f"{statistics.median(shares):.2f} % of the state, at most {max(shares):.2f} %"
    work = f"new bytes of a savepoint, 1 % of {large.keys:,} keys changed"
    return [Line(work, found, "at most 5 %", statistics.median(shares) <= 5)]


# ---------------------------------------------------------------- Kafka to Kafka


def from_kafka(bench: Bench, seconds: float) -> list[Line]:
    """The rows of bench/kafka.py; a consumer that reads committed sees each with its total."""
    import kafka

    from onceflow.testing.servers import Kafka

    seen = kafka.Seen()
    with Kafka(bench.folder / "kafka", java=("-Xmx1g",)) as server:
        topics = kafka.Bench(bench.spark, bench.folder, server.servers)
        for turn in range(bench.turns + 1):
            source, target = topics.topic("given"), topics.topic("seen")
            handle = _start(topics, source, target)
            found = kafka.measured(server.servers, source, target, "read_committed", seconds)
            epochs = kafka.epoch_times(handle.queries["totals"])
            handle.stop()
            topics.drop(source, target)
            centiles = statistics.quantiles(found, n=100)
            last = statistics.median(epochs[len(epochs) // 2 :])
            progress(f"turn {turn} of {bench.turns}: {len(found):,} rows, median "
                     f"{centiles[49]:.0f} ms, 99 of 100 below {centiles[98]:.0f} ms")  # fmt: skip
            if turn:
                seen.add(centiles[49], centiles[98], last)
    print(f"\nkafka: 10,000 rows/s of {_KAFKA_KEYS:,} keys, the total after each row; from append "
          f"to visible\n  {seen}")  # fmt: skip
    high = statistics.median(seen.high)
    found_here = f"median {statistics.median(seen.middle):.0f} ms, 99 of 100 below {high:.0f} ms"
    return [Line("topic to topic, 10,000 rows/s", found_here, "p99 under 1 s", high < 1000)]


def _start(topics: Any, source: str, target: str) -> Any:
    @onceflow.job("bench", every="0 seconds")
    def job(flow: onceflow.Flow) -> None:
        rows = topics.read(source, "id long, ad string, at long", "latest")
        rows = rows.selectExpr(
            f"concat('k-', id * 7919 % {_KAFKA_KEYS}) AS k", "id % 100 AS v", "at"
        )
        running = flow.keyed(rows, by="k", process=of_each_row())
        flow.write("totals", running, to=topics.sink(target, key="k"))

    return onceflow.start(job, home=topics.home(), spark=topics.spark)


if __name__ == "__main__":
    main()
