"""One key at a time: the same state, changed by assignment or in place."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from onceflow.errors import ProcessFailed
from onceflow.state.process import KeyedProcess, Time
from onceflow.state.states import ListState, MapState, ReducingState, Timer, ValueState
from onceflow.state.step import Step
from onceflow.state.vectors import to_python
from onceflow.testing import KeyedHarness

START = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = "user string, shop long, amount double, ad string, at timestamp"


class Shopper(KeyedProcess):
    output = "user string, total double, ads long"
    total = ReducingState("double", "sum")
    last_seen = ValueState("timestamp")
    clicks = ListState("struct<ad: string, at: timestamp>")
    per_ad = MapState("string", "long")

    def process_key(self, key: str, rows: list[dict[str, Any]], state: Any) -> Iterator[Any]:
        for row in rows:
            state.fold("total", row["amount"])
            state.last_seen = row["at"]
            state.clicks.append({"ad": row["ad"], "at": row["at"]})
            state.per_ad[row["ad"]] = state.per_ad.get(row["ad"], 0) + 1
        yield {"user": key, "total": state.total, "ads": len(state.per_ad)}


def test_state_is_changed_by_assignment_and_in_place() -> None:
    step = KeyedHarness(Shopper(), by="user", rows=ROWS)
    step.feed([{"user": "a", "amount": 1.0, "ad": "x", "at": START},
               {"user": "b", "amount": None, "ad": "z", "at": START}])  # fmt: skip
    out = step.feed([{"user": "a", "amount": 2.0, "ad": "y", "at": START}])
    assert out.to_pylist() == [{"user": "a", "total": 3.0, "ads": 2}]
    assert step.state("a") == {
        "total": 3.0, "last_seen": START, "per_ad": {"x": 1, "y": 1},
        "clicks": [{"ad": "x", "at": START}, {"ad": "y", "at": START}],
    }  # fmt: skip
    assert step.state("b")["total"] is None


def test_only_what_was_changed_is_written() -> None:
    class Look(KeyedProcess):
        output = "user string"
        n = ValueState("long")
        names = ListState("string")
        entry = ValueState("struct<n: long>")

        def process_key(self, key: str, rows: Any, state: Any) -> None:
            match key:
                case "same":
                    state.n = 1
                    assert (state.names, state.entry) == (["x"], {"n": 1})
                case "list":
                    state.names.append("y")
                case "struct":
                    state.entry["n"] = 2
                case "value":
                    state.n = 2
                case "cleared":
                    state.n = state.entry = None
                    state.names.clear()

    schema = pa.schema([("user", pa.string())])
    step = Step(Look(), keys=schema, rows=schema)
    users = pa.table({"user": ["same", "list", "struct", "value", "cleared", "none"]})
    stored = pa.Table.from_pylist([{"n": 1, "names": ["x"], "entry": {"n": 1}}] * 6, step.values)
    done = step.run(users, stored, users, np.arange(6), Time(0, None, 0))
    assert done.changed.tolist() == [False, True, True, True, True, False]
    assert done.live.tolist() == [True, True, True, True, False, True]
    assert done.state.to_pylist() == [
        {"n": 1, "names": ["x"], "entry": {"n": 1}},
        {"n": 1, "names": ["x", "y"], "entry": {"n": 1}},
        {"n": 1, "names": ["x"], "entry": {"n": 2}}, {"n": 2, "names": ["x"], "entry": {"n": 1}},
        {"n": None, "names": None, "entry": None}, {"n": 1, "names": ["x"], "entry": {"n": 1}},
    ]  # fmt: skip


def test_writing_the_same_value_makes_it_last_and_reading_does_not() -> None:
    class Alive(KeyedProcess):
        output = "user string"
        status = ValueState("long", ttl="1 hour")

        def process_key(self, key: str, rows: Any, state: Any) -> None:
            if key == "write" or state.status is None:
                state.status = 1

    step = KeyedHarness(Alive(), by="user", rows=ROWS, now=START)
    both = [{"user": "write"}, {"user": "read"}]
    step.feed(both)
    step.advance(by=timedelta(minutes=40))
    step.feed(both)
    step.advance(by=timedelta(minutes=40))
    assert (step.state("write"), step.state("read")) == ({"status": 1}, None)


def test_a_key_of_several_columns_has_names() -> None:
    class Named(KeyedProcess):
        output = "what string"
        n = ValueState("long")

        def process_key(self, key: Any, rows: Any, state: Any) -> list[tuple[str]]:
            return [(f"{key.user} in {key.shop} {key == (key[0], key[1])}",)]

    step = KeyedHarness(Named(), by=["user", "shop"], rows=ROWS)
    assert step.feed([{"user": "a", "shop": 7}])["what"].to_pylist() == ["a in 7 True"]


def test_timers_are_times_and_are_cleared_when_they_fire() -> None:
    class Nudge(KeyedProcess):
        output = "user string, at timestamp, due string"
        nudge = Timer("event")
        give_up = Timer("event")

        def process_key(self, key: str, rows: Any, state: Any) -> None:
            state.nudge = rows[-1]["at"] + timedelta(minutes=5)
            state.give_up = rows[-1]["at"] + timedelta(minutes=15)

        def on_timer_key(self, key: str, state: Any) -> Iterator[Any]:
            yield (key, state.nudge or state.give_up, ",".join(sorted(state.due)))
            if "nudge" in state.due and state.nudge < START + timedelta(minutes=10):
                state.nudge += timedelta(minutes=5)

    step = KeyedHarness(
        Nudge(), by="user", rows=ROWS, event_time="at", watermark="1 minute", now=START
    )
    step.feed([{"user": "a", "at": START}])
    out = step.watermark(START + timedelta(hours=1))
    assert [(r["at"].minute, r["due"]) for r in out.to_pylist()] == [
        (5, "nudge"), (10, "nudge"), (15, "give_up"),
    ]  # fmt: skip
    assert step.state("a") is None


@pytest.mark.parametrize(
    ("emits", "said"),
    [
        ({"user": "a"}, "a row of out lacks n"),
        ({"user": "a", "n": 1, "m": 2}, "a row of out has m, which is not declared"),
        ({"user": "a", "m": 2}, "a row of out lacks n and has m"),
        ([("a",)], r"a row of out is \('a',\)"),
        ([7], "a row of out is 7"),
        ({"user": "a", "n": "x"}, "column n of out is 'x', declared is int64"),
        ({"user": "a", "n": 2**70}, "column n of out is 1180591620717411303424, declared"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(emits: Any, said: str) -> None:
    class Emit(KeyedProcess):
        output = "user string, n long"
        seen = ValueState("long")

        def process_key(self, key: str, rows: Any, state: Any) -> Any:
            return emits if key == "b" else {"n": 1, "user": key}

    step = KeyedHarness(Emit(), by="user", rows=ROWS)
    assert step.feed([{"user": "a"}]).to_pylist() == [{"user": "a", "n": 1}]
    with pytest.raises(ProcessFailed, match=said):
        step.feed([{"user": "a"}, {"user": "b"}])


def test_a_value_that_does_not_fit_and_a_state_that_is_not_there_are_named() -> None:
    class Wrong(KeyedProcess):
        output = "user string"
        n = ValueState("long")

        def process_key(self, key: str, rows: Any, state: Any) -> None:
            if key == "value":
                state.n = "seven"
            elif key == "name":
                state.m = 1

    step = KeyedHarness(Wrong(), by="user", rows=ROWS)
    with pytest.raises(ProcessFailed, match="state n is 'seven', declared is int64"):
        step.feed([{"user": "value"}])
    with pytest.raises(
        ProcessFailed, match=r"process_key failed in epoch 1, key 'name': Attribute"
    ):
        step.feed([{"user": "a"}, {"user": "name"}, {"user": "b"}])


def test_a_generator_that_fails_is_named_with_its_key_and_line() -> None:
    class Fails(KeyedProcess):
        output = "user string"
        n = ValueState("long")

        def process_key(self, key: str, rows: Any, state: Any) -> Iterator[Any]:
            yield {"user": key}
            if key == "c":
                raise ValueError("no more")

    step = KeyedHarness(Fails(), by="user", rows=ROWS)
    with pytest.raises(ProcessFailed, match="key 'c': ValueError: no more") as caught:
        step.feed([{"user": u} for u in "abcd"])
    assert 'raise ValueError("no more")' in caught.value.message


def test_reducing_states_are_folded_value_by_value() -> None:
    class Folds(KeyedProcess):
        output = "user string"
        least = ReducingState("double", "min")
        most = ReducingState("double", "max")
        head = ReducingState("double", "first")
        tail = ReducingState("double", "last")
        n = ReducingState("long", "count")

        def process_key(self, key: str, rows: Any, state: Any) -> None:
            for row in rows:
                for name in ("least", "most", "head", "tail", "n"):
                    state.fold(name, row["amount"])

    step = KeyedHarness(Folds(), by="user", rows=ROWS)
    step.feed([{"user": "a", "amount": v} for v in (2.0, None, 1.0, 3.0)])
    assert step.state("a") == {"least": 1.0, "most": 3.0, "head": 2.0, "tail": 3.0, "n": 3}


def test_values_are_those_of_arrow() -> None:
    kinds = [
        (pa.timestamp("us", "UTC"), [START, None]),
        (pa.timestamp("us"), [datetime(1950, 1, 1, 0, 0, 0, 7), None]),
        (pa.list_(pa.struct([("at", pa.timestamp("us", "UTC")), ("n", pa.int8())])),
         [[{"at": START, "n": 1}, None], None, [], [{"at": None, "n": None}]]),
        (pa.struct([("a", pa.list_(pa.string()))]), [{"a": ["x"]}, None, {"a": None}]),
        (pa.decimal128(20, 3), [Decimal("1.500"), None]),
    ]  # fmt: skip
    for kind, values in kinds:
        assert to_python(pa.array(values, kind)) == values
        assert to_python(pa.array([None, *values, None], kind).slice(1, len(values))) == values
    maps = [{"a": [1]}, None, {}, {"b": None}]
    kind = pa.map_(pa.string(), pa.list_(pa.int64()))
    array = pa.array([m if m is None else list(m.items()) for m in maps], kind)
    assert to_python(array) == maps
    assert to_python(array.slice(1)) == maps[1:]
