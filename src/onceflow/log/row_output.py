"""Rows of a log as JSON and as text, which `strict_values` reads back unchanged."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from onceflow.contract.schema import arrow_schema
from onceflow.log.strict_values import Kind

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
_1970 = datetime(1970, 1, 1)


def plain_rows(batch: pa.RecordBatch, kinds: dict[str, Kind]) -> Iterator[Row]:
    """The rows with values that JSON has: binary as base64, decimals and times as text."""
    names = batch.schema.names
    fields = [{"name": name, "type": _raw(kinds[name])} for name in names]
    raw = arrow_schema(json.dumps({"type": "struct", "fields": fields}))
    columns = [
        _column(kinds[name], column.cast(field.type).to_pylist())
        for name, column, field in zip(names, batch.columns, raw, strict=True)
    ]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def as_word(value: Any) -> str:
    """A value of `plain_rows` in a line of text: unchanged if it cannot be misread."""
    misread = value in ("", "null") or not {" ", '"', "="}.isdisjoint(str(value))
    if isinstance(value, str) and value.isprintable() and not misread:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)  # no control characters for a terminal


def show_time(microseconds: int, *, zone: str = "Z", digits: str = "auto") -> str:
    try:
        at = _1970 + timedelta(microseconds=microseconds)
    except OverflowError:  # Python has no years before 1 and after 9999, a log may
        return f"{microseconds} microseconds since 1970"
    return at.isoformat(timespec=digits) + zone


def _column(kind: Kind, values: list[Any]) -> list[Any]:
    write = _writer(kind)
    return [None if value is None else write(value) for value in values]


def _raw(kind: Kind) -> Kind:
    """Times as numbers."""
    match kind:
        case "timestamp" | "timestamp_ntz":
            return "long"
        case "date":
            return "integer"
        case {"type": "struct", "fields": fields}:
            return {**kind, "fields": [{**f, "type": _raw(f["type"])} for f in fields]}
        case {"type": "array"}:
            return {**kind, "elementType": _raw(kind["elementType"])}
        case {"type": "map"}:
            return {**kind, "keyType": _raw(kind["keyType"]), "valueType": _raw(kind["valueType"])}
    return kind


def _writer(kind: Kind) -> Callable[[Any], Any]:
    match kind:
        case {"type": "struct", "fields": fields}:
            writers = {field["name"]: _writer(field["type"]) for field in fields}
            return lambda value: {
                name: None if value[name] is None else write(value[name])
                for name, write in writers.items()
            }
        case {"type": "array", "elementType": inner}:
            return lambda value: _column(inner, value)
        case {"type": "map"}:
            key, item = _writer(kind["keyType"]), _writer(kind["valueType"])
            return lambda pairs: {_key(key(k)): None if v is None else item(v) for k, v in pairs}
        case "binary":
            return lambda value: base64.b64encode(value).decode()
        case "timestamp":
            return show_time
        case "timestamp_ntz":
            return lambda value: show_time(value, zone="")
        case "date":
            return _date
        case "float":
            return lambda value: _floating(_shortest(value))
        case "double":
            return _floating
        case str() if kind.startswith("decimal"):
            return lambda value: format(value, "f")
    return lambda value: value


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _date(days: int) -> str:
    try:
        return (_1970 + timedelta(days=days)).date().isoformat()
    except OverflowError:
        return f"{days} days since 1970"


def _floating(value: float) -> Any:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _shortest(value: float) -> float:
    """The shortest number that is the same 32-bit float."""
    import numpy as np

    return float(str(np.float32(value)))
