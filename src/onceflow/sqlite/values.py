"""Spark's values as SQLite stores them: integers, doubles, text and bytes."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from onceflow.contract.unstorable import (
    YEAR_1,
    YEAR_10000,
    is_text,
    leaves,
    not_utf8,
    outside,
    time_kind,
)

_INTEGERS = ("boolean", "byte", "short", "integer", "long")


def sqlite_type(kind: str) -> str:
    if kind in _INTEGERS:
        return "INTEGER"
    if kind in ("float", "double"):
        return "REAL"
    return "BLOB" if kind == "binary" else "TEXT"


def affinity(declared: str) -> str:
    """The affinity that SQLite derives from the declared type of a column."""
    kind = declared.upper()
    for affinity, words in (
        ("INTEGER", ("INT",)),
        ("TEXT", ("CHAR", "CLOB", "TEXT")),
        ("BLOB", ("BLOB",)),
        ("REAL", ("REAL", "FLOA", "DOUB")),
    ):
        if any(word in kind for word in words):
            return affinity
    return "NUMERIC" if kind else "BLOB"


def sqlite_values(column: Any, kind: str) -> list[Any]:
    import pyarrow as pa

    if kind.startswith("timestamp"):
        column = column.cast(pa.timestamp("us")).cast(pa.string())
    elif kind == "date":
        column = column.cast(pa.string())
    elif kind.startswith("decimal"):
        return [None if value is None else f"{value:f}" for value in column.to_pylist()]
    elif kind.startswith(("struct", "array", "map")):
        return [_json(value) for value in column.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def _json(value: Any) -> str | None:
    def plain(part: Any) -> Any:
        """JSON has no NaN and no infinity; values of other types become text as in a column."""
        match part:
            case dict():
                return {name: plain(inner) for name, inner in part.items()}
            case list() | tuple():
                return [plain(inner) for inner in part]
            case float():
                return part if math.isfinite(part) else None if math.isnan(part) else str(part)
            case Decimal():
                return f"{part:f}"
            case bytes():
                return base64.b64encode(part).decode()
            case None | bool() | int() | str():
                return part
            case _:
                return str(part)

    return None if value is None else json.dumps(plain(value), ensure_ascii=False, allow_nan=False)


def may_be_unstorable(kind: str) -> bool:
    return kind == "string" or kind.startswith(("date", "timestamp"))


def count_unstorable(batch: Any, key: Sequence[str]) -> Counter[str]:
    """Kind of value that SQLite cannot store, or its date functions cannot read -> how many."""
    import pyarrow.compute as pc

    found: Counter[str] = Counter()
    for name in batch.schema.names:
        if name in key:
            nulls = pc.sum(batch.column(name).is_null(nan_is_null=True)).as_py()
            found[f"null or NaN in key column {name}"] += nulls or 0
        for leaf in leaves(batch.column(name)):
            if is_text(leaf.type):
                found[f"text that is not UTF-8 in column {name}"] += not_utf8(leaf)
            elif kind := time_kind(leaf.type):
                far = outside(leaf, YEAR_1, YEAR_10000 - 1)
                found[f"a {kind} before the year 1 or after 9999 in column {name}"] += far
    return +found
