"""Sizes and durations as people write them: "256 MB", "500ms"."""

from __future__ import annotations

import re

from onceflow.errors import JobError

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}

_MILLISECONDS = {
    "ms": 1, "millisecond": 1, "milliseconds": 1,
    "s": 1000, "second": 1000, "seconds": 1000,
    "min": 60_000, "minute": 60_000, "minutes": 60_000,
    "h": 3_600_000, "hour": 3_600_000, "hours": 3_600_000,
    "d": 86_400_000, "day": 86_400_000, "days": 86_400_000,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if found is None or found[2].lower() not in _BYTES:
        raise JobError(f"{text!r} is not a size", hint='write it like "256 MB"')
    return int(float(found[1]) * _BYTES[found[2].lower()])


def milliseconds(text: str) -> int:
    """ "500ms", "1 second", "2 min", "7 days": how many milliseconds."""
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]+)\s*", str(text))
    if found is None or found[2] not in _MILLISECONDS:
        raise JobError(f"{text!r} is not a time", hint='write it like "500ms" or "1 second"')
    return int(found[1]) * _MILLISECONDS[found[2]]
