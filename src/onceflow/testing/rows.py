"""Rows of any columns, each with an `id`, and the difference between two lists of them."""

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
_SHOWN = 10  # ids
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
    """The row with `number` as its id; its other values depend on number and version."""
    seed = number + 1000 * version
    return {**{f["name"]: _value(f["type"], seed) for f in _fields(schema)}, "id": number}


def awkward_rows(schema: str, first: int) -> list[Row]:
    """Rows with nulls, and with values that a sink might easily change."""
    kinds = {f["name"]: f["type"] for f in _fields(schema)}
    values = {name: [None, *_awkward(kind)] for name, kind in kinds.items()}
    return [
        {**{name: of[n % len(of)] for name, of in values.items()}, "id": first + n}
        for n in range(max(map(len, values.values())))
    ]


def difference(found: Iterable[Row], wanted: Iterable[Row]) -> str:
    """A description of the errors in `found`; empty if it has just the wanted rows, each as often.
    Does not compare columns that the wanted rows do not have."""
    found, wanted = list(found), list(wanted)
    names = list(wanted[0]) if wanted else []
    extra, lost = _without(found, wanted, names), _without(wanted, found, names)
    wrong = []
    for row in list(extra):
        right = next((other for other in lost if other["id"] == row["id"]), None)
        if right is not None:
            extra.remove(row)
            lost.remove(right)
            wrong += [
                f"{name} of id {row['id']} is {row.get(name)!r}, not {right[name]!r}"
                for name in names
                if name not in row or row[name] != right[name]
            ]
    return "; ".join(filter(None, [_ids("lost", lost), _ids("too many", extra), *wrong]))


def _without(rows: list[Row], others: list[Row], names: list[str]) -> list[Row]:
    """The rows that `others` does not have, or does not have as often."""
    left = Counter(_key(row, names) for row in others)
    found = []
    for row in rows:
        key = _key(row, names)
        if left[key]:
            left[key] -= 1
        else:
            found.append(row)
    return found


def _key(row: Row, names: list[str]) -> tuple[Any, ...]:
    return tuple(_hashable(row[name]) if name in row else KeyError for name in names)


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, _hashable(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def _ids(what: str, rows: list[Row]) -> str:
    ids = sorted((row["id"] for row in rows), key=lambda id: (id is None, id))
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"{what}: id {', '.join(map(str, ids[:_SHOWN]))}{more}" if rows else ""


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
            return _YEAR.date() + timedelta(days=n % 7)
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
