"""How commands speak: text for people on a terminal or in a log, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from onceflow.errors import OnceflowError
from onceflow.start import DEFAULT_HOME

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
home_option = click.option(
    "--home",
    default=lambda: os.environ.get("ONCEFLOW_HOME", DEFAULT_HOME),
    show_default=f"$ONCEFLOW_HOME or {DEFAULT_HOME}",
    help="The folder in which jobs keep what they must remember.",
)


def show(value: Any, *, as_json: bool, text: Callable[[Any], str]) -> None:
    """One answer, in one of its two forms."""
    click.echo(json.dumps(value, indent=2) if as_json else text(value))


def show_error(error: OnceflowError, *, as_json: bool) -> None:
    if as_json:
        kind, hint = type(error).__name__, error.hint
        body = {"error": kind, "message": error.message, "hint": hint, "exit_code": error.exit_code}
        click.echo(json.dumps(body), err=True)
        return
    failed(error.message, error.hint)


def failed(message: str, hint: str) -> None:
    click.echo(click.style("error: ", fg="red", bold=True) + message, err=True)
    if hint:
        click.echo(click.style("  fix: ", fg="green", bold=True) + hint, err=True)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns that line up, without boxes: reads well in a terminal and in a log."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    lines = [head, *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f} {unit}" if value < 10 and value != int(value) else f"{value:,.0f} {unit}"


def is_terminal() -> bool:
    return sys.stdout.isatty()
