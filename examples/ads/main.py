"""The application's command line: `python -m examples.ads COMMAND`."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ads.budget import Budget, campaigns
from ads.check import PARTS, CampaignLine, Verdict, by_campaign
from ads.check import check as compare
from ads.feed import Feed
from ads.order_service import OrderService
from ads.places import Places
from ads.stream import Stream, must_load
from ads.truth import Truth
from ads.verify.command import command as verify
from ads.world import CURRENCY, MICROS, SPEED
from onceflow.errors import OnceflowError

_SEND_EVERY = 0.1  # seconds
_MOST = 2 * SPEED  # chunks in one batch, when it is late

folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    show_default="where you are",
    help="The folder of this run.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


class _Group(click.Group):
    """An error says what fixes it, as text or as JSON."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OnceflowError as error:
            if "--json" in sys.argv:
                text = json.dumps({"error": error.message, "hint": error.hint})
            else:
                text = f"error: {error}"
            click.echo(text, err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group)
def main() -> None:
    """Ad events and orders in; exact counts, attributions and charges out.

    Streams and tables are under --folder, or in Kafka and PostgreSQL: ADS_KAFKA=host:port,
    ADS_POSTGRES_FILE=a file that holds the connection string.
    """


@main.command()
@folder_option
@json_option
def create(folder: Path, as_json: bool) -> None:
    """Create the logs or topics that do not exist yet."""
    Places.from_environment(folder).create()
    _say({"created": str(folder)}, as_json, lambda _: f"the streams are there, for {folder}")


@main.command()
@folder_option
@click.option("--seed", default=1, show_default=True, help="The same seed gives the same stream.")
@click.option("--rate", default=2000, show_default=True, help="Events a second, over both regions.")
@click.option("--seconds", type=float, help="How long; without it: until Ctrl-C.")
@click.option("--events", type=int, help="How many at least, instead of --seconds.")
@click.option("--fast", is_flag=True, help="As fast as it goes, instead of by the clock.")
@click.option("--close", is_flag=True, help="End with lines after which nothing is open.")
@click.option("--clean", is_flag=True, help="Nothing goes wrong with the lines.")
@json_option
def generate(
    *,
    folder: Path,
    seed: int,
    rate: int,
    seconds: float | None,
    events: int | None,
    fast: bool,
    close: bool,
    clean: bool,
    as_json: bool,
) -> None:
    """Send lines to the raw logs or topics. It continues where it was, even after kill -9.

    A second of the clock is a minute of ads.
    """
    if seconds is not None and events is not None:
        raise click.UsageError("give --seconds or --events, not both")
    if rate < 1:
        raise click.UsageError("--rate must be at least 1")
    if events is not None:
        seconds = events / rate
    places = Places.from_environment(folder)
    places.create()
    # A second of the clock is a minute of ads.
    feed = Feed(places, Stream(seed=seed, per_minute=rate * 60 // SPEED, clean=clean))
    most = sys.maxsize if seconds is None else round(seconds * SPEED) + 1  # one is the history
    sent = _send(feed, most, fast=fast, stop=_stop_on_signals())
    if close:
        sent["lines"] += sum(map(len, feed.close().values()))
    _say(
        {**sent, "chunks": feed.stream.chunks, "closed": feed.stream.closed},
        as_json,
        lambda it: f"{it['lines']:,} lines in {it['seconds']:.1f} s",
    )


def _send(feed: Feed, most: int, *, fast: bool, stop: threading.Event) -> dict[str, Any]:
    began, lines, chunks = time.monotonic(), 0, 0
    while chunks < most and not stop.is_set():
        due = 1 + int((time.monotonic() - began) * SPEED)
        count = min(_MOST, most - chunks, _MOST if fast else due - chunks)
        if count > 0:
            lines += sum(map(len, feed.send(count).values()))
            chunks += count
        if not fast:
            stop.wait(_SEND_EVERY)
    return {"lines": lines, "seconds": round(time.monotonic() - began, 3)}


@main.command()
@folder_option
@json_option
def truth(folder: Path, as_json: bool) -> None:
    """Show the expected result, computed from the generator alone."""
    true = _truth(folder)
    clicks, spend = true.clicks_by_campaign(), true.spend_micros_by_campaign()
    value = {
        "lines": true.lines,
        "events": sum(map(len, true.events.values())),
        "again": true.again,
        "rejected": true.rejected.total(),
        "orders": len(true.attributions()),
        "campaigns": [
            {"campaign": name, "clicks": clicks[name], "spend_micros": spend[name]}
            for name in clicks
        ],
    }

    def text(it: dict[str, Any]) -> str:
        rows = [[c["campaign"], f"{c['clicks']:,}", _money(c["spend_micros"])]
                for c in it["campaigns"]]  # fmt: skip
        return (
            f"{it['lines']:,} lines: {it['events']:,} events ({it['orders']:,} orders), "
            f"{it['again']:,} brought one again, {it['rejected']:,} are rejected\n"
            + _table(["campaign", "clicks", "spend"], rows)
        )

    _say(value, as_json, text)


@main.command()
@folder_option
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="Some parts only.")
@json_option
def check(folder: Path, only: tuple[str, ...], as_json: bool) -> None:
    """Compare every output with the expected result; exit code 0 if all is exact, 1 if not."""
    places, true = Places.from_environment(folder), _truth(folder)
    verdict = compare(places, true, parts=only or None)
    lines = by_campaign(places, true)
    value = {**verdict.as_json(), "campaigns": [asdict(line) for line in lines]}
    _say(value, as_json, lambda _: _verdict_text(verdict, lines))
    raise SystemExit(0 if verdict.exact else 1)


def _verdict_text(verdict: Verdict, lines: list[CampaignLine]) -> str:
    head = ["campaign", "clicks, truth", "committed", "spend, truth", "charged", ""]
    rows = [
        [
            line.campaign,
            f"{line.truth_clicks:,}",
            f"{line.clicks:,}",
            _money(line.truth_spend_micros),
            _money(line.charged_micros),
            "paused" if line.paused else "",
        ]
        for line in lines
    ]
    says = "exact" if verdict.exact else f"NOT EXACT: {len(verdict.differences):,} differences"
    end = f"lost {verdict.lost:,}, duplicated {verdict.duplicated:,}, "
    end += f"{verdict.compared:,} numbers compared: {says}"
    return "\n".join([_table(head, rows), *map(str, verdict.differences[:20]), end])


@main.command()
@click.option("--port", default=0, help="On loopback; without it: a free one.")
@click.option("--failing", default=0.0, help="The share of orders whose first ask gets a 503.")
@click.option("--slow", default=0.0, help="Seconds that each answer takes.")
@json_option
def order_service(port: int, failing: float, slow: float, as_json: bool) -> None:
    """Serve the value of orders over HTTP, until Ctrl-C."""
    stop = _stop_on_signals()
    try:
        service = OrderService(port, failing=failing, slow=slow)
    except OSError as error:
        raise OnceflowError(f"port {port}: {error.strerror}", hint="name another --port") from error
    with service:
        _say({"url": service.url}, as_json, lambda it: f"the order service is at {it['url']}")
        stop.wait()


@main.command()
@folder_option
@click.option("--once", is_flag=True, help="Charge what is committed now, and end.")
@json_option
def budget(folder: Path, once: bool, as_json: bool) -> None:
    """Charge committed clicks to the budgets of campaigns, until Ctrl-C."""
    stop = _stop_on_signals()
    places = Places.from_environment(folder)
    places.create()
    service = Budget(places)
    if once:
        service.catch_up()
    else:
        service.run(stop)
    service.close()

    def text(it: list[dict[str, Any]]) -> str:
        rows = [[c["campaign"], f"{c['clicks']:,}", _money(c["spent_micros"]),
                 _money(c["budget_micros"]), "paused" if c["paused_at"] else ""]
                for c in it]  # fmt: skip
        return _table(["campaign", "clicks", "spent", "budget", ""], rows)

    _say([asdict(each) for each in campaigns(places)], as_json, text)


main.add_command(verify)


def _truth(folder: Path) -> Truth:
    found = Truth()
    for lines in must_load(folder).lines():
        found.add(lines)
    return found


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _say(value: Any, as_json: bool, text: Callable[[Any], str]) -> None:
    click.echo(json.dumps(value) if as_json else text(value))


def _money(micros: int) -> str:
    return f"{micros // MICROS:,}.{micros % MICROS:06d} {CURRENCY}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in [head, *rows]]
    return "\n".join("  ".join(line).rstrip() for line in lines)
