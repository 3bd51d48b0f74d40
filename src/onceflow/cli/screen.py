"""What `onceflow run` shows: JSON lines, plain lines for a log, or live lines on a terminal.

What the job prints goes to standard error in all three, so that standard output is ours alone.
"""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

import click

from onceflow.cli.output import age, brief, failed, is_terminal, number
from onceflow.service.supervisor import Event, Screen

_NEWS_EVERY = 5.0  # seconds, if an epoch was decided since
_SIGN_OF_LIFE_EVERY = 60.0
_SILENT_AFTER = 5.0
_CLEAR = "\r\x1b[2K"  # the row we are in, where the terminal may have written ^C
_LEAST_WIDTHS = {"in": 12, "out": 12, "lag": 5, "published": 9}


def screen_for(*, as_json: bool) -> Screen:
    return Json() if as_json else Terminal() if is_terminal() else Plain()


class Json:
    """One event a line."""

    def show(self, event: Event) -> None:
        if event["event"] == "output":
            click.echo(event["text"], err=True)
        else:
            click.echo(json.dumps(event))

    def tick(self) -> None: ...

    def close(self) -> None: ...


class Plain:
    """Lines for a log: what happens, and every few seconds how it goes."""

    def __init__(self) -> None:
        self._said, self._epochs = time.monotonic(), 0

    def tick(self) -> None: ...

    def close(self) -> None: ...

    def show(self, event: Event) -> None:
        match event["event"]:
            case "output":
                click.echo(event["text"], err=True)
            case "starting":
                click.echo(f"starting {event['job']}")
            case "session":
                click.echo(f"spark {event['spark']} on {event['master']}; its log: {event['log']}")
            case "started":
                for line in started(event):
                    click.echo(line)
            case "progress":
                self._progress(event["queries"])
            case "replaying":
                if time.monotonic() - self._said >= _NEWS_EVERY or event["epoch"] == event["last"]:
                    self._said = time.monotonic()
                    click.echo(replaying(event))
            case "stopping":
                when = "when the running epoch is finished (Ctrl-C again: at once; nothing is lost)"
                click.echo(f"stopping {'at once' if event['at_once'] else when}")
            case "restarting":
                failed(event["message"], event["hint"])
                when = f"in {event['in_s']:.0f} s" if event["in_s"] else "now"
                click.echo(f"{_until(event)}starting again {when}", err=True)
            case "error":
                failed(event["message"], event["hint"])
            case "ended":
                for query in event["queries"]:
                    click.echo(summary(query))

    def _progress(self, queries: list[dict[str, Any]]) -> None:
        epochs = sum(query["epochs"] for query in queries)
        wait = _SIGN_OF_LIFE_EVERY if epochs == self._epochs else _NEWS_EVERY
        if time.monotonic() - self._said >= wait:
            self._said, self._epochs = time.monotonic(), epochs
            for query in queries:
                click.echo(line(query))


class Terminal(Plain):
    """A live line for each query, below what happened before."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[str] = []
        self._doing = ""
        self._since = self._heard = time.monotonic()
        self._queries: list[dict[str, Any]] = []

    def show(self, event: Event) -> None:
        self._heard = time.monotonic()
        if event["event"] == "progress":
            self._queries = event["queries"]
        else:
            self._erase()
            self._happened(event)
        self._draw()

    def tick(self) -> None:
        self._draw()

    def close(self) -> None:
        self._erase()
        click.echo(_CLEAR, nl=False)

    def _happened(self, event: Event) -> None:
        match event["event"]:
            case "starting":
                self._begin(f"starting {event['job']}")
            case "session":
                super().show(event)
                self._begin(f"opening the queries of {event['job']}")
            case "started":
                super().show(event)
                self._begin("")
            case "replaying":
                self._doing = replaying(event)
            case "restarting" | "error" | "ended":
                self._begin("")
                super().show(event)
            case _:
                super().show(event)

    def _begin(self, doing: str) -> None:
        self._doing, self._since, self._queries = doing, time.monotonic(), []

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns
        lines = live_lines(self._queries, width)
        silent = time.monotonic() - self._heard
        if self._doing:
            lines = [f"{self._doing} … {time.monotonic() - self._since:.0f} s"]
        elif lines and silent > _SILENT_AFTER:
            lines.append(f"the driver has said nothing for {age(silent)}")
        lines = [text if len(text) < width else text[: width - 2] + "…" for text in lines]
        if lines != self._drawn:
            self._erase(width)
            for text in lines:
                click.echo(text)
            self._drawn = lines

    def _erase(self, width: int | None = None) -> None:
        """A terminal that was made narrower has broken our lines: count the rows they take now."""
        width = width or shutil.get_terminal_size().columns
        rows = sum(1 + (len(text) - 1) // width for text in self._drawn if text)
        if rows:
            click.echo(_CLEAR + ("\x1b[1A" + _CLEAR) * rows, nl=False)
        self._drawn = []


# ---------------------------------------------------------------- words and numbers


def started(event: Event) -> list[str]:
    """What runs, where, and what each output promises."""
    lines = [f"job {event['job']}, process {event['pid']}, home {event['home']}"]
    for name, query in event["queries"].items():
        after = query["resumes_after"]
        begin = "begins" if after is None else f"goes on after epoch {after:,}"
        lines.append(f"  {name} {begin} (term {query['term']})")
        lines += [
            f"    {output} -> {what['target']}: {what['guarantee']}"
            for output, what in query["outputs"].items()
        ]
    return lines


def replaying(event: Event) -> str:
    return (
        f"{event['query']}: epoch {event['epoch']:,} of {event['last']:,} is run again, "
        "to make up the state; skipped rows are not published twice"
    )


def _until(event: Event) -> str:
    return "it is tried until the server answers; " if event.get("away") else ""


def cells(query: dict[str, Any]) -> dict[str, str]:
    published = age(query["published_s_ago"])
    return {
        "query": query["query"],
        "epoch": "-" if query["epoch"] is None else f"{query['epoch']:,}",
        "in": brief(query["rows_in_per_s"], "rows/s"),
        "out": brief(query["rows_out_per_s"], "rows/s"),
        "lag": age(query["lag_s"]),
        "published": published if published == "-" else f"{published} ago",
        "watermark": query["watermark"] or "-",
        "state": brief(query["state_rows"], "rows"),
    }


def live_lines(queries: list[dict[str, Any]], width: int) -> list[str]:
    """A heading and a line for each query. A narrow terminal gets the time of a watermark only."""
    rows = [cells(query) for query in queries]
    if not rows:
        return []
    if width < 100:
        for row in rows:
            row["watermark"] = row["watermark"].partition("T")[2] or row["watermark"]
    columns = [
        name
        for name in rows[0]
        if name not in ("watermark", "state") or any(row[name] != "-" for row in rows)
    ]
    widths = {
        name: max(len(name), _LEAST_WIDTHS.get(name, 0), *(len(row[name]) for row in rows))
        for name in columns
    }
    heading = {name: name for name in columns}
    return [
        "  ".join(row[name].ljust(widths[name]) for name in columns).rstrip()
        for row in (heading, *rows)
    ]


def line(query: dict[str, Any]) -> str:
    """One query in one line of a log; what it does not have is left out."""
    row = cells(query)
    name = row.pop("query")
    return f"{name}: " + ", ".join(f"{what} {value}" for what, value in row.items() if value != "-")


def summary(query: dict[str, Any]) -> str:
    last = "no epoch yet" if query["epoch"] is None else f"the last is epoch {query['epoch']:,}"
    return (
        f"{query['query']}: {number(query['rows_out'], 'rows')} published in "
        f"{number(query['epochs'], 'epochs')} since the last start; {last}"
    )
