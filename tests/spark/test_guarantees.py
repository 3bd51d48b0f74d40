"""Weaker guarantees keep what they promise, and only that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from story import FILES, Story

import onceflow
from onceflow import Flow, faults
from onceflow.contract.ledger import Guarantee, Ledger, Outcome, Publication
from onceflow.errors import JobError
from onceflow.sinks import Files, Sink

SINKS = ("files", "sqlite", "log")


def broken_at(point: str, story: Story, *, kill: bool = False) -> tuple[Counter[Any], Counter[Any]]:
    """Break the second epoch at the point, then run to the end. Returns lost and doubled rows."""
    story.write_input()
    if kill:
        assert story.live_apart(f"{point}:kill:2") == -9
    else:
        faults.arm(point, "raise", visit=2)
        with pytest.raises(faults.InjectedFault):
            story.live()
        faults.disarm()
    story.live()
    assert not list(story.home.glob("story/lineages/*/*/onceflow/staged/*"))
    return story.expected() - story.published(), story.published() - story.expected()


@pytest.mark.parametrize("sinks", SINKS)
def test_at_least_once_loses_nothing_and_may_repeat_an_epoch(
    tmp_path: Path, spark: Any, sinks: str
) -> None:
    story = Story(str(tmp_path), "stateless", sinks, guarantee="at-least-once")
    lost, doubled = broken_at("epoch.published", story, kill=sinks == "files")
    assert not lost
    assert len(doubled) == story.expected().total() / FILES
    assert set(doubled.values()) == {1}  # the rows that were decided, once more


@pytest.mark.parametrize("sinks", SINKS)
def test_at_most_once_repeats_nothing_and_may_lose_an_epoch(
    tmp_path: Path, spark: Any, sinks: str
) -> None:
    story = Story(str(tmp_path), "stateless", sinks, guarantee="at-most-once")
    lost, doubled = broken_at("epoch.decided", story, kill=sinks == "files")
    assert not doubled
    assert len(lost) == story.expected().total() / FILES


@pytest.mark.parametrize(
    ("guarantee", "point"),
    [("at-least-once", "epoch.decided"), ("at-most-once", "epoch.published")],
)
@pytest.mark.parametrize("sinks", SINKS)
def test_a_weaker_guarantee_is_exact_where_the_fault_does_not_hit_it(
    tmp_path: Path, spark: Any, sinks: str, guarantee: str, point: str
) -> None:
    lost, doubled = broken_at(point, Story(str(tmp_path), "stateful", sinks, guarantee=guarantee))
    assert not lost
    assert not doubled


@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize("sinks", ["files", "log"])
def test_a_driver_that_was_killed_while_it_added_files_is_followed_by_one_that_goes_on(
    tmp_path: Path, spark: Any, sinks: str, guarantee: str
) -> None:
    story = Story(str(tmp_path), "stateless", sinks, guarantee=guarantee)
    lost, doubled = broken_at("folder.moved-one", story, kill=True)
    assert not doubled  # what was moved and not committed is gone
    assert len(lost) == (0 if guarantee == "at-least-once" else story.expected().total() / FILES)
    seen = sum(pq.read_metadata(path).num_rows for path in (tmp_path / sinks).rglob("*.parquet"))
    assert seen == story.published().total()


@pytest.mark.parametrize("sinks", SINKS)
def test_a_stopped_job_repeats_nothing_and_may_change_its_guarantee(
    tmp_path: Path, spark: Any, sinks: str
) -> None:
    story = Story(str(tmp_path), "stateless", sinks, guarantee="at-least-once")
    for number, guarantee in enumerate([*Guarantee, *Guarantee][: FILES - 1]):
        story.write_input(range(number, number + 1))
        replace(story, guarantee=guarantee).live()
        assert story.published() == story.expected(number + 1)
    story.write_input(range(FILES - 1, FILES))
    faults.arm("epoch.decided", "raise")
    with pytest.raises(faults.InjectedFault):
        replace(story, guarantee="exactly-once").live()
    faults.disarm()
    replace(story, guarantee="at-most-once").live()  # what was decided is kept as it was promised
    story.check()


class Ledgered(Sink):
    """It has no ability beside the three methods."""

    def __init__(self, path: str) -> None:
        pass

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        raise NotImplementedError

    def published(self, output: str) -> Ledger:
        raise NotImplementedError

    def publish(self, publication: Publication) -> Outcome:
        raise NotImplementedError


class Unused(Ledgered):
    """It has a method of an ability that it does not say it has."""

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("sink", "guarantee", "says"),
    [
        (Unused("out"), "exactly-once", "Unused defines close but does not inherit from CanClean"),
        (Files("out"), "once", "'once' is not a guarantee"),
        (Files("out"), {"others": "exactly-once"}, "no such output"),
        (Ledgered("out"), "at-most-once", "cannot promise at-most-once"),
    ],
)
def test_a_guarantee_or_a_sink_that_promises_what_it_has_not_is_refused_at_start(
    spark: Any, sink: Files, guarantee: Any, says: str
) -> None:
    flow = Flow(spark)
    rows = flow.read("rows", spark.readStream.name("rows").format("rate").load())
    with pytest.raises(JobError, match=says):
        flow.write("result", rows, to=sink, guarantee=guarantee)


class Silent(Files):
    """Its publish compares what `judge` says with a word of another version, and does nothing."""

    def publish(self, publication: Publication) -> Outcome:
        return None  # type: ignore[return-value]


def test_a_publish_that_does_not_say_what_it_did_ends_the_job_and_keeps_the_rows(
    tmp_path: Path, spark: Any
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"id": 1}\n{"id": 2}\n')

    def run(sink: Sink) -> None:
        rows = spark.readStream.name("rows").schema("id long").json(str(tmp_path / "in"))
        query = onceflow.write(rows, "rows", to=sink, home=tmp_path / "home", once=True)
        query.awaitTermination()

    with pytest.raises(Exception, match=r"returned None and not an Outcome"):
        run(Silent(tmp_path / "out"))
    run(Files(tmp_path / "out"))
    found = Files.read(spark, tmp_path / "out").collect()
    assert sorted(row.id for row in found) == [1, 2]
