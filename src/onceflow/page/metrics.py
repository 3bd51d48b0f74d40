"""Metrics of all jobs of a home, in the text format of Prometheus (version 0.0.4).

Counters begin with a driver, as its progress does: a new driver is a reset. They stay what they
were while no driver runs. `docs/metrics.md` says what each means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from onceflow.page.files import Row
from onceflow.page.followed import FollowedQuery
from onceflow.page.jobs import FollowedJob
from onceflow.page.times import seconds

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    name: str
    type: str  # counter, gauge or histogram
    labels: tuple[str, ...]
    help: str


_JOB, _QUERY = ("job",), ("job", "query")
METRICS = {
    metric.name: metric
    for metric in (
        Metric("onceflow_up", "gauge", _JOB, "1 while a driver leads the job, else 0."),
        Metric("onceflow_leader_term", "gauge", _JOB, "The term of the driver that led last."),
        Metric(
            "onceflow_damaged", "gauge", _JOB, "1 if a file of the job cannot be read, else 0."
        ),
        Metric(
            "onceflow_restarts_total", "counter", _JOB,
            "Restarts in the journal of the job, after errors and kills.",
        ),
        Metric(
            "onceflow_heard_timestamp_seconds", "gauge", _JOB,
            "When a driver of the job told last how it goes, in seconds since 1970.",
        ),
        Metric("onceflow_epoch", "gauge", _QUERY, "The epoch that was decided last."),
        Metric(
            "onceflow_decided_timestamp_seconds", "gauge", _QUERY,
            "When the last epoch was decided, in seconds since 1970.",
        ),
        Metric("onceflow_epochs_total", "counter", _QUERY, "Epochs that this driver decided."),
        Metric("onceflow_rows_in_total", "counter", _QUERY, "Rows that came in."),
        Metric(
            "onceflow_rows_out_total", "counter", (*_QUERY, "output"), "Rows that were published."
        ),
        Metric(
            "onceflow_late_rows_total", "counter", _QUERY, "Rows that came behind the watermark."
        ),
        Metric(
            "onceflow_rejected_rows_total", "counter", _QUERY,
            "Rows that went to an output for rejected rows.",
        ),
        Metric(
            "onceflow_lag_seconds", "gauge", _QUERY,
            "How long the newest published input had waited, or the running epoch takes.",
        ),
        Metric(
            "onceflow_time_to_committed_seconds", "histogram", _QUERY,
            "From the plan of an epoch to its rows being published.",
        ),
        Metric(
            "onceflow_step_seconds_total", "counter", (*_QUERY, "step"),
            "Time spent in each step of the epochs.",
        ),
        Metric(
            "onceflow_watermark_timestamp_seconds", "gauge", _QUERY,
            "The watermark of the next epoch, in seconds since 1970.",
        ),
        Metric("onceflow_state_rows", "gauge", _QUERY, "Rows of state."),
        Metric("onceflow_state_bytes", "gauge", _QUERY, "Bytes of the files of state."),
    )
}  # fmt: skip

Sample = tuple[str, dict[str, str], Any]  # suffix of the name, labels, value


def exposition(jobs: Iterable[FollowedJob]) -> str:
    """All metrics, each with its help and type, also those that have no sample now."""
    samples: dict[str, list[Sample]] = {name: [] for name in METRICS}
    for job in jobs:
        for name, sample in _of_job(job):
            samples[name].append(sample)
    lines: list[str] = []
    for name, metric in METRICS.items():
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.type}"]
        lines += [
            f"{name}{suffix}{_labels(labels)} {_number(value)}"
            for suffix, labels, value in samples[name]
        ]
    return "\n".join(lines) + "\n"


def _of_job(job: FollowedJob) -> Iterator[tuple[str, Sample]]:
    labels = {"job": job.name}
    yield "onceflow_up", ("", labels, int(job.leads))
    yield "onceflow_leader_term", ("", labels, job.term)
    yield "onceflow_damaged", ("", labels, int(job.error is not None))
    yield "onceflow_restarts_total", ("", labels, job.story.restarts)
    if (heard := seconds(job.heard())) is not None:
        yield "onceflow_heard_timestamp_seconds", ("", labels, heard)
    progress, fresh = job.progress(), job.fresh()
    for query in job.queries.values():
        for name, sample in _of_query(query, progress.get(query.name, {}), fresh):
            suffix, more, value = sample
            if value is not None:
                yield name, (suffix, {**labels, "query": query.name, **more}, value)


def _of_query(query: FollowedQuery, told: Row, fresh: bool) -> Iterator[tuple[str, Sample]]:
    last = query.last
    rows, size = query.state()
    watermark = query.watermark()
    for name, value in (
        ("epoch", last["epoch"] if last else None),
        ("decided_timestamp_seconds", seconds(last["at"]) if last else None),
        ("epochs_total", told.get("epochs")),
        ("rows_in_total", told.get("rows_in")),
        ("late_rows_total", told.get("late_rows")),
        ("rejected_rows_total", told.get("rejected_rows")),
        ("lag_seconds", told.get("lag_s") if fresh else None),
        ("watermark_timestamp_seconds", None if watermark is None else watermark / 1000),
        ("state_rows", rows),
        ("state_bytes", size),
    ):
        yield f"onceflow_{name}", ("", {}, value)
    for output, value in (told.get("outputs") or {}).items():
        yield "onceflow_rows_out_total", ("", {"output": output}, value)
    for step, value in (told.get("steps_s") or {}).items():
        yield "onceflow_step_seconds_total", ("", {"step": step}, value)
    committed = told.get("committed_s") or {}
    if committed:
        name = "onceflow_time_to_committed_seconds"
        for most, count in committed["at_most"]:
            yield name, ("_bucket", {"le": f"{most:g}"}, count)
        yield name, ("_bucket", {"le": "+Inf"}, committed["epochs"])
        yield name, ("_sum", {}, committed["sum"])
        yield name, ("_count", {}, committed["epochs"])


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(int(value))
