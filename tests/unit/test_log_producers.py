"""Ten producers append to one log at once while readers look: for a minute with --all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pyarrow as pa

from onceflow.log import EmbeddedLog

SECONDS = 60 if os.environ.get("ONCEFLOW_TEST_ALL") == "1" else 3
PRODUCERS, PARTITIONS = 10, 3
SCHEMA = "producer long, batch long, row long, of long"

# Batches of one to forty rows, over all partitions, until the time is up; says how many it did.
PRODUCER = """
import random, sys, time
import pyarrow as pa
from onceflow.log import EmbeddedLog

path, number, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
log, dice, batch = EmbeddedLog(path), random.Random(number), 0
end = time.monotonic() + seconds
while time.monotonic() < end:
    of = dice.randrange(1, 41)
    log.append(pa.table({"producer": [number] * of, "batch": [batch] * of,
                         "row": list(range(of)), "of": [of] * of}))
    batch += 1
print(batch)
"""


def batches(log: EmbeddedLog) -> Counter[tuple[int, int]]:
    """The batches that are there. Asserts that each is there as a whole, once, at its offsets."""
    rows = [row for batch in log.read() for row in batch.to_pylist()]
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    offsets: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
    for row in rows:
        found.setdefault((row["producer"], row["batch"]), []).append((row["row"], row["of"]))
        offsets[row["_partition"]].append(row["_offset"])
    for name, parts in found.items():
        wanted = [(n, parts[0][1]) for n in range(parts[0][1])]
        assert sorted(parts) == wanted, f"batch {name} is torn or doubled: {sorted(parts)}"
    for partition, used in offsets.items():
        assert sorted(used) == list(range(len(used))), f"partition {partition}: {sorted(used)}"
    return Counter(found.keys())


def test_ten_producers_at_once_lose_nothing_and_share_no_offset(tmp_path: Path) -> None:
    path = tmp_path / "log"
    EmbeddedLog.create(path, SCHEMA, partitions=PARTITIONS, key=["row"])
    wrong: list[BaseException] = []
    looks = Counter[str]()
    done = threading.Event()

    def watch(name: str, log: EmbeddedLog | None) -> None:
        before: Counter[tuple[int, int]] = Counter()
        try:
            while not done.is_set():
                seen = batches(log.refresh() if log else EmbeddedLog(path))
                assert not before - seen, "what was seen is gone"
                before = seen
                looks[name] += 1
                done.wait(SECONDS / 12)
        except BaseException as error:
            wrong.append(error)

    watchers = [
        threading.Thread(target=watch, args=("goes on", EmbeddedLog(path))),
        threading.Thread(target=watch, args=("opens anew", None)),
    ]
    command = [sys.executable, "-c", PRODUCER, str(path)]
    producers = [
        subprocess.Popen([*command, str(n), str(SECONDS)], stdout=subprocess.PIPE, text=True)
        for n in range(PRODUCERS)
    ]
    for watcher in watchers:
        watcher.start()
    said = [process.communicate(timeout=SECONDS + 120)[0] for process in producers]
    done.set()
    for watcher in watchers:
        watcher.join()
    assert not wrong, wrong[0]
    assert [process.returncode for process in producers] == [0] * PRODUCERS
    assert min(looks["goes on"], looks["opens anew"]) > 1
    truth = Counter((n, b) for n, count in enumerate(said) for b in range(int(count)))
    assert all(int(count) > 0 for count in said), "every producer got through"
    assert batches(EmbeddedLog(path)) == truth
    assert os.listdir(path / "_appending") == []
    segments = {file for folder in path.glob("partition=*") for file in folder.iterdir()}
    log = EmbeddedLog(path)
    known = {path / s.path for s in log.segments(log.view.low, log.view.next)}
    assert segments == known, "nothing is left behind"
    assert pa.Table.from_batches(log.read()).num_rows == sum(log.view.next)
