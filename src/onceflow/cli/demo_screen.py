"""What `onceflow demo` says of its events."""

from __future__ import annotations

from typing import Any

from onceflow.cli.output import age, brief, number, paint, table
from onceflow.cli.telling import Event, Words

_MOST_DIFFERENCES = 20
_DOING = {
    "starting": "three jobs start",
    "running": "running",
    "draining": "the last rows go through",
    "stopping": "stopping at the end of the epoch",
}
_BLANK = " " * 9


def stamp(event: Event) -> str:
    return f"{event['seconds']:5.1f} s"


def how_it_goes(event: Event) -> str:
    jobs = ", ".join(f"{name} {_job(job)}" for name, job in event["jobs"].items())
    return f"{_DOING[event['doing']]}: {brief(event['rows_per_s'], 'rows/s')} fed; {jobs}"


def _job(job: dict[str, Any]) -> str:
    if job["state"] != "runs" or job["lag_s"] is None:
        return str(job["state"])
    return f"{age(job['lag_s'])} behind"


def happened(event: Event) -> list[str]:
    match event["event"]:
        case "begin":
            return _begin(event)
        case "page":
            return _page(event)
        case "servers" if event["doing"] == "running":
            return [f"{stamp(event)}  Kafka at {event['kafka']}, and PostgreSQL"]
        case "starting":
            again = "the same again" if event["life"] > 1 else "starting"
            return [f"{stamp(event)}  {again}: {event['command']}"]
        case "started":
            return [f"{stamp(event)}  {event['part']}: driver {event['driver']} {_where(event)}"]
        case "playing":
            look = f": look at {event['url']}" if event["url"] else ""
            return [f"{stamp(event)}  all work{look}"]
        case "restarting":
            return [f"{stamp(event)}  {event['part']}: {event['message']}; it is started again"]
        case "killed":
            return _killed(event)
        case "draining":
            fed = number(event["rows"], "rows")
            return [f"{stamp(event)}  {fed} are fed; the last ones close what is open"]
        case "stopped":
            return [f"{stamp(event)}  all are stopped; comparing with the truth"]
        case "verdict":
            return _verdict(event)
        case "next":
            return _next(event["commands"])
    return []


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
    return f"goes on after epoch {max(after)}" if after else "begins"


def _killed(event: Event) -> list[str]:
    names = [f"{p['what']} {p['pid']}" for p in event["processes"] if p["what"] != "worker"]
    workers = len(event["processes"]) - len(names)
    one = "a Python worker" if workers == 1 else f"{workers} Python workers"
    names += [one] if workers else []
    lines = [f"{stamp(event)}  {paint('kill -9', 'wrong')} of {event['part']}: {', '.join(names)}"]
    if event["epoch"] is not None:
        fate = {True: ": decided, so it will be published", False: ": not decided, so it runs anew"}
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
    lines = ["", *_table(head, campaigns), "", *_table(["", "truth", "found"], others), ""]
    lost = f"lost {event['lost']:,}, duplicated {event['duplicated']:,}"
    if event["exact"]:
        says = paint(lost, "ok")
        return [*lines, f"{says}: {event['compared']:,} numbers compared, all are exact"]
    wrong = f"{event['differing']:,} of {event['compared']:,} numbers differ"
    lines.append(f"{paint(lost, 'wrong')}: {wrong}")
    lines += [f"  {difference['says']}" for difference in event["differences"][:_MOST_DIFFERENCES]]
    more = event["differing"] - _MOST_DIFFERENCES
    return [*lines, f"  and {more:,} more"] if more > 0 else lines


def _money(micros: int, currency: str) -> str:
    """To the micro-unit, which is what is compared."""
    return f"{micros / 1_000_000:,.6f} {currency}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """As `table`, with numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    aligned = [
        [cell if at < 1 else cell.rjust(widths[at]) for at, cell in enumerate(line)]
        for line in (head, *rows)
    ]
    return table(aligned[0], aligned[1:]).splitlines()


def _next(commands: list[dict[str, str]]) -> list[str]:
    lines = ["", "try next:"]
    for command in commands:
        lines += [f"  # {command['shows']}"] if command["shows"] else []
        lines.append(f"  {command['command']}")
    return lines


WORDS = Words(happened, lambda event: f"{stamp(event)}  {how_it_goes(event)}", news_every=5.0)
