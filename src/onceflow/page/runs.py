"""Runs of `onceflow verify` as their views need them."""

from __future__ import annotations

from typing import Any

from onceflow.harness.schedule import is_kill
from onceflow.page.html import bar

Row = dict[str, Any]

_VERDICTS = {
    "valid": "valid: nothing lost, nothing twice",
    "invalid": "invalid: what came out is not the truth",
    "unknown": "unknown: a check could not be made",
}
_STATES = {"running": "running", "broken": "interrupted: it ended without a verdict"}
_FAULTS = 60  # that are listed, the newest first
_VIOLATIONS = 20


def told(run: Row) -> Row:
    """A run with its verdict in words, and how it goes."""
    progress = run.get("progress") or {}
    words = _VERDICTS.get(str(run.get("verdict"))) or _STATES.get(run["state"], "unknown")
    now, share = "", 0.0
    if progress:
        of = progress.get("of") or 0
        share = (progress.get("faults") or 0) / of if of else 0.0
        now = (
            f"{progress.get('job')} to {progress.get('sinks')}: {progress.get('faults')} of {of} "
            f"faults, {progress.get('rows_in') or 0:,} rows in, {progress.get('rows_out') or 0:,} "
            f"rows out, {progress.get('violations')} violations so far"
        )
    return {**run, "words": words, "now": now, "bar": bar(share, "progress")}


def faults(run: Row) -> list[Row]:
    """What struck, the newest first: from the result, or from the events of a run that goes on."""
    result = run.get("result") or {}
    known = result.get("faults") or [
        e for e in run.get("events") or () if e.get("event") == "fault"
    ]
    return [
        {
            "kill": is_kill(str(fault.get("kind"))),
            "when": f"{fault.get('at_s') or 0:.1f} s",
            "says": f"{fault.get('kind') or ''}: {fault.get('what') or ''}".strip(": ")
            + ("" if fault.get("hit", True) else " (missed)"),
        }
        for fault in list(reversed(known))[:_FAULTS]
    ]


def violations(run: Row) -> list[str]:
    found = (run.get("result") or {}).get("violations") or []
    said = [
        f"{one.get('kind')}: {one.get('where')}: {one.get('message')}"
        if isinstance(one, dict)
        else str(one)
        for one in found
    ]
    more = len(said) - _VIOLATIONS
    return said[:_VIOLATIONS] + ([f"and {more} more"] if more > 0 else [])
