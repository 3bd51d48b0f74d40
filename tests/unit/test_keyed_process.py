"""Keyed processes on slices of keys: states, helpers, what is emitted and what is kept."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from onceflow.errors import ProcessFailed
from onceflow.state.process import KeyedProcess, Time
from onceflow.state.states import ListState, MapState, ReducingState, ValueState
from onceflow.state.step import Step
from onceflow.testing import KeyedHarness

ROWS = "user string, amount double, n long, cents decimal(10,2), name string"


def by_user(out: pa.Table) -> dict[str, dict[str, Any]]:
    return {row.pop("user"): row for row in out.to_pylist()}


class Running(KeyedProcess):
    total = ReducingState("double", "sum", of="amount")
    least = ReducingState("long", "min", of="n")
    most = ReducingState("long", "max", of="n")
    first_name = ReducingState("string", "first", of="name")
    last_name = ReducingState("string", "last", of="name")
    rows = ReducingState("long", "count")
    names = ReducingState("long", "count", of="name")
    cents = ReducingState("decimal(20,2)", "sum", of="cents")


def test_declared_totals_need_no_code() -> None:
    step = KeyedHarness(Running(), by="user", rows=ROWS)
    out = step.feed([
        {"user": "a", "amount": 1.5, "n": 3, "cents": Decimal("0.10"), "name": "x"},
        {"user": "b", "amount": None, "n": None, "cents": None, "name": None},
        {"user": "a", "amount": 2.0, "n": 1, "cents": Decimal("-0.30"), "name": None},
    ])  # fmt: skip
    assert out.column_names == [
        "user", "total", "least", "most", "first_name", "last_name", "rows", "names", "cents",
    ]  # fmt: skip
    assert by_user(out) == {
        "a": {"total": 3.5, "least": 1, "most": 3, "first_name": "x", "last_name": "x",
              "rows": 2, "names": 1, "cents": Decimal("-0.20")},
        "b": {"total": None, "least": None, "most": None, "first_name": None, "last_name": None,
              "rows": 1, "names": 0, "cents": None},
    }  # fmt: skip
    again = step.feed([
        {"user": "a", "amount": -4.0, "n": 9, "cents": Decimal("1.00"), "name": "z"},
    ])  # fmt: skip
    assert by_user(again) == {
        "a": {"total": -0.5, "least": 1, "most": 9, "first_name": "x", "last_name": "z",
              "rows": 3, "names": 2, "cents": Decimal("0.80")},
    }  # fmt: skip
    assert by_user(step.state())["b"]["rows"] == 1


def test_an_output_may_take_some_of_the_totals() -> None:
    class Short(Running):
        output = "total double, user string"

    out = KeyedHarness(Short(), by="user", rows=ROWS).feed([{"user": "a", "amount": 1.0}])
    assert out.to_pylist() == [{"total": 1.0, "user": "a"}]


class Spend(KeyedProcess):
    output = "user string, spent double, seen long"
    total = ReducingState("double", "sum")
    last = None
    names = ListState("string")
    per_name = MapState("string", "long")
    best = ValueState("struct<name: string, amount: double>")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        spent = self.fold("total", rows["amount"])
        out = {"user": keys["user"], "spent": spent, "seen": self.count()}
        return out, {"total": spent}


def test_a_process_sees_state_and_rows_of_its_keys_and_returns_both() -> None:
    step = KeyedHarness(Spend(), by="user", rows=ROWS)
    step.feed([{"user": "b", "amount": 1.0}, {"user": "a", "amount": 2.0}])
    out = step.feed([{"user": "a", "amount": 3.0}, {"user": "c", "amount": 4.0}])
    assert by_user(out) == {"a": {"spent": 5.0, "seen": 1}, "c": {"spent": 4.0, "seen": 1}}
    assert step.state("b") == {"total": 1.0, "names": None, "per_name": None, "best": None}
    assert step.state("nobody") is None


def test_helpers_reduce_the_rows_of_each_key_and_can_leave_rows_out() -> None:
    seen: dict[str, Any] = {}

    class Look(KeyedProcess):
        output = "user string"
        total = ValueState("long")

        def process(self, keys: pa.Table, rows: pa.Table) -> Any:
            big = pc.greater(rows["n"], 2)
            seen.update(
                index=self.index.tolist(), starts=self.starts.tolist(), epoch=self.time.epoch,
                now=self.time.now_at, watermark=self.time.watermark_at,
                sum=self.sum(rows["n"]).to_pylist(), big=self.sum(rows["n"], big).to_pylist(),
                min=self.min(rows["name"]).to_pylist(), max=self.max(rows["name"]).to_pylist(),
                first=self.first(rows["n"]).to_pylist(), last=self.last(rows["n"]).to_pylist(),
                count=self.count(where=big).to_pylist(), keys=keys["user"].to_pylist(),
            )  # fmt: skip
            return None

    step = KeyedHarness(Look(), by="user", rows=ROWS, now=datetime(2026, 5, 1, tzinfo=UTC))
    out = step.feed([
        {"user": "b", "n": 1, "name": "q"}, {"user": "a", "n": 2, "name": None},
        {"user": "b", "n": 3, "name": "p"},
    ])  # fmt: skip
    assert len(out) == 0
    assert seen == {
        "index": [0, 0, 1], "starts": [0, 2], "epoch": 0, "now": datetime(2026, 5, 1, tzinfo=UTC),
        "watermark": None, "sum": [4, 2], "big": [3, None], "min": ["p", None],
        "max": ["q", None], "first": [1, 2], "last": [3, 2], "count": [1, 0], "keys": ["b", "a"],
    }  # fmt: skip


def test_nested_state_comes_back_as_it_was_returned_and_an_empty_list_is_nothing() -> None:
    class Nested(KeyedProcess):
        output = "user string"
        names = ListState("string")
        per_name = MapState("string", "struct<n: long, at: timestamp>")

        def process(self, keys: pa.Table, rows: pa.Table) -> Any:
            names = rows["name"].to_pylist()
            known = keys["names"].to_pylist()
            lists = [[*(old or []), n] if n else [] for old, n in zip(known, names, strict=True)]
            kind = keys.schema.field("per_name").type
            at = datetime(2026, 1, 1, tzinfo=UTC)
            maps = [[(n, {"n": 1, "at": at})] if n else None for n in names]
            return None, {"names": pa.array(lists), "per_name": pa.array(maps, kind)}

    step = KeyedHarness(Nested(), by="user", rows=ROWS)
    step.feed([{"user": "a", "name": "x"}])
    step.feed([{"user": "a", "name": "y"}])
    kept = step.state("a")
    assert kept["names"] == ["x", "y"]
    assert kept["per_name"] == {"y": {"n": 1, "at": datetime(2026, 1, 1, tzinfo=UTC)}}
    step.feed([{"user": "a", "name": None}])
    assert step.state("a") is None  # nothing is left, so the key is gone


def test_a_reducing_function_folds_pairs_in_order_whatever_their_number() -> None:
    class Joined(KeyedProcess):
        names = ReducingState(
            "string", lambda old, new: pc.binary_join_element_wise(old, new, ""), of="name"
        )

    step = KeyedHarness(Joined(), by="user", rows=ROWS)
    step.feed([{"user": u, "name": n} for n in "abcdefg" for u in ("p", "q")])
    step.feed([{"user": "p", "name": "h"}, {"user": "p", "name": None}, {"user": "r"}])
    assert by_user(step.state()) == {"p": {"names": "abcdefgh"}, "q": {"names": "abcdefg"}}


@pytest.mark.parametrize("amounts", [[2**62, 2**62], [-(2**63), -1], [2**63 - 1, 1, 5]])
def test_a_sum_of_whole_numbers_that_is_too_large_raises(amounts: list[int]) -> None:
    class Sum(KeyedProcess):
        total = ReducingState("long", "sum", of="n")

    together = KeyedHarness(Sum(), by="user", rows=ROWS)
    with pytest.raises(ProcessFailed, match="larger than a long"):
        together.feed([{"user": "a", "n": n} for n in amounts])
    apart = KeyedHarness(Sum(), by="user", rows=ROWS)
    apart.feed([{"user": "a", "n": amounts[0]}])
    with pytest.raises(ProcessFailed, match="larger than a long"):
        apart.feed([{"user": "a", "n": amounts[1]}])


def test_decimals_are_summed_exactly_and_refused_where_they_do_not_fit() -> None:
    class Sum(KeyedProcess):
        total = ReducingState("decimal(38,2)", "sum", of="cents")

    wide = "user string, cents decimal(38,2)"
    step = KeyedHarness(Sum(), by="user", rows=wide)
    large, small = Decimal("9" * 36 + ".99"), Decimal("-0.01")
    out = step.feed([{"user": "a", "cents": c} for c in (large, large.copy_negate(), small, large)])
    assert out["total"].to_pylist() == [Decimal("9" * 36 + ".98")]
    with pytest.raises(ProcessFailed, match="38 digits"):
        step.feed([{"user": "a", "cents": large}])

    class Small(KeyedProcess):
        total = ReducingState("decimal(4,2)", "sum", of="cents")

    with pytest.raises(ProcessFailed, match=r"total does not fit decimal128\(4, 2\)"):
        KeyedHarness(Small(), by="user", rows=ROWS).feed(
            [{"user": "a", "cents": Decimal("99.99")}, {"user": "a", "cents": Decimal("0.01")}]
        )


def test_nan_is_the_largest_number_and_makes_a_sum_nan() -> None:
    class Ends(KeyedProcess):
        least = ReducingState("double", "min", of="amount")
        most = ReducingState("double", "max", of="amount")
        total = ReducingState("double", "sum", of="amount")

    step = KeyedHarness(Ends(), by="user", rows=ROWS)
    step.feed([{"user": "a", "amount": float("nan")}, {"user": "b", "amount": float("nan")}])
    step.feed([{"user": "a", "amount": 1.0}])
    found = by_user(step.state())
    assert (found["a"]["least"], np.isnan(found["a"]["most"])) == (1.0, True)
    assert np.isnan([found["a"]["total"], found["b"]["least"]]).all()


def test_a_key_of_several_columns_and_a_null_key_are_keys() -> None:
    class Count(KeyedProcess):
        seen = ReducingState("long", "count")

    step = KeyedHarness(Count(), by=["user", "n"], rows=ROWS)
    step.feed([{"user": "a", "n": 1}, {"user": "a", "n": None}, {"user": None, "n": None}])
    step.feed([{"user": "a", "n": None}])
    assert step.state(("a", None)) == {"seen": 2}
    assert step.state((None, None)) == {"seen": 1}


def test_only_keys_that_changed_are_said_to_have() -> None:
    class Largest(KeyedProcess):
        output = "user string"
        most = ReducingState("long", "max", of="n")

        def process(self, keys: pa.Table, rows: pa.Table) -> Any:
            return None, self.folded()

    schema = pa.schema([("user", pa.string()), ("n", pa.int64())])
    keys = pa.schema([schema.field("user")])
    step = Step(Largest(), keys=keys, rows=schema)
    done = step.run(
        pa.table({"user": ["a", "b", "c"]}),
        pa.table({"most": pa.array([5, 5, None], pa.int64())}),
        pa.table({"user": ["a", "b", "c"], "n": pa.array([1, 9, None], pa.int64())}),
        np.arange(3),
        Time(0, None, 0),
    )
    assert done.changed.tolist() == [False, True, False]
    assert done.live.tolist() == [True, True, False]
    assert done.state["most"].to_pylist() == [5, 9, None]


def test_a_bound_process_travels_and_works_elsewhere() -> None:
    harness = KeyedHarness(Running(), by="user", rows=ROWS)
    harness.feed([{"user": "a", "amount": 1.0}])
    process = pickle.loads(pickle.dumps(harness.step.process))
    out = KeyedHarness(process, by="user", rows=ROWS).feed([{"user": "a", "amount": 1.0}])
    assert out["total"].to_pylist() == [1.0]


def test_a_process_takes_arguments_without_calling_its_base() -> None:
    class Times(KeyedProcess):
        output = "user string, total double"
        total = ValueState("double")

        def __init__(self, factor: float) -> None:
            self.factor = factor

        def process(self, keys: pa.Table, rows: pa.Table) -> Any:
            new = pc.multiply(self.sum(rows["amount"]), self.factor)
            return pa.table({"user": keys["user"], "total": new}), {"total": new}

    out = KeyedHarness(Times(3.0), by="user", rows=ROWS).feed([{"user": "a", "amount": 2.0}])
    assert out.to_pylist() == [{"user": "a", "total": 6.0}]
