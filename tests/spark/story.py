"""A small job with a known truth, told in several lives of its driver.

The input is five Parquet files of numbered rows, one for each epoch, or five commits of a log
where the output goes to one. The truth is computed from the numbers alone. Outputs are read back
without onceflow's own readers: commit entries as JSON lines, rows by pyarrow and sqlite3.
"""

from __future__ import annotations

import atexit
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onceflow import faults
from onceflow.log import EmbeddedLog

FILES = 5
ROWS = 60  # of one file
STEP = 1  # seconds of event time from row to row
WINDOW = 20  # seconds
DELAY = 5  # seconds
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)

INPUT = "id long, key string, at timestamp"

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Story:
    """Where it plays, what kind of query, which outputs."""

    root: str
    query: str  # stateless | stateful
    sinks: str  # files | sqlite | log | both (files and sqlite) | all
    keep_epochs: int = 2
    files_per_epoch: int = 1
    guarantee: str = "exactly-once"

    @property
    def path(self) -> Path:
        return Path(self.root)

    @property
    def home(self) -> Path:
        return self.path / "home"

    # -------------------------------------------------------------- input and truth

    @property
    def from_log(self) -> bool:
        return self.sinks in ("log", "all")

    def write_input(self, files: range = range(FILES)) -> None:
        log = None
        if self.from_log:
            log = EmbeddedLog.create(self.path / "in", INPUT, partitions=2, exist_ok=True)
        (self.path / "in").mkdir(parents=True, exist_ok=True)
        for number in files:
            ids = list(range(number * ROWS, (number + 1) * ROWS))
            table = pa.table(
                {
                    "id": pa.array(ids, pa.int64()),
                    "key": [key_of(i) for i in ids],
                    "at": pa.array([at(i) for i in ids], pa.timestamp("us", "UTC")),
                }
            )
            if log is not None:
                log.append(table)
                continue
            part = self.path / "in" / f".{number}.part"
            pq.write_table(table, part)
            os.utime(part, (number + 1_700_000_000, number + 1_700_000_000))
            part.rename(self.path / "in" / f"{number}.parquet")  # readers see whole files only

    def truth(self, files: int = FILES) -> Counter[Row]:
        ids = range(files * ROWS)
        if self.query in ("stateless", "flaky"):
            return Counter((i, key_of(i), i * 3) for i in ids if i % 10)
        watermark = at(files * ROWS - 1) - timedelta(seconds=DELAY)
        windows: Counter[tuple[datetime, str]] = Counter()
        for i in ids:
            begin = BEGIN + timedelta(seconds=(i * STEP) // WINDOW * WINDOW)
            windows[begin, key_of(i)] += 1
        closed = {
            (k, b): n for (b, k), n in windows.items() if b + timedelta(seconds=WINDOW) <= watermark
        }
        return Counter((k, b.isoformat(sep=" "), n) for (k, b), n in closed.items())

    # -------------------------------------------------------------- the job

    def job(self) -> Any:
        from pyspark.sql import functions as F

        import onceflow
        from onceflow import sinks, sources

        class Files(sinks.Files):
            roll_up_every = 3

        class Log(sinks.Log):
            def tidy(self) -> None:
                assert self._log is not None
                self._log.commits.roll_up(every=3)

        @onceflow.job("story", every="0ms", keep_epochs=self.keep_epochs)
        def story(flow: onceflow.Flow) -> None:
            source: sources.Source = (
                sources.Log(
                    self.path / "in",
                    columns=["id", "key", "at"],
                    max_rows_per_epoch=self.files_per_epoch * ROWS,
                )
                if self.from_log
                else sources.Files(
                    self.path / "in", schema=INPUT, max_files_per_epoch=self.files_per_epoch
                )
            )
            rows = flow.read("rows", source)
            if self.query == "random":
                out = rows.groupBy(_dice()("id").alias("key")).count()
                to = sinks.Sqlite(self.path / "out.db", table="result", key="key")
                flow.write("result", out, to=to, mode="update")
                return
            if self.query == "flaky":
                rows = rows.where(_flaky(str(self.path / "attempts"))("id"))
            if self.query in ("stateless", "flaky"):
                out = rows.where("id % 10 != 0").select("id", "key", (rows.id * 3).alias("triple"))
            else:
                out = (
                    rows.withWatermark("at", f"{DELAY} seconds")
                    .groupBy(F.window("at", f"{WINDOW} seconds"), "key")
                    .count()
                    .select("key", F.col("window.start").cast("string").alias("begin"), "count")
                )
            to = {
                "files": Files(self.path / "files"),
                "sqlite": sinks.Sqlite(self.path / "out.db", table="result"),
                "log": Log(self.path / "log", key="key", partitions=3),
            }
            if len(self.outputs) == 1:
                flow.write("result", out, to=to[self.sinks], guarantee=self.guarantee)
                return
            kind = F.when(out.key < "b", "files").when(out.key < "c", self.outputs[-1])
            out = out.withColumn("outcome", kind.otherwise("sqlite"))
            flow.write("result", out, to={name: to[name] for name in self.outputs}, by="outcome")

        return story

    # -------------------------------------------------------------- lives

    def live(self, **options: Any) -> None:
        """One life of the driver in this process, on the session that is there."""
        import onceflow

        faults.record(self.trace)
        onceflow.start(self.job(), home=self.home, once=True, **options).wait()

    def spawn(self, fault: str = "", host: str = "", **options: Any) -> Driver:
        """A driver process of its own. `fault` is armed in it; `host` is what it thinks it is."""
        settings = options.pop("settings", None)
        driver = Driver(settings) if settings else _spares.pop() if _spares else Driver()
        driver.send(
            story=asdict(self),
            options=options,
            environment={
                "ONCEFLOW_FAULT": fault,
                "ONCEFLOW_TRACE": str(self.trace),
                "ONCEFLOW_HOST": host or os.environ.get("ONCEFLOW_HOST", ""),
            },
        )
        if not _spares:
            _spares.append(Driver())
        return driver

    def live_apart(self, fault: str = "", **options: Any) -> int:
        """One life in a process of its own; its exit code."""
        driver = self.spawn(fault, **options)
        code = driver.process.wait(120)
        if code not in (0, -9):
            print(driver.said)
        return code

    @property
    def trace(self) -> Path:
        """The points that its drivers reached, in all their lives."""
        return self.path / "trace.jsonl"

    @property
    def outputs(self) -> tuple[str, ...]:
        several = {"both": ("files", "sqlite"), "all": ("files", "sqlite", "log")}
        return several.get(self.sinks, (self.sinks,))

    @property
    def checkpoint(self) -> Path:
        (found,) = self.home.glob("story/lineages/*/result")
        return found

    def newest(self, folder: str) -> Path:
        """The newest `offsets/<N>` or `commits/<N>` of Spark's checkpoint."""
        names = [p for p in (self.checkpoint / folder).iterdir() if p.name.isdigit()]
        return max(names, key=lambda p: int(p.name))

    def log_entries(self) -> list[dict[str, Any]]:
        """The entries of the epoch log that are not rolled up, oldest first."""
        names = sorted((self.checkpoint / "onceflow" / "log").glob("0*.json"))
        return [body(name) for name in names]

    # -------------------------------------------------------------- reading back

    def published(self) -> Counter[Row]:
        """All rows that a reader of committed rows sees now."""
        rows: Counter[Row] = Counter()
        if "files" in self.outputs:
            rows += read_files(self.path / "files")
        if "log" in self.outputs:
            rows += read_files(self.path / "log")
        if "sqlite" in self.outputs:
            rows += read_sqlite(self.path / "out.db", "result")
        return rows

    def check(self, files: int = FILES) -> None:
        """The outputs are the truth, as multisets; nothing is left behind."""
        found, truth = self.published(), self.truth(files)
        assert not truth - found, f"lost: {sorted(truth - found)[:5]}"
        assert not found - truth, f"doubled or wrong: {sorted(found - truth)[:5]}"
        staged = list(self.home.glob("story/lineages/*/*/onceflow/staged/*"))
        assert not staged, f"left behind: {staged}"

    def check_trace(self) -> None:
        """What its drivers did is what the model of the protocol allows."""
        from model.traces import accept  # a driver process runs this file without the path to it

        refusal = accept(self.trace.read_text().splitlines())
        assert refusal is None, f"{self.trace}, {refusal}"


class Driver:
    """A driver process, which starts its JVM and waits for its orders, and what it said."""

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self._output, path = tempfile.mkstemp()
        os.unlink(path)
        weakref.finalize(self, os.close, self._output)
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(settings or {})],
            env={**os.environ, "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def send(self, **orders: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(orders).encode() + b"\n")
        self.process.stdin.close()

    @property
    def said(self) -> str:
        return os.pread(self._output, 1 << 24, 0).decode()

    def dismiss(self) -> None:
        """It ends when nobody can give it orders any more."""
        self.process.communicate()


_spares: list[Driver] = []  # started ahead, so that a JVM starts beside other work


@atexit.register
def _dismiss_spares() -> None:
    for driver in _spares:
        driver.dismiss()


class Poller:
    """Reads committed rows all the time: never a row that is not in the truth, never fewer."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.truth = story.truth()
        self.wrong: list[str] = []
        self.polls = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        if kind is None:
            assert not self.wrong, self.wrong[:3]
            assert self.polls > 1

    def _run(self) -> None:
        before: Counter[Row] = Counter()
        while not self._stop.is_set():
            seen = self.story.published()
            if seen - self.truth:
                self.wrong.append(f"saw {sorted(seen - self.truth)[:3]}")
            if before - seen:
                self.wrong.append(f"went back: {sorted(before - seen)[:3]}")
            before = seen
            self.polls += 1
            time.sleep(0.02)


def key_of(number: int) -> str:
    return "abcd"[number * 7 % 4]


def at(number: int) -> datetime:
    return BEGIN + timedelta(seconds=number * STEP)


def _dice() -> Any:
    """An enrichment whose answer is another at every call."""
    import random

    from pyspark.sql import functions as F

    return F.udf(lambda _: random.SystemRandom().randrange(5), "long").asNondeterministic()


def _flaky(folder: str) -> Any:
    """In the middle of a partition the first attempt fails, or is slow if it may be speculated."""
    from pyspark.sql import functions as F

    def check(number: int) -> bool:
        import os
        import time

        from pyspark import TaskContext

        if number % 60 == 31:
            context = TaskContext.get()
            assert context is not None
            os.makedirs(folder, exist_ok=True)
            slow = os.path.exists(folder + ".slow")
            open(f"{folder}/{number}-{context.attemptNumber()}", "w").close()
            if context.attemptNumber() == 0:
                if not slow:
                    raise RuntimeError("this attempt fails half way")
                if number in (31, 211):  # in an epoch that is written and in one that is collected
                    time.sleep(60)  # ended as soon as the other attempt has won
        return True

    return F.udf(check, "boolean")


def read_files(root: Path) -> Counter[Row]:
    """Follow the documented layout: newest roll-up, its manifests, the entries above it."""
    for _ in range(100):
        try:
            return _read_files(root)
        except FileNotFoundError:
            continue  # rolled up while we read: begin again
    raise AssertionError("a reader of the commits cannot keep up")


def _read_files(root: Path) -> Counter[Row]:
    commits = root / "_commits"
    names = sorted(os.listdir(commits)) if commits.exists() else []
    roll_up = max((n for n in names if n.startswith("rollup-")), default="")
    paths: list[str] = []
    if roll_up:
        for manifest in body(commits / roll_up)["manifests"]:
            paths += [file["path"] for file in _listed(root, manifest)]
    above = roll_up.removeprefix("rollup-")
    for name in names:
        if name[0].isdigit() and name > above:
            paths += [f["path"] for f in body(commits / name).get("files", ())]
    if (
        max((n for n in os.listdir(commits) if n.startswith("rollup-")), default="") != roll_up
        if commits.exists()
        else False
    ):
        raise FileNotFoundError
    rows: Counter[Row] = Counter()
    for path in paths:
        for row in pq.read_table(root / path).to_pylist():
            rows[_row(row)] += 1
    return rows


def _listed(root: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """A manifest lists the files of commits, or manifests of the level below."""
    said = body(root / "_manifests" / manifest["name"])
    files = [file for commit in said.get("commits", ()) for file in commit["files"]]
    return files + [f for below in said.get("manifests", ()) for f in _listed(root, below)]


def body(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text().split("\n")[1])
    return found


def read_sqlite(path: Path, table: str) -> Counter[Row]:
    if not path.exists():
        return Counter()
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)
    try:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
            return Counter()
        cursor = db.execute(f"SELECT * FROM {table}")
        names = [c[0] for c in cursor.description]
        return Counter(_row(dict(zip(names, row, strict=True))) for row in cursor)
    finally:
        db.close()


def _row(row: dict[str, Any]) -> Row:
    kept = {k: v for k, v in row.items() if k not in ("outcome", "_lineage", "_epoch")}
    if "begin" in kept:
        kept["begin"] = datetime.fromisoformat(kept["begin"]).replace(tzinfo=UTC).isoformat(sep=" ")
    return tuple(kept.values())


def main() -> None:
    import onceflow

    onceflow.get_session("local[2]", json.loads(sys.argv[1]))
    line = sys.stdin.readline()
    if line:
        orders = json.loads(line)
        os.environ.update(orders["environment"])
        faults.arm_from_environment()
        Story(**orders["story"]).live(**orders["options"])
    os._exit(0)


if __name__ == "__main__":
    main()
