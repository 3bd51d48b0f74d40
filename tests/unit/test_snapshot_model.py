"""Chandy and Lamport's snapshot and aligned barriers, in every state of a small dataflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.explained import page
from model.explorer import explore
from model.snapshots import Snapshots, consistent, counted_once, nothing_in_flight

PAGE = Path(__file__).parents[2] / "docs" / "snapshots-explained.md"


@pytest.mark.parametrize("algorithm", ["chandy-lamport", "aligned"])
def test_the_cut_is_consistent_and_a_restored_job_counts_every_record_once(algorithm: str) -> None:
    found = explore(Snapshots(algorithm))
    print(f"{algorithm}: {found.states:,} states")
    assert found.violation is None, str(found.violation)


def test_chandy_and_lamport_record_a_message_in_flight() -> None:
    violation = explore(Snapshots("chandy-lamport", (nothing_in_flight,))).violation
    assert violation is not None
    assert violation.what == "the snapshot holds a1 in a channel"
    assert "count: counts a1, notes it as in flight" in violation.trace


def test_with_alignment_nothing_is_in_flight() -> None:
    assert explore(Snapshots("aligned", (nothing_in_flight,))).violation is None


def test_without_alignment_a_record_is_counted_twice_after_a_restore() -> None:
    violation = explore(Snapshots("at-least-once", (counted_once,))).violation
    assert violation is not None
    assert violation.what == "counted twice: a1"
    assert [step for step in violation.trace if "counts a1" in step] == ["count: counts a1"] * 2


def test_without_alignment_the_cut_is_not_consistent_but_nothing_is_lost() -> None:
    violation = explore(Snapshots("at-least-once", (consistent,))).violation
    assert violation is not None
    assert violation.what == "sent before the cut: nothing; the snapshot: a1"
    assert explore(Snapshots("at-least-once", ())).violation is None


def test_a_snapshot_that_forgets_the_channels_loses_a_record() -> None:
    class Forgetful(Snapshots):
        def _crash(self, flow):  # type: ignore[no-untyped-def]
            for name, after in super()._crash(flow):
                yield name, after._replace(channels=((), ()))

    violation = explore(Forgetful("chandy-lamport", (counted_once,))).violation
    assert violation is not None
    assert violation.what.startswith("never counted: a1")


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(), "cd tests; python -m model --snapshots-page > " + str(PAGE)
