"""Rows of any columns, told apart by their `id`, and in what two lots of them differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import Any

Row = dict[str, Any]

_EXACT = Context(prec=76)  # Python's own rounds to 28 digits
_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
_TIMES = [
    datetime(1970, 1, 1, tzinfo=UTC) - timedelta(microseconds=1),
    datetime(2026, 3, 29, 1, 30, tzinfo=UTC),  # an hour that summer time leaves out elsewhere
    datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
]
_AWKWARD: dict[str, list[Any]] = {
    "string": ["", " ", "null", "\\N", "tab\tline\n'one' \"two\" \\, 100%", "naïve ☃ 😀"],
    "binary": [b"", b"\x00\xff\n"],
    "boolean": [True, False],
    "byte": [-(2**7), 2**7 - 1],
    "short": [-(2**15), 2**15 - 1],
    "integer": [-(2**31), 2**31 - 1],
    "long": [-(2**63), 2**63 - 1, 2**53 + 1],
    "float": [0.0, -1.5],
    "double": [0.0, 0.1, 1.7976931348623157e308, 5e-324],
    "date": [date(1600, 2, 29), date(9999, 12, 31)],
    "timestamp": _TIMES,
    "timestamp_ntz": [time.replace(tzinfo=None) for time in _TIMES],
}


def make_row(schema: str, number: int, *, version: int = 0) -> Row:
    """The row with `number` as its id; its other values follow from number and version."""
    seed = number + 1000 * version
    return {**{f["name"]: _value(f["type"], seed) for f in _fields(schema)}, "id": number}


def awkward_rows(schema: str, first: int) -> list[Row]:
    """Rows with nulls, and with every value that is easily changed on its way."""
    kinds = {f["name"]: f["type"] for f in _fields(schema)}
    values = {name: [None, *_awkward(kind)] for name, kind in kinds.items()}
    return [
        {**{name: of[n % len(of)] for name, of in values.items()}, "id": first + n}
        for n in range(max(map(len, values.values())))
    ]


def difference(found: Iterable[Row], wanted: Iterable[Row]) -> str:
    """What is wrong with `found`, in words; empty if it has just the rows that are wanted."""
    found, wanted = list(found), list(wanted)
    have, want = (Counter(row["id"] for row in rows) for rows in (found, wanted))
    wrong = [_ids("lost", want - have), _ids("too many", have - want)]
    known = {row["id"]: row for row in wanted}
    for row in found:
        right = known.get(row["id"], row)
        wrong += [
            f"{name} of id {row['id']} is {row.get(name)!r}, not {right[name]!r}"
            for name in right
            if name not in row or row[name] != right[name]
        ]
    return "; ".join(filter(None, wrong))


def _ids(what: str, rows: Counter[int]) -> str:
    return f"{what}: id {', '.join(map(str, sorted(rows.elements())))}" if rows else ""


def _fields(schema: str) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = json.loads(schema)["fields"]
    return fields


def _value(kind: Any, n: int) -> Any:
    match kind:
        case "string":
            return f"text {n}"
        case "binary":
            return f"data {n}".encode()
        case "boolean":
            return n % 2 == 0
        case "byte" | "short" | "integer":
            return n % 100
        case "long":
            return n
        case "float" | "double":
            return n / 4
        case "date":
            return _YEAR.date() + timedelta(days=n)
        case "timestamp":
            return _YEAR + timedelta(microseconds=n)
        case "timestamp_ntz":
            return (_YEAR + timedelta(microseconds=n)).replace(tzinfo=None)
        case {"type": "array", "elementType": inner}:
            return [_value(inner, n), _value(inner, n + 1)]
        case {"type": "map", "keyType": key, "valueType": inner}:
            return [(_value(key, n), _value(inner, n))]  # as Arrow gives a map
        case {"type": "struct", "fields": fields}:
            return {f["name"]: _value(f["type"], n) for f in fields}
        case str() if kind.startswith("decimal"):
            precision, scale = _decimal(kind)
            return _EXACT.scaleb(Decimal(n % 10**precision), -scale)
    raise ValueError(f"the contract has no rows with the type {kind}")


def _awkward(kind: Any) -> list[Any]:
    match kind:
        case {"type": "array", "elementType": inner}:
            return [[], [None], _awkward(inner)]
        case {"type": "map", "keyType": key}:
            return [[], [(_value(key, 0), None)]]
        case {"type": "struct", "fields": fields}:
            return [dict.fromkeys((f["name"] for f in fields), None)]
        case str() if kind.startswith("decimal"):
            precision, scale = _decimal(kind)
            largest = _EXACT.scaleb(Decimal(10**precision - 1), -scale)
            smallest = _EXACT.scaleb(Decimal(1), -scale)
            return [Decimal(0), largest, _EXACT.minus(largest), smallest]
    return _AWKWARD[kind]


def _decimal(kind: str) -> tuple[int, int]:
    precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
    return int(precision), int(scale)
