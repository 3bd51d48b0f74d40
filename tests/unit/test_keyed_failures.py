"""Keyed processes that are wrong: refused before they run, or named with epoch and keys."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from onceflow.errors import JobError, ProcessFailed, ServerSilent
from onceflow.state.process import KeyedProcess, Time
from onceflow.state.states import ListState, MapState, ReducingState, Timer, ValueState, parse_span
from onceflow.testing import KeyedHarness

ROWS = "user string, amount double, n long, at timestamp"


def declared(**members: Any) -> KeyedProcess:
    """A process with these members, and a process method unless it has one."""
    given = {"output": "user string", "process": lambda self, keys, rows: None, **members}
    kind = type("Mine", (KeyedProcess,), {n: m for n, m in given.items() if m is not None})
    return kind()  # type: ignore[no-any-return]


def on_timer(self: Any, keys: pa.Table) -> None:
    return None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"total": ValueState("dubble")}, r"Mine\.total: .*'dubble' is not a type"),
    "types": ({"total": ValueState("long, n int")}, r"Mine\.total: .*more than one type"),
    "key": ({"User": ValueState("long")}, r"Mine\.User has the name of a key column"),
    "case": ({"n": ValueState("long"), "N": ValueState("long")}, "has the name of another state"),
    "hidden": ({"_n": ValueState("long")}, r"Mine\._n: .* must not begin with _"),
    "helper": ({"count": ReducingState("long", "count")}, r"Mine\.count has the name of a part of"),
    "ttl": ({"n": ValueState("long", ttl="soon")}, r"Mine\.n: 'soon' is not a span of time"),
    "zero": ({"n": ValueState("long", ttl="0 days")}, r"Mine\.n: '0 days' is not a span of time"),
    "clock of ttl": ({"n": ValueState("long", ttl="1 s", ttl_on="sun")}, "no clock 'sun'"),
    "ttl_on": ({"n": ValueState("long", ttl_on="event")}, "ttl_on= has no effect without ttl="),
    "watermark": ({"n": ValueState("long", ttl="1 s", ttl_on="event")}, "needs a watermark"),
    "time": ({"n": ListState("long", time="at")}, "time= has no effect without ttl="),
    "no field": ({"n": ListState("long", ttl="1 s", time="at")}, "no field 'at' in int64"),
    "field": (
        {"n": MapState("long", "struct<at: long>", ttl="1 s", time="at")}, "'at' is of int64",
    ),
    "clock": ({"t": Timer("lunar"), "on_timer": on_timer}, r"Mine\.t: there is no clock 'lunar'"),
    "event timer": ({"t": Timer("event"), "on_timer": on_timer}, "needs a watermark"),
    "no on_timer": ({"t": Timer("processing")}, "declares the timer t and no on_timer"),
    "no timer": ({"on_timer": on_timer}, "defines on_timer and declares no timer"),
    "how": ({"n": ReducingState("long", "avg")}, "'avg' is not a way to reduce"),
    "of": ({"n": ReducingState("long", "sum", of="m")}, "no column 'm'"),
    "sum": ({"n": ReducingState("string", "sum")}, "a sum cannot be of string"),
    "count": ({"n": ReducingState("int", "count")}, "a count cannot be of int32"),
    "folded": ({"n": ReducingState("long", "sum", of="amount")}, "not folded into int64"),
    "both": ({"process_key": lambda self, key, rows, state: None}, "both process and process_key"),
    "output": ({"output": None}, "Mine does not declare what it emits"),
    "bad output": ({"output": "user strong"}, r"Mine\.output: .*'strong' is not a type"),
    "odd output": ({"output": 7}, r"Mine\.output is 7"),
    "nothing": ({"process": None}, "Mine defines no process and no state"),
    "not folded": ({"process": None, "n": ValueState("long")}, "n is not folded by itself"),
    "unknown output": (
        {"process": None, "n": ReducingState("long", "count"), "output": "m long"},
        "names m, which is no key and no state",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_is_refused_by_name_before_anything_runs(name: str) -> None:
    members, said = WRONG[name]
    with pytest.raises(JobError, match=said) as caught:
        KeyedHarness(declared(**members), by="user", rows=ROWS)
    assert caught.value.hint


def test_a_step_that_does_not_fit_its_rows_is_refused() -> None:
    with pytest.raises(JobError, match="no column 'when'"):
        KeyedHarness(declared(), by="user", rows=ROWS, event_time="when")
    with pytest.raises(JobError, match="event time n is of int64"):
        KeyedHarness(declared(), by="user", rows=ROWS, event_time="n")
    with pytest.raises(JobError, match="a watermark needs event_time="):
        KeyedHarness(declared(), by="user", rows=ROWS, watermark="1 s")


def test_spans_are_written_as_people_do() -> None:
    assert (
        parse_span("1 hour 30 minutes") == parse_span(timedelta(minutes=90)) == parse_span("90min")
    )
    assert [parse_span(t) for t in ("2 weeks", "7 days", "500ms", "1 us")] == [
        14 * 86_400_000_000, 7 * 86_400_000_000, 500_000, 1,
    ]  # fmt: skip


def run(returns: Any, **members: Any) -> ProcessFailed:
    """The error of a process that returns this."""
    states = {"total": ValueState("double"), "n": ValueState("int"), **members}
    process = declared(process=lambda self, keys, rows: returns(keys), **states)
    step = KeyedHarness(process, by="user", rows=ROWS)
    with pytest.raises(ProcessFailed) as caught:
        step.feed([{"user": u} for u in "abcde"])
    assert caught.value.hint
    return caught.value


FIVE = pa.array([1.0] * 5)
UNFIT = {
    "a table alone": (lambda keys: keys, "it returned a Table"),
    "three": (lambda keys: (None, None, None), "it returned a tuple of 3"),
    "rows": (lambda keys: (None, {"total": FIVE.slice(1)}), "total of new_state has 4 rows for 5"),
    "type": (lambda keys: (None, {"total": pa.array(["x"] * 5)}), "is of string, declared is doub"),
    "kind": (lambda keys: (None, {"n": FIVE}), "column n of new_state is of double, declared is i"),
    "range": (lambda keys: (None, {"n": pa.array([2**40] * 5)}), "n of new_state does not fit int"),
    "unknown": (lambda keys: (None, {"totl": FIVE}), "has totl, which is not declared"),
    "others": (lambda keys: (None, keys.take([0, 1, 2, 4, 3])), "for other keys than were given"),
    "lacks": (lambda keys: ({}, None), "out lacks user"),
    "extra": (lambda keys: (keys.select(["user", "total"]), None), "has total, which is not decl"),
    "list": (lambda keys: ([1], None), "out is a list of 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    returns, said = UNFIT[name]
    error = run(returns)
    assert said in error.message
    assert "Mine.process returned what does not fit, in epoch 0, keys 'a', 'b', 'c' and 2 more" in (
        error.message
    )


def test_numbers_of_the_same_kind_are_taken_if_none_is_lost() -> None:
    small = pa.array([1] * 2, pa.int64()), pa.array([0.5] * 2, pa.float32())
    process = declared(
        process=lambda self, keys, rows: (None, {"n": small[0], "total": small[1]}),
        n=ValueState("short"), total=ValueState("double"),
    )  # fmt: skip
    step = KeyedHarness(process, by="user", rows=ROWS)
    step.feed([{"user": "a"}, {"user": "b"}])
    assert step.state("b") == {"n": 1, "total": 0.5}


def test_a_process_that_raises_is_named_with_epoch_keys_and_line() -> None:
    def fails(self: Any, keys: pa.Table, rows: pa.Table) -> None:
        pa.array([1, 2], pa.int8()).cast("date32")  # fails inside of Arrow

    step = KeyedHarness(declared(process=fails), by=["user", "n"], rows=ROWS)
    with pytest.raises(ProcessFailed) as caught:
        step.feed([{"user": "a", "n": n} for n in range(4)])
    said = caught.value.message
    assert said.startswith(
        "Mine.process failed in epoch 0, keys ('a', 0), ('a', 1), ('a', 2) and 1 more: ArrowNotImpl"
    )
    assert "test_keyed_failures.py, line " in said
    assert "# fails inside of Arrow)" in said
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.message, copy.exit_code, copy.retryable) == (said, 9, False)


def test_the_caller_says_where_it_failed() -> None:
    process = declared(process=lambda self, keys, rows: 1 / 0)
    step = KeyedHarness(process, by="user", rows=ROWS).step
    keys = pa.table({"user": ["a"]})
    rows = pa.Table.from_pylist([{"user": "a"}], step.rows)
    with pytest.raises(
        ProcessFailed, match=r"^key groups 0 to 31: Mine\.process failed in epoch 7"
    ):
        step.run(keys, pa.table({}), rows, np.zeros(1, np.int64), Time(0, None, 7),
                 where="key groups 0 to 31")  # fmt: skip


def test_an_error_of_onceflow_passes_as_it_is() -> None:
    def away(self: Any, keys: pa.Table, rows: pa.Table) -> None:
        raise ServerSilent("no answer", hint="wait")

    with pytest.raises(ServerSilent):
        KeyedHarness(declared(process=away), by="user", rows=ROWS).feed([{"user": "a"}])


def test_nothing_of_an_epoch_that_failed_is_kept() -> None:
    class Picky(KeyedProcess):
        output = "user string"
        total = ReducingState("double", "sum", of="amount")

        def process(self, keys: pa.Table, rows: pa.Table) -> Any:
            if "bad" in keys["user"].to_pylist():
                raise ValueError("bad")
            return None, self.folded()

    step = KeyedHarness(Picky(), by="user", rows=ROWS)
    step.feed([{"user": "a", "amount": 1.0}])
    with pytest.raises(ProcessFailed):
        step.feed([{"user": "a", "amount": 1.0}, {"user": "bad"}])
    step.feed([{"user": "a", "amount": 1.0}])
    assert step.state("a") == {"total": 2.0}


def test_the_helpers_say_where_they_can_be_used() -> None:
    process = declared()
    with pytest.raises(RuntimeError, match="only while rows are processed"):
        _ = process.time
    with pytest.raises(JobError, match="not part of a step yet"):
        _ = process.binding
