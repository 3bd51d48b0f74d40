"""One query, followed: its epoch log and its times, each entry read once and kept in short."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from onceflow.errors import OnceflowError
from onceflow.page.files import Changes, Lines, Row
from onceflow.page.progress import numbers
from onceflow.page.times import Published, percentiles, seconds
from onceflow.protocol.home import Query
from onceflow.service.status import held
from onceflow.store.posix import unseal

KEPT = 400  # epochs
STEPS = ("check", "stage", "harden", "decide", "publish", "sweep")
_TO_PUBLISHED = STEPS[:-1]
_SHOWN = 60  # epochs of a timeline
_SIZES_EVERY = 10.0  # seconds
_TICKS = "onceflow_ticks"  # a source of ours that has no rows


@dataclass(frozen=True)
class Epoch:
    """A decision, in short."""

    epoch: int
    term: int
    at: str
    time: float
    outputs: dict[str, int]  # rows
    late: int
    positions: dict[str, int | None]  # source -> rows up to there, if its offsets say so

    @property
    def rows(self) -> int:
        return sum(self.outputs.values())


def _short(entry: Row) -> Epoch:
    return Epoch(
        epoch=entry["epoch"],
        term=entry["term"],
        at=entry["at"],
        time=seconds(entry["at"]) or 0.0,
        outputs={
            name: sum(file["rows"] for file in output["files"])
            for name, output in entry["outputs"].items()
        },
        late=sum(stood["late"] for stood in entry.get("keyed", {}).values()),
        positions={name: position(end) for name, end in entry["end"].items() if name != _TICKS},
    )


def position(offset: Any) -> int | None:
    """How many rows lie before an offset of a log or of topics, counted from their beginning."""
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


class _View:
    """The log as far as it was read: see `storage.View`."""

    def __init__(self) -> None:
        self.epochs: deque[Epoch] = deque(maxlen=KEPT)
        self.restart(0, None)

    def restart(self, position: int, roll_up: Row | None) -> None:
        body = roll_up or {}
        self.position = position
        self.fence: Row | None = body.get("fence")
        self.end: Row | None = body.get("end")
        self.last: Row | None = None
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
            self.epochs.append(_short(entry))
            self.last = entry


class FollowedQuery:
    """Reads what is new when asked. `error` says what could not be read."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.error: OnceflowError | None = None
        self._log, self._view = query.epoch_log(), _View()
        self._log_changes = Changes(query.folder / "onceflow" / "log")
        self._times: dict[int, Row] = {}
        path = query.folder / "onceflow" / "times.jsonl"
        self._times_file = Lines(path, self._take_time, self._times.clear)
        self._sizes: Row = {"spark_bytes": 0, "keyed": {}}
        self._sized: tuple[int, float] | None = None  # the epoch, and when

    def read(self) -> None:
        if self._log_changes.any():
            try:
                self._log.follow(self._view)
                self.error = None
            except OnceflowError as error:
                self.error = error
                self._log_changes.forget()
        self._times_file.read()

    def _take_time(self, line: Row) -> None:
        if isinstance(line.get("epoch"), int):
            known = numbers(line) | {"ms": numbers(line["ms"])} if "ms" in line else numbers(line)
            at = {"at": line["at"]} if isinstance(line.get("at"), str) else {}
            self._times.setdefault(line["epoch"], {}).update(known | at)
            while len(self._times) > KEPT:
                del self._times[next(iter(self._times))]

    # ------------------------------------------------------------ what is known

    @property
    def name(self) -> str:
        return self.query.name

    @property
    def ended(self) -> bool:
        """Has its lineage been closed?"""
        return self._view.end is not None

    @property
    def fence(self) -> Row:
        return self._view.fence or {}

    @property
    def last(self) -> Row | None:
        return self._view.last

    @property
    def epochs(self) -> deque[Epoch]:
        return self._view.epochs

    @property
    def outputs(self) -> dict[str, Row]:
        return self.fence.get("outputs") or {}

    @property
    def sources(self) -> dict[str, Row]:
        """Those that it reads, with what is known of where they are."""
        told: dict[str, Row] = self.fence.get("sources") or {}
        if self.last is None:
            return dict(told)
        return {
            name: told.get(name) or _of_offset(end)
            for name, end in self.last["end"].items()
            if name != _TICKS
        }

    def published(self, output: str | None = None) -> list[Published]:
        """When, and how many rows; to one output, or to all."""
        return [
            (e.time, e.rows if output is None else e.outputs.get(output, 0)) for e in self.epochs
        ]

    def read_from(self, source: str) -> list[Published] | None:
        """The same of what came in, if the offsets of the source count rows."""
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
        """Of the next epoch, the smallest of the query and its keyed steps, in milliseconds."""
        last = self.last or {}
        found = [last["watermark"]] if last.get("watermark") else []
        of_steps = [stood["watermark"] for stood in last.get("keyed", {}).values()]
        found += [at // 1000 for at in of_steps if at is not None]
        return min(found, default=None)

    # ------------------------------------------------------------ how long it took

    def steps(self) -> list[Row]:
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

    def percentiles(self) -> Row:
        """Milliseconds from an epoch's plan to its rows being published."""
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

    def state(self) -> tuple[int | None, int | None]:
        """Rows and bytes of state, Spark's and that of keyed steps; None: it keeps none. Of keyed
        steps with older versions of rows. Looked at every few seconds."""
        last = self.last
        if last is None or not (last["state"] or last.get("keyed")):
            return None, None
        now = time.monotonic()
        if self._sized is None or (
            self._sized[0] != last["epoch"] and now - self._sized[1] > _SIZES_EVERY
        ):
            self._sized = (last["epoch"], now)
            spark = held(self.query.folder / "state")[1] if last["state"] else 0
            keyed = {step: self._keyed(step, stood) for step, stood in last["keyed"].items()}
            self._sizes = {"spark_bytes": spark, "keyed": keyed}
        known = [kept["state_rows"] for kept in self._times.values() if kept.get("state_rows")]
        keyed = self._sizes["keyed"].values()
        rows = (known[-1] if known and last["state"] else 0) + sum(rows for rows, _ in keyed)
        return rows, self._sizes["spark_bytes"] + sum(size for _, size in keyed)

    def _keyed(self, step: str, stood: Row) -> tuple[int, int]:
        """From the manifest, without Arrow."""
        path = self.query.folder / "onceflow" / "keyed" / step / str(stood["manifest"])
        try:
            body = unseal(path.read_bytes(), "state-manifest", None, str(path))
        except (OSError, OnceflowError):  # given up meanwhile; or damaged: `state` says so
            return 0, 0
        runs = [entry["run"] for entry in body["entries"]]
        return sum(run["rows"] for run in runs), sum(run["bytes"] for run in runs)


def _of_offset(offset: Any) -> Row:
    """The offset of a log says where the log is."""
    if isinstance(offset, dict) and isinstance(offset.get("path"), str):
        return {"kind": "log", "place": offset["path"]}
    return {"kind": None, "place": None}
