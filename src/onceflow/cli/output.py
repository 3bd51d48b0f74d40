"""How commands speak: text for people on a terminal or in a log, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from onceflow.errors import JobError, OnceflowError
from onceflow.handle import DEFAULT_HOME

_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red", "error": "red", "fix": "green"}
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))
_ONE = {
    "rows": "row", "entries": "entry", "bytes": "byte", "epochs": "epoch", "lines": "line",
    "files": "file", "commits": "commit", "partitions": "partition", "operators": "operator",
}  # fmt: skip


def _local(_: click.Context, __: click.Parameter, home: str) -> str:
    path = home.removeprefix("file://").removeprefix("file:")
    if not path or "://" in path:
        raise JobError(f"home {home!r} is not a local path", hint="name a folder: --home DIR")
    return path


json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
home_option = click.option(
    "--home",
    metavar="DIR",
    default=lambda: os.environ.get("ONCEFLOW_HOME") or DEFAULT_HOME,
    show_default=f"$ONCEFLOW_HOME or {DEFAULT_HOME}",
    callback=_local,
    help="The folder in which jobs keep what they must remember.",
)


def show(value: Any, *, as_json: bool, text: Callable[[Any], str]) -> None:
    """One answer, in one of its two forms."""
    click.echo(json.dumps(value, indent=2) if as_json else text(value))


def show_error(error: OnceflowError, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({
            "event": "error", "kind": type(error).__name__, "message": error.message,
            "hint": error.hint, "exit_code": error.exit_code, "retryable": error.retryable,
        }), err=True)  # fmt: skip
        return
    failed(error.message, error.hint)


def failed(message: str, hint: str) -> None:
    click.echo(paint("error: ", "error") + message, err=True)
    if hint:
        click.echo(paint("  fix: ", "fix") + hint, err=True)


def paint(text: str, meaning: str) -> str:
    """In colour, unless NO_COLOR is set. (click takes colours away where there is no terminal.)"""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=_COLOURS[meaning])


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns that line up, without boxes: reads well in a terminal and in a log."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    lines = [head, *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


# ---------------------------------------------------------------- numbers, never without a unit


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


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
