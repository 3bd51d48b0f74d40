"""How a long command shows what happens: JSON lines, plain lines for a log, or a live line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from onceflow.cli.output import is_terminal

Event = dict[str, Any]

_JSON_EVERY = 1.0  # seconds
_CLEAR = "\r\x1b[2K"


@dataclass(frozen=True)
class Words:
    """A command's own words for its events."""

    happened: Callable[[Event], list[str]]
    how_it_goes: Callable[[Event], str]  # for the event "progress"
    news_every: float  # seconds, in a log


def screen(words: Words, *, as_json: bool) -> Json | Plain:
    return Json() if as_json else Terminal(words) if is_terminal() else Plain(words)


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

    def __init__(self, words: Words) -> None:
        self._words = words
        self._said = time.monotonic()

    def show(self, event: Event) -> None:
        if event["event"] == "progress":
            self._progress(self._words.how_it_goes(event))
        else:
            for line in self._words.happened(event):
                click.echo(line)

    def close(self) -> None: ...

    def _progress(self, text: str) -> None:
        if time.monotonic() - self._said >= self._words.news_every:
            self._said = time.monotonic()
            click.echo(text)


class Terminal(Plain):
    """A live line below what happened before."""

    def show(self, event: Event) -> None:
        click.echo(_CLEAR, nl=False)
        super().show(event)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            click.echo(_CLEAR, nl=False)

    def _progress(self, text: str) -> None:
        click.echo(text[: shutil.get_terminal_size().columns - 1], nl=False)


@contextlib.contextmanager
def shown_on(screen: Json | Plain) -> Iterator[None]:
    """SIGTERM and SIGHUP end all that was started, as Ctrl-C does; so does a reader that goes."""

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
        screen.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def write_nowhere() -> None:
    """Nobody reads any more. Else Python complains when it flushes standard output at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
