"""Numbers with units, and times, as text for people on the command line and the page."""

from __future__ import annotations

from datetime import UTC, datetime

_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))
_ONE = {
    "rows": "row", "entries": "entry", "bytes": "byte", "epochs": "epoch", "lines": "line",
    "files": "file", "commits": "commit", "partitions": "partition", "operators": "operator",
    "faults": "fault", "cases": "case", "kills": "kill", "violations": "violation",
}  # fmt: skip


def number(value: float | None, unit: str) -> str:
    """The whole number: 13,339 rows."""
    if value is None:
        return "-"
    return f"{value:,.0f} {_ONE.get(unit, unit) if value == 1 else unit}"


def brief(value: float | None, unit: str) -> str:
    """Three digits or so: 13.3k rows/s."""
    if value is None:
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if letter == 'k' else size):.1f}{letter} {unit}"
    return f"{value:,.1f} {unit}" if 0 < value < 10 and value != int(value) else number(value, unit)


def age(seconds: float | None) -> str:
    """0.4 s, 12 s, 3 min, 5 h, 2 d."""
    if seconds is None:
        return "-"
    for size, unit in _AGES:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if 0.05 <= seconds < 9.95 else f"{seconds:.0f} s"


def iso_time(milliseconds: int) -> str:
    """A watermark in UTC: 2026-01-01T23:03:14.000Z."""
    try:
        at = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # Spark knows years that Python does not
        return f"{milliseconds} ms"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
