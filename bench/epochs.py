"""What exactly-once costs: onceflow against Spark's own exactly-once file sink.

    python bench/epochs.py [--only throughput,tiny,ageing,intervals] [--turns 7] [--rows 20000000]

- throughput: the same rows through both, in large epochs
- tiny: the time of an epoch of ten rows, against Spark under the same session settings and
  against Spark as it comes; what fsync costs
- ageing: a thousand epochs in one query; epochs 900 to 1,000 against 100 to 200, and memory
- intervals: throughput, latency and recovery time for epochs of 0.1, 1, 10 and 60 seconds
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measure import alternate, cpu_seconds, progress, ratio, spread

import onceflow
from onceflow.log import EmbeddedLog
from onceflow.sinks import Files

_WARM = 10  # epochs at the beginning of a run that do not count
_TINY = 60  # epochs of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="throughput,tiny,ageing,intervals")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--epochs", type=int, default=1000, help="of the ageing test")
    parser.add_argument("--intervals", default="0.1,1,10,60", help="seconds")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--drive", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--every", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(Path(options.serve))
    if options.drive:
        return drive(Path(options.drive), options.every)
    folder = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
    try:
        if "throughput" in options.only:
            throughput(folder, options.rows, options.turns)
        if "tiny" in options.only:
            tiny(folder, options.turns)
        if "ageing" in options.only:
            ageing(folder, options.epochs)
        if "intervals" in options.only:
            for seconds in options.intervals.split(","):
                interval(folder, float(seconds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


# ---------------------------------------------------------------- both sides


def ours(df: Any, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Through onceflow into Files; what Spark reports of each epoch."""
    name = f"run-{uuid.uuid4().hex[:8]}"
    target = Files(folder / name)
    query = onceflow.write(df, "bench", to=target, home=folder / f"home-{name}", **options)
    return _reports(query, folder, name)


def theirs(df: Any, folder: Path) -> list[dict[str, Any]]:
    """Through Spark's own exactly-once file sink."""
    name = f"run-{uuid.uuid4().hex[:8]}"
    query = (
        df.writeStream.format("parquet").option("path", str(folder / name))
        .option("checkpointLocation", str(folder / f"home-{name}"))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    return _reports(query, folder, name)


def _reports(query: Any, folder: Path, name: str) -> list[dict[str, Any]]:
    query.awaitTermination()
    reports = [json.loads(report.json) for report in query.recentProgress]
    for path in (folder / name, folder / f"home-{name}"):
        shutil.rmtree(path, ignore_errors=True)
    return [report for report in reports if report["numInputRows"]]


def times(reports: list[dict[str, Any]]) -> list[float]:
    """Milliseconds of each epoch, without the first ones."""
    found = [float(report["durationMs"]["triggerExecution"]) for report in reports]
    return found[_WARM:]


# ---------------------------------------------------------------- throughput


def throughput(folder: Path, rows: int, turns: int) -> None:
    spark = onceflow.get_session()
    source = folder / "large"
    progress(f"writing {rows:,} rows")
    columns = ["id", "id % 1000 AS ad", "concat('event-', id) AS event", "id * 0.5D AS price"]
    spark.range(0, rows, 1, 8).selectExpr(*columns).write.parquet(str(source))

    def read() -> Any:
        return large_rows(spark.readStream.name("rows"), source)

    with other_session(folder) as ask:
        sides = alternate(
            {
                "spark": lambda: theirs(read(), folder),
                "onceflow": lambda: ours(read(), folder, once=True),
                "without digests": lambda: ours(read(), folder, once=True, digests=False),
                "spark as it comes": lambda: ask("large"),
            },
            turns,
        )
    print(f"\nthroughput: {rows:,} rows in 2 epochs, file stream to Parquet files")
    for side in sides.values():
        speed = [rows / wall / 1e6 for wall in side.wall]
        print(f"  {side}, {spread(speed, 'M rows/s')}")
    for name in ("spark", "spark as it comes"):
        for mine in ("onceflow", "without digests"):
            wall = 1 / ratio(sides[mine].wall, sides[name].wall)
            cpu = 1 / ratio(sides[mine].cpu, sides[name].cpu)
            print(
                f"  {mine} / {name}: {wall:.2f} by wall time, {cpu:.2f} by cpu (goal: at least 1.0)"
            )
    shutil.rmtree(source)


def large_rows(stream: Any, source: Path) -> Any:
    stream = stream.schema("id long, ad long, event string, price double")
    stream = stream.option("maxFilesPerTrigger", 4)
    return stream.parquet(str(source)).where("ad >= 0").selectExpr("*", "upper(event) AS name")


# ---------------------------------------------------------------- tiny epochs


def tiny(folder: Path, turns: int) -> None:
    source = folder / "tiny"
    source.mkdir()
    for number in range(_TINY):
        rows = pa.table({"id": list(range(number * 10, number * 10 + 10)), "v": ["x"] * 10})
        pq.write_table(rows, source / f"{number:05d}.parquet")
    spark = onceflow.get_session()
    found: dict[str, list[float]] = {
        "onceflow": [],
        "at-least-once": [],
        "at-most-once": [],
        "without fsync": [],
        "spark": [],
        "as it comes": [],
    }
    with other_session(folder) as ask:
        for turn in range(turns + 1):
            for name in list(found):
                if name == "as it comes":
                    measured = ask("tiny")
                elif name == "spark":
                    rows = tiny_rows(spark.readStream.name("rows"), source)
                    measured = times(theirs(rows, folder))
                else:
                    with no_fsync() if name == "without fsync" else contextlib.nullcontext():
                        rows = tiny_rows(spark.readStream.name("rows"), source)
                        chosen = {"guarantee": name} if name.startswith("at-") else {}
                        measured = times(ours(rows, folder, once=True, **chosen))
                progress(f"turn {turn} of {turns}, {name}: {statistics.median(measured):.0f} ms")
                if turn:
                    found[name].append(statistics.median(measured))
    print(f"\ntiny epochs: the median of {_TINY - _WARM} epochs of ten rows, {turns} times each")
    for name, values in found.items():
        print(f"  {name}: {spread(values, 'ms')}")
    base = statistics.median(found["onceflow"])
    same, bare = statistics.median(found["spark"]), statistics.median(found["as it comes"])
    print(f"  onceflow / spark under the same settings: {base / same:.2f} (goal: at most 1.0)")
    print(f"  onceflow / spark as it comes: {base / bare:.2f} (goal: at most 0.8)")
    for name in ("at-least-once", "at-most-once"):
        print(f"  {name} / exactly-once: {statistics.median(found[name]) / base:.2f}")
    fsync = base - statistics.median(found["without fsync"])
    print(f"  of it fsync: {fsync:.1f} ms; Spark's sink does none")


def tiny_rows(stream: Any, source: Path) -> Any:
    stream = stream.schema("id long, v string").option("maxFilesPerTrigger", 1)
    return stream.parquet(str(source))


@contextlib.contextmanager
def no_fsync() -> Iterator[None]:
    real, os.fsync = os.fsync, lambda _: None
    try:
        yield
    finally:
        os.fsync = real


@contextlib.contextmanager
def other_session(folder: Path) -> Iterator[Any]:
    """Spark as it comes needs a JVM of its own; it runs when it is asked to."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stdin, stdout = child.stdin, child.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(what: str) -> list[float]:
        stdin.write(f"{what}\n")
        stdin.flush()
        return [float(value) for value in json.loads(stdout.readline())]

    try:
        yield ask
    finally:
        stdin.close()
        child.wait(60)


def serve(folder: Path) -> None:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    reads = {"tiny": tiny_rows, "large": large_rows}
    for line in sys.stdin:
        what = line.strip()
        measured = times(theirs(reads[what](spark.readStream, folder / what), folder))
        print(json.dumps(measured), flush=True)
    spark.stop()


# ---------------------------------------------------------------- a thousand epochs


def ageing(folder: Path, epochs: int) -> None:
    spark = onceflow.get_session()
    print(f"\n{epochs:,} epochs of ten rows in one query")
    for name in ("onceflow", "spark"):
        stream = spark.readStream.name("rows").format("rate-micro-batch")
        df = stream.option("rowsPerBatch", 10).option("numPartitions", 1).load()
        home, target = folder / f"aged-home-{name}", folder / f"aged-{name}"
        if name == "onceflow":
            query = onceflow.write(df, "aged", to=Files(target), home=home, every="0ms")
        else:
            query = (
                df.writeStream.format("parquet").option("path", str(target))
                .option("checkpointLocation", str(home)).trigger(processingTime="0 seconds").start()
            )  # fmt: skip
        memory, cpu, reports = {}, {}, {}
        tenth = epochs // 10
        for mark in (tenth, 2 * tenth, epochs - tenth, epochs):
            while max(reports, default=-1) < mark:
                if query.exception():
                    raise query.exception()
                time.sleep(1)  # Spark keeps a hundred reports
                for report in query.recentProgress:
                    reports[report["batchId"]] = report["durationMs"]["triggerExecution"]
                progress(f"{name}: epoch {max(reports, default=-1)}")
            cpu[mark], memory[mark] = cpu_seconds(), used_memory(spark)
        query.stop()
        young = [reports[e] for e in range(tenth, 2 * tenth) if e in reports]
        old = [reports[e] for e in range(epochs - tenth, epochs) if e in reports]
        print(f"  {name}: epochs {tenth} to {2 * tenth} {spread(young, 'ms')}, "
              f"{epochs - tenth} to {epochs} {spread(old, 'ms')}: {ratio(old, young):.2f}"
              f"{' (goal: at most 1.1)' if name == 'onceflow' else ''}")  # fmt: skip
        early, late = cpu[2 * tenth] - cpu[tenth], cpu[epochs] - cpu[epochs - tenth]
        print(f"    cpu {early:.1f} s and {late:.1f} s: {late / early:.2f}")
        for what in ("python", "jvm"):
            first, last = memory[tenth][what], memory[epochs][what]
            print(f"    {what} memory after {tenth} epochs {first / 1e6:.0f} MB, after {epochs} "
                  f"{last / 1e6:.0f} MB: {last / first:.2f}"
                  f"{' (goal: at most 1.2)' if name == 'onceflow' else ''}")  # fmt: skip


def used_memory(spark: Any) -> dict[str, float]:
    """Of the driver: resident memory of Python, and the JVM's heap after a collection."""
    runtime = spark._jvm.java.lang.Runtime.getRuntime()
    for _ in range(3):
        spark._jvm.java.lang.System.gc()
        time.sleep(0.1)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    heap = runtime.totalMemory() - runtime.freeMemory()
    return {"python": pages * os.sysconf("SC_PAGE_SIZE"), "jvm": heap}


# ---------------------------------------------------------------- intervals

_RATE = 20_000  # rows a second that the producer appends


def interval(folder: Path, seconds: float) -> None:
    """A log that is filled at a steady rate; the driver is killed once in the middle."""
    place = folder / f"every-{seconds:g}"
    log = EmbeddedLog.create(place / "in", "id long, at timestamp")
    stop = threading.Event()
    producer = threading.Thread(target=produce, args=(log, stop))
    target = place / "out"
    driver = start_driver(place, seconds)
    producer.start()
    try:
        run = max(12.0, 3.2 * seconds)
        first = wait_for_commit(target, "")
        time.sleep(run)
        before = commits(target)
        os.kill(-driver.pid, signal.SIGKILL)
        driver.wait()
        killed = time.time()
        driver = start_driver(place, seconds)
        again = wait_for_commit(target, max(before))
        time.sleep(run)
    finally:
        stop.set()
        producer.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-driver.pid, signal.SIGKILL)
        driver.wait()
    latencies, rows = [], 0
    for at, files in sorted(before.values(), key=lambda commit: commit[0]):
        if at < first + seconds:
            continue  # the first epochs work off what had come before
        appended = published_times(target, files)
        rows += len(appended)
        latencies += [at - row for row in appended[:: max(1, len(appended) // 1000)]]
    print(f"\nepochs of {seconds:g} s, {_RATE:,} rows/s appended")
    if latencies:
        span = max(at for at, _ in before.values()) - first - seconds
        centiles = statistics.quantiles(latencies, n=100)
        print(f"  throughput {rows / max(span, 1e-9):,.0f} rows/s; from append to published: "
              f"median {centiles[49]:.2f} s, 99 of 100 below {centiles[98]:.2f} s")  # fmt: skip
    print(f"  recovery: first rows published {again - killed:.1f} s after kill -9 "
          f"(a JVM starts in it)")  # fmt: skip


def produce(log: EmbeddedLog, stop: threading.Event) -> None:
    number, begin = 0, time.time()
    while not stop.wait(0.1):
        due = int((time.time() - begin) * _RATE) - number
        now = int(time.time() * 1e6)
        ids = pa.array(range(number, number + due), pa.int64())
        log.append(pa.table({"id": ids, "at": pa.array([now] * due, pa.timestamp("us", "UTC"))}))
        number += due


def start_driver(place: Path, seconds: float) -> subprocess.Popen[bytes]:
    every = f"{int(seconds * 1000)}ms"
    command = [sys.executable, __file__, "--drive", str(place), "--every", every]
    return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


def drive(place: Path, every: str) -> None:
    from onceflow.sources import Log

    @onceflow.job("latency", every=every)
    def latency(flow: onceflow.Flow) -> None:
        rows = flow.read("rows", Log(place / "in", columns=["id", "at"]))
        flow.write("rows", rows, to=Files(place / "out"))

    onceflow.start(latency, home=place / "home").wait()


def commits(target: Path) -> dict[str, tuple[float, list[str]]]:
    """Commit with rows -> when it was there, and its files. Old ones are rolled up and go."""
    found = {}
    for path in (target / "_commits").glob("0*.json"):
        with contextlib.suppress(FileNotFoundError):
            body = json.loads(path.read_bytes().splitlines()[1])
            if body.get("files"):
                files = [file["path"] for file in body["files"]]
                found[path.name] = (path.stat().st_mtime, files)
    return found


def wait_for_commit(target: Path, known: str) -> float:
    while max(found := commits(target), default="") <= known:
        time.sleep(0.02)
    return max(at for at, _ in found.values())


def published_times(target: Path, files: list[str]) -> list[float]:
    found: list[float] = []
    for file in files:
        column = pq.read_table(target / file, columns=["at"]).column(0)
        found += [value / 1e6 for value in column.cast(pa.int64()).to_pylist()]
    return found


if __name__ == "__main__":
    main()
