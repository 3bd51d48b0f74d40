"""`onceflow run`"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.output import failed, home_option, is_terminal, json_option, number
from onceflow.job import load, milliseconds
from onceflow.runtime.supervisor import Event, Supervisor

if TYPE_CHECKING:
    from rich.live import Live

_PLAIN_EVERY = 5.0


@click.command("run")
@click.argument("job", metavar="JOB.py[:name]")
@home_option
@click.option("--once", is_flag=True, help="Stop when the input is used up.")
@click.option("--master", help="Spark master, such as local[4] or spark://host:7077.")
@click.option("--every", help='How often an epoch begins, such as "500ms"; else what the job says.')
@click.option("--take-over", is_flag=True, help="End the driver that leads now, and replace it.")
@json_option
def command(  # noqa: PLR0917 - one parameter for each option
    job: str, home: str, once: bool, master: str | None, every: str | None, take_over: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Run a job. It is started again when it fails and that can help; SIGINT (Ctrl-C) and SIGTERM
    stop it at an epoch's end. Kill it as you like: the next run goes on exactly where it stood.
    """
    if every is not None:
        milliseconds(every)
    name = load(job).name  # a job file that is wrong is told at once, without starting Spark
    arguments = [job, "--home", home]
    for option, value in (("--master", master), ("--every", every)):
        arguments += [option, value] if value else []
    arguments += ["--once"] if once else []
    arguments += ["--take-over"] if take_over else []
    screen = _Json() if as_json else _Terminal(name) if is_terminal() else _Plain()
    with screen:
        code = Supervisor(arguments, screen.show).run()
    sys.exit(code)


class _Json:
    """One event a line."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        click.echo(json.dumps(event))


class _Plain:
    """Lines for a log: what happens, and every few seconds how it goes."""

    def __init__(self) -> None:
        self._said = 0.0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        match event["event"]:
            case "session":
                click.echo(f"spark {event['spark']} on {event['master']}; its log: {event['log']}")
            case "started":
                for line in started(event):
                    click.echo(line)
            case "progress":
                if time.monotonic() - self._said >= _PLAIN_EVERY:
                    self._said = time.monotonic()
                    self._queries(event)
            case "stopping":
                click.echo("stopping at the end of the epoch")
            case "restarting":
                failed(event["message"], event["hint"])
                click.echo(f"starting again in {event['in_s']:.0f} s", err=True)
            case "error":
                failed(event["message"], event["hint"])
            case "ended":
                self._queries(event)
                for query in event["queries"]:
                    rows = number(query["rows_out"], "rows")
                    click.echo(f"{query['query']}: {rows} published by this run")

    def _queries(self, event: Event) -> None:
        for query in event["queries"]:
            click.echo("  ".join(line(query)))


class _Terminal(_Plain):
    """A live line for each query."""

    def __init__(self, job: str) -> None:
        super().__init__()
        self._job = job
        self._live: Live | None = None

    def __enter__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(highlight=False), refresh_per_second=4, transient=True)
        self._live.start()
        self._live.update(f"{self._job}: starting Spark …")

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: Event) -> None:
        assert self._live is not None
        if event["event"] == "progress":
            self._live.update(self._table(event))
            return
        self._live.update("")
        self._live.refresh()
        super().show(event)

    @staticmethod
    def _table(event: Event) -> Any:
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        for query in event["queries"]:
            grid.add_row(*line(query))
        return grid


def started(event: Event) -> list[str]:
    """What runs, where, and what each output promises."""
    lines = [f"job {event['job']}, process {event['pid']}, home {event['home']}"]
    for name, query in event["queries"].items():
        after = query["resumes_after"]
        begin = "begins" if after is None else f"goes on after epoch {after}"
        lines.append(f"  {name} {begin} (term {query['term']})")
        lines += [
            f"    {output} -> {what['target']}: {what['guarantee']}"
            for output, what in query["outputs"].items()
        ]
    return lines


def line(query: dict[str, Any]) -> list[str]:
    epoch = "-" if query["epoch"] is None else f"{query['epoch']:,}"
    ago = "-" if query["published_s_ago"] is None else f"{query['published_s_ago']:.0f} s ago"
    watermark = (query["watermark"] or "-").removesuffix("Z").replace("T", " ")
    return [
        query["query"],
        f"epoch {epoch}",
        f"in {number(query['rows_in_per_s'], 'rows/s')}",
        f"out {number(query['rows_out_per_s'], 'rows/s')}",
        f"lag {number(query['lag_s'], 's')}",
        f"published {ago}",
        f"watermark {watermark}",
        f"state {number(query['state_rows'], 'rows')}",
    ]
