"""Any value of any type that Spark can stage, for properties that hold for all of them.

Values are raw: strings are bytes, dates are days and timestamps microseconds since 1970, since
Spark's own go further than Python's. A map is a list of pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from onceflow.contract.schema import arrow_schema
from onceflow.contract.staged_files import describe
from onceflow.sinks import Staged

TIMES = ("date", "timestamp", "timestamp_ntz")
US_A_DAY = 86_400_000_000
_EXACT = Context(prec=76)
_DECIMALS = ("decimal(38,38)", "decimal(38,0)", "decimal(20,4)", "decimal(1,0)")
_PLAIN = (
    "string", "binary", "boolean", "byte", "short", "integer", "long", "float", "double", *TIMES,
    *_DECIMALS,
)  # fmt: skip
_EDGES = {
    "string": [b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbf\xbf", b"\\N",
               b"null", b'"{,}\\', b"\x01\x1f\x7f\t\r\n\x0b\x0c\b", "😀ß".encode()],
    "date": [-719_163, -719_162, 2_932_896, 2_932_897, -2_440_588, -2_440_589, 2_145_042_905,
             2_145_042_906, 11_248_738, -12_687_429],
}  # fmt: skip


def _kinds() -> st.SearchStrategy[Any]:
    plain = st.sampled_from(_PLAIN)

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        field = st.builds(lambda kind: {"type": kind, "nullable": True, "metadata": {}}, inner)
        return st.one_of(
            st.builds(lambda k: {"type": "array", "elementType": k, "containsNull": True}, inner),
            st.builds(lambda k, v: {"type": "map", "keyType": k, "valueType": v,
                                    "valueContainsNull": True}, plain, inner),
            st.builds(lambda fields: {"type": "struct", "fields": [
                {"name": f"field {n}", **field} for n, field in enumerate(fields)
            ]}, st.lists(field, min_size=1, max_size=3)),
        )  # fmt: skip

    return st.recursive(plain, nested, max_leaves=4)


KINDS = _kinds()


def values(kind: Any) -> st.SearchStrategy[Any]:
    match kind:
        case {"type": "array", "elementType": inner}:
            return st.lists(st.none() | values(inner), max_size=3)
        case {"type": "map", "keyType": key, "valueType": inner}:
            pair = st.tuples(values(key), st.none() | values(inner))
            return st.lists(pair, max_size=3, unique_by=lambda found: repr(found[0]).lstrip("-"))
        case {"type": "struct", "fields": fields}:
            return st.fixed_dictionaries({f["name"]: st.none() | values(f["type"]) for f in fields})
        case "string":
            text = st.text(st.characters(exclude_categories=["Cs"])).map(str.encode)
            return text | st.sampled_from(_EDGES["string"]) | st.binary(max_size=4)
        case "binary":
            return st.binary()
        case "boolean":
            return st.booleans()
        case "float" | "double":
            return st.floats(width=32 if kind == "float" else 64)
        case "date":
            return st.integers(-(2**31), 2**31 - 1) | st.sampled_from(_EDGES["date"]) | _days()
        case "timestamp" | "timestamp_ntz":
            edges = st.sampled_from([d * US_A_DAY - n for d in _EDGES["date"][:6] for n in (0, 1)])
            near = st.builds(lambda day, us: day * US_A_DAY + us, _days(), st.integers(0, US_A_DAY))
            return st.integers(-(2**63), 2**63 - 1) | edges | near
        case str() if kind.startswith("decimal"):
            precision, scale = map(int, kind.removeprefix("decimal(").removesuffix(")").split(","))
            most = 10**precision - 1
            return st.integers(-most, most).map(lambda n: _EXACT.scaleb(Decimal(n), -scale))
    bits = {"byte": 8, "short": 16, "integer": 32, "long": 64}[kind]
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _days() -> st.SearchStrategy[int]:
    return st.integers(-800_000, 3_000_000)


def schema_of(kind: Any) -> str:
    kinds = {"id": "long", "v": kind}
    fields = [{"name": n, "type": k, "nullable": True, "metadata": {}} for n, k in kinds.items()]
    return json.dumps({"type": "struct", "fields": fields})


def staged(root: Path, kind: Any, found: Sequence[Any]) -> Staged:
    """Rows of an id and a value `v`, as Spark would stage them."""
    root.mkdir()
    schema = arrow_schema(schema_of(kind))
    ids = pa.array(range(len(found)), pa.int64())
    column = pa.array(found, _raw(schema.field("v").type)).cast(schema.field("v").type, safe=False)
    pq.write_table(pa.Table.from_arrays([ids, column], schema=schema), root / "part-0.parquet")
    return Staged(describe(root, ()), root, root, "tag", schema_of(kind), lambda: None)


def _raw(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _raw(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(_raw(kind.key_type), _raw(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_raw(kind.value_type))
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_date(kind):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


def walk(kind: Any, value: Any, change: Callable[[str, Any], Any]) -> Any:
    """The value with every plain one in it changed, and maps as dicts; None stays."""
    if value is None:
        return None
    match kind:
        case {"type": "array", "elementType": inner}:
            return [walk(inner, part, change) for part in value]
        case {"type": "map", "keyType": key, "valueType": inner}:
            pairs = value.items() if isinstance(value, dict) else value
            return {walk(key, k, change): walk(inner, part, change) for k, part in pairs}
        case {"type": "struct", "fields": fields}:
            return {f["name"]: walk(f["type"], value[f["name"]], change) for f in fields}
    return change(kind, value)


def plain_values(kind: Any, value: Any) -> list[tuple[str, Any]]:
    """All plain values in it, each with its type."""
    found: list[tuple[str, Any]] = []
    walk(kind, value, lambda of, part: found.append((of, part)))
    return found


def is_utf8(value: bytes) -> bool:
    return value.decode(errors="replace").encode() == value


def day_of(kind: str, value: int) -> int:
    return value if kind == "date" else value // US_A_DAY


def time_from(kind: str, text: str) -> int:
    """The raw value of an ISO 8601 text."""
    if kind == "date":
        return (date.fromisoformat(text) - date(1970, 1, 1)).days
    found = datetime.fromisoformat(text)
    assert found.tzinfo is None or found.utcoffset() == timedelta(0)
    return (found.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(
        microseconds=1
    )
