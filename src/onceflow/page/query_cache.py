"""The epoch log and the times of one query. Each entry is read once and kept in short."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from onceflow.errors import OnceflowError
from onceflow.page.files import Changes, JsonLinesFile, Row
from onceflow.page.job_events import numbers_in
from onceflow.page.rates import Published, percentiles, timestamp
from onceflow.page.shapes import EpochSteps, Percentiles
from onceflow.protocol.home import Query
from onceflow.service.status import folder_size
from onceflow.store.posix import unseal

KEPT = 400  # epochs
STEPS = ("check", "stage", "harden", "decide", "publish", "sweep")
_TO_PUBLISHED = STEPS[:-1]
_SHOWN = 60  # epochs of a timeline
_SIZES_EVERY = 10.0  # seconds
_TICKS = "onceflow_ticks"  # a source of our own that has no rows


@dataclass(frozen=True)
class EpochSummary:
    """A decision without its files."""

    epoch: int
    term: int
    at: str
    time: float
    outputs: dict[str, int]  # rows
    late: int
    positions: dict[str, int | None]  # source -> rows before its end, if its offsets tell

    @property
    def rows(self) -> int:
        return sum(self.outputs.values())


def _summary(entry: Row) -> EpochSummary:
    return EpochSummary(
        epoch=entry["epoch"],
        term=entry["term"],
        at=entry["at"],
        time=timestamp(entry["at"]) or 0.0,
        outputs={
            name: sum(file["rows"] for file in output["files"])
            for name, output in entry["outputs"].items()
        },
        late=sum(stood["late"] for stood in entry.get("keyed", {}).values()),
        positions={name: row_position(end) for name, end in entry["end"].items() if name != _TICKS},
    )


def row_position(offset: Any) -> int | None:
    """The number of rows before an offset of a log or of topics, counted from their beginning."""
    if not isinstance(offset, dict):
        return None
    if isinstance(offset.get("next"), list):
        return sum(map(int, offset["next"]))
    parts = list(offset.values())
    if parts and all(isinstance(part, dict) for part in parts):
        numbers = [number for part in parts for number in part.values()]
        if all(type(number) is int for number in numbers):
            return int(sum(numbers))
    return None


class _Decisions:
    """The epoch log up to the last entry that was read: a view for `EpochLog.follow`."""

    def __init__(self) -> None:
        self.epochs: deque[EpochSummary] = deque(maxlen=KEPT)
        self.restart(0, None)

    def restart(self, position: int, roll_up: Row | None) -> None:
        body = roll_up or {}
        self.position = position
        self.fence: Row | None = body.get("fence")
        self.end: Row | None = body.get("end")
        self.last: Row | None = None  # decision
        self.epochs.clear()
        self._decided(body.get("decisions", ()))

    def apply(self, number: int, entry: Row) -> None:
        self.position = number
        match entry["type"]:
            case "fence":
                self.fence = entry
            case "epoch":
                self._decided([entry])
            case "begin":
                self._decided(entry["decisions"])
            case "end":
                self.end = entry

    def _decided(self, entries: Any) -> None:
        for entry in entries:
            self.epochs.append(_summary(entry))
            self.last = entry


class QueryCache(_Decisions):
    """One query. `read` reads new entries; `error` says which file could not be read."""

    def __init__(self, query: Query) -> None:
        super().__init__()
        self.query = query
        self.error: OnceflowError | None = None
        self._log = query.epoch_log()
        self._log_changes = Changes(query.folder / "onceflow" / "log")
        self._times: dict[int, Row] = {}
        path = query.folder / "onceflow" / "times.jsonl"
        self._times_file = JsonLinesFile(path, self._take_time, self._times.clear)
        self._sizes: Row = {"spark_bytes": 0, "keyed": {}}
        self._sized: tuple[int, float] | None = None  # the epoch, and when

    def read(self) -> None:
        if self._log_changes.any():
            try:
                self._log.follow(self)
                self.error = None
            except OnceflowError as error:
                self.error = error
                self._log_changes.forget()
        self._times_file.read()

    def _take_time(self, line: Row) -> None:
        if isinstance(line.get("epoch"), int):
            known = numbers_in(line)
            if "ms" in line:
                known |= {"ms": numbers_in(line["ms"])}
            at = {"at": line["at"]} if isinstance(line.get("at"), str) else {}
            self._times.setdefault(line["epoch"], {}).update(known | at)
            while len(self._times) > KEPT:
                del self._times[next(iter(self._times))]

    # ------------------------------------------------------------ decisions

    @property
    def name(self) -> str:
        return self.query.name

    @property
    def has_ended(self) -> bool:
        """Was its lineage closed?"""
        return self.end is not None

    @property
    def outputs(self) -> dict[str, Row]:
        return (self.fence or {}).get("outputs") or {}

    @property
    def sources(self) -> dict[str, Row]:
        """Source -> its kind and place, as far as known."""
        known: dict[str, Row] = (self.fence or {}).get("sources") or {}
        if self.last is None:
            return dict(known)
        return {
            name: known.get(name) or _source_of_offset(end)
            for name, end in self.last["end"].items()
            if name != _TICKS
        }

    def published(self, output: str | None = None) -> list[Published]:
        """When rows were published, and how many; to one output or to all."""
        return [
            (e.time, e.rows if output is None else e.outputs.get(output, 0)) for e in self.epochs
        ]

    def read_from(self, source: str) -> list[Published] | None:
        """When rows were read from a source, and how many; None if its offsets count no rows."""
        found: list[Published] = []
        before: int | None = None
        for epoch in self.epochs:
            at = epoch.positions.get(source)
            if at is None:
                return None
            found.append((epoch.time, max(0, at - (at if before is None else before))))
            before = at
        return found

    def watermark(self) -> int | None:
        """Of the next epoch, in milliseconds: the smallest of the query and its keyed steps."""
        last = self.last or {}
        found = [last["watermark"]] if last.get("watermark") else []
        of_steps = [stood["watermark"] for stood in last.get("keyed", {}).values()]
        found += [at // 1000 for at in of_steps if at is not None]
        return min(found, default=None)

    # ------------------------------------------------------------ times

    def steps(self) -> list[EpochSteps]:
        """The last epochs, each with its steps, oldest first."""
        return [
            {
                "epoch": epoch.epoch,
                "at": kept.get("at") or epoch.at,
                "ms": {s: ms for s, ms in (kept.get("ms") or {}).items() if s in STEPS},
                "rows_in": kept.get("rows_in"),
                "rows_out": epoch.rows,
                "term": epoch.term,
            }
            for epoch in list(self.epochs)[-_SHOWN:]
            for kept in [self._times.get(epoch.epoch, {})]
        ]

    def percentiles(self) -> Percentiles:
        """Milliseconds from the plan of an epoch until its rows are published."""
        took = [kept["ms"] for kept in self._times.values() if "publish" in (kept.get("ms") or {})]
        return percentiles(round(sum(ms.get(s, 0.0) for s in _TO_PUBLISHED), 1) for ms in took)

    def rows_in(self) -> list[Published]:
        """Of the epochs that Spark has reported on."""
        return [
            (epoch.time, self._times[epoch.epoch]["rows_in"])
            for epoch in self.epochs
            if self._times.get(epoch.epoch, {}).get("rows_in") is not None
        ]

    # ------------------------------------------------------------ state

    def state(self) -> tuple[float | None, int | None]:
        """Rows and bytes of state, of Spark and of keyed steps; None if the query keeps none. Rows
        of keyed steps include older versions. Sizes are read again every few seconds."""
        last = self.last
        if last is None or not (last["state"] or last.get("keyed")):
            return None, None
        now = time.monotonic()
        if self._sized is None or (
            self._sized[0] != last["epoch"] and now - self._sized[1] > _SIZES_EVERY
        ):
            self._sized = (last["epoch"], now)
            spark = folder_size(self.query.folder / "state")[1] if last["state"] else 0
            keyed = {step: self._keyed(step, stood) for step, stood in last["keyed"].items()}
            self._sizes = {"spark_bytes": spark, "keyed": keyed}
        known = [kept["state_rows"] for kept in self._times.values() if kept.get("state_rows")]
        keyed = self._sizes["keyed"].values()
        rows = (known[-1] if known and last["state"] else 0) + sum(rows for rows, _ in keyed)
        return rows, self._sizes["spark_bytes"] + sum(size for _, size in keyed)

    def _keyed(self, step: str, stood: Row) -> tuple[int, int]:
        """Rows and bytes of a keyed step, from its manifest, without Arrow."""
        path = self.query.folder / "onceflow" / "keyed" / step / str(stood["manifest"])
        try:
            body = unseal(path.read_bytes(), "state-manifest", None, str(path))
        except (OSError, OnceflowError):  # the job no longer keeps it, or it is damaged:
            return 0, 0  # the view of the state tells the latter
        runs = [entry["run"] for entry in body["entries"]]
        return sum(run["rows"] for run in runs), sum(run["bytes"] for run in runs)


def _source_of_offset(offset: Any) -> Row:
    """The offset of a log names the log."""
    if isinstance(offset, dict) and isinstance(offset.get("path"), str):
        return {"kind": "log", "place": offset["path"]}
    return {"kind": None, "place": None}
