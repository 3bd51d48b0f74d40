"""The progress of a running job, in numbers with units."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from onceflow.protocol.epoch_log import Decision
from onceflow.service.number_format import iso_time

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from onceflow.jobs.handle import Handle, StartedQuery
    from onceflow.protocol.query_spec import QuerySpec

_WINDOW = 10.0  # seconds over which rates are taken, at least
# Progress reports that Spark keeps for a query. All are read when one is new, so a small number is
# cheap; the meter must look before that many epochs have passed.
REPORTS_KEPT = ("spark.sql.streaming.numRecentProgressUpdates", "25")


@dataclass(frozen=True)
class QueryProgress:
    """One query at one moment. Counts begin with this driver."""

    query: str
    epoch: int | None  # decided last
    epochs: int
    rows_in: int
    rows_out: int
    rows_in_per_s: float  # over the last ten seconds, or two epochs if that is longer
    rows_out_per_s: float
    lag_s: float  # how long the newest published input had waited, or the running epoch takes
    published_s_ago: float | None  # by this driver or one before
    watermark: str | None
    state_rows: int | None
    epoch_ms: int | None  # how long the last epoch took
    late_rows: int = 0  # behind the watermark: of keyed steps, and dropped by Spark
    rejected_rows: int | None = None  # None: the query has no output for them
    outputs: dict[str, int] = field(default_factory=dict)  # rows
    steps_s: dict[str, float] = field(default_factory=dict)  # time spent in each step
    # Plan to published: how many epochs, their sum, and how many took at most so long.
    committed_s: dict[str, Any] = field(default_factory=dict)


class ProgressMeter:
    """Reads a handle now and then and remembers what rates need."""

    def __init__(self, handle: Handle, clock: Callable[[], float] = time.time) -> None:
        self._meters = [_Meter(name, s, clock) for name, s in handle.started.items()]

    def count(self) -> int:
        """The number of decided epochs. Call it often, because old decisions are rolled up."""
        return sum(meter.count() for meter in self._meters)

    def look(self) -> list[QueryProgress]:
        return [meter.look() for meter in self._meters]


class _Meter:
    def __init__(self, name: str, started: StartedQuery, clock: Callable[[], float]) -> None:
        self._name, self._started, self._clock = name, started, clock
        opened_at, last = started.epochs.opened_at, started.epochs.log.last
        self._seen = -1 if opened_at is None else opened_at
        self._epochs = self._rows_in = self._rows_out = self._late = 0
        self._outputs = dict.fromkeys(started.epochs.spec.outputs, 0)
        self._rejects = _rejects(name, started.epochs.spec)
        self._newest = ("", -1)  # Spark's progress reports up to here are counted
        self._executed: Any = {}  # the newest report of an epoch that ran
        self._samples = deque([(clock(), 0, 0)])
        self._looked_at = self._seen
        self._waited = 0.0
        # Nothing that appeared before this moment is waiting, as far as we know.
        self._idle_at = clock() if last is None else _seconds(last.at)
        self._busy_since = clock()

    def count(self) -> int:
        for decision in self._started.epochs.log.decisions:
            if decision.epoch > self._seen:
                self._seen = decision.epoch
                self._epochs += 1
                self._rows_out += decision.rows
                self._late += sum(record["late"] for record in decision.keyed.values())
                for output, decided in decision.outputs.items():
                    rows = sum(file.rows for file in decided.files)
                    self._outputs[output] = self._outputs.get(output, 0) + rows
        return self._epochs

    def look(self) -> QueryProgress:
        self.count()
        for report in _reports(self._started.query, self._newest):
            self._newest = (report["timestamp"], report["batchId"])
            self._rows_in += report["numInputRows"]
            self._late += sum(s["numRowsDroppedByWatermark"] for s in report["stateOperators"])
            if "addBatch" in report["durationMs"]:
                self._executed = report
        now, last = self._clock(), self._started.epochs.log.last
        took: int | None = self._executed.get("batchDuration")
        rates = self._rates(now, (took or 0) / 1000)
        published = self._started.epochs.published_at or (_seconds(last.at) if last else None)
        states = self._executed.get("stateOperators")
        watermark = last.lowest_watermark if last else None
        return QueryProgress(
            query=self._name,
            epoch=last.epoch if last else None,
            epochs=self._epochs,
            rows_in=self._rows_in,
            rows_out=self._rows_out,
            rows_in_per_s=rates[0],
            rows_out_per_s=rates[1],
            lag_s=round(self._lag(now, last), 1),
            published_s_ago=None if published is None else round(max(0.0, now - published), 1),
            watermark=None if watermark is None else iso_time(watermark).replace(".000Z", "Z"),
            state_rows=sum(s["numRowsTotal"] for s in states) if states else None,
            epoch_ms=took,
            late_rows=self._late,
            rejected_rows=sum(self._outputs[o] for o in self._rejects) if self._rejects else None,
            outputs=dict(self._outputs),
            **self._started.epochs.times.sums.as_json(),
        )

    def _rates(self, now: float, epoch_s: float) -> tuple[float, float]:
        begin = now - max(_WINDOW, 2 * epoch_s)
        self._samples.append((now, self._rows_in, self._rows_out))
        while len(self._samples) > 2 and self._samples[1][0] <= begin:
            self._samples.popleft()
        then, rows_in, rows_out = self._samples[0]
        seconds = max(now - then, 0.001)
        return (
            round((self._rows_in - rows_in) / seconds, 1),
            round((self._rows_out - rows_out) / seconds, 1),
        )

    def _lag(self, now: float, last: Decision | None) -> float:
        """How long rows wait. Those that are published now appeared after their file was written,
        and after Spark last saw no data."""
        status = self._started.query.status
        if not status["isDataAvailable"]:
            self._idle_at, self._waited, self._busy_since = now, 0.0, now
        elif last is not None and last.epoch != self._looked_at:
            published = self._started.epochs.published_at or now
            self._waited = max(0.0, published - max(self._idle_at, self._appeared(last)))
            self._busy_since = now
        self._looked_at = last.epoch if last else -1
        running = now - self._busy_since if status["isTriggerActive"] else 0.0
        return max(self._waited, running)

    def _appeared(self, decision: Decision) -> float:
        """When the oldest file of the epoch was written; for other sources, when it began."""
        files = [
            json.loads(entry)["timestamp"] / 1000
            for offsets in decision.sources.values()
            for entries in offsets.values()
            for entry in entries
        ]
        if files:
            return float(min(files))
        return _seconds(self._executed["timestamp"]) if self._executed else 0.0


def _rejects(query: str, spec: QuerySpec) -> list[str]:
    """Outputs of rows that could not be taken: `on_bad` of a query or of a source, or by name."""
    if query.endswith(".rejected"):
        return list(spec.outputs)
    return [
        output
        for output in spec.outputs
        if output in (spec.on_bad, "rejected") or output.startswith("rejected_")
    ]


def _reports(query: StreamingQuery, newest: tuple[str, int]) -> list[Any]:
    """Spark's progress reports that are newer, oldest first."""
    last = query.lastProgress
    if last is None or (last["timestamp"], last["batchId"]) <= newest:
        return []
    return [r for r in query.recentProgress if (r["timestamp"], r["batchId"]) > newest]


def _seconds(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()


def as_json(progress: list[QueryProgress]) -> list[dict[str, Any]]:
    return [asdict(query) for query in progress]
