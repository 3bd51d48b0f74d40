"""Restores: rewind of many epochs of files, and skip of some, with the time of the data itself."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measure import progress, spread

import onceflow
from onceflow.protocol.home import JobFolder
from onceflow.sinks import Files
from onceflow.snapshots.restore import Restore
from onceflow.snapshots.savepoint import Savepoint
from onceflow.snapshots.savepoints import Savepoints

_SKIPPED = 50


def going_back(root: Path, epochs: int) -> None:
    (root / "in").mkdir(parents=True)
    spark = onceflow.get_session("local[2]")
    folder = JobFolder(root / "home", "files")
    _add(root, 0, 2)
    _live(spark, root)
    first = Savepoints(folder).create("first", {})
    _add(root, 2, epochs - _SKIPPED)
    _live(spark, root)
    later = Savepoints(folder).create("later", {})
    _add(root, 2 + epochs - _SKIPPED, _SKIPPED)
    once = _live(spark, root)
    progress(f"{epochs} epochs of files are published")

    _restore(folder, later, "skip")
    began = time.monotonic()
    skipped = _live(spark, root)
    took = time.monotonic() - began
    print(f"skip: {_SKIPPED} epochs in {took:.1f} s, {took / _SKIPPED * 1000:.0f} ms an epoch;")
    print(f"  the same epochs at first: median {statistics.median(once) * 1000:.0f} ms "
          f"{spread([t * 1000 for t in once])}; {len(skipped)} epochs afterwards")  # fmt: skip

    planned = _restore(folder, first, "rewind")
    began = time.monotonic()
    with _start(spark, root) as handle:
        (query,) = handle.queries.values()
        while not query.recentProgress and query.isActive:
            time.sleep(0.05)
        opened = time.monotonic() - began
    print(f"rewind of {epochs} epochs of files: restore {planned:.2f} s, "
          f"until the first epoch of the new lineage has ended {opened:.2f} s")  # fmt: skip


def _restore(folder: JobFolder, savepoint: Savepoint, choice: str) -> float:
    began = time.monotonic()
    Restore(folder, savepoint.cuts(), {"": choice}, "bench").run({})
    return time.monotonic() - began


def _add(root: Path, first: int, count: int) -> None:
    for number in range(first, first + count):
        part = root / "in" / f".{number}"
        pq.write_table(pa.table({"id": pa.array(range(10), pa.int64())}), part)
        part.rename(root / "in" / f"{number:06}.parquet")


def _start(spark: Any, root: Path, **options: Any) -> onceflow.Handle:
    @onceflow.job("files", every="0ms", keep_epochs=2000)
    def files(flow: onceflow.Flow) -> None:
        reader = spark.readStream.name("rows").schema("id long").option("maxFilesPerTrigger", 1)
        flow.write("files", reader.parquet(str(root / "in")), to=Files(root / "out"))

    return onceflow.start(files, home=root / "home", spark=spark, **options)


def _live(spark: Any, root: Path) -> list[float]:
    """Seconds of each epoch."""
    handle = _start(spark, root, once=True)
    handle.wait()
    (query,) = handle.queries.values()
    return [report["durationMs"]["triggerExecution"] / 1000 for report in query.recentProgress]
