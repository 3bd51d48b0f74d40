"""Processes that need no code."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from onceflow.errors import JobError
from onceflow.state.process import KeyedProcess
from onceflow.state.ready.join_last import JoinLast
from onceflow.state.ready.running import Deduplicate, Last, TopN, Totals
from onceflow.state.ready.sessions import Sessions
from onceflow.testing import KeyedHarness

START = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = "user string, id long, amount double, cents decimal(6,2), at timestamp"
TIMED: dict[str, Any] = {"event_time": "at", "watermark": "10 minutes"}


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def harness(process: KeyedProcess, *, rows: str = ROWS, **settings: Any) -> KeyedHarness:
    return KeyedHarness(process, by="user", rows=rows, **settings)


def test_totals_are_emitted_for_each_key_that_has_rows() -> None:
    totals = {"spend": "sum(amount)", "n": "count", "cents": "sum(cents)", "last": "last(id)"}
    step = harness(Totals(totals))
    step.feed([{"user": "a", "amount": 1.0, "cents": Decimal("9999.99"), "id": 4}, {"user": "b"}])
    out = step.feed([{"user": "a", "amount": 2.0, "cents": Decimal("9999.99"), "id": 5}])
    assert out.to_pylist() == [
        {"user": "a", "spend": 3.0, "n": 2, "cents": Decimal("19999.98"), "last": 5}
    ]
    assert str(out.schema.field("cents").type) == "decimal128(16, 2)"


def test_duplicates_of_an_id_are_dropped_within_and_across_epochs() -> None:
    step = harness(Deduplicate(id="id", ttl="1 hour"), **TIMED)
    ids = [("a", 1), ("a", 2), ("b", 1), ("a", 1), ("a", None), ("a", None)]
    rows = [{"user": user, "id": id_, "at": at(m)} for m, (user, id_) in enumerate(ids)]
    out = step.feed(rows)
    assert [(r["user"], r["id"]) for r in out.to_pylist()] == [
        ("a", 1),
        ("a", 2),
        ("a", None),
        ("b", 1),
    ]
    assert len(step.feed(rows)) == 0
    step.watermark(at(60))  # an hour after the first row of a 1; what was dropped does not count
    again = step.feed([{"user": "a", "id": 1, "at": at(61)}, {"user": "a", "id": 2, "at": at(60)}])
    assert again["id"].to_pylist() == [1]


def test_the_key_itself_can_be_the_id() -> None:
    step = harness(Deduplicate(ttl="1 hour"), now=START)
    out = step.feed([{"user": "a", "id": 1}, {"user": "b", "id": 2}, {"user": "a", "id": 3}])
    assert out["id"].to_pylist() == [1, 2]
    step.advance(to=at(59))
    assert len(step.feed([{"user": "a", "id": 4}])) == 0
    step.advance(to=at(60))
    assert step.feed([{"user": "a", "id": 5}])["id"].to_pylist() == [5]


def test_several_columns_can_be_the_id() -> None:
    step = harness(Deduplicate(id=["id", "amount"]))
    pairs = [(1, 1.0), (1, 2.0), (2, 1.0), (1, 2.0), (None, 1.0)]
    out = step.feed([{"user": "a", "id": i, "amount": x} for i, x in pairs])
    assert len(out) == 4
    assert len(step.feed([{"user": "a", "id": i, "amount": x} for i, x in pairs])) == 0


def test_the_last_row_of_a_key_is_emitted_when_another_takes_its_place() -> None:
    step = harness(Last(order="at"))
    out = step.feed([{"user": "a", "id": n, "at": at(m)} for n, m in ((1, 5), (2, 9), (3, 7))])
    assert out["id"].to_pylist() == [2]
    assert len(step.feed([{"user": "a", "id": 4, "at": at(8)}, {"user": "a", "id": 5}])) == 0
    out = step.feed([{"user": "a", "id": 6, "at": at(9)}, {"user": "b", "id": 7}])
    assert sorted(r["id"] for r in out.to_pylist()) == [6, 7]
    assert out.column_names == ["user", "id", "amount", "cents", "at"]
    assert step.feed([{"user": "b", "id": 8, "at": at(0)}])["id"].to_pylist() == [8]


def test_the_largest_rows_of_a_key_are_emitted_with_their_rank_when_they_change() -> None:
    step = harness(TopN(2, by="amount"))

    def top(*rows: tuple[str, int, float | None]) -> list[Any]:
        out = step.feed([{"user": u, "id": i, "amount": x} for u, i, x in rows])
        return [(r["user"], r["rank"], r["id"]) for r in out.to_pylist()]

    assert top(("a", 1, 5.0), ("b", 2, 1.0), ("a", 3, 9.0), ("a", 4, 7.0), ("a", 5, None)) == [
        ("a", 1, 3), ("a", 2, 4), ("b", 1, 2),
    ]  # fmt: skip
    assert top(("a", 6, 7.0), ("a", 7, float("nan"))) == []  # not larger than what was there first
    assert top(("a", 8, 8.0), ("b", 9, 0.0)) == [("a", 1, 3), ("a", 2, 8), ("b", 1, 2), ("b", 2, 9)]


SESSIONS = {"n": "count", "ids": "count(id)", "sum": "sum(amount)", "first": "first(id)",
            "last": "last(id)", "max": "max(id)"}  # fmt: skip


def test_a_session_is_emitted_once_when_the_watermark_has_passed_it() -> None:
    step = harness(Sessions("30 minutes", SESSIONS), **TIMED)
    rows = [
        {"user": "a", "id": n, "amount": 1.0, "at": at(m)} for n, m in ((1, 0), (2, 29), (3, 59))
    ]
    assert len(step.feed(rows)) == 0  # 59 is thirty minutes after 29: another session
    assert len(step.feed([{"user": "b", "at": at(68)}])) == 0
    out = step.feed([{"user": "b", "at": at(69)}])
    assert out.to_pylist() == [
        {"user": "a", "start": at(0), "end": at(29), "n": 2, "ids": 2, "sum": 2.0, "first": 1,
         "last": 2, "max": 2},
    ]  # fmt: skip
    rest = step.watermark(at(500)).to_pylist()
    assert sorted((r["user"], r["start"], r["n"], r["ids"]) for r in rest) == [
        ("a", at(59), 1, 1), ("b", at(68), 2, 0),
    ]  # fmt: skip
    assert len(step.state()) == 0
    assert len(step.watermark(at(999))) == 0


def test_a_row_that_falls_between_two_sessions_makes_one_of_them() -> None:
    step = KeyedHarness(
        Sessions("30 minutes", SESSIONS), by="user", rows=ROWS, event_time="at", watermark="2 hours"
    )
    for n, m in enumerate((0, 50, 25)):
        step.feed([{"user": "a", "id": n, "amount": 1.0, "at": at(m)}])
    assert step.watermark(at(500)).to_pylist() == [
        {"user": "a", "start": at(0), "end": at(50), "n": 3, "ids": 3, "sum": 3.0, "first": 0,
         "last": 1, "max": 2},
    ]  # fmt: skip


CLICKS = "user string, kind string, id long, ad string, at timestamp"
JOIN = {"to": ["click", "impression"], "within": "7 days", "take": ["ad"]}


def joined(*rows: tuple[str, int, float]) -> list[Any]:
    """(kind, id, days), one epoch each; what each order was joined with."""
    step = harness(JoinLast("order", **JOIN), rows=CLICKS, event_time="at", watermark="30 days")
    for kind, n, days in rows:
        step.feed([{"user": "a", "kind": kind, "id": n, "ad": f"ad{n}", "at": at(days * 1440)}])
    out = step.watermark(at(1440 * 365))
    assert len(step.state()) == 0
    return [(r["id"], r["matched"], r["matched_ad"]) for r in out.to_pylist()]


def test_an_order_is_joined_with_the_last_click_before_it() -> None:
    assert joined(("click", 1, 0), ("click", 2, 1), ("order", 3, 2), ("click", 4, 3)) == [
        (3, "click", "ad2")
    ]


def test_it_does_not_matter_which_of_them_came_first() -> None:
    assert joined(("order", 3, 2), ("click", 2, 1)) == [(3, "click", "ad2")]
    assert joined(("order", 3, 2), ("click", 2, 2)) == [(3, "click", "ad2")]  # at the same time


def test_a_click_counts_for_seven_days_and_then_an_impression_does() -> None:
    assert joined(("click", 1, 0), ("order", 2, 7)) == [(2, "click", "ad1")]
    late = 7 + 1e-8
    assert joined(("click", 1, 0), ("order", 2, late)) == [(2, None, None)]
    assert joined(("click", 1, 0), ("impression", 3, 1), ("order", 2, late)) == [
        (2, "impression", "ad3")
    ]
    assert joined(("click", 1, 0), ("impression", 3, 1), ("order", 2, 6)) == [(2, "click", "ad1")]


def test_an_order_waits_until_its_answer_is_certain_and_is_emitted_once() -> None:
    step = harness(JoinLast("order", **JOIN), rows=CLICKS, **TIMED)
    step.feed([{"user": "a", "kind": "order", "id": 1, "at": at(0)}])
    step.feed([{"user": "b", "kind": "view", "id": 2, "at": at(10)}])
    out = step.feed([{"user": "b", "kind": "view", "id": 3, "at": at(11)}])
    assert [(r["id"], r["matched"]) for r in out.to_pylist()] == [(1, None)]
    assert len(step.watermark(at(99))) == 0
    assert out.column_names[-3:] == ["matched", "matched_at", "matched_ad"]


def test_clicks_that_a_later_one_hides_are_not_kept() -> None:
    step = harness(JoinLast("order", **JOIN), rows=CLICKS, **TIMED)
    for n in range(50):
        step.feed([{"user": "a", "kind": "click", "id": n, "ad": str(n), "at": at(n)}])
    assert len(step.state("a")["seen"]) <= 15
    step.watermark(at(1440 * 8))
    assert step.state("a") is None


@pytest.mark.parametrize(
    ("process", "settings", "said"),
    [
        (Totals({"n": "avg(id)"}), {}, r"Totals: n is 'avg\(id\)', which is not an aggregate"),
        (Totals({"n": "sum(ids)"}), {}, "the rows have no column 'ids'"),
        (Totals({"n": "sum(at)"}), {}, "at is of timestamp"),
        (Totals({"user": "count"}), {}, r"Totals\.user has the name of a key column"),
        (Deduplicate(id="key"), {}, "Deduplicate: the rows have no column key"),
        (Last(order="user"), {}, "Last: order='user' is a key"),
        (TopN(0, by="amount"), {}, "TopN: n is 0"),
        (TopN(1, by="user"), {}, "TopN: by='user' is a key"),
        (TopN(1, by="amount", rank="id"), {}, "the rows have a column id"),
        (Sessions("1 hour"), {"event_time": "at"}, "no session is ever complete"),
        (Sessions("often"), TIMED, "'often' is not a span"),
        (Sessions("1 hour", {"end": "count"}), TIMED, "end is there already"),
        (JoinLast("order", to="click", within="1 day"), {}, "no match is final"),
        (JoinLast("order", to="click", within="1 day"), TIMED, "no column kind"),
        (JoinLast("a", to="a", within="1 day", kind="id"), TIMED, "name other kinds"),
    ],
)
def test_what_cannot_work_is_refused_by_name(process: Any, settings: Any, said: str) -> None:
    with pytest.raises(JobError) as caught:
        harness(process, **settings)
    assert re.search(said, str(caught.value))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_id_comes_again_after_its_ttl_however_rows_fall_into_epochs(size: int) -> None:
    rows = [{"user": "ann", "id": 1, "at": START + timedelta(seconds=s)} for s in (0, 30, 33, 60)]
    once = KeyedHarness(
        Deduplicate(id="id", ttl="5 seconds"),
        by="user", rows="user string, id long, at timestamp",
        event_time="at", watermark="10 seconds",
    )  # fmt: skip
    out = [once.feed(rows[n : n + size]).to_pylist() for n in range(0, 4, size)]
    assert [row["at"] for part in out for row in part] == [rows[n]["at"] for n in (0, 1, 3)]


def test_a_row_that_comes_out_of_order_is_no_first_one() -> None:
    once = KeyedHarness(
        Deduplicate(id="id", ttl="5 seconds"),
        by="user", rows="user string, id long, at timestamp",
        event_time="at", watermark="1 minute",
    )  # fmt: skip
    at = [START + timedelta(seconds=s) for s in (10, 7, 5, 14, 15)]
    assert once.feed([{"user": "ann", "id": 1, "at": at[0]}]).num_rows == 1
    out = once.feed([{"user": "ann", "id": 1, "at": later} for later in at[1:]])
    assert [row["at"] for row in out.to_pylist()] == [at[2], at[4]]
