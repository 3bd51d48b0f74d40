"""How commands speak: text for people on a terminal or in a log, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from onceflow.errors import JobError, OnceflowError
from onceflow.jobs.handle import DEFAULT_HOME
from onceflow.service.units import age, brief, number

_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red", "error": "red", "fix": "green"}


def _local(_: click.Context, __: click.Parameter, home: str) -> str:
    path = home.removeprefix("file://").removeprefix("file:")
    if not path or "://" in path:
        raise JobError(f"home {home!r} is not a local path", hint="name a folder: --home DIR")
    return path


__all__ = [
    "age",
    "brief",
    "failed",
    "home_option",
    "is_terminal",
    "json_option",
    "number",
    "paint",
    "show",
    "show_error",
    "table",
]

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
        click.echo(json.dumps(error.as_json()), err=True)
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


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
