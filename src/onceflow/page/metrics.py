"""Metrics of all jobs of a home, for Prometheus. `docs/metrics.md` describes each.

Counters begin with a driver, as its progress does: a new driver is a reset. They keep their values
while no driver runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from onceflow.page.files import Row
from onceflow.page.job_cache import JobCache
from onceflow.page.query_cache import QueryCache
from onceflow.page.rates import timestamp

_FAMILIES: dict[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True)
class Definition:
    name: str
    type: str
    labels: tuple[str, ...]
    help: str


_JOB, _QUERY = ("job",), ("job", "query")
METRICS = {
    metric.name: metric
    for metric in (
        Definition("onceflow_up", "gauge", _JOB, "1 while a driver leads the job, else 0."),
        Definition("onceflow_leader_term", "gauge", _JOB, "The term of the driver that led last."),
        Definition(
            "onceflow_damaged", "gauge", _JOB, "1 if a file of the job cannot be read, else 0."
        ),
        Definition(
            "onceflow_restarts_total", "counter", _JOB,
            "Restarts in the journal of the job, after errors and kills.",
        ),
        Definition(
            "onceflow_heard_timestamp_seconds", "gauge", _JOB,
            "When a driver of the job last reported its progress, in seconds since 1970.",
        ),
        Definition("onceflow_epoch", "gauge", _QUERY, "The last decided epoch."),
        Definition(
            "onceflow_decided_timestamp_seconds", "gauge", _QUERY,
            "When the last epoch was decided, in seconds since 1970.",
        ),
        Definition("onceflow_epochs_total", "counter", _QUERY, "Epochs that this driver decided."),
        Definition("onceflow_rows_in_total", "counter", _QUERY, "Rows that came in."),
        Definition(
            "onceflow_rows_out_total", "counter", (*_QUERY, "output"), "Rows that were published."
        ),
        Definition(
            "onceflow_late_rows_total", "counter", _QUERY, "Rows that arrived behind the watermark."
        ),
        Definition(
            "onceflow_rejected_rows_total", "counter", _QUERY,
            "Rows that went to an output for rejected rows.",
        ),
        Definition(
            "onceflow_lag_seconds", "gauge", _QUERY,
            "How long the newest published input waited, or the running epoch takes.",
        ),
        Definition(
            "onceflow_time_to_committed_seconds", "histogram", _QUERY,
            "From the plan of an epoch until its rows are published.",
        ),
        Definition(
            "onceflow_step_seconds_total", "counter", (*_QUERY, "step"),
            "Time spent in each step of the epochs.",
        ),
        Definition(
            "onceflow_watermark_timestamp_seconds", "gauge", _QUERY,
            "The watermark of the next epoch, in seconds since 1970.",
        ),
        Definition("onceflow_state_rows", "gauge", _QUERY, "Rows of state."),
        Definition("onceflow_state_bytes", "gauge", _QUERY, "Bytes of the files of state."),
    )
}  # fmt: skip

Sample = tuple[str, dict[str, str], Any]  # name of the metric, labels, value


@dataclass(frozen=True)
class Exposition:
    """A text format, and how it is written."""

    content_type: str
    write: Callable[[Collector], bytes]

    def encode(self, jobs: Iterable[JobCache]) -> bytes:
        """All metrics, each with its help and type, even those without a sample."""
        return self.write(_Jobs(jobs))


_TEXT = Exposition("text/plain; version=0.0.4; charset=utf-8", generate_latest)
_OPENMETRICS = Exposition(openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest)


def exposition(accept: str = "") -> Exposition:
    """OpenMetrics for those who accept it, else the text format 0.0.4."""
    kinds = {part.partition(";")[0].strip() for part in accept.split(",")}
    return _OPENMETRICS if "application/openmetrics-text" in kinds else _TEXT


class _Jobs(Collector):
    def __init__(self, jobs: Iterable[JobCache]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        families = {
            name: _FAMILIES[found.type](name, found.help, labels=found.labels)
            for name, found in METRICS.items()
        }
        for job in self._jobs:
            for name, labels, value in _of_job(job):
                found = families[f"onceflow_{name}"]
                values = [labels[label] for label in METRICS[f"onceflow_{name}"].labels]
                if isinstance(found, HistogramMetricFamily):
                    found.add_metric(values, *value)
                elif value is not None:
                    found.add_metric(values, value)
        yield from families.values()


def _of_job(job: JobCache) -> Iterator[Sample]:
    labels = {"job": job.name}
    yield "up", labels, int(job.is_led)
    yield "leader_term", labels, job.term
    yield "damaged", labels, int(job.error is not None)
    yield "restarts_total", labels, job.events.restarts
    yield "heard_timestamp_seconds", labels, timestamp(job.reported_at())
    progress, fresh = job.progress(), job.is_fresh()
    for query in job.queries.values():
        for name, more, value in _of_query(query, progress.get(query.name, {}), fresh):
            yield name, {**labels, "query": query.name, **more}, value


def _of_query(query: QueryCache, progress: Row, fresh: bool) -> Iterator[Sample]:
    last = query.last
    rows, size = query.state()
    watermark = query.watermark()
    yield "epoch", {}, last["epoch"] if last else None
    yield "decided_timestamp_seconds", {}, timestamp(last["at"]) if last else None
    yield "epochs_total", {}, progress.get("epochs")
    yield "rows_in_total", {}, progress.get("rows_in")
    yield "late_rows_total", {}, progress.get("late_rows")
    yield "rejected_rows_total", {}, progress.get("rejected_rows")
    yield "lag_seconds", {}, progress.get("lag_s") if fresh else None
    yield "watermark_timestamp_seconds", {}, None if watermark is None else watermark / 1000
    yield "state_rows", {}, rows
    yield "state_bytes", {}, size
    for output, value in (progress.get("outputs") or {}).items():
        yield "rows_out_total", {"output": output}, value
    for step, value in (progress.get("steps_s") or {}).items():
        yield "step_seconds_total", {"step": step}, value
    committed = progress.get("committed_s")
    if committed:
        buckets = [(f"{most:g}", count) for most, count in committed["at_most"]]
        buckets.append(("+Inf", committed["epochs"]))
        yield "time_to_committed_seconds", {}, (buckets, committed["sum"])
