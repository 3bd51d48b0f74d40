"""The keyed steps of the reference application, without Spark."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from ads.aggregation import Once
from ads.answers import Answers
from ads.attribution import Attribution
from ads.order_service import OrderService
from ads.truth import record_id, worth
from ads.world import BEGIN, DELAY, EVENT, UNSTEADY

from onceflow.testing import KeyedHarness

SECOND = timedelta(seconds=1)


def harness() -> KeyedHarness:
    rows = "identity string, received timestamp, reason string"
    return KeyedHarness(Once(), by="identity", rows=rows, event_time="received", watermark=UNSTEADY)


def line(identity: str, after: timedelta, reason: str | None = None) -> dict[str, Any]:
    return {"identity": identity, "received": BEGIN + after, "reason": reason}


@pytest.mark.parametrize("stop", [timedelta(days=1), timedelta(days=3), timedelta(days=400)])
def test_a_copy_is_known_however_long_the_job_was_down(stop: timedelta) -> None:
    once = harness()
    assert once.feed([line("event/a", SECOND)]).num_rows == 1
    once.advance(by=stop)
    assert once.feed([line("event/a", SECOND + DELAY)]).num_rows == 0
    assert once.feed([line("event/b", 2 * DELAY)]).num_rows == 1


def test_an_id_is_forgotten_when_no_copy_of_it_can_come() -> None:
    once = harness()
    for hours in range(4):
        once.feed([line(f"event/{hours}", timedelta(hours=hours))])
    known = {row["identity"] for row in once.state().to_pylist() if row["seen"]}
    assert known == {"event/2", "event/3"}


def test_a_rejected_line_is_not_remembered() -> None:
    once = harness()
    assert once.feed([line("line/0/7", SECOND, "not JSON")]).num_rows == 1
    assert not [row for row in once.state().to_pylist() if row["seen"]]


def test_regions_number_their_orders_each_for_itself(tmp_path: Path) -> None:
    with OrderService() as service:
        process = Attribution(Answers(tmp_path / "answers.db", service.url))
        orders = KeyedHarness(
            process, by=["region", "user", "restaurant"], rows=EVENT, event_time="at",
            watermark=DELAY,
        )  # fmt: skip
        order = {"kind": "order", "at": BEGIN, "received": BEGIN, "restaurant": "restaurant-01",
                 "order_id": "order-1", "raw_partition": 0, "raw_offset": 0}  # fmt: skip
        both = [
            {**order, "id": r, "region": r, "user": f"{r}-001", "ad": None} for r in ("eu", "us")
        ]
        last = {**both[0], "kind": "impression", "ad": "ad-01", "at": BEGIN + 2 * DELAY}
        found = [*orders.feed(both).to_pylist(), *orders.feed([last]).to_pylist()]
    assert {row["region"]: row["record_id"] for row in found} == {
        region: record_id((region, "order-1")) for region in ("eu", "us")
    }
    for row in found:
        assert (row["value_cents"], row["courier"]) == worth((row["region"], "order-1"))
    assert len({row["answer_id"] for row in found}) == 2
