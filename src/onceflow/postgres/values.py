"""Spark's values as text for PostgreSQL's COPY, a batch at a time.

| Spark | PostgreSQL |
|---|---|
| string, binary, boolean | text, bytea, boolean |
| byte and short, integer, long | smallint, integer, bigint |
| float, double, decimal(p,s) | real, double precision, numeric(p,s) |
| date, timestamp, timestamp_ntz | date, timestamp with time zone, timestamp without time zone |
| array of one of these | an array of it |
| struct, map, array of anything else | jsonb; bytes in hex, NaN and infinity as strings |

Arrow alone makes the lines of a batch: they are the data of one array of strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from onceflow.contract.unstorable import US_A_DAY, YEAR_1, YEAR_10000, between

_PLAIN = {
    "string": "text", "binary": "bytea", "boolean": "boolean", "byte": "smallint",
    "short": "smallint", "integer": "integer", "long": "bigint", "float": "real",
    "double": "double precision", "date": "date", "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
}  # fmt: skip
_IN_COPY = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
_IN_JSON = (("\\", "\\\\"), ('"', '\\"'), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
_IN_ARRAY = (("\\", "\\\\"), ('"', '\\"'))
_ENCLOSED = ("date", "timestamp", "timestamp_ntz", "binary")  # their text has no quote in it
_BYTES_AT_ONCE = 16_000_000


def postgres_type(kind: Any) -> str | None:
    """The type as `format_type` writes it; None if PostgreSQL has none for this Spark type."""
    match kind:
        case str() if kind.startswith("decimal"):
            return f"numeric{kind.removeprefix('decimal')}"
        case str():
            return _PLAIN.get(kind)
        case {"type": "array", "elementType": str(inner)}:
            element = postgres_type(inner)
            return element and f"{element}[]"
        case {"type": "array", "elementType": inner}:
            return postgres_type(inner) and "jsonb"
        case {"type": "map", "keyType": str(key), "valueType": inner}:
            return postgres_type(key) and postgres_type(inner) and "jsonb"
        case {"type": "struct", "fields": fields}:
            return "jsonb" if all(postgres_type(field["type"]) for field in fields) else None
    return None


def copy_lines(batch: Any, fields: Sequence[tuple[str, Any]], ends: Sequence[Any]) -> memoryview:
    """The rows as lines for COPY. `fields`: names and types; `ends`: further columns, as strings
    or as one string for all rows."""
    import pyarrow.compute as pc

    def joined(*parts: Any) -> Any:
        return pc.binary_join_element_wise(*parts, null_handling="replace", null_replacement="\\N")

    *parts, last = *(_copied(batch.column(name), kind) for name, kind in fields), *ends
    last = f"{last}\n" if isinstance(last, str) else joined(last, "\n", "")
    lines = joined(*parts, last, "\t")
    offsets, data = lines.buffers()[1:]
    at = memoryview(offsets).cast("i")
    return memoryview(data)[at[lines.offset] : at[lines.offset + len(lines)]]


def slices(batch: Any) -> Iterator[Any]:
    """Divide a batch into parts that are small enough for one array of strings."""
    rows = max(1, int(batch.num_rows * _BYTES_AT_ONCE / max(batch.nbytes, _BYTES_AT_ONCE)))
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)


def _copied(column: Any, kind: Any) -> Any:
    if kind == "binary":
        return _joined("\\\\x", _hex(column))
    if isinstance(kind, str):
        text = _text(column, kind)
        return _escaped(text, _IN_COPY) if kind == "string" else text
    native = kind["type"] == "array" and isinstance(kind["elementType"], str)
    text = _array(column, kind["elementType"]) if native else _json(column, kind)
    return _escaped(text, _IN_COPY)


def _text(column: Any, kind: str) -> Any:
    """A plain value as PostgreSQL reads it, not yet escaped for COPY, JSON or an array."""
    import pyarrow as pa

    if kind == "binary":
        return _joined("\\x", _hex(column))
    if kind == "date":
        return _dates(column)
    if kind.startswith("timestamp"):
        return _times(column)
    return column.cast(pa.string())


# ---------------------------------------------------------------- nested


def _array(column: Any, kind: str) -> Any:
    """`{1,2,NULL}`; text is in quotes, so that PostgreSQL does not read it as syntax."""
    import pyarrow.compute as pc

    def element(values: Any) -> Any:
        text = _text(values, kind)
        if kind == "string" or kind in _ENCLOSED:
            text = _joined('"', _escaped(text, _IN_ARRAY), '"')
        return pc.fill_null(text, "NULL")

    return _lists("{", column, lambda part: element(part(column.values)), "}")


def _json(column: Any, kind: Any) -> Any:
    """JSON text of each value; null where the value is null."""
    import pyarrow.compute as pc

    def inner(values: Any, of: Any) -> Any:
        return pc.fill_null(_json(values, of), "null")

    match kind:
        case {"type": "struct", "fields": fields}:
            parts: list[Any] = []
            for number, field in enumerate(fields):
                name = json.dumps(field["name"], ensure_ascii=False)
                parts += [f"{',' if number else '{'}{name}:"]
                parts += [inner(pc.struct_field(column, [number]), field["type"])]
            return _null_as(column, _joined(*parts, "}"))
        case {"type": "array", "elementType": of}:
            return _lists("[", column, lambda part: inner(part(column.values), of), "]")
        case {"type": "map", "keyType": key, "valueType": of}:
            return _lists(
                "{",
                column,
                lambda part: _joined(
                    _quoted(_words(part(column.keys), key)), ":", inner(part(column.items), of)
                ),
                "}",
            )
        case "string":
            return _quoted(_words(column, kind))
        case "binary":
            return _joined('"\\\\x', _hex(column), '"')
        case "float" | "double":
            text = _words(column, kind)
            return pc.if_else(pc.is_finite(column), text, _joined('"', text, '"'))
        case "date" | "timestamp" | "timestamp_ntz":
            return _joined('"', _words(column, kind), '"')
    return _text(column, kind)


def _words(column: Any, kind: str) -> Any:
    """A plain value as the text of a JSON string, as `to_jsonb` writes it."""
    import pyarrow.compute as pc

    text = _text(column, kind)
    if kind.startswith("timestamp"):  # in a date before the year 1 the one space stands before BC
        return pc.replace_substring(text, " ", "T", max_replacements=1)
    if kind in ("float", "double"):
        for arrow, name in (("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")):
            text = pc.if_else(pc.equal(text, arrow), name, text)
    return text


def _lists(begin: str, column: Any, texts: Callable[[Callable[[Any], Any]], Any], end: str) -> Any:
    """Join the texts of each list. `texts` gets a function that cuts a child to our slice."""
    import pyarrow as pa
    import pyarrow.compute as pc

    offsets = column.offsets.to_numpy()
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    values = texts(lambda child: child.slice(first, count))
    lists = pa.ListArray.from_arrays(pa.array(offsets - first, pa.int32()), values)
    return _null_as(column, _joined(begin, pc.binary_join(lists, ","), end))


def _quoted(text: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    found = np.unique(bytes_of(text))
    if set(found[found < 32].tolist()) - {9, 10, 13}:
        values = text.to_pylist()
        dumped = [None if v is None else json.dumps(v, ensure_ascii=False) for v in values]
        return pa.array(dumped, pa.string())
    return _joined('"', _escaped(text, _IN_JSON), '"')


# ---------------------------------------------------------------- parts


def _joined(*parts: Any) -> Any:
    """Null where any part is."""
    import pyarrow.compute as pc

    return pc.binary_join_element_wise(*parts, "")


def _null_as(column: Any, text: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(column.is_valid(), text, pa.scalar(None, pa.string()))


def bytes_of(text: Any) -> Any:
    """The bytes of all values; they may include values outside of the slice."""
    import numpy as np

    data = text.buffers()[2]
    return np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)


def _escaped(text: Any, escapes: Sequence[tuple[str, str]]) -> Any:
    import pyarrow.compute as pc

    data = bytes_of(text)
    for plain, escaped in escapes:
        if (data == ord(plain)).any():
            text = pc.replace_substring(text, plain, escaped)
    return text


def _hex(column: Any) -> Any:
    """Two digits for each byte: the offsets double and the data is looked up."""
    import numpy as np
    import pyarrow as pa

    column = column.cast(pa.binary())
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    data = bytes_of(column)[offsets[0] : offsets[-1]]
    pairs = np.array([f"{n:02x}".encode() for n in range(256)], "S2")
    text = pa.py_buffer(pairs[data].tobytes())
    doubled = pa.py_buffer(((offsets - offsets[0]) * 2).astype(np.int32).tobytes())
    found = pa.StringArray.from_buffers(len(column), doubled, text)
    return _null_as(column, found)


def _dates(column: Any) -> Any:
    import pyarrow as pa

    days = column.cast(pa.int32())
    if between(days, YEAR_1, YEAR_10000):
        return column.cast(pa.string())
    return pa.array([None if d is None else _far(d, "") for d in days.to_pylist()], pa.string())


def _times(column: Any) -> Any:
    import pyarrow as pa

    zone = "Z" if column.type.tz else ""
    ticks = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    if between(ticks, YEAR_1 * US_A_DAY, YEAR_10000 * US_A_DAY):
        text = column.cast(pa.timestamp("us")).cast(
            pa.string()
        )  # with a zone it takes six times as long
        return _joined(text, zone) if zone else text

    def far(tick: int) -> str:
        day, rest = divmod(tick, US_A_DAY)
        seconds, micros = divmod(rest, 1_000_000)
        clock = f" {seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{micros:06}{zone}"
        return _far(day, clock)

    return pa.array([None if t is None else far(t) for t in ticks.to_pylist()], pa.string())


def _far(day: int, clock: str) -> str:
    """Any day of the Gregorian calendar, as PostgreSQL reads it: the year 0 is 1 BC."""
    era, of_era = divmod(day + 719_468, 146_097)  # eras of 400 years that begin on 1 March
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    number = of_year - (153 * month + 2) // 5 + 1
    month, year = (month + 3, year) if month < 10 else (month - 9, year + 1)
    year += era * 400
    if year < 1:
        return f"{1 - year:04}-{month:02}-{number:02}{clock} BC"
    return f"{year:04}-{month:02}-{number:02}{clock}"
