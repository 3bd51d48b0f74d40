"""The embedded log against Spark's own Parquet file stream, and against itself as it ages.

    python bench/log.py [--rows 16000000] [--turns 7] [--only read,append,head]

- reading a log as a stream, all columns used, against Spark's file stream over the same segments
- the same with one column of eight, named with `columns=`
- appending Arrow tables
- reading the head of a log of 10,000 commits against one of 10
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from measure import alternate, progress, ratio, spread

from onceflow.log import EmbeddedLog

SCHEMA = (
    "event_id string, ad string, user long, price double, at timestamp, country string, "
    "clicks integer, paid boolean"
)


def table(rows: int, seed: int = 0) -> pa.Table:
    dice = np.random.default_rng(seed)
    ids = np.arange(rows, dtype=np.int64) + seed * rows
    return pa.table(
        {
            "event_id": pa.array([f"{i:016x}" for i in ids.tolist()]),
            "ad": pa.array([f"ad-{i}" for i in range(500)]).take(dice.integers(0, 500, rows)),
            "user": dice.integers(0, 1_000_000, rows),
            "price": dice.random(rows),
            "at": pa.array(ids + 1_700_000_000_000_000).cast(pa.timestamp("us", "UTC")),
            "country": pa.array(["NL", "DE", "FR", "US"]).take(dice.integers(0, 4, rows)),
            "clicks": pa.array(dice.integers(0, 9, rows).astype(np.int32)),
            "paid": dice.integers(0, 2, rows).astype(bool),
        }
    )


# ---------------------------------------------------------------- reading


def drain(df: Any, folder: Path, rows: int) -> float:
    """All that is there, through one streaming query into nothing. Seconds that its epoch took."""
    checkpoint = folder / f"checkpoint-{uuid.uuid4().hex}"
    query = (
        df.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    read = sum(progress["numInputRows"] for progress in query.recentProgress)
    assert read == rows, f"read {read} rows, there are {rows}"
    shutil.rmtree(checkpoint)
    return (
        sum(progress["durationMs"]["triggerExecution"] for progress in query.recentProgress) / 1e3
    )


def reading(folder: Path, rows: int, turns: int) -> None:
    import onceflow
    from onceflow.sources import Log

    log = EmbeddedLog.create(folder / "log", SCHEMA, partitions=2)
    for number in range(8):
        progress(f"writing segment {number + 1} of 8")
        log.append(table(rows // 8, number))
    total = sum(log.view.next)
    plain = folder / "plain"
    plain.mkdir()
    for path in (folder / "log").glob("partition=*/*.parquet"):
        os.link(path, plain / f"{path.parent.name}-{path.name}")
    spark = onceflow.get_session()
    schema = spark.read.parquet(str(plain)).schema

    def files(columns: list[str]) -> Any:
        return spark.readStream.name("f").schema(schema).parquet(str(plain)).select(*columns)

    def ours(columns: list[str]) -> Any:
        return Log(folder / "log", columns=columns).stream(spark, "l")

    names = schema.names
    for what, columns, goal in (("all eight columns", names, 0.6), ("one of eight", ["user"], 0.4)):
        sides = alternate(
            {
                "spark": lambda c=columns: drain(files(c), folder, total),
                "log": lambda c=columns: drain(ours(c), folder, total),
            },
            turns,
        )
        print(f"\nreading {total:,} rows as a stream, {what}")
        for side in sides.values():
            speed = [total / said / 1e6 for said in side.said]
            print(f"  {side.name}: epoch {spread(side.said)}, {spread(speed, 'M rows/s')}; with "
                  f"its start {spread(side.wall)}; cpu {spread(side.cpu)}")  # fmt: skip
        epoch = 1 / ratio(sides["log"].said, sides["spark"].said)
        whole = 1 / ratio(sides["log"].wall, sides["spark"].wall)
        cpu = 1 / ratio(sides["log"].cpu, sides["spark"].cpu)
        print(f"  log / spark: {epoch:.2f} (goal: at least {goal}); with the start of the query "
              f"{whole:.2f}, by cpu {cpu:.2f}")  # fmt: skip
    spark.stop()


# ---------------------------------------------------------------- appending


def appending(folder: Path, turns: int) -> None:
    rows = table(1_000_000)
    narrow = rows.select(["event_id", "at"])
    print("\nappending Arrow tables of a million rows, fsync included")
    for what, data in (("eight columns", rows), ("two columns", narrow)):
        for key in ((), ("event_id",)):
            log = EmbeddedLog.create(
                folder / f"append-{uuid.uuid4().hex}", data.schema, partitions=4, key=key
            )
            speeds = []
            for _ in range(turns):
                begin = time.perf_counter()
                log.append(data)
                speeds.append(1 / (time.perf_counter() - begin))
            keyed = "with a key of a million values" if key else "without key"
            print(f"  {what}, {keyed}: {spread(speeds, 'M rows/s')} (goal: 1)")


# ---------------------------------------------------------------- the head


def head(folder: Path, turns: int) -> None:
    one = pa.table({"value": ["x"], "event_time": pa.array([0], pa.timestamp("us", "UTC"))})
    logs = {}
    # 16 commits are rolled up into one document, so the worst is just before that.
    for commits in (10, 10_000, 10_014):
        path = folder / f"head-{commits}"
        if commits == 10_014:
            shutil.copytree(folder / "head-10000", path)
        log = EmbeddedLog.create(path, exist_ok=True)
        while log.view.position < commits:
            log.append(one)
            if log.view.position % 1000 == 0:
                progress(f"{log.view.position} of {commits} commits")
        logs[commits] = path
    found: dict[int, list[float]] = {commits: [] for commits in logs}
    for _ in range(max(turns, 7) * 20):
        for commits, path in logs.items():
            begin = time.perf_counter()
            assert EmbeddedLog(path).view.position == commits
            found[commits].append((time.perf_counter() - begin) * 1000)
    print("\nreading the head of a log (opening it and finding where it ends)")
    for commits, times in found.items():
        print(f"  {commits:,} commits: {spread(times, 'ms')}")
    for commits in (10_000, 10_014):
        much = statistics.median(found[commits]) / statistics.median(found[10])
        print(f"  {commits:,} against 10: {much:.2f} (goal: at most 2)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16_000_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default="read,append,head")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
    try:
        if "head" in options.only:
            head(folder, options.turns)
        if "append" in options.only:
            appending(folder, options.turns)
        if "read" in options.only:
            reading(folder, options.rows, options.turns)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
