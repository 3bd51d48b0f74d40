"""Timers and expiry: in which order rows and timers come, and how long a value is there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from onceflow.errors import JobError, ProcessFailed
from onceflow.state.process import KeyedProcess, Time
from onceflow.state.states import ListState, MapState, Timer, ValueState
from onceflow.state.step import Step
from onceflow.state.vectors import datetime_to_micros
from onceflow.testing import KeyedHarness

START = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = "user string, at timestamp, n long"
TIMED = {"by": "user", "rows": ROWS, "event_time": "at", "watermark": "10 minutes"}


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def row(user: str, minutes: float, n: int = 1) -> dict[str, Any]:
    return {"user": user, "at": at(minutes), "n": n}


class Remind(KeyedProcess):
    """Says what it was given: rows, or that a timer fired."""

    output = "user string, what string"
    remind = Timer("event")

    def __init__(self, after: timedelta = timedelta(minutes=30)) -> None:
        self.after = after

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        names = rows["user"].to_pylist()
        whats = [f"row {t:%H:%M}" if t else "row" for t in rows["at"].to_pylist()]
        later = pc.add(self.max(rows["at"]), pa.scalar(self.after))
        return {"user": names, "what": whats}, {"remind": later}

    def on_timer(self, keys: pa.Table) -> Any:
        whats = [f"timer {t:%H:%M}" for t in keys["remind"].to_pylist()]
        return {"user": keys["user"], "what": whats}, None


def said(out: pa.Table, user: str) -> list[str]:
    return [r["what"] for r in out.to_pylist() if r["user"] == user]


def test_an_event_timer_fires_once_when_the_watermark_has_passed_it() -> None:
    step = KeyedHarness(Remind(), **TIMED)
    step.feed([row("a", 0)])
    assert step.state("a") == {"remind": at(30)}
    assert len(step.feed([row("b", 39)])) == 1  # the watermark is 00:29
    assert said(step.feed([row("b", 40)]), "a") == ["timer 00:30"]
    assert step.state("a") is None
    assert said(step.feed([row("b", 41)]), "a") == []


def test_a_row_moves_a_timer_that_is_not_due_yet() -> None:
    step = KeyedHarness(Remind(), **TIMED)
    step.feed([row("a", 0)])
    step.feed([row("a", 20)])
    assert said(step.feed([row("b", 45)]), "a") == []
    assert said(step.watermark(at(50)), "a") == ["timer 00:50"]


def run(step: Step, rows: list[dict[str, Any]], watermark: datetime, state: Any = None) -> Any:
    """One run with a watermark that may be past some of the rows; they are all on time."""
    users = sorted({r["user"] for r in rows} | set(state or {}))
    table = pa.Table.from_pylist(sorted(rows, key=lambda r: users.index(r["user"])), step.rows)
    index = np.array([users.index(u) for u in table["user"].to_pylist()], np.int64)
    stored = pa.Table.from_pylist([(state or {}).get(u, {}) for u in users], step.values)
    micros = (watermark - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    keys = pa.table({"user": users})
    return step.run(keys, stored, table, index, Time(micros, micros, 0))


def bind_process(process: KeyedProcess) -> Step:
    return KeyedHarness(process, **TIMED).step


def test_a_timer_comes_after_the_rows_up_to_it_and_before_later_ones() -> None:
    state = {"a": {"remind": at(30)}, "b": {"remind": at(90)}, "c": {"remind": at(5)}}

    class Once(Remind):
        def process(self, keys: pa.Table, rows: pa.Table) -> Any:
            return super().process(keys, rows)[0], None

    rows = [row("a", 50), row("a", 10), row("a", 30), row("a", 31), row("b", 1), row("d", 3)]
    done = run(bind_process(Once()), rows, at(60), state)
    assert said(done.out, "a") == [
        "row 00:10",
        "row 00:30",
        "timer 00:30",
        "row 00:31",
        "row 00:50",
    ]
    assert said(done.out, "b") == ["row 00:01"]
    assert said(done.out, "c") == ["timer 00:05"]
    assert said(done.out, "d") == ["row 00:03"]
    assert done.state["remind"].to_pylist() == [None, at(90), None, None]
    assert done.changed.tolist() == [True, False, True, False]
    assert done.live.tolist() == [False, True, False, False]


def test_a_timer_that_is_due_when_it_is_set_fires_in_the_same_epoch() -> None:
    done = run(bind_process(Remind()), [row("a", 0), row("a", 10), row("b", 100)], at(60))
    assert said(done.out, "a") == ["row 00:00", "row 00:10", "timer 00:40"]
    assert done.state["remind"].to_pylist() == [None, at(130)]


def test_a_timer_that_is_set_again_fires_again_but_not_for_ever() -> None:
    class Every(Remind):
        def on_timer(self, keys: pa.Table) -> Any:
            out, _ = super().on_timer(keys)
            return out, {"remind": pc.add(keys["remind"], pa.scalar(self.after))}

    done = run(bind_process(Every(timedelta(minutes=20))), [row("a", 0)], at(60))
    assert said(done.out, "a") == ["row 00:00", "timer 00:20", "timer 00:40", "timer 01:00"]
    assert done.state["remind"].to_pylist() == [at(80)]
    with pytest.raises(ProcessFailed, match="remind was set to a time that is due 1000 times"):
        run(bind_process(Every(timedelta(milliseconds=1))), [row("a", 0), row("b", 0)], at(60))


def test_rows_between_timers_are_no_endless_loop() -> None:
    class Every(Remind):
        def process(self, keys: pa.Table, rows: pa.Table) -> Any:
            return None

        def on_timer(self, keys: pa.Table) -> Any:
            return {"user": keys["user"], "what": keys["user"]}, {
                "remind": pc.add(keys["remind"], pa.scalar(timedelta(minutes=1)))
            }

    rows = [row("a", minutes) for minutes in range(1100)]
    done = run(bind_process(Every()), rows, at(1200), {"a": {"remind": at(0)}})
    assert len(done.out) == 1201


def test_two_timers_of_a_key_fire_in_their_order_and_say_which_they_are() -> None:
    class Two(KeyedProcess):
        output = "user string, soon boolean, late boolean"
        soon = Timer("event")
        late = Timer("event")

        def process(self, keys: pa.Table, rows: pa.Table) -> Any:
            return None

        def on_timer(self, keys: pa.Table) -> Any:
            out = {"user": keys["user"], "soon": self.due("soon"), "late": self.due("late")}
            return out, None

    state = {"a": {"soon": at(1), "late": at(2)}, "b": {"soon": at(3), "late": at(3)}}
    done = run(bind_process(Two()), [], at(60), state)
    assert sorted(map(tuple, (r.values() for r in done.out.to_pylist()))) == [
        ("a", False, True), ("a", True, False), ("b", True, True),
    ]  # fmt: skip
    assert done.out.to_pylist()[0]["soon"]


def test_a_processing_timer_fires_when_the_clock_says_so_without_rows() -> None:
    class Later(KeyedProcess):
        output = "user string, n long"
        n = ValueState("long")
        flush = Timer("processing")

        def process(self, keys: pa.Table, rows: pa.Table) -> Any:
            when = self.time.now_at + timedelta(minutes=5)
            return None, {"n": self.count(), "flush": pa.array([when] * len(keys))}

        def on_timer(self, keys: pa.Table) -> Any:
            nothing = pa.nulls(len(keys), pa.int64())
            return {"user": keys["user"], "n": keys["n"]}, {"n": nothing}

    step = KeyedHarness(Later(), by="user", rows=ROWS, now=START)
    step.feed([row("a", 0), row("a", 0)])
    assert len(step.advance(to=at(4))) == 0
    assert step.advance(by=timedelta(minutes=1)).to_pylist() == [{"user": "a", "n": 2}]
    assert step.state("a") is None
    assert len(step.advance(to=START)) == 0  # a clock that goes back does no harm


def test_rows_before_the_watermark_are_late_and_kept_apart() -> None:
    step = KeyedHarness(Remind(), **TIMED)
    step.feed([row("a", 60)])
    out = step.feed([row("b", 49), row("b", 50), {"user": "b", "n": 1}])
    assert said(out, "b") == ["row", "row 00:50"]  # without a time it is never late
    assert step.late.to_pylist() == [row("b", 49)]


# ---------------------------------------------------------------- expiry


class Seen(KeyedProcess):
    """Emits what it knew before, and writes the number of the row if that is not 0."""

    output = "user string, known long"
    known = ValueState("long", ttl="30 minutes")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        out = {"user": keys["user"], "known": keys["known"]}
        n = self.last(rows["n"])
        written = pc.any(pc.not_equal(n, 0)).as_py()
        return out, {"known": n} if written else None


def known(out: pa.Table) -> list[Any]:
    return [r["known"] for r in out.to_pylist()]


def test_a_value_is_gone_when_it_was_not_written_for_its_ttl() -> None:
    step = KeyedHarness(Seen(), **TIMED)
    step.feed([row("a", 0, 7)])
    assert known(step.feed([row("a", 20, 0)])) == [7]  # seen, not written
    step.feed([row("b", 39, 1)])
    assert step.state("a") == {"known": 7}
    step.feed([row("b", 40, 1)])
    assert step.state("a") is None
    assert known(step.feed([row("a", 41, 0)])) == [None]
    assert step.state("a") is None


def test_writing_makes_it_last_longer_also_if_the_value_is_the_same() -> None:
    step = KeyedHarness(Seen(), **TIMED)
    step.feed([row("a", 0, 7)])
    step.feed([row("a", 20, 7)])
    step.feed([row("b", 59, 1)])
    assert step.state("a") == {"known": 7}
    assert step.step.values.names == ["known", "_written.known"]


def test_a_row_never_misses_what_was_written_less_than_its_ttl_before() -> None:
    done = run(bind_process(Seen()), [row("a", 0, 7)], at(0))
    stored = {"a": done.state.to_pylist()[0]}
    assert known(run(bind_process(Seen()), [row("a", 500, 0)], at(29), stored).out) == [7]
    assert known(run(bind_process(Seen()), [row("a", 30, 0)], at(30), stored).out) == [None]


def test_a_row_behind_the_watermark_sees_what_merging_runs_would_have_left() -> None:
    step = bind_process(Seen())
    done = run(step, [row("a", 0, 7)], at(0))
    stored = {"a": done.state.to_pylist()[0]}
    assert step.is_expired(done.state, Time(0, datetime_to_micros(at(500)), 2)).all()
    assert known(run(step, [row("a", 29, 0)], at(500), stored).out) == [None]


def test_expiry_on_the_clock_of_processing() -> None:
    class Now(Seen):
        known = ValueState("long", ttl="30 minutes", ttl_on="processing")

    step = KeyedHarness(Now(), **TIMED, now=START)
    step.feed([row("a", 0, 7)])
    step.feed([row("b", 500, 1)])
    assert step.state("a") == {"known": 7}
    step.advance(to=at(30))
    assert step.state("a") is None


class Elements(KeyedProcess):
    output = "user string"
    clicks = ListState("struct<ad: string, at: timestamp>", ttl="30 minutes", time="at")
    per_ad = MapState("string", "struct<at: timestamp>", ttl="30 minutes", time="at")

    def process_key(self, key: str, rows: list[dict[str, Any]], state: Any) -> None:
        for r in rows:
            state.clicks.append({"ad": str(r["n"]), "at": r["at"]})
            state.per_ad[str(r["n"])] = {"at": r["at"]}


def test_elements_and_entries_expire_one_by_one() -> None:
    step = KeyedHarness(Elements(), **TIMED)
    step.feed([row("a", 0, 1), row("a", 25, 2), {"user": "a", "n": 3}])
    step.watermark(at(40))
    kept = step.state("a")
    assert [c["ad"] for c in kept["clicks"]] == ["3", "2"]
    assert sorted(kept["per_ad"]) == ["2", "3"]
    step.feed([row("a", 60, 4)])
    step.watermark(at(61))
    assert [c["ad"] for c in step.state("a")["clicks"]] == ["3", "4"]


def test_what_is_wholly_expired_can_be_dropped() -> None:
    class Mixed(Seen):
        clicks = ListState("struct<at: timestamp>", ttl="30 minutes", time="at")
        forever = ValueState("long")

    step = bind_process(Mixed())
    base = int(START.timestamp() * 1e6)
    values = pa.Table.from_pylist(
        [
            {"known": 1, "_written.known": base, "clicks": [{"at": at(0)}]},
            {"known": 1, "_written.known": base, "clicks": [{"at": at(1)}]},
            {"known": 1, "_written.known": base, "forever": 1},
            {"known": 1},  # written before it had a ttl
            {},
        ],
        step.values,
    )
    found = step.is_expired(values, Time(0, base + 30 * 60 * 10**6, 0))
    assert found.tolist() == [True, False, False, False, True]
    assert not step.is_expired(values, Time(0, None, 0))[:4].any()


def test_a_key_with_a_timer_is_not_expired() -> None:
    class Timed(Seen):
        ring = Timer("event")

        def on_timer(self, keys: pa.Table) -> None:
            return None

    step = bind_process(Timed())
    values = pa.Table.from_pylist([{"ring": at(999)}], step.values)
    assert step.timers == {"ring": "event"}
    assert not step.is_expired(values, Time(0, 10**17, 0)).any()


def test_the_harness_refuses_what_a_step_has_not() -> None:
    step = KeyedHarness(Seen(), by="user", rows=ROWS)
    with pytest.raises(JobError, match="has no watermark"):
        step.watermark(START)
    with pytest.raises(JobError, match="no column amount"):
        step.feed([{"amount": 1}])
    with pytest.raises(JobError, match="to= or by="):
        step.advance()
    with pytest.raises(JobError, match="no column client"):
        KeyedHarness(Seen(), by="client", rows=ROWS)
