"""What `onceflow verify` says of its events."""

from __future__ import annotations

from onceflow.cli.output import number, paint
from onceflow.cli.telling import Event, Words

_MOST_VIOLATIONS = 20
_COLOURS = {"valid": "ok", "invalid": "wrong", "unknown": "warning"}


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
    lines += [f"  allowed by its guarantee: {_said(allowed)}" for allowed in event["allowed"]]
    lines += [f"  {_said(violation)}" for violation in event["violations"][:_MOST_VIOLATIONS]]
    more = len(event["violations"]) - _MOST_VIOLATIONS
    lines += [f"  and {more} more"] if more > 0 else []
    lines += [f"  unknown: {why}" for why in event["unknown"]]
    return [*lines, f"again: {event['command']}"]


def _said(violation: Event) -> str:
    return f"{violation['kind']}: {violation['where']}: {violation['message']}"


WORDS = Words(happened, lambda event: f"{_stamp(event)}  {how_it_goes(event)}", news_every=10.0)
