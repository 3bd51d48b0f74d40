"""The three jobs as cases of `onceflow verify`: their inputs and their targets.

They run at the same time, in one folder. Each reads the logs that the one before it writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ads.generator import Generator, Line, table
from ads.places import AD_MINUTES, ATTRIBUTIONS, STREAMS, Places
from ads.truth import Truth
from ads.world import PARTITIONS, RAW_KEY, REGIONS, SPEED
from onceflow.harness.case_runner import Case
from onceflow.harness.targets import Target

if TYPE_CHECKING:
    import pyarrow as pa

    from onceflow.harness.feed import Input

PAUSE = 0.2  # seconds from commit to commit
_CHUNKS = round(PAUSE * SPEED)  # seconds of ads in a commit
_PER_MINUTE = 120  # events in a minute of ads, which is a second of the clock
JOBS = Path(__file__).with_name("jobs.py")


class Lines:
    """The generator's lines for the raw logs, and the expected result of the lines so far."""

    def __init__(self, seed: int) -> None:
        self.truth = Truth()
        self._generator = Generator(seed, per_minute=_PER_MINUTE)
        self.logs = {f"raw/{region}": _how("raw") for region in REGIONS}

    def commit(self, number: int) -> dict[str, pa.Table]:
        """The first commit begins with the history. Call it in turn, once for each number."""
        if number * _CHUNKS != self._generator.chunks:
            raise ValueError(f"commit {number} does not follow")
        found: dict[str, list[Line]] = {region: [] for region in REGIONS}
        for _ in range(_CHUNKS):
            for region, lines in self._generator.chunk().items():
                found[region] += lines
        return self._given_out(found)

    def last(self, number: int) -> dict[str, pa.Table]:
        return self._given_out(self._generator.closing())

    def _given_out(self, lines: dict[str, list[Line]]) -> dict[str, pa.Table]:
        self.truth.add(lines)
        return {f"raw/{region}": table(some) for region, some in lines.items()}


class Chained:
    """No input of its own: another job writes these logs."""

    def __init__(self, *streams: str) -> None:
        self.logs = {f"{s}/{region}": _how(s) for s in streams for region in REGIONS}

    def commit(self, number: int) -> None:
        """Nothing follows."""

    def last(self, number: int) -> dict[str, pa.Table]:
        return {}


def _how(stream: str) -> dict[str, Any]:
    """The arguments of `Places.create`."""
    key = RAW_KEY if stream == "raw" else ()
    return {
        "schema": STREAMS[stream],
        "partitions": PARTITIONS,
        "key": key,
        "exist_ok": True,
    }


def cases(places: Places, lines: Lines, environment: dict[str, str]) -> list[Case]:
    """In the order in which they read each other."""

    def case(name: str, source: Input, logs: dict[str, str], targets: list[Target]) -> Case:
        return Case(
            job=f"{JOBS}:{name}",
            name=name,
            sinks=", ".join(dict.fromkeys(target.kind for target in targets)),
            folder=places.folder,
            targets=targets,
            source=source,
            queries=tuple(dict.fromkeys(t.output.partition("/")[0] for t in targets)),
            logs=logs,
            environment=environment,
            every=None,
            repeats=True,
            keyed=name != "load",
        )

    def log(output: str, path: Path) -> Target:
        return Target(output, "log", str(path))

    def read(*streams: str) -> dict[str, str]:
        return {f"{s}_{region}": f"{s}/{region}" for s in streams for region in REGIONS}

    return [
        case(
            "aggregation",
            lines,
            read("raw"),
            [
                log(f"ads/{stream}_{region}", places.log(stream, region))
                for stream in ("events", "counts", "rejected")
                for region in REGIONS
            ]
            + [log("ads/once.late", places.late_log("aggregation"))],
        ),
        case(
            "attribution",
            Chained("events"),
            read("events"),
            [
                *(log(f"orders/{region}", places.log("attributed", region)) for region in REGIONS),
                log("orders/attribution.late", places.late_log("attribution")),
            ],
        ),
        case(
            "load",
            Chained("counts", "attributed"),
            read("counts", "attributed"),
            [
                *_loaded(places, "counts", AD_MINUTES),
                *_loaded(places, "attributions", ATTRIBUTIONS),
            ],
        ),
    ]


def _loaded(places: Places, query: str, table: str) -> list[Target]:
    serving, warehouse = str(places.serving_file), str(places.warehouse_folder(table))
    return [
        Target(f"{query}/serving", "sqlite", serving, table, ("record_id",)),
        Target(f"{query}/warehouse", "files", warehouse),
    ]
