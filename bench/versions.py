"""Two versions of onceflow in one run: has a change made epochs slower?

    git worktree add ../before REVISION && ../before/scripts/bootstrap
    python bench/versions.py ../before [--only tiny,throughput,kafka-tiny,kafka] [--turns 7]

Each version runs in a process and a Spark of its own, with the environment of its own checkout.
They take turns, so both meet the same machine. Only what both versions offer is used: `write`,
`sinks.Files` and `sinks.Kafka`.

- tiny: the time of an epoch of ten rows into files
- throughput: rows that wait in Parquet files, in two epochs, into files
- kafka-tiny: the time of an epoch of ten rows into a topic
- kafka: rows that wait in Parquet files, in two epochs, into a topic
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
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measure import cpu_seconds, progress, spread

HERE = Path(__file__).resolve().parents[1]
_ALL = "tiny,throughput,kafka-tiny,kafka"
_EPOCHS, _WARM = 60, 10  # tiny epochs of a turn, and how many of them do not count
_PARTITIONS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, nargs="?", help="the checkout of the other version")
    parser.add_argument("--only", default=_ALL)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--side", nargs=2, metavar=("FOLDER", "SERVERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return serve(Path(options.side[0]), options.side[1], options.rows)
    if options.before is None:
        parser.error("name the checkout of the other version")
    folder = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
    try:
        compare(options.before.resolve(), folder, options.only.split(","), options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def compare(before: Path, folder: Path, only: list[str], options: argparse.Namespace) -> None:
    from onceflow.testing.servers import Kafka

    prepare(folder, options.rows)
    with ExitStack() as stack:
        servers = ""
        if any(name.startswith("kafka") for name in only):
            servers = stack.enter_context(Kafka(folder / "kafka", java=("-Xmx1g",))).servers
        sides = {
            "before": stack.enter_context(Side(before, folder / "before", servers, options.rows)),
            "after": stack.enter_context(Side(HERE, folder / "after", servers, options.rows)),
        }
        for name in only:
            found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for turn in range(options.turns + 1):
                for side, process in sides.items():
                    said = process.ask(name)
                    progress(f"{name}, turn {turn} of {options.turns}, {side}: {said}")
                    if turn:  # the first one warms up
                        found[side].append(said)
            print(f"\n{name}: {options.turns} turns")
            for key, unit in (("epoch", "ms"), ("wall", "s"), ("cpu", "s")):
                values = {side: [said[key] for said in found[side]] for side in found}
                for side, numbers in values.items():
                    print(f"  {key} {side}: {spread(numbers, unit)}")
                ratio = statistics.median(values["after"]) / statistics.median(values["before"])
                print(f"  {key} after / before: {ratio:.3f}")


def prepare(folder: Path, rows: int) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "tiny").mkdir(parents=True)
    for number in range(_EPOCHS):
        few = pa.table({"id": list(range(number * 10, number * 10 + 10)), "v": ["x"] * 10})
        pq.write_table(few, folder / "tiny" / f"{number:05d}.parquet")
    (folder / "large").mkdir()
    for number in range(8):
        ids = np.arange(number * rows // 8, (number + 1) * rows // 8)
        many = pa.table({"id": ids, "v": pa.array(ids).cast(pa.string())})
        pq.write_table(many, folder / "large" / f"{number}.parquet")


class Side:
    """A process that runs one version."""

    def __init__(self, checkout: Path, folder: Path, servers: str, rows: int) -> None:
        python = checkout / ".venv" / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"{checkout} has no environment: run {checkout}/scripts/bootstrap")
        folder.mkdir()
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
        arguments = ["--side", str(folder), servers, "--rows", str(rows)]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [str(python), __file__, *arguments], cwd=checkout, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()

    def ask(self, name: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(Path(self._log.name).read_text()[-3000:])


def serve(folder: Path, servers: str, rows: int) -> None:
    import onceflow
    from onceflow import sinks

    spark = onceflow.get_session("local[2]")
    data = folder.parent

    def read(name: str, schema: str, files: int) -> Any:
        stream = spark.readStream.name("rows").schema(schema).option("maxFilesPerTrigger", files)
        return stream.parquet(str(data / name))

    def topic() -> Any:
        settings = {"servers": servers, "create": {"partitions": _PARTITIONS}}
        return sinks.Kafka(f"bench-{uuid.uuid4().hex[:8]}", **settings)

    def files() -> Any:
        return sinks.Files(folder / f"out-{uuid.uuid4().hex[:8]}")

    works: dict[str, Callable[[], tuple[Any, Any]]] = {
        "tiny": lambda: (read("tiny", "id long, v string", 1), files()),
        "throughput": lambda: (read("large", "id long, v string", 4), files()),
        "kafka-tiny": lambda: (read("tiny", "id long, v string", 1), topic()),
        "kafka": lambda: (read("large", "id long, v string", 4), topic()),
    }
    for line in sys.stdin:
        rows_in, to = works[line.strip()]()
        home = folder / f"home-{uuid.uuid4().hex[:8]}"
        cpu, wall = cpu_seconds(), time.perf_counter()
        query = onceflow.write(rows_in, "bench", to=to, home=home, once=True)
        query.awaitTermination()
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
        reports = [json.loads(report.json) for report in query.recentProgress]
        epochs = [r for r in reports if r["numInputRows"]]
        measured = [r["durationMs"]["triggerExecution"] for r in epochs]
        count = measured[_WARM:] if len(measured) > _WARM else measured
        said = {"epoch": float(statistics.median(count)), "wall": wall, "cpu": cpu}
        print(json.dumps(said), flush=True)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
