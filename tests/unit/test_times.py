"""The times of epochs: kept as far as they are known, small, and never in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onceflow.protocol.step_times import StepTimes, read_times

STEPS = ("epoch.checked", "epoch.staged", "epoch.hardened", "epoch.decided", "epoch.published")


class Spark:
    """Reports on an epoch when the next one ends, as Spark does."""

    def __init__(self) -> None:
        self.finished = -1

    def report(self, epoch: int) -> dict[str, Any] | None:
        if epoch > self.finished:
            return None
        return {"numInputRows": epoch * 10, "durationMs": {"addBatch": 5}, "stateOperators": []}


class Gone:
    def report(self, epoch: int) -> dict[str, Any] | None:
        raise ConnectionError("the JVM is gone")


def run(times: StepTimes, epoch: int, spark: Spark | Gone) -> None:
    times.begin(epoch)
    for point in (*STEPS, "put.linked", "epoch.swept"):
        times.passed(point)
    times.end(spark)


def test_steps_and_reports_come_together(tmp_path: Path) -> None:
    times, spark = StepTimes(tmp_path, 2), Spark()
    for epoch in range(3):
        run(times, epoch, spark)
        spark.finished = epoch
    assert [told.get("rows_in") for told in read_times(tmp_path).values()] == [0, 10, None]
    times.ask(spark)
    known = read_times(tmp_path)[2]
    assert (known["rows_in"], known["state_rows"]) == (20, None)
    assert list(known["ms"]) == ["check", "stage", "harden", "decide", "publish", "sweep"]


def test_when_an_epoch_began_is_kept_and_all_times_are_summed_up(tmp_path: Path) -> None:
    times = StepTimes(tmp_path, 2)
    for epoch in range(3):
        run(times, epoch, Gone())
    began = [told["at"] for told in read_times(tmp_path).values()]
    assert began == sorted(began)
    assert all(at.endswith("Z") for at in began)
    sums = times.sums.as_json()
    assert list(sums["steps_s"]) == ["check", "stage", "harden", "decide", "publish", "sweep"]
    assert sums["committed_s"]["epochs"] == 3
    counts = [epochs for _, epochs in sums["committed_s"]["at_most"]]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_the_newest_are_kept_through_restarts(tmp_path: Path) -> None:
    for epoch in range(50):
        spark = Spark()
        spark.finished = epoch
        run(StepTimes(tmp_path, 3), epoch, spark)
        known = read_times(tmp_path)
        assert set(range(max(0, epoch - 2), epoch + 1)) <= set(known)
    assert len((tmp_path / "times.jsonl").read_text().splitlines()) <= 4 * 3 + 2


def test_half_a_line_a_lost_spark_and_a_folder_that_is_gone_stop_nothing(tmp_path: Path) -> None:
    times = StepTimes(tmp_path, 3)
    run(times, 0, Gone())
    with open(tmp_path / "times.jsonl", "a") as file:
        file.write('{"epoch": 1, "ms"')
    run(times, 1, Gone())
    run(times, 2, Gone())
    assert set(read_times(tmp_path)) == {0, 2}
    nowhere = StepTimes(tmp_path / "gone", 3)
    run(nowhere, 0, Spark())
    assert read_times(tmp_path / "gone") == {}
