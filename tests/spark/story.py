"""A small job with a known result, run in several lives of its driver.

The input is five Parquet files of numbered rows, one for each epoch, or five commits of a log
where the output goes to one. The expected rows follow from the numbers alone. Driver processes,
the reader of committed rows and the checker are those of `onceflow verify`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onceflow import faults
from onceflow.harness.builtin_catalog import Expected
from onceflow.harness.checker import check
from onceflow.harness.drivers import Drivers, Life
from onceflow.harness.observer import Observer
from onceflow.harness.target_reader import read
from onceflow.harness.targets import Row, Target, read_folder
from onceflow.log import EmbeddedLog

JOB = Path(__file__).with_name("story_job.py")
_POLL = 0.02  # seconds from one look at the committed rows to the next
ENDS_WITHIN = 120.0  # seconds, for one life of a driver
FILES = 5
ROWS = 60  # of one file
STEP = 1  # seconds of event time from row to row
WINDOW = 20  # seconds
DELAY = 5  # seconds
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)

INPUT = "id long, key string, at timestamp"


@dataclass(frozen=True)
class Story:
    """Where it runs, its kind of query, and its outputs."""

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

    # -------------------------------------------------------------- input and expected

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

    def expected(self, files: int = FILES) -> Counter[Row]:
        """The rows of all outputs."""
        return sum(self._expected(files).values(), Counter())

    def _expected(self, files: int) -> dict[str, Counter[Row]]:
        ids = range(files * ROWS)
        rows: Counter[Row]
        if self.query in ("stateless", "flaky"):
            rows, key = Counter((i, key_of(i), i * 3) for i in ids if i % 10), 1
        else:
            watermark = at(files * ROWS - 1) - timedelta(seconds=DELAY)
            windows: Counter[tuple[str, datetime]] = Counter()
            for i in ids:
                windows[key_of(i), BEGIN + timedelta(seconds=(i * STEP) // WINDOW * WINDOW)] += 1
            closed = {
                (k, f"{begin:%Y-%m-%d %H:%M:%S}", n)
                for (k, begin), n in windows.items()
                if begin + timedelta(seconds=WINDOW) <= watermark
            }
            rows, key = Counter(closed), 0
        if len(self.outputs) == 1:
            return {self.outputs[0]: rows}
        found: dict[str, Counter[Row]] = {name: Counter() for name in self.outputs}
        for row in rows:
            name = self._output_of(row[key])
            found[name][*row, name] += 1
        return found

    def _output_of(self, key: str) -> str:
        return "files" if key < "b" else self.outputs[-1] if key < "c" else "sqlite"

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
                self._log.commit_log.roll_up(every=3)

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
            kind = F.when(out.key < "b", "files").when(
                out.key < "c", self.outputs[-1]
            )  # _output_of
            out = out.withColumn("outcome", kind.otherwise("sqlite"))
            flow.write("result", out, to={name: to[name] for name in self.outputs}, by="outcome")

        return story

    # -------------------------------------------------------------- lives

    def live(self, **options: Any) -> None:
        """One life of the driver in this process, on the session that is there."""
        import onceflow

        faults.record(self.trace)
        onceflow.start(self.job(), home=self.home, once=True, **options).wait()

    def spawn(
        self, fault: str = "", host: str = "", *, take_over: bool = False, of: Drivers | None = None
    ) -> Life:
        """A life in a process of its own. `fault` is armed in it; `host`: the name of its machine,
        for the lease; `of`: drivers of another master. Let `end` wait for it."""
        pool = of or drivers()
        driver = pool.take()
        pool.wait_until_ready(driver)
        environment = {
            "ONCEFLOW_STORY": json.dumps(asdict(self)),
            "ONCEFLOW_FAULT": fault,
            "ONCEFLOW_TRACE": str(self.trace),
            "ONCEFLOW_HOST": host or os.environ.get("ONCEFLOW_HOST", ""),
        }
        life = driver.live(str(JOB), self.path, environment, take_over=take_over, once=True)
        if of is None:
            pool.keep_one_ahead()
        return life

    def live_apart(self, fault: str = "", **options: Any) -> int:
        """One life in a process of its own; its exit code."""
        life = self.spawn(fault, **options)
        code = end(life)
        if code not in (0, -9):
            print(life.complaint)
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

    @property
    def targets(self) -> list[Target]:
        found = []
        for kind in self.outputs:
            path, table = str(self.path / kind), ""
            if kind == "sqlite":
                path, table = str(self.path / "out.db"), "result"
            output = kind if len(self.outputs) > 1 else "result"
            key = ("key",) if self.query == "random" else ()
            found.append(Target(f"result/{output}", kind, path, table, key))
        return found

    def published(self) -> Counter[Row]:
        """All rows that a reader of committed rows sees now."""
        return Counter(row for target in self.targets for row in read(target, "story").rows)

    def observer(self) -> Observer:
        return Observer(self.home, "story", self.targets, pause=_POLL)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A reader reads committed rows all the time: none goes away. `check` compares them with
        the expected rows when they are all there."""
        observer = self.observer()
        observer.start()
        try:
            yield
        finally:
            observer.stop()
            observer.close()
        observer.raise_failure()
        wrong = [
            said for seen in observer.seen.values() for said in (*seen.backwards, *seen.corrupt)
        ]
        assert not wrong, wrong[:3]
        assert observer.polls > 1

    def check(self, files: int = FILES) -> None:
        """The outputs hold the expected rows, each epoch as a whole; nothing is left behind."""
        observer = self.observer()
        observer.poll()
        expected = {
            target.output: Expected(rows)
            for target, rows in zip(self.targets, self._expected(files).values(), strict=True)
        }
        promised = {target.output: self.guarantee for target in self.targets}
        found = check("story", self.home, observer, expected, guarantees=promised)
        assert not found, "\n".join(map(str, found))

    def check_trace(self) -> None:
        """Its drivers did only what the model of the protocol allows."""
        from model.traces import accept  # a driver process runs this file without the path to it

        refusal = accept(self.trace.read_text().splitlines())
        assert refusal is None, f"{self.trace}, {refusal}"


@functools.cache
def drivers() -> Drivers:
    """Of all stories: a driver that was not killed has another life. A task is tried four times."""
    folder = Path(tempfile.mkdtemp(prefix="onceflow-stories-"))
    found = Drivers(folder, "local[2,4]", {}, job=JOB)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(found.close)
    return found


def end(life: Life, seconds: float = ENDS_WITHIN) -> int:
    """Wait for the end of a life, whose driver can have another; its exit code."""
    code = life.wait(seconds)
    drivers().give_back(life.driver)
    return code


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
    """The committed rows of a folder or a log."""
    return Counter(read_folder(root, "", {}).rows)


def body(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text().split("\n")[1])
    return found
