"""`onceflow demo`"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.display import Event, Report, display, json_option, paint, shown_on, table
from onceflow.service.number_format import age, brief, number

if TYPE_CHECKING:
    from onceflow.demo.run import DemoRun

_MOST_DIFFERENCES = 20
_DOING = {
    "starting": "starting three jobs",
    "running": "running",
    "draining": "processing the last rows",
    "stopping": "stopping at the end of the epoch",
}
_BLANK = " " * 9
_LOOK = "SELECT campaign, sum(clicks) FROM ad_minutes GROUP BY campaign"
_LOOK_IN_PYTHON = "import sqlite3; print(*sqlite3.connect('serving.db').execute('{}'), sep='\\n')"


@click.command("demo")
@click.option(
    "--folder",
    metavar="DIR",
    default="onceflow-demo",
    show_default=True,
    help="The folder to run in. An earlier demo there is replaced; any other folder is refused.",
)
@click.option(
    "--seed", metavar="N", default=1, show_default=True, help="The same seed gives the same events."
)
@click.option(
    "--rate",
    metavar="N",
    type=click.IntRange(60, 100_000),
    default=2_000,
    show_default=True,
    help="Events a second; some arrive more than once.",
)
@click.option(
    "--seconds",
    metavar="N",
    type=click.FloatRange(min=1),
    default=30.0,
    show_default=True,
    help="How long events come once all jobs have started; longer if a kill is still to come.",
)
@click.option(
    "--kills",
    metavar="N",
    type=click.IntRange(0, 10),
    default=1,
    show_default=True,
    help="How many times a job is killed: aggregation, attribution, load, and so on.",
)
@click.option(
    "--chaos", is_flag=True, help="Kill a job, a part of one or a service every few seconds."
)
@click.option("--keep", is_flag=True, help="Continue until Ctrl-C, then check the outputs.")
@click.option(
    "--kafka",
    is_flag=True,
    help="Use a Kafka broker and a PostgreSQL server. They are started, unless $ONCEFLOW_KAFKA or "
    "$ONCEFLOW_POSTGRES names one. Needs Maven once.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    show_default="8765, or another that is free",
    help="The port of the page, on 127.0.0.1.",
)
@click.option("--no-page", is_flag=True, help="Do not serve the page.")
@json_option
def command(  # noqa: PLR0917 - one parameter for each option
    folder: str, seed: int, rate: int, seconds: float, kills: int, chaos: bool, keep: bool,
    kafka: bool, port: int | None, no_page: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run the example application, kill a job of it, and check every output.

    Ad impressions, clicks and orders of two regions, with duplicates, late events and broken
    lines, go through three jobs and a budget service while a page shows them. In the middle of an
    epoch all processes of a job get kill -9; then the same command starts it again. At the end
    every output is compared with the result that is expected from the events alone. The folder
    stays. docs/ads.md describes the application.

    With --json: one event a line (docs/events.md). Exit codes: 0 nothing is lost or duplicated; 1
    an output is wrong.

    \b
    onceflow demo
    onceflow demo --kafka --chaos --seconds 120
    """
    from onceflow.demo.run import DemoRun, Settings

    shown = display(DemoReport(), as_json=as_json)
    settings = Settings(
        seed=seed, rate=rate, seconds=None if keep else seconds, kills=kills, chaos=chaos,
        kafka=kafka,
    )  # fmt: skip
    page = None
    if not no_page:
        from onceflow.page.server import Page

        page = partial(Page, port=port)
    run = DemoRun(Path(folder), settings, tell=shown.show, page=page)
    with shown_on(shown), _ctrl_c_judges(run) if keep else contextlib.nullcontext():
        verdict = run.run()
        shown.show({"event": "next", "commands": next_commands(run.folder, kafka=kafka)})
    sys.exit(0 if verdict.exact else 1)


@contextlib.contextmanager
def _ctrl_c_judges(run: DemoRun) -> Iterator[None]:
    """The first Ctrl-C ends the stream of events, the second ends everything."""

    def finish(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        run.finish()

    before = signal.signal(signal.SIGINT, finish)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def next_commands(folder: Path, *, kafka: bool = False) -> list[dict[str, str]]:
    """What to try in the folder of a demo: each command with what it shows."""
    first = [f"cd {shlex.quote(str(folder))}"]
    if shutil.which("onceflow") is None:
        first.append(f"source {shlex.quote(sys.prefix)}/bin/activate")
        if java := os.environ.get("JAVA_HOME"):
            first.append(f"export JAVA_HOME={shlex.quote(java)}")
    look = ["sqlite3", "serving.db", _LOOK]
    if shutil.which("sqlite3") is None:
        look = ["python", "-c", _LOOK_IN_PYTHON.format(_LOOK)]
    found = {
        **dict.fromkeys(first, ""),
        "onceflow serve --home home": "the page",
        "onceflow status --home home": "where each query stands",
    }
    if not kafka:  # else the servers are gone, and what they held
        found |= {
            "onceflow ledger load --home home": "what each target says is published",
            "onceflow log tail counts/eu": "the newest counts",
            shlex.join(look): "the clicks in the serving table",
            "python -m ads check": "compare every output again",
            "onceflow run ads/load.py --home home": "resume a job; kill it whenever you like",
        }
    return [{"command": command, "shows": shows} for command, shows in found.items()]


# ---------------------------------------------------------------- what happens


class DemoReport(Report):
    def lines(self, event: Event) -> list[str]:
        match event["event"]:
            case "progress":
                return [f"{_stamp(event)}  {_how_it_goes(event)}"]
            case "begin":
                return _begin(event)
            case "page":
                return _page(event)
            case "servers" if event["doing"] == "running":
                return [f"{_stamp(event)}  Kafka at {event['kafka']}, and PostgreSQL"]
            case "starting":
                again = "starting again" if event["life"] > 1 else "starting"
                return [f"{_stamp(event)}  {again}: {event['command']}"]
            case "started":
                driver = f"driver {event['driver']} {_where(event)}"
                return [f"{_stamp(event)}  {event['part']}: {driver}"]
            case "playing":
                look = f": look at {event['url']}" if event["url"] else ""
                return [f"{_stamp(event)}  all jobs work{look}"]
            case "restarting":
                said = f"{event['part']}: {event['message']}; starting it again"
                return [f"{_stamp(event)}  {said}"]
            case "killed":
                return _killed(event)
            case "draining":
                fed = number(event["rows"], "rows")
                return [f"{_stamp(event)}  fed {fed}; the last ones close every open window"]
            case "stopped":
                return [f"{_stamp(event)}  all have stopped; comparing with the expected result"]
            case "verdict":
                return _verdict(event)
            case "next":
                return _next(event["commands"])
        return []


def _stamp(event: Event) -> str:
    return f"{event['seconds']:5.1f} s"


def _how_it_goes(event: Event) -> str:
    jobs = ", ".join(f"{name} {_job(job)}" for name, job in event["jobs"].items())
    return f"{_DOING[event['doing']]}: {brief(event['rows_per_s'], 'rows/s')} fed; {jobs}"


def _job(job: dict[str, Any]) -> str:
    if job["state"] != "runs" or job["lag_s"] is None:
        return str(job["state"])
    return f"{age(job['lag_s'])} behind"


def _begin(event: Event) -> list[str]:
    what = f"{event['rate']:,} ad events a second (seed {event['seed']})"
    kills = {0: "nothing is killed", 1: "a job is killed"}.get(
        event["kills"], f"jobs are killed {event['kills']} times"
    )
    kills = "something is killed every few seconds" if event["chaos"] else kills
    return [f"{what}, for two regions; {kills}", f"folder {event['folder']}"]


def _page(event: Event) -> list[str]:
    token = f", token {event['token']}" if event["token"] else ""
    return [f"page   {paint(event['url'], 'ok')}{token}"]


def _where(event: Event) -> str:
    after = [epoch for epoch in event["resumes_after"].values() if epoch is not None]
    return f"resumes after epoch {max(after)}" if after else "starts"


def _killed(event: Event) -> list[str]:
    names = [f"{p['what']} {p['pid']}" for p in event["processes"] if p["what"] != "worker"]
    workers = len(event["processes"]) - len(names)
    one = "a Python worker" if workers == 1 else f"{workers} Python workers"
    names += [one] if workers else []
    who = f"{paint('kill -9', 'wrong')} of {event['part']}: {', '.join(names)}"
    lines = [f"{_stamp(event)}  {who}"]
    if event["epoch"] is not None:
        fate = {
            True: ": decided, so it will be published",
            False: ": not decided, so it runs again",
        }
        what = f"in the middle of epoch {event['epoch']} of query {event['query']}"
        lines.append(f"{_BLANK}{what}{fate.get(event['decided'], '')}")
    return lines


# ---------------------------------------------------------------- the verdict


def _verdict(event: Event) -> list[str]:
    head = ["campaign", "clicks", "serving", "warehouse", "spend", "charged"]
    campaigns = [
        [
            line["campaign"],
            *(f"{line[name]:,}" for name in ("clicks", "serving", "warehouse")),
            *(_money(line[name], event["currency"]) for name in ("spend_micros", "charged_micros")),
        ]
        for line in event["campaigns"]
    ]
    others = [
        [line["what"], f"{line['truth']:,}", f"{line['found']:,}"] for line in event["others"]
    ]
    counts = table(["", "expected", "found"], others, numbers=True)
    lines = ["", table(head, campaigns, numbers=True), "", counts, ""]
    lost = f"lost {event['lost']:,}, duplicated {event['duplicated']:,}"
    if event["exact"]:
        says = paint(lost, "ok")
        return [*lines, f"{says}: {event['compared']:,} numbers compared, all are equal"]
    wrong = f"{event['differing']:,} of {event['compared']:,} numbers differ"
    lines.append(f"{paint(lost, 'wrong')}: {wrong}")
    lines += [f"  {difference['says']}" for difference in event["differences"][:_MOST_DIFFERENCES]]
    more = event["differing"] - _MOST_DIFFERENCES
    return [*lines, f"  and {more:,} more"] if more > 0 else lines


def _money(micros: int, currency: str) -> str:
    """To the micro-unit, which is what is compared."""
    return f"{micros / 1_000_000:,.6f} {currency}"


def _next(commands: list[dict[str, str]]) -> list[str]:
    lines = ["", "try next:"]
    for command in commands:
        lines += [f"  # {command['shows']}"] if command["shows"] else []
        lines.append(f"  {command['command']}")
    return lines
