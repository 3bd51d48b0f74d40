"""What each guarantee costs into a target: the time of an epoch of ten rows."""

from __future__ import annotations

import json
import statistics
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measure import progress, spread

import onceflow
from onceflow.contract.ledger import Guarantee
from onceflow.contract.sink import Sink

_EPOCHS = 50
_WARM = 10  # of them, which do not count


def guarantees(spark: Any, folder: Path, turns: int, make: Callable[[str], Sink]) -> None:
    """`make` declares a sink for a target of its own, with the name that it gets."""
    source = folder / "tiny"
    source.mkdir()
    for number in range(_EPOCHS):
        rows = pa.table({"id": list(range(number * 10, number * 10 + 10)), "v": ["x"] * 10})
        pq.write_table(rows, source / f"{number:05d}.parquet")
    found: dict[str, list[float]] = {str(guarantee): [] for guarantee in Guarantee}
    for turn in range(turns + 1):
        for guarantee, medians in found.items():
            stream = spark.readStream.name("rows").schema("id long, v string")
            name = f"tiny-{uuid.uuid4().hex[:8]}"
            query = onceflow.write(
                stream.option("maxFilesPerTrigger", 1).parquet(str(source)), name, to=make(name),
                home=folder / f"home-{name}", once=True, guarantee=guarantee,
            )  # fmt: skip
            query.awaitTermination()
            reports = [json.loads(report.json) for report in query.recentProgress]
            times = [r["durationMs"]["triggerExecution"] for r in reports if r["numInputRows"]]
            assert len(times) == _EPOCHS, f"{len(times)} epochs"
            middle = statistics.median(times[_WARM:])
            progress(f"turn {turn} of {turns}, {guarantee}: {middle:.0f} ms")
            if turn:
                medians.append(middle)
    print(f"\nguarantees: the median of {_EPOCHS - _WARM} epochs of ten rows, {turns} times each")
    base = statistics.median(found[Guarantee.EXACTLY_ONCE])
    for guarantee, medians in found.items():
        part = statistics.median(medians) / base
        print(f"  {guarantee}: {spread(medians, 'ms')}, {part:.2f} of exactly-once")
