"""Columns and their types: as Spark's JSON, as a person writes them, and as an Arrow schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onceflow.errors import JobError, SchemaMismatch

if TYPE_CHECKING:
    import pyarrow as pa

_ALIASES = {
    "int": "integer", "bigint": "long", "smallint": "short", "tinyint": "byte", "real": "float",
    "numeric": "decimal", "dec": "decimal", "timestamp_ltz": "timestamp",
}  # fmt: skip
_PLAIN = (
    "string", "binary", "boolean", "byte", "short", "integer", "long", "float", "double", "date",
    "timestamp", "timestamp_ntz",
)  # fmt: skip


def columns(schema: str) -> dict[str, str]:
    """Column -> type, as a person writes it."""
    return {field["name"]: type_name(field["type"]) for field in json.loads(schema)["fields"]}


def type_name(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    match kind["type"]:
        case "struct":
            inner = ", ".join(f"{f['name']}: {type_name(f['type'])}" for f in kind["fields"])
            return f"struct<{inner}>"
        case "array":
            return f"array<{type_name(kind['elementType'])}>"
        case "map":
            return f"map<{type_name(kind['keyType'])}, {type_name(kind['valueType'])}>"
        case other:
            return str(other)


def leaf_types(schema: str) -> dict[str, set[str]]:
    """Column -> the types of its values at any depth, without the names of fields."""

    def walk(kind: Any) -> set[str]:
        match kind:
            case str():
                return {kind}
            case {"type": "struct"}:
                return set().union(*(walk(field["type"]) for field in kind["fields"]))
            case {"type": "array"}:
                return walk(kind["elementType"])
            case {"type": "map"}:
                return walk(kind["keyType"]) | walk(kind["valueType"])
            case _:
                return {str(kind.get("sqlType", kind["type"]))}

    return {field["name"]: walk(field["type"]) for field in json.loads(schema)["fields"]}


def nested_twice(schema: str) -> list[str]:
    """Field names that a struct inside a column has twice; Spark ignores upper and lower case."""
    found: set[str] = set()

    def walk(kind: Any, top: bool) -> None:
        if not isinstance(kind, dict):
            return
        fields = kind.get("fields", ())
        lowered = [field["name"].lower() for field in fields]
        found.update(name for name in lowered if not top and lowered.count(name) > 1)
        for field in fields:
            walk(field["type"], False)
        for part in ("elementType", "keyType", "valueType"):
            walk(kind.get(part), False)

    walk(json.loads(schema), True)
    return sorted(found)


def quoted(column: str) -> str:
    """A column name, quoted for Spark's parser."""
    return "`" + column.replace("`", "``") + "`"


def refuse_difference(target: str, have: Mapping[str, str], want: Mapping[str, str]) -> None:
    """Raise `SchemaMismatch` that names every column in which target and rows differ."""
    wrong = [f"{c} ({want[c]}) is not in the target" for c in want if c not in have]
    wrong += [f"{c} ({have[c]}) is in the target only" for c in have if c not in want]
    wrong += [
        f"{c} is {want[c]}, the target has {have[c]}"
        for c in want
        if c in have and have[c] != want[c]
    ]
    if wrong:
        raise SchemaMismatch(
            f"the rows do not fit {target}:\n  - " + "\n  - ".join(wrong),
            hint="select and cast the columns that the target has, or write to a new target",
        )


def plain_schema(schema: dict[str, Any]) -> str:
    """Spark's JSON without Spark's own metadata of columns (for example watermarks)."""
    fields = [{**field, "metadata": {}} for field in schema["fields"]]
    return json.dumps({**schema, "fields": fields}, separators=(",", ":"))


def selected(schema: str, names: Sequence[str]) -> str:
    """Spark's JSON of only these columns, in this order."""
    whole = json.loads(schema)
    fields = {field["name"]: field for field in whole["fields"]}
    some = {**whole, "fields": [fields[name] for name in names]}
    return json.dumps(some, separators=(",", ":"))


def nullable(schema: str) -> str:
    """The same columns, all nullable at every depth, so that the rows of every writer fit."""

    def walk(kind: Any) -> Any:
        match kind:
            case {"type": "struct", "fields": fields}:
                loose = [{**f, "type": walk(f["type"]), "nullable": True} for f in fields]
                return {**kind, "fields": loose}
            case {"type": "array"}:
                return {**kind, "elementType": walk(kind["elementType"]), "containsNull": True}
            case {"type": "map"}:
                value = walk(kind["valueType"])
                return {**kind, "keyType": walk(kind["keyType"]), "valueType": value,
                        "valueContainsNull": True}  # fmt: skip
            case _:
                return kind

    return json.dumps(walk(json.loads(schema)), separators=(",", ":"))


# ---------------------------------------------------------------- as a person writes it


def parse_schema(text: str) -> str:
    """Spark's JSON for `"id long, at timestamp, tags array<string>"`, without a JVM."""
    fields = _Parser(text).fields(end="")
    return json.dumps({"type": "struct", "fields": fields}, separators=(",", ":"))


class _Parser:
    """name type, name type …, where struct<…> has name: type inside."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = re.findall(r"`(?:[^`]|``)+`|\w+|[^\w\s]", text)
        self.at = 0

    def fields(self, *, end: str) -> list[dict[str, Any]]:
        found = []
        while True:
            name = self._name()
            self._skip(":")
            kind, nullable = self._type(), True
            if self._peek().lower() == "not":
                self.at += 1
                self._expect("null")
                nullable = False
            found.append({"name": name, "type": kind, "nullable": nullable, "metadata": {}})
            if not self._skip(","):
                self._expect(end)
                break
        lowered = [field["name"].lower() for field in found]
        twice = sorted({name for name in lowered if lowered.count(name) > 1})
        if twice:
            raise JobError(
                f"column {', '.join(twice)} is there twice in {self.text!r}", hint="rename one"
            )
        return found

    def _name(self) -> str:
        token = self._next()
        if token.startswith("`") and len(token) > 1:  # a single backtick is not closed
            return token[1:-1].replace("``", "`")
        if not re.fullmatch(r"\w+", token):
            raise self._wrong(f"a column's name is missing before {token!r}")
        return token

    def _type(self) -> Any:
        word = self._next().lower()
        kind = _ALIASES.get(word, word)
        if kind in _PLAIN:
            return kind
        if kind == "decimal":
            if not self._skip("("):
                return "decimal(10,0)"
            precision, scale = self._number(), self._number() if self._skip(",") else 0
            self._expect(")")
            if not (0 < precision <= 38 and scale <= precision):
                raise self._wrong(f"decimal({precision},{scale}) is out of range")
            return f"decimal({precision},{scale})"
        if kind in ("struct", "array", "map"):
            self._expect("<")
            if kind == "struct":
                return {"type": "struct", "fields": self.fields(end=">")}
            if kind == "array":
                inner = {"type": "array", "elementType": self._type(), "containsNull": True}
            else:
                key = self._type()
                self._expect(",")
                inner = {"type": "map", "keyType": key, "valueType": self._type(),
                         "valueContainsNull": True}  # fmt: skip
            self._expect(">")
            return inner
        raise self._wrong(f"{word!r} is not a type")

    def _number(self) -> int:
        token = self._next()
        if not token.isdecimal():
            raise self._wrong(f"{token!r} is not a number")
        return int(token)

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self.at += 1
        return token

    def _skip(self, token: str) -> bool:
        found = self._peek() == token
        self.at += found
        return found

    def _expect(self, token: str) -> None:
        found = self._next()
        if found.lower() != token:
            raise self._wrong(f"found {found!r} instead of {token or 'the end'!r}")

    def _wrong(self, what: str) -> JobError:
        return JobError(
            f"schema {self.text!r} cannot be read: {what}",
            hint='write it like "id long, at timestamp, tags array<string>"; types are '
            f"{', '.join(_PLAIN)}, decimal(p,s), array<…>, map<…, …> and struct<name: type, …>",
        )


# ---------------------------------------------------------------- as Arrow has it


def arrow_schema(schema: str) -> pa.Schema:
    """The Arrow schema that Spark expects for these columns."""
    import pyarrow as pa

    return pa.schema([_field(field) for field in json.loads(schema)["fields"]])


def _field(field: dict[str, Any]) -> pa.Field:
    import pyarrow as pa

    return pa.field(field["name"], _arrow(field["type"]), field.get("nullable", True))


def _arrow(kind: Any) -> pa.DataType:
    import pyarrow as pa

    if isinstance(kind, str):
        if found := re.fullmatch(r"decimal\((\d+),(-?\d+)\)", kind):
            return pa.decimal128(int(found[1]), int(found[2]))
        plain = {
            "string": pa.string(), "binary": pa.binary(), "boolean": pa.bool_(), "byte": pa.int8(),
            "short": pa.int16(), "integer": pa.int32(), "long": pa.int64(),
            "float": pa.float32(), "double": pa.float64(), "date": pa.date32(),
            "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"),
        }  # fmt: skip
        if kind in plain:
            return plain[kind]
    elif kind["type"] == "array":
        return pa.list_(pa.field("element", _arrow(kind["elementType"]), kind["containsNull"]))
    elif kind["type"] == "map":
        value = pa.field("value", _arrow(kind["valueType"]), kind["valueContainsNull"])
        return pa.map_(_arrow(kind["keyType"]), value)
    elif kind["type"] == "struct":
        return pa.struct([_field(field) for field in kind["fields"]])
    raise JobError(
        f"a log cannot hold the type {type_name(kind)}", hint="cast the column to another type"
    )


def spark_schema(schema: pa.Schema) -> str:
    """Spark's JSON for an Arrow schema; `JobError` for what Spark has no type for."""
    fields = [_spark_field(field) for field in schema]
    return json.dumps({"type": "struct", "fields": fields}, separators=(",", ":"))


def _spark_field(field: pa.Field) -> dict[str, Any]:
    return {
        "name": field.name, "type": _spark(field.type, field.name), "nullable": field.nullable,
        "metadata": {},
    }  # fmt: skip


def _spark(kind: pa.DataType, where: str) -> Any:
    from pyarrow import types as t

    for check, name in (
        (t.is_large_string, "string"), (t.is_string, "string"), (t.is_binary, "binary"),
        (t.is_large_binary, "binary"), (t.is_boolean, "boolean"), (t.is_int8, "byte"),
        (t.is_int16, "short"), (t.is_int32, "integer"), (t.is_int64, "long"),
        (t.is_float32, "float"), (t.is_float64, "double"), (t.is_date32, "date"),
    ):  # fmt: skip
        if check(kind):
            return name
    if t.is_dictionary(kind):
        return _spark(kind.value_type, where)
    if t.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if t.is_decimal(kind) and kind.precision <= 38 and kind.scale >= 0:
        return f"decimal({kind.precision},{kind.scale})"
    if t.is_struct(kind):
        return {"type": "struct", "fields": [_spark_field(field) for field in kind]}
    if t.is_list(kind) or t.is_large_list(kind):
        return {"type": "array", "elementType": _spark(kind.value_type, where),
                "containsNull": kind.value_field.nullable}  # fmt: skip
    if t.is_map(kind):
        return {"type": "map", "keyType": _spark(kind.key_type, where),
                "valueType": _spark(kind.item_type, where),
                "valueContainsNull": kind.item_field.nullable}  # fmt: skip
    raise JobError(
        f"column {where} is of the Arrow type {kind}, which a log cannot hold",
        hint="cast it, for instance to int64 or string",
    )
