"""What bench/state.py compares: one running sum of each key, kept by onceflow and by Spark.

Every side reads the same Parquet files, one an epoch, and emits (k, total) for each key that the
epoch touched. The sides of Spark write as is kindest to it: what its Python state emits goes
nowhere (the noop sink), what its aggregation emits goes into Parquet files without fsync, ledger or
decision. onceflow publishes exactly once into `Files`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from measure import progress

import onceflow
from onceflow.protocol.home import JobFolder
from onceflow.protocol.keyed_spec import keyed
from onceflow.sinks import Files
from onceflow.snapshots.savepoints import Savepoints
from onceflow.state.process import KeyedProcess
from onceflow.state.states import ValueState

SCHEMA = "k long, v double"
_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
_KEYED = "onceflow/keyed/"


# ---------------------------------------------------------------- what they are given


@dataclass(frozen=True)
class Given:
    """Files of rows, one an epoch, and what must come of them."""

    folder: Path
    rows: int
    keys: int
    epochs: int
    emitted: int  # rows: one for each key that an epoch touched
    total: float  # of all keys, in the end


def given(folder: Path, rows: int, keys: int, epochs: int) -> Given:
    """Every key comes equally often, and in each epoch as many keys as it has rows for."""
    folder.mkdir(parents=True)
    each, emitted, total = rows // epochs, 0, 0.0
    for number in range(epochs):
        ids = np.arange(number * each, (number + 1) * each)
        found, values = ids * 2654435761 % keys, (ids % 100).astype(np.float64)
        put(folder, number, found, values)
        emitted += len(np.unique(found))
        total += float(values.sum())
    return Given(folder, each * epochs, keys, epochs, emitted, total)


def put(folder: Path, number: int, keys: Any, values: Any) -> None:
    part = folder / f".{number}"
    table = pa.table({"k": pa.array(keys, pa.int64()), "v": pa.array(values, pa.float64())})
    pq.write_table(table, part, row_group_size=max(1, len(table) // 4))  # for both cores
    os.utime(part, (1_700_000_000 + number,) * 2)
    part.rename(folder / f"{number:06d}.parquet")


def read(spark: Any, folder: Path) -> Any:
    stream = spark.readStream.name("rows").schema(SCHEMA).option("maxFilesPerTrigger", 1)
    return stream.parquet(str(folder))


def refuse_wrong(output: Path, given: Given) -> None:
    """Totals only grow, so the last one of a key is its largest."""
    files = [
        str(path)
        for path in output.rglob("*.parquet")
        if not any(part[0] in "._" for part in path.relative_to(output).parts)
    ]
    found = ds.dataset(files).to_table(columns=["k", "total"])
    assert len(found) == given.emitted, f"{len(found):,} rows, not {given.emitted:,}"
    last = found.group_by("k").aggregate([("total", "max")])
    total = pc.sum(last["total_max"]).as_py()
    assert total == given.total, f"{total} in all, not {given.total}"


# ---------------------------------------------------------------- onceflow


def vectorised() -> KeyedProcess:
    # A class of a function goes to the workers with its code; they do not find this module.
    class Sum(KeyedProcess):
        output = "k long, total double"
        total = ValueState("double")

        def process(self, keys: pa.Table, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
            total = pc.add(pc.fill_null(keys["total"], 0.0), self.sum(rows["v"]))
            return pa.table({"k": keys["k"], "total": total}), pa.table({"total": total})

    return Sum()


def by_key() -> KeyedProcess:
    class Sum(KeyedProcess):
        output = "k long, total double"
        total = ValueState("double")

        def process_key(self, key: int, rows: Any, state: Any) -> Iterator[dict[str, Any]]:
            state.total = (state.total or 0.0) + sum(row["v"] for row in rows)
            yield {"k": key, "total": state.total}

    return Sum()


def of_each_row() -> KeyedProcess:
    """One row out for each row in: the total of its key after it."""

    class Running(KeyedProcess):
        output = "k string, total long, at long"
        total = ValueState("long")

        def process(self, keys: pa.Table, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
            old = pc.fill_null(keys["total"], 0).to_numpy()
            added = rows["v"].to_numpy()
            running = np.cumsum(added)
            before = (running - added)[self.starts]
            totals = running - before[self.index] + old[self.index]
            out = pa.table({"k": rows["k"], "total": totals, "at": rows["at"]})
            return out, pa.table({"total": pc.add(pa.array(old), self.sum(rows["v"]))})

    return Running()


# ---------------------------------------------------------------- the sides


class Sides:
    """Ways to run the same sum; each returns the seconds of its epochs, as Spark reports them."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self._spark, self._folder = spark, folder
        self._written: list[tuple[Path, Given]] = []

    def onceflow(self, given: Given, process: Callable[[], KeyedProcess]) -> float:
        place = self._place()
        rows = keyed(read(self._spark, given.folder), by="k", process=process())
        query = onceflow.write(
            rows, "bench", to=Files(place / "out"), home=place / "home", once=True
        )
        self._written.append((place / "out", given))
        return sum(epochs_of(query, given.epochs))

    def in_pandas(self, given: Given) -> float:
        """Spark's transformWithStateInPandas: a data frame for each key."""
        import pandas as pd  # type: ignore[import-untyped]
        from pyspark.sql.streaming.stateful_processor import StatefulProcessor

        class Sum(StatefulProcessor):
            def init(self, handle: Any) -> None:
                self.total = handle.getValueState("total", "total double")

            def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
                old = self.total.get()
                total = (old[0] if old else 0.0) + sum(float(frame["v"].sum()) for frame in rows)
                self.total.update((total,))
                yield pd.DataFrame({"k": [key[0]], "total": [total]})

        grouped = read(self._spark, given.folder).groupBy("k")
        return self._spark_state(
            grouped.transformWithStateInPandas(Sum(), "k long, total double", "Update", "None"),
            given,
        )

    def in_rows(self, given: Given) -> float:
        """Spark's transformWithState: the same with Row objects."""
        from pyspark.sql import Row
        from pyspark.sql.streaming.stateful_processor import StatefulProcessor

        class Sum(StatefulProcessor):
            def init(self, handle: Any) -> None:
                self.total = handle.getValueState("total", "total double")

            def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
                old = self.total.get()
                total = (old[0] if old else 0.0) + sum(row["v"] for row in rows)
                self.total.update((total,))
                yield Row(k=key[0], total=total)

        grouped = read(self._spark, given.folder).groupBy("k")
        return self._spark_state(
            grouped.transformWithState(Sum(), "k long, total double", "Update", "None"), given
        )

    def _spark_state(self, df: Any, given: Given) -> float:
        self._spark.conf.unset(_BATCH)  # onceflow has set its own
        writer = df.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self._place() / "home")).start()
        seconds = epochs_of(query, given.epochs)
        kept = query.lastProgress["stateOperators"][0]["numRowsTotal"]
        assert kept == given.keys, f"state of {kept:,} keys, not {given.keys:,}"
        return sum(seconds)

    def aggregation(self, given: Given) -> float:
        """Spark's own aggregation, in the JVM and in update mode."""
        from pyspark.sql import functions as F

        self._spark.conf.unset(_BATCH)
        place = self._place()
        totals = read(self._spark, given.folder).groupBy("k").agg(F.sum("v").alias("total"))

        def write(batch: Any, epoch: int) -> None:
            batch.write.parquet(str(place / "out" / f"epoch-{epoch}"))

        writer = totals.writeStream.foreachBatch(write).outputMode("update")
        writer = writer.option("checkpointLocation", str(place / "home"))
        query = writer.trigger(availableNow=True).start()
        self._written.append((place / "out", given))
        return sum(epochs_of(query, given.epochs))

    def _place(self) -> Path:
        return self._folder / f"run-{uuid.uuid4().hex[:8]}"

    def check(self) -> None:
        """Is what the last turn wrote right? Then it is removed."""
        for output, given in self._written:
            refuse_wrong(output, given)
        self._written.clear()
        for place in self._folder.glob("run-*"):
            shutil.rmtree(place, ignore_errors=True)


def epochs_of(query: Any, expected: int) -> list[float]:
    """Seconds of each epoch that had rows."""
    query.awaitTermination()
    reports = [json.loads(report.json) for report in query.recentProgress]
    found = [r["durationMs"]["triggerExecution"] / 1000 for r in reports if r["numInputRows"]]
    assert len(found) == expected, f"{len(found)} epochs, not {expected}"
    return found


# ---------------------------------------------------------------- a job that goes on


class Job:
    """A running sum that is stopped and started; its state stays."""

    def __init__(self, folder: Path, keys: int) -> None:
        self.folder, self.keys = folder, keys
        self._input, self._home, self._files = folder / "in", folder / "home", 0
        self._input.mkdir(parents=True)
        self.filled_in = 0.0  # MB of the largest worker

    def fill(self, spark: Any, epochs: int) -> None:
        for keys in np.array_split(np.arange(self.keys), epochs):
            self._put(keys)
        progress(f"filling in {self.keys:,} keys")
        with peak_anonymous() as peak:
            took = self.run(spark, epochs)
        self.filled_in = peak["worker"]
        progress(f"{self.keys:,} keys took {sum(took):.1f} s in {epochs} epochs")

    def touch(self, keys: int, *, epochs: int) -> None:
        """One row of each of so many keys, spread over all, and others in each epoch."""
        step = self.keys // keys
        for _ in range(epochs):
            self._put(np.arange(keys) * step + self._files % step)

    def run(self, spark: Any, epochs: int) -> list[float]:
        rows = keyed(read(spark, self._input), by="k", process=vectorised())
        target = Files(self.folder / "out")
        query = onceflow.write(rows, "bench", to=target, home=self._home, once=True)
        return epochs_of(query, epochs)

    def savepoint(self, name: str) -> dict[int, tuple[bool, int]]:
        """By file: is it keyed state, and its bytes."""
        taken = Savepoints(JobFolder(self._home, "bench")).create(name, {})
        return {
            path.stat().st_ino: (entry["path"].startswith(_KEYED), entry["bytes"])
            for path, entry in taken.paths()
        }

    def _put(self, keys: Any) -> None:
        put(self._input, self._files, keys, np.ones(len(keys)))
        self._files += 1


# ---------------------------------------------------------------- memory


@contextlib.contextmanager
def peak_anonymous() -> Iterator[dict[str, float]]:
    """The most MB that the largest of Spark's Python workers had of its own (RssAnon): pages of
    files that it maps are not counted, the system takes them back when it likes."""
    found, done = {"worker": 0.0}, threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            workers = [p for p in _below(os.getpid()) if b"pyspark.daemon" in _of(p, "cmdline")]
            for pid in workers:
                _, _, after = _of(pid, "status").partition(b"RssAnon:")
                if after:
                    found["worker"] = max(found["worker"], int(after.split()[0]) / 1000)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        done.set()
        looking.join()


def _below(pid: int) -> Iterator[int]:
    """All that this process started, by any of its threads."""
    threads: list[Path] = []
    with contextlib.suppress(OSError):
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    for thread in threads:
        for child in map(int, _of(pid, f"task/{thread.name}/children").split()):
            yield child
            yield from _below(child)


def _of(pid: int, name: str) -> bytes:
    """Nothing, of a process that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
