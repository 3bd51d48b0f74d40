"""Run a keyed process without Spark: feed rows, let time pass, read its output and its state.

It runs the same code as a job, and keeps its state in memory. There are two differences: whether a
row is late depends on the watermark before its epoch, while a job looks at the earlier rows of its
partition; and all keys of an epoch are one slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from onceflow.contract.schema import arrow_schema, nullable, parse_schema
from onceflow.errors import JobError
from onceflow.state.process import KeyedProcess, Time
from onceflow.state.states import parse_span
from onceflow.state.step import Step
from onceflow.state.vectors import NEVER, datetime_to_micros, to_micros

Rows: TypeAlias = "Sequence[Mapping[str, Any]] | pa.Table"
_START = datetime(2026, 1, 1, tzinfo=UTC)
_MICRO = timedelta(microseconds=1)
_NO_TIME = -(2**63)  # of a row whose event time is null: it is never late


class KeyedHarness:
    """One keyed step. `rows`: the columns of its rows, as a Spark schema string."""

    def __init__(
        self,
        process: KeyedProcess,
        *,
        by: str | Sequence[str],
        rows: str,
        event_time: str | None = None,
        watermark: str | timedelta | None = None,
        now: datetime = _START,
    ) -> None:
        self._by = [by] if isinstance(by, str) else list(by)
        self.rows = arrow_schema(nullable(parse_schema(rows)))
        missing = [name for name in self._by if name not in self.rows.names]
        if missing or not self._by:
            raise JobError(
                f"the rows have no column {', '.join(missing) or '(no by=)'}",
                hint=f"they have {', '.join(self.rows.names)}",
            )
        self.step = Step(
            process,
            keys=pa.schema([self.rows.field(name) for name in self._by]),
            rows=self.rows,
            event_time=event_time,
            watermark=watermark is not None,
        )
        self._delay = None if watermark is None else parse_span(watermark)
        self._now, self._epoch = datetime_to_micros(now), -1
        self._watermark: int | None = None
        self._keys: dict[tuple[Any, ...], int] = {}  # key -> its row in what is stored
        self._stored = pa.schema([*self.step.keys, *self.step.values]).empty_table()
        self._late = [self.rows.empty_table()]

    @property
    def late(self) -> pa.Table:
        """The rows that were late and not processed."""
        return pa.concat_tables(self._late)

    def feed(self, rows: Rows) -> pa.Table:
        """Run one epoch with these rows. Returns its output.

        If the epoch moves the watermark past timers, they fire in a further epoch that follows at
        once, as in a job.
        """
        table = self._on_time(self._table(rows))
        out = self._run(table)
        if self._delay is not None:
            seen = [at for at in self._micros(table).tolist() if at != _NO_TIME]
            self._move(max(seen, default=_NO_TIME + self._delay) - self._delay)
        return self._after(out)

    def advance(self, *, to: datetime | None = None, by: timedelta | None = None) -> pa.Table:
        """Move the processing clock, and fire the timers that are due."""
        if (to is None) == (by is None):
            raise JobError("advance takes to= or by=", hint="give one of them")
        then = (
            datetime_to_micros(to) if to is not None else self._now + (by or timedelta()) // _MICRO
        )
        self._now = then
        return self._run(self.rows.empty_table())

    def watermark(self, to: datetime) -> pa.Table:
        """Move the watermark, and fire the timers that are due. It never goes back."""
        if self._delay is None:
            raise JobError("this step has no watermark", hint='give watermark="10 minutes"')
        self._move(datetime_to_micros(to))
        return self._run(self.rows.empty_table())

    def state(self, key: Any = None) -> Any:
        """The whole state as a table; or the state of a key as a dict, None if there is none."""
        time = self._time()
        seen = self.step.read(self._stored, time)
        gone = self.step.is_expired(self._stored, time)
        if key is None:
            columns = [*(self._stored[name] for name in self._by), *seen.columns]
            schema = pa.schema([*self.step.keys, *self.step.states])
            return pa.table(columns, schema=schema).filter(pa.array(~gone))
        number = self._keys.get(tuple(key) if isinstance(key, tuple | list) else (key,))
        if number is None or gone[number]:
            return None
        return seen.slice(number, 1).to_pylist(maps_as_pydicts="strict")[0]

    # ------------------------------------------------------------ an epoch

    def _move(self, watermark: int) -> None:
        if watermark != _NO_TIME:
            self._watermark = (
                watermark if self._watermark is None else max(watermark, self._watermark)
            )

    def _run(self, rows: pa.Table) -> pa.Table:
        self._epoch += 1
        keys = dict.fromkeys(zip(*(rows[name].to_pylist() for name in self._by), strict=True))
        number = {key: n for n, key in enumerate(keys)}
        due = [key for key in self._due() if key not in number]
        number.update({key: n for n, key in enumerate(due, len(number))})
        index = np.array(
            [number[key] for key in zip(*(rows[n].to_pylist() for n in self._by), strict=True)],
            np.int64,
        )
        order = np.argsort(index, kind="stable")
        key_table = pa.table(
            [pa.array([key[n] for key in number], f.type) for n, f in enumerate(self.step.keys)],
            schema=self.step.keys,
        )
        places = pa.array([self._keys.get(key) for key in number], pa.int64())
        before = self._stored.select(self.step.values.names).take(places)
        done = self.step.run(
            key_table, before, rows.take(pa.array(order)), index[order], self._time()
        )
        self._keep(list(number), key_table, done.state, done.changed, done.live)
        return done.out

    def _keep(
        self, keys: list[Any], table: pa.Table, state: pa.Table, changed: Any, live: Any
    ) -> None:
        """Write only the keys that changed, and remove those that are no longer live."""
        changed_keys = {key for key, is_changed in zip(keys, changed, strict=True) if is_changed}
        stay = [n for key, n in self._keys.items() if key not in changed_keys]
        stayed = [key for key in self._keys if key not in changed_keys]
        new = np.flatnonzero(changed & live)
        both = pa.table([*table.columns, *state.columns], schema=self._stored.schema)
        self._stored = pa.concat_tables(
            [self._stored.take(pa.array(stay, pa.int64())), both.take(pa.array(new))]
        ).combine_chunks()
        self._keys = {key: n for n, key in enumerate([*stayed, *(keys[n] for n in new)])}

    def _after(self, out: pa.Table) -> pa.Table:
        if "event" not in self.step.timers.values() or not self._due():
            return out
        return pa.concat_tables([out, self._run(self.rows.empty_table())])

    def _due(self) -> list[tuple[Any, ...]]:
        is_due = np.zeros(len(self._stored), np.bool_)
        for timer, clock in self.step.timers.items():
            until = self._watermark if clock == "event" else self._now
            at = to_micros(self._stored[timer], NEVER)
            if until is not None:
                is_due |= at <= until
        return [key for key, n in self._keys.items() if is_due[n]]

    def _time(self) -> Any:
        return Time(self._now, self._watermark, max(self._epoch, 0))

    # ------------------------------------------------------------ rows

    def _table(self, rows: Rows) -> pa.Table:
        if isinstance(rows, pa.Table):
            return rows.select(self.rows.names).cast(self.rows)
        unknown = sorted({name for row in rows for name in row} - set(self.rows.names))
        if unknown:
            raise JobError(
                f"the rows have no column {', '.join(unknown)}",
                hint=f"they have {', '.join(self.rows.names)}",
            )
        return pa.Table.from_pylist(list(rows), self.rows)

    def _micros(self, rows: pa.Table) -> Any:
        return to_micros(rows[self.step.event_time], _NO_TIME)

    def _on_time(self, rows: pa.Table) -> pa.Table:
        if self._watermark is None:
            return rows
        at = self._micros(rows)
        late = (at < self._watermark) & (at != _NO_TIME)
        if late.any():
            self._late.append(rows.filter(pa.array(late)))
        return rows.filter(pa.array(~late))
