"""Damaged lines of the generator, and the reason for which each is rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from ads.world import (
    FIELD_MISSING,
    FIELD_TOO_LONG,
    FREE,
    NOT_A_TIME,
    NOT_JSON,
    NULL_CHARACTER,
    UNKNOWN_AD,
    UNKNOWN_KIND,
)

_LONG = "long " * 4_000
_STRANGE = "Ünïcödé \u202e \U0001d538 😀 \u2028"

_OTHER = ("[]", "null", "5", "true", '"text"', "<html>", "{id: 1}", "click of ad-01", _STRANGE)
_KINDS = ("impressions", "CLICK", "", "\u0441lick", _STRANGE, _LONG)  # one begins in Cyrillic
_TIMES = (
    "soon", "", "2026-13-45T99:99:99Z", "2026-02-30T10:00:00Z", "11:00:00", "T11:00",
    "-290308-12-21T19:59:30Z", "+294247-01-10T04:00:54Z", _STRANGE, _LONG,
)  # fmt: skip
_ADS = ("ad-99", "", "AD-01", "ad-01 ", _STRANGE, _LONG)


def broken(chance: Random, value: str) -> tuple[str, str]:
    """A rejected line, made from a good one, and the reason."""
    return chance.choice(_BREAKS)(chance, value)


def odd(chance: Random, value: str) -> str:
    """Another text for the same event: longer, with fields that nobody needs."""
    fields = json.loads(value)
    note = chance.choice((_STRANGE, _LONG, None, ["a", {"b": 1}]))
    return json.dumps({"note": note, **fields}, indent=1, ensure_ascii=chance.random() < 0.5)


def _cut_off(chance: Random, value: str) -> tuple[str, str]:
    return value[: chance.randrange(len(value))], NOT_JSON


def _something_else(chance: Random, value: str) -> tuple[str, str]:
    return chance.choice(_OTHER), NOT_JSON


def _with_more_behind_it(chance: Random, value: str) -> tuple[str, str]:
    return value + chance.choice((value, "garbage", "," + value, "]", "}", "],{}", ",5]")), NOT_JSON


def _with_a_null_character(chance: Random, value: str) -> tuple[str, str]:
    fields = json.loads(value)
    name = chance.choice(("id", "user", "restaurant"))
    return _text({**fields, name: f"{fields[name]}\0"}), NULL_CHARACTER


def _without_a_field(chance: Random, value: str) -> tuple[str, str]:
    fields, name = _one_of(chance, value)
    del fields[name]
    return _text(fields), FIELD_MISSING + name


def _with_a_null(chance: Random, value: str) -> tuple[str, str]:
    fields, name = _one_of(chance, value)
    fields[name] = None
    return _text(fields), FIELD_MISSING + name


def _with_an_empty_field(chance: Random, value: str) -> tuple[str, str]:
    fields, name = _free_one_of(chance, value)
    return _text({**fields, name: ""}), FIELD_MISSING + name


def _with_a_long_field(chance: Random, value: str) -> tuple[str, str]:
    fields, name = _free_one_of(chance, value)
    return _text({**fields, name: chance.choice((_LONG, "x" * 201, '"' * 201))}), (
        FIELD_TOO_LONG + name
    )


def _unknown_kind(chance: Random, value: str) -> tuple[str, str]:
    return _text({**json.loads(value), "kind": chance.choice(_KINDS)}), UNKNOWN_KIND


def _not_a_time(chance: Random, value: str) -> tuple[str, str]:
    return _text({**json.loads(value), "at": chance.choice(_TIMES)}), NOT_A_TIME


def _unknown_ad(chance: Random, value: str) -> tuple[str, str]:
    fields = json.loads(value)
    if fields["ad"] is None:
        return _not_a_time(chance, value)
    return _text({**fields, "ad": chance.choice(_ADS)}), UNKNOWN_AD


_BREAKS: list[Callable[[Random, str], tuple[str, str]]] = [
    _cut_off, _something_else, _with_more_behind_it, _with_a_null_character, _without_a_field,
    _with_a_null, _with_an_empty_field, _with_a_long_field, _unknown_kind, _not_a_time, _unknown_ad,
]  # fmt: skip


def _one_of(chance: Random, value: str) -> tuple[dict[str, Any], str]:
    """The fields, and one of those that must be there."""
    fields = json.loads(value)
    return fields, chance.choice([name for name in fields if fields[name] is not None])


def _free_one_of(chance: Random, value: str) -> tuple[dict[str, Any], str]:
    """The fields, and one of those that may say anything."""
    fields = json.loads(value)
    return fields, chance.choice([name for name in FREE if fields.get(name) is not None])


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False)
