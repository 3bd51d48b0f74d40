"""How commands answer, and how long-running ones show events: text for people, JSON for programs.

A long-running command puts its events into words in a `Report`. A display shows them:
one JSON object a line, plain lines for a pipe or a file, or, on a terminal and if `rich` is
installed, live lines that are kept up to date below the lines of earlier events.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import click

from onceflow.errors import JobError, OnceflowError
from onceflow.protocol.home import DEFAULT_HOME

Event = dict[str, Any]

_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red", "error": "red", "fix": "green"}
_NEWS_EVERY = 2.0  # seconds
_ERASE_ROW = "\r\x1b[2K"

# ---------------------------------------------------------------- options that commands share


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
    help="The state directory (home) of the jobs.",
)

# ---------------------------------------------------------------- answers


def show(value: Any, *, as_json: bool, text: Callable[[Any], str]) -> None:
    """One answer, in one of its two forms."""
    click.echo(json.dumps(value, indent=2) if as_json else text(value))


def show_error(error: OnceflowError, *, as_json: bool) -> None:
    text = json.dumps(error.as_json()) if as_json else error_text(error.message, error.hint)
    click.echo(text, err=True)


def show_warning(text: str) -> None:
    click.echo(paint("warning: ", "warning") + text, err=True)


def error_text(message: str, hint: str) -> str:
    first = paint("error: ", "error") + message
    return f"{first}\n{paint('  fix: ', 'fix')}{hint}" if hint else first


def paint(text: str, meaning: str) -> str:
    """In colour, unless NO_COLOR is set. (click takes colours away where there is no terminal.)"""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=_COLOURS[meaning])


def table(head: list[str], rows: list[list[str]], *, numbers: bool = False) -> str:
    """Columns that line up, without boxes, so that it reads well in a terminal and in a log.

    With `numbers`, all columns but the first are aligned to the right.
    """
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def cell(text: str, at: int) -> str:
        return text.rjust(widths[at]) if numbers and at else text.ljust(widths[at])

    return "\n".join(
        "  ".join(cell(text, at) for at, text in enumerate(line)).rstrip() for line in lines
    )


def indented(title: str, text: str) -> str:
    """A title, and below it the text, two columns to the right."""
    return f"{title}\n{text}".replace("\n", "\n  ")


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class ProgressLine:
    """How far a command is, on standard error: one line that changes on a terminal, else news every
    few seconds."""

    def __init__(self, text: str, *, quiet: bool) -> None:
        self._text, self._quiet, self._live = text, quiet, sys.stderr.isatty()
        self._next = time.monotonic() + _NEWS_EVERY

    def __call__(self, done: int) -> None:
        if self._quiet or not (self._live or time.monotonic() >= self._next):
            return
        self._next = time.monotonic() + _NEWS_EVERY
        said = self._text.format(done)
        click.echo(_ERASE_ROW + said if self._live else said, nl=not self._live, err=True)

    def clear(self) -> None:
        if self._live and not self._quiet:
            click.echo(_ERASE_ROW, nl=False, err=True)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


# ---------------------------------------------------------------- what happens, as it happens


class Report:
    """A command's events in words. A subclass finds the words; a display decides where they go."""

    json_every = 1.0  # seconds from one "progress" to the next, at least
    news_every = 5.0  # the same, for the lines of a log
    live_events = frozenset({"progress"})  # on a terminal they change the live lines
    errors = frozenset[str]()  # events that go to standard error

    def __init__(self) -> None:
        self.progress: Event | None = None  # the last one

    def lines(self, event: Event) -> list[str]:
        raise NotImplementedError

    def take(self, event: Event) -> None:
        """Remember what the live lines need."""
        if event["event"] == "progress":
            self.progress = event

    def pause(self, event: Event) -> float:
        """The seconds that must have passed since the last news before a log says this event."""
        return self.news_every if event["event"] == "progress" else 0.0

    def live(self, width: int) -> str:
        """The lines that a terminal shows below what happened."""
        return "\n".join(self.lines(self.progress)) if self.progress else ""


class Json:
    """One event a line; progress at most every `json_every` seconds."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._said = 0.0

    def show(self, event: Event) -> None:
        if event["event"] == "output":  # of the job's own code: standard output is ours alone
            click.echo(event["text"], err=True)
            return
        if event["event"] == "progress":
            if time.monotonic() - self._said < self._report.json_every:
                return
            self._said = time.monotonic()
        click.echo(json.dumps(event))

    def tick(self) -> None: ...

    def close(self) -> None: ...


class Plain:
    """Lines for a log: each event, and progress every few seconds."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._said = time.monotonic()

    def show(self, event: Event) -> None:
        if pause := self._report.pause(event):
            if time.monotonic() - self._said < pause:
                return
            self._said = time.monotonic()
        for line in self._report.lines(event):
            click.echo(line, err=event["event"] in self._report.errors)

    def tick(self) -> None: ...

    def close(self) -> None: ...


class Live:
    """Live lines below the lines of earlier events."""

    def __init__(self, report: Report) -> None:
        from rich.console import Console
        from rich.live import Live as Lines

        self._report = report
        self._console = Console(force_terminal=True, highlight=False)
        self._drawn: tuple[str, int] = "", self._console.width
        self._lines = Lines(
            console=self._console, auto_refresh=False, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._lines.start()
        self._console.show_cursor(True)  # a terminal without a cursor is left by kill -9

    def show(self, event: Event) -> None:
        self._report.take(event)
        self._erase_wrapped()
        if event["event"] not in self._report.live_events:
            in_file = event["event"] in self._report.errors and not sys.stderr.isatty()
            for line in self._report.lines(event):
                if in_file:
                    click.echo(line, err=True)
                else:
                    self._console.out(line, highlight=False)
        self.tick()

    def tick(self) -> None:
        from rich.text import Text

        self._erase_wrapped()
        width = self._console.width
        drawn = self._report.live(width), width
        if drawn != self._drawn:
            self._drawn = drawn
            text = Text.from_ansi(drawn[0], no_wrap=True, overflow="ellipsis")
            self._lines.update(text, refresh=True)

    def _erase_wrapped(self) -> None:
        """In a terminal that was made narrower our lines take more rows than rich knows of."""
        (text, before), width = self._drawn, self._console.width
        rows = sum((min(len(line), before) - 1) // width for line in text.splitlines() if line)
        if rows and width < before:
            self._console.file.write(_ERASE_ROW + f"\x1b[1A{_ERASE_ROW}" * rows)
            self._drawn = "", width

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._erase_wrapped()
            self._lines.stop()


Display = Json | Plain | Live


def display(report: Report, *, as_json: bool) -> Display:
    if as_json:
        return Json(report)
    return Live(report) if is_terminal() and find_spec("rich") else Plain(report)


@contextlib.contextmanager
def shown_on(display: Display) -> Iterator[None]:
    """SIGTERM, SIGHUP and a closed output end all that was started, as Ctrl-C does."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    wanted = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        wanted.append(signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in wanted}
    try:
        yield
    except BrokenPipeError:
        write_nowhere()
        sys.exit(128 + signal.SIGPIPE)
    finally:
        display.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def write_nowhere() -> None:
    """Nobody reads standard output any longer: without this, Python complains at its last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
