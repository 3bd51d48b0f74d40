"""What snapshots cost.

    python bench/snapshots.py [--only savepoint,listing,images,back] [--state-mb 1000]

- savepoint: a running job with much state; its epochs while savepoints are taken against those
  before, and time and bytes of a first and of a second savepoint
- listing: `onceflow savepoint list` of a job that has run many epochs
- images: upserts into Sqlite and Postgres, keeping what they change and not
- back: a restore that takes back many epochs of files, and one that skips them
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from going_back import going_back
from images import images
from measure import progress, spread

import onceflow
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, now
from onceflow.sinks import Sqlite
from onceflow.snapshots.savepoints import Savepoints

_WARM = 5  # epochs that do not count
_ONCEFLOW = (sys.executable, "-c", "from onceflow.cli import main; main()")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="savepoint,listing,images,back")
    parser.add_argument("--state-mb", type=int, default=1000, help="of the savepoint's job")
    parser.add_argument("--seconds", type=float, default=60.0, help="of epochs on each side")
    parser.add_argument("--epochs", type=int, default=10_000, help="of the listed job")
    parser.add_argument("--turns", type=int, default=7, help="of each side of the images")
    parser.add_argument("--rows", type=int, default=200_000, help="of a large epoch of the images")
    parser.add_argument("--taken-back", type=int, default=1000, help="epochs of files")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
    try:
        if "savepoint" in options.only:
            savepoint(folder / "savepoint", options.state_mb, options.seconds)
        if "listing" in options.only:
            listing(folder / "listing", options.epochs)
        if "images" in options.only:
            images(folder / "images", options.turns, options.rows)
        if "back" in options.only:
            going_back(folder / "back", options.taken_back)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- savepoints of a running job


class Feed:
    """Files of rows, one an epoch; the first ones make the state, the others touch a little."""

    ROWS = 2000  # of an epoch that is measured

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.keys = folder, 0, 0
        folder.mkdir(parents=True)

    def fill(self, rows: int) -> None:
        """New keys, each with a value that cannot be compressed."""
        ids = list(range(self.keys, self.keys + rows))
        self.keys += rows
        self._put(ids)

    def touch(self) -> None:
        step = max(1, self.keys // self.ROWS)
        self._put([(i * step + self.files) % self.keys for i in range(self.ROWS)])

    def _put(self, ids: list[int]) -> None:
        values = [os.urandom(100).hex() for _ in ids]
        part = self.folder / f".{self.files}"
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "value": values}), part)
        os.utime(part, (1_700_000_000 + self.files,) * 2)
        part.rename(self.folder / f"{self.files:06d}.parquet")
        self.files += 1


class Job:
    """A groupBy that keeps the newest value of each key, and the times of its epochs."""

    def __init__(self, root: Path) -> None:
        self.spark = onceflow.get_session()
        self.feed = Feed(root / "in")
        self.home = root / "home"
        stream = self.spark.readStream.name("rows").schema("id long, value string")
        rows = stream.option("maxFilesPerTrigger", 1).parquet(str(self.feed.folder))
        newest = rows.groupBy("id").agg({"value": "max"}).withColumnRenamed("max(value)", "value")
        self.df = newest.where("value < '05'")  # a fiftieth is published, all is state
        self.target = Sqlite(root / "out.db", table="newest", key="id")
        self.query: Any = None

    @property
    def folder(self) -> JobFolder:
        return JobFolder(self.home, "bench")

    def start(self) -> None:
        self.query = onceflow.write(
            self.df, "bench", to=self.target, home=self.home, mode="update", every="0ms"
        )

    def epoch(self) -> float:
        """Put in what an epoch takes and wait for it; its milliseconds, as Spark reports them."""
        self.feed.touch()
        return self.wait()

    def wait(self) -> float:
        """Until all files are read, each in an epoch of its own."""
        while True:
            assert self.query.isActive, self.query.exception()
            report = self.query.lastProgress
            said = {"batchId": -1} if report is None else json.loads(report.json)
            if said["batchId"] == self.feed.files - 1 and said["numInputRows"]:
                return float(said["durationMs"]["triggerExecution"])
            time.sleep(0.005)

    def state_mb(self) -> float:
        (query,) = self.folder.queries()
        sizes = [p.stat().st_size for p in (query.folder / "state").rglob("*") if p.is_file()]
        return sum(sizes) / 1e6


def savepoint(root: Path, state_mb: int, seconds: float) -> None:
    job = Job(root)
    job.feed.fill(20_000)
    job.start()
    while job.state_mb() < state_mb:
        job.feed.fill(200_000)
        job.wait()
        progress(f"{job.state_mb():,.0f} of {state_mb:,} MB of state")
    for _ in range(_WARM):
        job.epoch()
    before = _epochs(job, seconds)
    done, made = threading.Event(), []
    taking = threading.Thread(target=_take, args=(job.folder, done, made))
    taking.start()
    during: list[float] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(made) < 2:
        during.append(job.epoch())
    done.set()
    taking.join()
    after = _epochs(job, seconds)
    job.query.stop()
    part = statistics.median(during) / statistics.median([*before, *after])
    print(f"\nsavepoint: {job.state_mb():,.0f} MB of state, epochs of {Feed.ROWS:,} rows")
    print(f"  epochs before:  {spread(before, 'ms')}, {len(before)} of them")
    print(f"  epochs during:  {spread(during, 'ms')}, {len(during)} of them")
    print(f"  epochs after:   {spread(after, 'ms')}, {len(after)} of them")
    print(f"  during / before and after: {part:.2f} (goal: at most 1.2)")
    for name, (took, size, read) in zip(("first", "second"), made, strict=False):
        print(f"  {name} savepoint: {took:.2f} s, {size / 1e6:,.0f} MB, {read / 1e6:,.0f} MB read")
    print(f"  savepoints while the epochs were measured: {len(made)}")


def _epochs(job: Job, seconds: float) -> list[float]:
    found, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline or len(found) < _WARM:
        found.append(job.epoch())
    return found


def _take(folder: JobFolder, done: threading.Event, made: list[tuple[float, int, int]]) -> None:
    """Savepoint after savepoint, each by a process of its own as a person would."""
    known: set[int] = set()
    while not done.is_set():
        begin = time.monotonic()
        name = f"s{len(made)}"
        ran = subprocess.run(
            [*_ONCEFLOW, "savepoint", "create", folder.name, "--name", name,
             "--home", str(folder.home)],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        took = time.monotonic() - begin
        taken = Savepoints(folder).read(name)
        files = {path.stat().st_ino: entry["bytes"] for path, entry in taken.paths()}
        new = sum(size for inode, size in files.items() if inode not in known)
        known |= set(files)
        made.append((took, taken.bytes, new))
        progress(f"savepoint {name}: {took:.2f} s")


# ---------------------------------------------------------------- listing


def listing(root: Path, epochs: int) -> None:
    print(f"\nlisting: onceflow savepoint list of a job that has run {epochs:,} epochs")
    for keep in (100, epochs):
        folder = _ran(root / str(keep), epochs, keep)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            subprocess.run(
                [*_ONCEFLOW, "savepoint", "list", folder.name, "--home",
                 str(folder.home)],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            times.append(time.perf_counter() - begin)
        print(f"  keep_epochs={keep:,}: {spread(times)} (goal: under 1 s)")


def _ran(home: Path, epochs: int, keep: int) -> JobFolder:
    """A job as many epochs leave it, without having run them."""
    sync, os.fsync = os.fsync, lambda _: None
    try:
        folder = JobFolder(home, "bench")
        query = folder.query(folder.open_lineage("4.2.1"), "bench")
        log = query.epoch_log()
        log.fence(1, {"at": now(), "spark": "4.2.1", "outputs": {}})
        (query.folder / "offsets").mkdir()
        for epoch in range(epochs):
            state = {"0": [[str(uuid.uuid4())] for _ in range(8)]}
            offsets = f'v2\n{{"batchWatermarkMs":0}}\nrows:{{"logOffset":{epoch}}}'
            start, end = {"rows": {"logOffset": epoch - 1}}, {"rows": {"logOffset": epoch}}
            lines = {"rows": {str(epoch): [json.dumps({"path": "x" * 80, "batchId": epoch})]}}
            decision = Decision(epoch, 1, now(), start, end, offsets, lines, state, epoch, {})
            log.decide(decision)
            log.roll_up(keep=keep, slack=keep)
            if epoch >= epochs - keep:
                (query.folder / "offsets" / str(epoch)).write_text(offsets)
            if epoch % 1000 == 0:
                progress(f"{epoch:,} of {epochs:,} epochs")
        return folder
    finally:
        os.fsync = sync


if __name__ == "__main__":
    main()
