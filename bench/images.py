"""What it costs to keep what upserts change, so that it can be taken back: `keep_before`.

The time that a sink takes to publish, without Spark. Half of an epoch's rows change what the one
before wrote, the other half are new.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measure import alternate, ratio, spread

from onceflow.contract.ledger import Committable, Position, Publication
from onceflow.contract.schema import parse_schema
from onceflow.contract.sink import Sink
from onceflow.contract.staged_files import describe
from onceflow.sinks import Postgres, Sqlite
from onceflow.testing import servers

_SCHEMA = parse_schema("id long, name string, kind string, ratio double, at timestamp")
_TINY = 10  # rows


def images(folder: Path, turns: int, rows: int) -> None:
    with servers.Postgres(folder / "postgres") as server:
        sinks: dict[str, Callable[..., Sink]] = {
            "Sqlite": lambda table, **more: Sqlite(folder / f"{table}.db", table=table, **more),
            "Postgres": lambda table, **more: Postgres(server.dsn, table=table, **more),
        }
        for size, epochs in ((rows, 4), (_TINY, 40)):
            staged = [_stage(folder / f"{size}-{n}", n * size // 2, size) for n in range(epochs)]
            for name, make in sinks.items():
                _compare(f"{name}, {epochs} epochs of {size:,} rows", make, staged, turns)


def _stage(folder: Path, first: int, rows: int) -> tuple[Committable, ...]:
    folder.mkdir(parents=True)
    ids = range(first, first + rows)
    made = pa.table({
        "id": pa.array(ids, pa.int64()), "name": [f"name-{n}-{first}" for n in ids],
        "kind": ["view" if n % 3 else "buy" for n in ids], "ratio": [n % 997 / 8 for n in ids],
        "at": pa.array([1_700_000_000_000_000 + n + first for n in ids], pa.timestamp("us", "UTC")),
    })  # fmt: skip
    pq.write_table(made, folder / "part-00000.parquet")
    return describe(folder, ())


def _compare(
    what: str, make: Callable[..., Sink], staged: list[tuple[Committable, ...]], turns: int
) -> None:
    def publish(**settings: Any) -> float:
        sink = make(f"rows_{uuid.uuid4().hex[:8]}", key="id", **settings)
        output, times = f"bench/query/{uuid.uuid4().hex}", []
        sink.prepare(output, _SCHEMA, "update")
        sink.fence(output, term=1, token="bench")
        for epoch, files in enumerate(staged):
            previous = Position("bench", epoch - 1) if epoch else None
            began = time.perf_counter()
            sink.publish(Publication(output, "bench", epoch, 1, previous, files, _SCHEMA,
                                     "update", str(epoch)))  # fmt: skip
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    sides = alternate({"without": lambda: publish(keep_before=0), "with images": publish}, turns)
    print(f"\nimages: {what}, half of them changed; publishing one")
    for side in sides.values():
        print(f"  {side.name}: {spread(side.said)}, cpu of the whole turn {spread(side.cpu)}")
    found = ratio(sides["with images"].said, sides["without"].said)
    print(f"  with images / without: {found:.2f} (goal: at most 1.5)")
