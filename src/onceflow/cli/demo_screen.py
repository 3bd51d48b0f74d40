"""What `onceflow demo` says of its events."""

from __future__ import annotations

from onceflow.cli.output import number, paint, table
from onceflow.cli.telling import Event, Words

_MOST_DIFFERENCES = 20
_DOING = {
    "starting": "Spark starts",
    "running": "running",
    "draining": "the last windows close",
    "stopping": "stopping at the end of the epoch",
}


def stamp(event: Event) -> str:
    return f"{event['seconds']:5.1f} s"


def how_it_goes(event: Event) -> str:
    epoch = "no epoch yet" if event["epoch"] is None else f"epoch {event['epoch']}"
    read = f"{event['appended']:,} of {event['of']:,} rows appended, {event['read']:,} processed"
    return f"{_DOING[event['doing']]}: {read}, {epoch}"


def happened(event: Event) -> list[str]:
    match event["event"]:
        case "begin":
            return _begin(event)
        case "starting":
            again = "the same again" if event["life"] > 1 else "starting"
            return [f"{stamp(event)}  {again}: {event['command']}"]
        case "started":
            after = event["resumes_after"]
            where = "begins" if after is None else f"goes on after epoch {after}"
            return [f"{stamp(event)}  driver {event['driver']} {where}"]
        case "restarting":
            return [f"{stamp(event)}  {event['message']}; it is started again"]
        case "killed":
            return _killed(event)
        case "draining":
            return [f"{stamp(event)}  all is appended; a last event closes the windows"]
        case "stopped":
            return [f"{stamp(event)}  stopped after epoch {event['epoch']}"]
        case "verdict":
            return _verdict(event)
        case "next":
            return _next(event["commands"])
    return []


def _begin(event: Event) -> list[str]:
    return [
        f"{number(event['events'], 'ad events')} will happen (seed {event['seed']}), "
        f"{event['again']:,} will arrive again, {event['malformed']:,} lines are broken",
        f"folder {event['folder']}",
    ]


def _killed(event: Event) -> list[str]:
    names = [f"{p['what']} {p['pid']}" for p in event["processes"] if p["what"] != "worker"]
    workers = len(event["processes"]) - len(names)
    names += [f"{workers} Python workers"] if workers else []
    fate = (
        "decided, so it will be published" if event["decided"] else "not decided, so it runs anew"
    )
    return [
        f"{stamp(event)}  {paint('kill -9', 'wrong')} of {', '.join(names)}",
        f"         in the middle of epoch {event['epoch']}: {fate}",
    ]


def _verdict(event: Event) -> list[str]:
    rows = [
        [
            line["minute"],
            line["kind"],
            *(
                "-" if line[name] is None else f"{line[name]:,}"
                for name in ("truth", "files", "sqlite")
            ),
        ]
        for line in event["table"]
    ]
    lost = f"lost {event['lost']:,}, duplicated {event['duplicated']:,}"
    lines = ["", *_table(["minute", "kind", "truth", "files", "sqlite"], rows), ""]
    if event["exact"]:
        says = paint(lost, "ok")
        return [*lines, f"{says}: {event['compared']:,} numbers compared, all are exact"]
    wrong = event["differences"]
    lines.append(f"{paint(lost, 'wrong')}: {len(wrong):,} of {event['compared']:,} numbers differ")
    lines += [f"  {difference['says']}" for difference in wrong[:_MOST_DIFFERENCES]]
    more = len(wrong) - _MOST_DIFFERENCES
    return [*lines, f"  and {more:,} more"] if more > 0 else lines


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """As `table`, with numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    aligned = [
        [cell if at < 2 else cell.rjust(widths[at]) for at, cell in enumerate(line)]
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
