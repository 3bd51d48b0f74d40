"""What rows may hold that PostgreSQL cannot store: it is looked for before an epoch is decided."""

from __future__ import annotations

from typing import Any

from onceflow.sinks.postgres_values import US_A_DAY, between, bytes_of

_FIRST_DAY = -2_440_588  # 4714-11-24 BC, of dates and timestamps
_LAST_DATE, _LAST_TIME = 2_145_042_905, 2**63 - 1  # Spark's own timestamps end before


def always_fits(kind: Any) -> bool:
    return isinstance(kind, str) and kind not in ("string", "date", "timestamp", "timestamp_ntz")


def unfit(column: Any, kind: Any) -> dict[str, int]:
    """What is in a column that PostgreSQL cannot store -> how many of it."""
    match kind:
        case {"type": "struct", "fields": fields}:
            import pyarrow.compute as pc

            children = [
                unfit(pc.struct_field(column, [number]), field["type"])
                for number, field in enumerate(fields)
            ]
        case {"type": "array", "elementType": of}:
            children = [unfit(column.flatten(), of)]
        case {"type": "map", "keyType": key, "valueType": of}:
            children = [unfit(column.keys, key), unfit(column.items, of)]
        case "string":
            return _unfit_text(column)
        case "date" | "timestamp" | "timestamp_ntz":
            return _unfit_time(column, kind)
        case _:
            return {}
    found: dict[str, int] = {}
    for child in children:
        for what, count in child.items():
            found[what] = found.get(what, 0) + count
    return found


def _unfit_text(column: Any) -> dict[str, int]:
    import pyarrow as pa
    import pyarrow.compute as pc

    column = column.cast(pa.string(), safe=False)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        broken = sum(not _is_utf8(value) for value in column.cast(pa.binary()).to_pylist())
        return {"text that is not UTF-8": broken}
    if (bytes_of(column) == 0).any():
        count = pc.sum(pc.match_substring(column, "\0")).as_py() or 0
        return {"text with a NUL character": count} if count else {}
    return {}


def _is_utf8(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _unfit_time(column: Any, kind: str) -> dict[str, int]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind == "date":
        numbers, least, last = column.cast(pa.int32()), _FIRST_DAY, _LAST_DATE
    else:
        numbers = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        least, last = _FIRST_DAY * US_A_DAY, _LAST_TIME
    if between(numbers, least, last + 1):
        return {}
    outside = pc.or_(pc.less(numbers, least), pc.greater(numbers, last))
    return {f"a {kind} that is out of PostgreSQL's range": pc.sum(outside).as_py()}
