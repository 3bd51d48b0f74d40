"""The store of keyed state by itself, without Spark: what look-ups and epochs cost as it grows.

    python bench/state_store.py [--keys 5000000,20000000] [--turns 7] [--epochs 30]

- looking up 1 % of the keys of a state that was loaded at once, places in order
- epochs that read and write 100,000 keys, with the merges that they bring, and look-ups after them
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
from measure import progress

from onceflow.protocol.keyed_spec import GROUPS
from onceflow.state.compact import compact, plan_merges
from onceflow.state.keys import places_of
from onceflow.state.manifest import Manifest
from onceflow.state.runs import RunWriter, StoreSchema
from onceflow.state.store import Reader

SCHEMA = StoreSchema(
    pa.schema([("user", pa.int64())]),
    pa.schema([("total", pa.float64()), ("seen", pa.timestamp("us", "UTC"))]),
    ("seen",),
)
TOUCHED = 100_000


def table(users: np.ndarray, epoch: int) -> tuple[np.ndarray, pa.Table, pa.Table]:
    """These users in the order of their places, with values."""
    keys = pa.table({"user": users})
    places = places_of(keys)
    order = np.argsort(places, kind="stable")
    values = pa.table(
        {
            "total": np.random.default_rng(epoch).random(len(users)),
            "seen": pa.array(np.full(len(users), epoch)).cast(pa.timestamp("us", "UTC")),
        }
    )
    return places[order], keys.take(pa.array(order)), values


def load(folder: Path, keys: int) -> Manifest:
    places, users, values = table(np.arange(keys), 0)
    writer = RunWriter(folder / "loaded.arrow", SCHEMA, GROUPS)
    for at in range(0, keys, 1 << 20):
        part = slice(at, at + (1 << 20))
        step = len(places[part])
        live = np.ones(step, np.bool_)
        writer.add(places[part], users.slice(at, step), values.slice(at, step), live)
    return Manifest(0, GROUPS).advance(0, [writer.close(0)])


def cpu(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@contextlib.contextmanager
def peak_anonymous() -> Iterator[list[int]]:
    """The most MB of memory that was no mapped file, looked at all the time. Filled at the end."""
    found, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            lines = Path("/proc/self/status").read_text().splitlines()
            now = next(line for line in lines if line.startswith("RssAnon"))
            found[0] = max(found[0], int(now.split()[1]) // 1024)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def look_ups(folder: Path, manifest: Manifest, keys: int, turns: int) -> list[float]:
    """CPU seconds of a look-up of 1 % of the keys by a new reader, for each turn."""
    found = []
    for turn in range(turns + 1):
        users = np.random.default_rng(turn).choice(keys, keys // 100, replace=False)
        places, asked, _ = table(users, 0)
        reader = Reader(folder, manifest, SCHEMA)
        took = cpu(lambda reader=reader, p=places, a=asked: reader.look_up(p, a))
        if turn:  # the first one reads the file to check it
            found.append(took)
    return found


def epochs(folder: Path, manifest: Manifest, keys: int, number: int) -> Manifest:
    parts: dict[str, list[float]] = {"look up": [], "write": [], "merge": [], "due": []}
    read, runs = 0, 0
    for epoch in range(1, number + 1):
        users = np.random.default_rng(epoch).choice(keys, TOUCHED, replace=False)
        places, asked, values = table(users, epoch)
        reader = Reader(folder, manifest, SCHEMA)
        parts["look up"].append(cpu(lambda r=reader, p=places, a=asked: r.look_up(p, a)))
        parts["due"].append(
            cpu(lambda r=reader: r.find_due("seen", -1, -(1 << 63), 1 << 63, 1 << 16))
        )
        start = time.process_time()
        writer = RunWriter(folder / f"{epoch}.arrow", SCHEMA, GROUPS)
        writer.add(places, asked, values, np.ones(TOUCHED, np.bool_))
        run = writer.close(epoch)
        parts["write"].append(time.process_time() - start)
        start = time.process_time()
        plan = plan_merges(manifest, run, reader.groups)
        done = compact(reader, plan, folder / f"{epoch}-merged.arrow") if plan else []
        manifest = manifest.advance(epoch, [run], done)
        parts["merge"].append(time.process_time() - start)
        read += sum(run.count(group) for m in plan for run in m.inputs for group in m.groups)
        runs = max(runs, *(len(manifest.stack(group)) for group in range(GROUPS)))
    for name, took in parts.items():
        middle, mean, worst = (f(took) * 1000 for f in (statistics.median, statistics.mean, max))
        print(f"    {name}: median {middle:.1f}, mean {mean:.1f}, most {worst:.1f} ms CPU")
    print(f"    merges read {read / number / TOUCHED:.2f} rows for each row written")
    print(f"    at most {runs} runs of a group, {len(manifest.entries)} of all in the end")
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", default="5000000,20000000")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    for keys in map(int, options.keys.split(",")):
        folder = Path(tempfile.mkdtemp(prefix="onceflow-state-"))
        try:
            progress(f"loading {keys:,} keys")
            with ProcessPoolExecutor(1) as other:  # so that its memory is not ours
                manifest = other.submit(load, folder, keys).result()
            took = look_ups(folder, manifest, keys, options.turns)
            _print(keys, "loaded", took)
            print(f"  {keys:,} keys, epochs of {TOUCHED:,}")
            with peak_anonymous() as most:
                manifest = epochs(folder, manifest, keys, options.epochs)
            print(f"    RssAnon at most {most[0]} MB")
            _print(
                keys,
                f"after {options.epochs} epochs",
                look_ups(folder, manifest, keys, options.turns),
            )
        finally:
            shutil.rmtree(folder)


def _print(keys: int, when: str, took: list[float]) -> None:
    each = [seconds / (keys // 100) * 1e9 for seconds in took]
    middle = statistics.median(each)
    print(f"  {keys:,} keys, {when}: {1000 / middle:.2f} M look-ups/s, {middle:.0f} ns each "
          f"({min(each):.0f} to {max(each):.0f}), CPU")  # fmt: skip


if __name__ == "__main__":
    main()
