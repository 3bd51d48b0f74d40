"""`onceflow run`"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click

from onceflow.cli.display import (
    Event,
    Report,
    display,
    error_text,
    home_option,
    json_option,
    show_warning,
    table,
)
from onceflow.errors import JobError
from onceflow.protocol.home import now
from onceflow.service.number_format import age, brief, number
from onceflow.service.supervisor import Supervisor

_SIGN_OF_LIFE_EVERY = 60.0  # seconds, in a log, if no epoch was decided
_SILENT_AFTER = 5.0
_NARROW = 100  # columns of a terminal
_LEAST_WIDTHS = {"in": 12, "out": 12, "lag": 5, "published": 9}


@click.command("run")
@click.argument("job", metavar="JOB.py[:name]")
@home_option
@click.option("--as", "fork", metavar="NAME", help="Run a fork of the job: see onceflow fork.")
@click.option("--once", is_flag=True, help="Stop when all input that is there has been read.")
@click.option(
    "--master",
    metavar="URL",
    show_default="$SPARK_MASTER or local[*]",
    help="The Spark master, such as local[4] or spark://host:7077.",
)
@click.option(
    "--every",
    metavar="TIME",
    help='How often an epoch begins, such as "500ms"; by default what the job says.',
)
@click.option(
    "--take-over", is_flag=True, help="End the driver that leads the job, and replace it."
)
@click.option("--page", is_flag=True, help="Serve the page of the home while the job runs.")
@click.option(
    "--token-file",
    metavar="FILE",
    help="A file with the token of the page; by default a token is made and printed.",
)
@json_option
def command(  # noqa: PLR0917 - one parameter for each option
    job: str, home: str, fork: str | None, once: bool, master: str | None, every: str | None,
    take_over: bool, page: bool, token_file: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run a job, and start it again when it fails and a retry can help.

    JOB.py is a file with a function that is decorated with @job; if it has several, :name chooses
    one. Paths in the job are relative to the working directory.

    SIGINT (Ctrl-C), SIGTERM and onceflow stop stop the job when its running epoch is finished; a
    second signal ends it at once. However it ended, the next run resumes exactly where it stood.
    A server that does not answer (Kafka, PostgreSQL, the Spark master) is tried until it does,
    except with --once.

    With --json: one event a line (docs/events.md). Exit codes: 0 stopped at the end of an epoch;
    5 another driver leads the job; 75 a retry may help, and the command has retried; 137 the
    driver was killed; else the code of the error.

    \b
    onceflow run word_count.py
    onceflow run jobs.py:counts --once --json
    """
    arguments = [job]
    named = (("--home", home), ("--as", fork), ("--master", master), ("--every", every))
    for option, value in named:
        arguments += [f"{option}={value}"] if value is not None else []
    arguments += ["--once"] if once else []
    arguments += ["--take-over"] if take_over else []
    if token_file is not None and not page:
        raise JobError("--token-file is for the page", hint="add --page, or leave it out")
    with _page(home, token_file, as_json=as_json) if page else nullcontext():
        code = Supervisor(arguments, display(RunReport(), as_json=as_json)).run()
    sys.exit(code)


@contextmanager
def _page(home: str, token_file: str | None, *, as_json: bool) -> Iterator[None]:
    """In a thread: the job has a process of its own, which the page does not slow."""
    from onceflow.page.access import token_in
    from onceflow.page.server import Page

    token, warning = (None, None) if token_file is None else token_in(token_file)
    if warning:
        show_warning(warning)
    with Page(home, token=token) as page:
        made = page.token if token_file is None else None
        if as_json:
            event = {"event": "page", "at": now(), "url": page.url, "token": made}
            click.echo(json.dumps(event))
        else:
            click.echo(f"page: {page.url}")
            if made is not None:
                click.echo(f"token: {made}")
        yield


# ---------------------------------------------------------------- what happens


class RunReport(Report):
    """What the supervisor and the driver tell."""

    json_every = 0.0
    live_events = frozenset({"starting", "progress", "replaying"})
    errors = frozenset({"output", "restarting", "error"})

    def __init__(self) -> None:
        super().__init__()
        self._epochs = 0  # when a log was told last
        self._doing = ""
        self._since = self._heard = time.monotonic()

    def lines(self, event: Event) -> list[str]:
        match event["event"]:
            case "output":
                return [event["text"]]
            case "starting":
                return [f"starting {event['job']}"]
            case "session":
                return [f"spark {event['spark']} on {event['master']}; its log: {event['log']}"]
            case "started":
                return _started(event)
            case "replaying":
                return [_replaying(event)]
            case "progress":
                self._epochs = _epochs(event)
                return [_line(query) for query in event["queries"]]
            case "stopping" if event["at_once"]:
                return ["stopping at once"]
            case "stopping":
                when = "when the running epoch is finished"
                return [f"stopping {when} (Ctrl-C again: at once; nothing is lost)"]
            case "restarting":
                until = "it is tried until the server answers; " if event.get("away") else ""
                when = f"in {event['in_s']:.0f} s" if event["in_s"] else "now"
                said = error_text(event["message"], event["hint"])
                return [said, f"{until}starting again {when}"]
            case "error":
                return [error_text(event["message"], event["hint"])]
            case "ended":
                return [_summary(query) for query in event["queries"]]
        return []

    def pause(self, event: Event) -> float:
        match event["event"]:
            case "progress" if _epochs(event) == self._epochs:
                return _SIGN_OF_LIFE_EVERY
            case "replaying" if event["epoch"] < event["last"]:
                return self.news_every
        return super().pause(event)

    def take(self, event: Event) -> None:
        super().take(event)
        self._heard = time.monotonic()
        match event["event"]:
            case "starting":
                self._begin(f"starting {event['job']}")
            case "session":
                self._begin(f"opening the queries of {event['job']}")
            case "replaying":
                self._doing = _replaying(event)
            case "started" | "restarting" | "error" | "ended":
                self._begin("")

    def _begin(self, doing: str) -> None:
        self._doing, self._since, self.progress = doing, time.monotonic(), None

    def live(self, width: int) -> str:
        if self._doing:
            return f"{self._doing} … {time.monotonic() - self._since:.0f} s"
        if self.progress is None or not self.progress["queries"]:
            return ""
        lines = live_table(self.progress["queries"], width)
        silent = time.monotonic() - self._heard
        if silent > _SILENT_AFTER:
            lines += f"\nthe driver has said nothing for {age(silent)}"
        return lines


def _epochs(event: Event) -> int:
    return sum(query["epochs"] for query in event["queries"])


def _started(event: Event) -> list[str]:
    """What runs, where, and what each output promises."""
    lines = [f"job {event['job']}, process {event['pid']}, home {event['home']}"]
    for name, query in event["queries"].items():
        after = query["resumes_after"]
        how = "starts" if after is None else f"resumes after epoch {after:,}"
        lines.append(f"  {name} {how} (term {query['term']})")
        lines += [
            f"    {output} -> {what['target']}: {what['guarantee']}"
            for output, what in query["outputs"].items()
        ]
    return lines


def _replaying(event: Event) -> str:
    return (
        f"{event['query']}: running epoch {event['epoch']:,} of {event['last']:,} again to rebuild "
        "the state; skipped rows are not published twice"
    )


def _cells(query: dict[str, Any]) -> dict[str, str]:
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


def live_table(queries: list[dict[str, Any]], width: int) -> str:
    """A heading and a line for each query. A narrow terminal shows the time of a watermark only."""
    rows = [_cells(query) for query in queries]
    if width < _NARROW:
        for row in rows:
            row["watermark"] = row["watermark"].partition("T")[2] or row["watermark"]
    columns = [
        name
        for name in rows[0]
        if name not in ("watermark", "state") or any(row[name] != "-" for row in rows)
    ]
    cells = [[row[name].ljust(_LEAST_WIDTHS.get(name, 0)) for name in columns] for row in rows]
    return table(columns, cells)


def _line(query: dict[str, Any]) -> str:
    """One query in one line of a log, without what it does not have."""
    row = _cells(query)
    name = row.pop("query")
    return f"{name}: " + ", ".join(f"{what} {value}" for what, value in row.items() if value != "-")


def _summary(query: dict[str, Any]) -> str:
    last = "no epoch yet" if query["epoch"] is None else f"the last is epoch {query['epoch']:,}"
    return (
        f"{query['query']}: {number(query['rows_out'], 'rows')} published in "
        f"{number(query['epochs'], 'epochs')} since the last start; {last}"
    )
