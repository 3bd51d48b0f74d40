"""Aggregates as a person writes them, `"sum(amount)"` or `"count"`, and of which type they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import types as t

from onceflow.errors import JobError
from onceflow.state.states import HOWS


@dataclass(frozen=True)
class Aggregate:
    name: str
    how: str
    of: str | None
    type: pa.DataType


def aggregates(given: Mapping[str, str], rows: pa.Schema, owner: str) -> list[Aggregate]:
    """What they are, of these rows; `JobError` for one that cannot be read or is of no column."""
    return [_parsed(name, text, rows, owner) for name, text in given.items()]


def _parsed(name: str, text: str, rows: pa.Schema, owner: str) -> Aggregate:
    found = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(.+?)\s*\))?\s*", str(text))
    how, of = (found[1], found[2]) if found else ("", None)
    of = None if of == "*" else of
    if how not in HOWS or (of is None and how != "count"):
        raise JobError(
            f"{owner}: {name} is {text!r}, which is not an aggregate",
            hint=f'write it like "sum(amount)" or "count"; there are {", ".join(HOWS)}',
        )
    if of is None:
        return Aggregate(name, how, None, pa.int64())
    if of not in rows.names:
        raise JobError(
            f"{owner}: {name} is {text!r}, and the rows have no column {of!r}",
            hint=f"they have {', '.join(rows.names)}",
        )
    kind = rows.field(of).type
    if how == "sum" and not (t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind)):
        raise JobError(
            f"{owner}: {name} is {text!r}, and {of} is of {kind}", hint="sum a column of numbers"
        )
    return Aggregate(name, how, of, _type(how, kind))


def _type(how: str, kind: pa.DataType) -> pa.DataType:
    """As in Spark: sums are long, double, or a decimal with ten digits more."""
    if how == "count":
        return pa.int64()
    if how != "sum":
        return kind
    if t.is_decimal(kind):
        return pa.decimal128(min(38, kind.precision + 10), kind.scale)
    return pa.float64() if t.is_floating(kind) else pa.int64()
