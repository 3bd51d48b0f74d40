"""What `onceflow verify` shows: JSON lines, plain lines for a log, or a live line on a terminal."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from typing import Any

import click

from onceflow.cli.output import is_terminal, number, paint

Event = dict[str, Any]

_NEWS_EVERY = 10.0  # seconds, in a log
_JSON_EVERY = 1.0
_MOST_VIOLATIONS = 20
_CLEAR = "\r\x1b[2K"
_COLOURS = {"valid": "ok", "invalid": "wrong", "unknown": "warning"}


def verify_screen(*, as_json: bool) -> Json | Plain:
    return Json() if as_json else Terminal() if is_terminal() else Plain()


class Json:
    """One event a line; how it goes at most once a second."""

    def __init__(self) -> None:
        self._said = 0.0

    def show(self, event: Event) -> None:
        if event["event"] == "progress":
            if time.monotonic() - self._said < _JSON_EVERY:
                return
            self._said = time.monotonic()
        click.echo(json.dumps(event))

    def close(self) -> None: ...


class Plain:
    """Lines for a log: what happens, and every few seconds how it goes."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def show(self, event: Event) -> None:
        if event["event"] == "progress":
            self._progress(event)
        else:
            for line in happened(event):
                click.echo(line)

    def close(self) -> None: ...

    def _progress(self, event: Event) -> None:
        if time.monotonic() - self._said >= _NEWS_EVERY:
            self._said = time.monotonic()
            click.echo(f"{_stamp(event)}  {how_it_goes(event)}")


class Terminal(Plain):
    """A live line below what happened before."""

    def show(self, event: Event) -> None:
        click.echo(_CLEAR, nl=False)
        super().show(event)

    def close(self) -> None:
        with suppress(OSError):  # the terminal may be gone
            click.echo(_CLEAR, nl=False)

    def _progress(self, event: Event) -> None:
        text = f"{_stamp(event)}  {how_it_goes(event)}"
        click.echo(text[: shutil.get_terminal_size().columns - 1], nl=False)


# ---------------------------------------------------------------- words and numbers


def _stamp(event: Event) -> str:
    return f"{event['at_s']:6.1f} s"


def how_it_goes(event: Event) -> str:
    return (
        f"{event['job']} to {event['sinks']}: {event['faults']} of {event['of']} faults, "
        f"{event['rows_in']:,} rows in, {event['rows_out']:,} out, lag {event['lag']:,}, "
        f"violations {event['violations']}"
    )


def happened(event: Event) -> list[str]:
    match event["event"]:
        case "begin":
            lines = [
                f"{event['faults']} faults over {len(event['cases'])} cases (seed {event['seed']})",
                f"folder {event['folder']}",
            ]
            return lines + [f"left out: {what}" for what in event["left_out"]]
        case "case":
            return [f"{_stamp(event)}  {event['job']} to {event['sinks']}"]
        case "truth":
            return [f"{_stamp(event)}  {event['says']}"]
        case "fault":
            return [f"{_stamp(event)}    {event['number'] + 1:3d}  {event['what']}"]
        case "case-ended":
            return _case_ended(event)
        case "verdict":
            return _verdict(event)
        case "report":
            return [f"report {event['path']}"]
    return []


def _case_ended(event: Event) -> list[str]:
    says = (
        f"{number(event['rows_in'], 'rows')} in, {number(event['rows_out'], 'rows')} out, "
        f"{number(event['epochs'], 'epochs')}"
    )
    lines = [f"{_stamp(event)}    {says}"]
    lines += [f"          {paint(text, 'wrong')}" for text in event["violations"]]
    if event["unknown"]:
        lines.append(f"          {paint('unknown: ' + event['unknown'], 'warning')}")
    return lines


def _verdict(event: Event) -> list[str]:
    verdict = paint(event["verdict"], _COLOURS[event["verdict"]])
    took = f"{event['seconds']:.0f} s"
    lines = [
        "",
        f"{verdict}: {event['struck']} faults struck ({event['kills']} kills) in {took}, "
        f"{len(event['violations'])} violations",
    ]
    if event["recovery_s"]:
        times = ", ".join(f"{name} {value:.1f} s" for name, value in event["recovery_s"].items())
        lines.append(f"from a fault to the next epoch, Spark's start apart: {times}")
    for allowed in event["allowed"]:
        said = f"{allowed['kind']}: {allowed['where']}: {allowed['message']}"
        lines.append(f"  allowed by its guarantee: {said}")
    for violation in event["violations"][:_MOST_VIOLATIONS]:
        lines.append(f"  {violation['kind']}: {violation['where']}: {violation['message']}")
    more = len(event["violations"]) - _MOST_VIOLATIONS
    lines += [f"  and {more} more"] if more > 0 else []
    lines += [f"  unknown: {why}" for why in event["unknown"]]
    return [*lines, f"again: {event['command']}"]
