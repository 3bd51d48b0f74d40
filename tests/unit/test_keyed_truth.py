"""The same rows in epochs of any size give the same sessions and joins: those of plain Python."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.state.process import KeyedProcess
from onceflow.state.ready.join_last import JoinLast
from onceflow.state.ready.sessions import Sessions
from onceflow.testing import KeyedHarness

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=1)
DELAY, GAP, WITHIN = 10, 7, 12  # minutes
SCHEMA = "user string, kind string, id long, at timestamp"
KINDS = ("order", "click", "impression", "view")


@st.composite
def streams(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Rows in the order in which they come, none of them late, cut into epochs."""
    rows: list[dict[str, Any]] = []
    latest = DELAY
    for n in range(draw(st.integers(1, 30))):
        minute = draw(st.integers(latest - DELAY, latest + 15))
        latest = max(latest, minute)
        rows.append({
            "user": draw(st.sampled_from("abc")), "kind": draw(st.sampled_from(KINDS)), "id": n,
            "at": START + timedelta(minutes=minute),
        })  # fmt: skip
    epochs: list[list[dict[str, Any]]] = [[]]
    for row in rows:
        if draw(st.booleans()):
            epochs.append([])
        epochs[-1].append(row)
    return epochs


def run(process: KeyedProcess, epochs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    step = KeyedHarness(
        process, by="user", rows=SCHEMA, event_time="at", watermark=timedelta(minutes=DELAY)
    )
    out = [step.feed(epoch) for epoch in epochs]
    out.append(step.watermark(END))
    assert len(step.late) == 0
    assert len(step.state()) == 0
    found: list[dict[str, Any]] = pa.concat_tables(out).to_pylist()
    return found


def minutes(count: int) -> timedelta:
    return timedelta(minutes=count)


def sessions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_user = defaultdict(list)
    for row in sorted(rows, key=lambda r: r["at"]):
        found = by_user[row["user"]]
        if not found or row["at"] >= found[-1][-1]["at"] + minutes(GAP):
            found.append([])
        found[-1].append(row)
    return [
        {"user": user, "start": s[0]["at"], "end": s[-1]["at"], "n": len(s),
         "ids": sum(r["id"] for r in s), "most": max(r["id"] for r in s),
         "first": s[0]["id"], "last": s[-1]["id"]}
        for user, all_ in by_user.items() for s in all_
    ]  # fmt: skip


def joins(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for order in (r for r in rows if r["kind"] == "order"):
        match = None
        for kind in ("click", "impression"):
            able = [
                r for r in rows if r["kind"] == kind and r["user"] == order["user"]
                and order["at"] - minutes(WITHIN) <= r["at"] <= order["at"]
            ]  # fmt: skip
            if able and match is None:
                match = max(able, key=lambda r: (r["at"], r["id"]))
        found.append({
            **order, "matched": match and match["kind"], "matched_at": match and match["at"],
            "matched_id": match and match["id"],
        })  # fmt: skip
    return found


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: (r["user"], r.get("id", 0), str(r.get("start"))))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(streams())
def test_sessions_do_not_depend_on_epochs(epochs: list[list[dict[str, Any]]]) -> None:
    totals = {"n": "count", "ids": "sum(id)", "most": "max(id)", "first": "first(id)",
              "last": "last(id)"}  # fmt: skip
    found = run(Sessions(minutes(GAP), totals), epochs)
    rows = [row for epoch in epochs for row in epoch]
    assert in_order(found) == in_order(sessions(rows))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(streams())
def test_joins_do_not_depend_on_epochs(epochs: list[list[dict[str, Any]]]) -> None:
    process = JoinLast("order", to=["click", "impression"], within=minutes(WITHIN), take=["id"])
    found = run(process, epochs)
    rows = [row for epoch in epochs for row in epoch]
    assert in_order(found) == in_order(joins(rows))
