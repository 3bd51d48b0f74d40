"""Values of a log's columns, strictly read from JSON and from text. `plain` is the way back.

| type | in JSON | in a cell of CSV |
|---|---|---|
| string | string | as it is |
| byte, short, integer, long | whole number | whole number |
| float, double | number, "NaN", "Infinity", "-Infinity" | the same |
| decimal | number or string, exactly | number, exactly |
| boolean | true, false | true, false |
| date | "2026-11-15" | 2026-11-15 |
| timestamp | ISO 8601; UTC if it names no zone | the same |
| timestamp_ntz | ISO 8601 without a zone | the same |
| binary | base64 | base64 |
| struct, map | object | JSON |
| array | list | JSON |
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any

from onceflow.contract.schema import type_name

Kind = Any  # a type in Spark's JSON
Parse = Callable[[Any], Any]

_BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST_FLOAT = (2 - 2**-24) * 2.0**127  # from here on a 32-bit float is infinite
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ]([0-9]{2}:[0-9]{2}(?::[0-9]{2})?)(?:[.,]([0-9]+))?)?"
    r"(Z|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)
_1970 = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_FIRST, _LAST = ((t - _1970) // _MICROSECOND for t in (datetime.min, datetime.max))


class Malformed(ValueError):
    """The reason why a value, or a line, is refused. `path`: its column, and the place in it."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason, self.path = reason, path

    def inside(self, name: str) -> Malformed:
        path = self.path if self.path.startswith("[") or not self.path else f".{self.path}"
        return Malformed(self.reason, name + path)


# ---------------------------------------------------------------- JSON


def _no_constant(word: str) -> Any:
    raise Malformed(f"is not JSON: {word} (write it as a string)")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Malformed(f"{_quote(twice)} is there twice")
    return found


_DECODER = json.JSONDecoder(
    parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=_object
)


def load_json(text: str) -> Any:
    """One JSON value: numbers with a point are exact, no name is there twice."""
    try:
        return _DECODER.decode(text)
    except Malformed:
        raise
    except json.JSONDecodeError as error:
        raise Malformed(f"is not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise Malformed("is nested too deeply") from None
    except (ValueError, ArithmeticError):
        raise Malformed("has a number that is out of all range") from None


def from_json(kind: Kind) -> Parse:
    """A function: JSON value that is not null -> Python value for Arrow."""
    if isinstance(kind, dict):
        match kind["type"]:
            case "struct":
                return _struct(kind)
            case "array":
                return _array(from_json(kind["elementType"]))
            case _:
                return _map(from_text(kind["keyType"]), from_json(kind["valueType"]))
    if kind in _BITS:
        return _whole(kind)
    if kind in ("float", "double"):
        return _floating(kind)
    if kind.startswith("decimal"):
        return _decimal(kind)
    if kind == "boolean":
        return _boolean
    parse = from_text(kind)

    def from_string(value: Any) -> Any:
        if type(value) is not str:
            if kind.startswith("timestamp") and isinstance(value, int | Decimal):
                raise Malformed(f"the number {_quote(value)} is no time: write ISO 8601")
            raise _wrong(value, kind)
        return parse(value)

    return from_string


def _struct(kind: Kind) -> Parse:
    fields = [(field["name"], from_json(field["type"])) for field in kind["fields"]]
    names = frozenset(name for name, _ in fields)

    def parse(value: Any) -> tuple[Any, ...]:
        if type(value) is not dict:
            raise Malformed(f"{_quote(value)} is not an object")
        if not value.keys() <= names:
            unknown = next(name for name in value if name not in names)
            raise Malformed(f"there is no column {_quote(unknown)}")
        row = []
        for name, parse_field in fields:
            found = value.get(name)
            try:
                row.append(None if found is None else parse_field(found))
            except Malformed as error:
                raise error.inside(name) from None
        return tuple(row)

    return parse


def _array(parse_element: Parse) -> Parse:
    def parse(value: Any) -> list[Any]:
        if type(value) is not list:
            raise Malformed(f"{_quote(value)} is not a list")
        found = []
        for at, element in enumerate(value):
            try:
                found.append(None if element is None else parse_element(element))
            except Malformed as error:
                raise error.inside(f"[{at}]") from None
        return found

    return parse


def _map(parse_key: Parse, parse_value: Parse) -> Parse:
    def parse(value: Any) -> list[tuple[Any, Any]]:
        if type(value) is not dict:
            raise Malformed(f"{_quote(value)} is not an object")
        found = []
        for key, inner in value.items():
            try:
                found.append((parse_key(key), None if inner is None else parse_value(inner)))
            except Malformed as error:
                raise error.inside(f"[{_quote(key)}]") from None
        return found

    return parse


def _whole(kind: str) -> Parse:
    end = 2 ** (_BITS[kind] - 1)

    def parse(value: Any) -> int:
        if type(value) is not int:
            raise _wrong(value, kind)
        if not -end <= value < end:
            raise Malformed(f"{_quote(value)} is out of range for {kind}")
        return value

    return parse


def _floating(kind: str) -> Parse:
    def parse(value: Any) -> float:
        if type(value) is str and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if type(value) is not int and type(value) is not Decimal:
            raise _wrong(value, kind)
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isinf(found) or (kind == "float" and abs(found) >= _LARGEST_FLOAT):
            raise Malformed(f"{_quote(value)} is out of range for {kind}")
        return found

    return parse


def _decimal(kind: str) -> Parse:
    precision, scale = map(int, re.findall(r"-?\d+", kind))
    exactly = Context(prec=precision, traps=[Inexact, InvalidOperation])
    unit = Decimal((0, (1,), -scale))

    def parse(value: Any) -> Decimal:
        if type(value) is str and _NUMBER.fullmatch(value):
            value = _number(value)
        if type(value) is int:
            value = Decimal(value)
        if type(value) is not Decimal:
            raise _wrong(value, kind)
        try:
            return value.quantize(unit, context=exactly)
        except Inexact:
            raise Malformed(f"{_quote(value)} has too many digits behind the point for {kind}") \
                from None  # fmt: skip
        except InvalidOperation:
            raise Malformed(f"{_quote(value)} is out of range for {kind}") from None

    return parse


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise _wrong(value, "boolean")
    return value


# ---------------------------------------------------------------- text


def from_text(kind: Kind) -> Parse:
    """A function: text -> Python value for Arrow."""
    if isinstance(kind, dict):
        parse_json = from_json(kind)
        return lambda text: parse_json(load_json(text))
    if kind == "string":
        return _string
    if kind == "binary":
        return _binary
    if kind == "date":
        return _date
    if kind in ("timestamp", "timestamp_ntz"):
        return lambda text: _timestamp(text, kind)
    if kind == "boolean":
        return _boolean_text
    parse = from_json(kind)
    pattern, convert = (_INTEGER, int) if kind in _BITS else (_NUMBER, _number)

    def from_number(text: str) -> Any:
        if not pattern.fullmatch(text):
            return parse(text)  # NaN and Infinity; other texts are refused
        try:
            number = convert(text)
        except ValueError:
            raise Malformed(f"{_quote(text)} is out of range for {kind}") from None
        return parse(number)

    return from_number


def _string(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Malformed("has half of a surrogate pair, which is not valid text") from None
    return text


def _binary(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Malformed(f"{_quote(text)} is not base64") from None


def _boolean_text(text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("true", "false"):
        raise _wrong(text, "boolean")
    return lowered == "true"


def _number(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError:
        raise Malformed(f"{_quote(text)} is out of all range") from None


def _date(text: str) -> date:
    try:
        if _DATE.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise Malformed(f"{_quote(text)} is no date: write it like 2026-11-15")


def _timestamp(text: str, kind: str) -> int:
    """Microseconds since 1970."""
    found = _TIME.fullmatch(text)
    day, time, fraction, zone = found.groups() if found else ("", "", "", "")
    if found is None or (zone and not time) or (fraction and len(time) < 8):
        raise Malformed(f"{_quote(text)} is no time: write ISO 8601")
    if zone and kind == "timestamp_ntz":
        raise Malformed(f"{_quote(text)} names a zone, but {kind} has none")
    if fraction and fraction[6:].strip("0"):
        raise Malformed(f"{_quote(text)} is finer than microseconds")
    try:
        at = datetime.fromisoformat(f"{day}T{time or '00:00'}")
        away = timedelta(0) if not zone or zone == "Z" else _zone(zone)
    except ValueError as error:
        raise Malformed(f"{_quote(text)} is no time: {error}") from None
    found_us = (at - _1970 - away) // _MICROSECOND + int((fraction or "0")[:6].ljust(6, "0"))
    if not _FIRST <= found_us <= _LAST:
        raise Malformed(f"{_quote(text)} is out of range: years are 1 to 9999, in UTC")
    return found_us


def _zone(zone: str) -> timedelta:
    hours, minutes = int(zone[1:3]), int(zone[3:].lstrip(":") or 0)
    if hours > 18 or minutes > 59:
        raise ValueError(f"{zone} is no zone")
    away = timedelta(hours=hours, minutes=minutes)
    return -away if zone[0] == "-" else away


def microseconds(text: str) -> int:
    """A time, written as for a `timestamp` column, in microseconds since 1970."""
    return _timestamp(text, "timestamp")


def _wrong(value: Any, kind: Kind) -> Malformed:
    return Malformed(f"{_quote(value)} is not of type {type_name(kind)}")


def _quote(value: Any) -> str:
    text = str(value) if type(value) is Decimal else json.dumps(value, default=str)
    if type(value) is str and value.isprintable():
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
