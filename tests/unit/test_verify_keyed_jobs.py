"""The keyed processes of the built-in jobs, without Spark: right in epochs of any size, strict."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from onceflow.errors import ProcessFailed
from onceflow.harness.builtin_catalog import FILE, JOBS
from onceflow.harness.epoch_logs import Decision
from onceflow.harness.feed import BuiltIn
from onceflow.harness.workload import SCHEMA, table
from onceflow.jobs.job import load
from onceflow.testing import KeyedHarness

COMMITS = 30
SIZES = [5, 64, 5000]  # rows of an epoch
EVENT_TIME = {"event_time": "at", "watermark": "10 seconds"}
STEP = {"by": "face", "rows": "face long, before long, count long, value long, side long"}


@pytest.fixture(scope="module")
def jobs() -> Any:
    """The job file, as a driver loads it."""
    load(f"{FILE}:keyed")
    return sys.modules[f"onceflow.harness.{FILE.stem}"]


def epochs(size: int, seed: int = 5) -> Iterator[pa.Table]:
    rows = table(BuiltIn(seed).rows(COMMITS))
    return (rows.slice(start, size) for start in range(0, len(rows), size))


def expected(job: str) -> Counter[Any]:
    return JOBS[job].expected_results(BuiltIn(5).rows(COMMITS), "files")["result/result"].rows


@pytest.mark.parametrize("size", SIZES)
def test_running_sums_are_those_of_the_truth(jobs: Any, size: int) -> None:
    step = KeyedHarness(jobs.Numbered(), by="key", rows=SCHEMA)
    found = [row for rows in epochs(size) for row in step.feed(rows).to_pylist()]
    last = {row["key"]: (row["key"], row["count"], row["total"]) for row in found}
    assert Counter(last.values()) == expected("keyed")


@pytest.mark.parametrize("size", SIZES)
def test_each_window_is_emitted_once(jobs: Any, size: int) -> None:
    step = KeyedHarness(jobs.Windows(), by="key", rows=f"{SCHEMA}, begin long", **EVENT_TIME)
    found: Counter[Any] = Counter()
    for rows in epochs(size):
        millis = rows["at"].cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        begin = pa.array([at // 10_000 * 10_000 for at in millis.to_pylist()])
        out = step.feed(rows.append_column("begin", begin))
        found.update((r["begin"], r["key"], r["count"], r["total"]) for r in out.to_pylist())
    assert found == expected("timers")
    assert not len(step.late)


@pytest.mark.parametrize("size", SIZES)
def test_each_id_comes_once_and_is_forgotten(jobs: Any, size: int) -> None:
    once = jobs.Once(id="id", ttl="10 seconds")
    step = KeyedHarness(once, by="key", rows=SCHEMA, **EVENT_TIME)
    found: Counter[Any] = Counter()
    for rows in epochs(size):
        found.update((r["id"], r["key"], r["value"]) for r in step.feed(rows).to_pylist())
    assert found == expected("expiring")
    kept = sum(len(ids or ()) for ids in step.state()["ids"].to_pylist())
    assert kept < 300 or size == SIZES[-1], "in one epoch nothing has expired before its end"


@pytest.mark.parametrize("wrong", ["missing", "twice"])
def test_a_row_that_is_missing_or_there_twice_is_told(jobs: Any, wrong: str) -> None:
    first, second, *_ = epochs(20)
    step = KeyedHarness(jobs.Numbered(), by="key", rows=SCHEMA)
    step.feed(first)
    with pytest.raises(ProcessFailed, match="must follow"):
        step.feed(first if wrong == "twice" else second.slice(15))


def test_a_step_that_does_not_follow_the_one_before_it_is_told(jobs: Any) -> None:
    thrown = KeyedHarness(jobs.Thrown(), by="face", rows="face long, value long")
    followed = KeyedHarness(jobs.Followed(), **STEP)
    for side in range(3):
        (out,) = thrown.feed([{"face": 4, "value": 10}] * 2).to_pylist()
        (sums,) = followed.feed([{**out, "side": side % 2}]).to_pylist()
    assert sums == {"face": 4, "count": 6, "total": 60}
    with pytest.raises(ProcessFailed, match="6 throws are known here"):
        followed.feed([{**out, "side": 0}])


@pytest.mark.parametrize(
    ("watermark", "due", "idle_at", "waited_for"),
    [(9, 10, None, False), (10, 10, None, True), (9, None, 7, True), (None, None, None, False)],
)
def test_the_end_waits_for_timers_that_are_due_and_for_partitions_that_fall_idle(
    watermark: int | None, due: int | None, idle_at: int | None, waited_for: bool
) -> None:
    said = {"watermark": watermark, "next": {"closes": due}, "idle_at": idle_at}
    assert Decision(3, 1, {}, 0, False, {}, {"step": said}).is_waited_for is waited_for
