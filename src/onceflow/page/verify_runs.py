"""Runs of `onceflow verify` that were kept under a home, and the view of them.

<home>/_verify/<run>/   events.jsonl while it runs; result.json and report.html once it has ended
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from markupsafe import Markup

from onceflow.errors import JobError
from onceflow.harness import charts
from onceflow.harness.fault_schedule import is_kill
from onceflow.page.files import Row, first_row, last_rows, names_in, read_json
from onceflow.page.rates import seconds_since
from onceflow.page.shapes import Run, RunState, RunSummary
from onceflow.store.names import NAME, check_name

_READ = 4 * 2**20  # bytes of the events of a run, from the end
_EVENTS = 400  # of a run
_SILENT = 120.0  # seconds; a run that writes nothing for so long was killed
_FAULTS = 60  # that are listed, the newest first
_VIOLATIONS = 20

_STATES: dict[RunState, str] = {
    "ended": "it has ended",
    "running": "it is running",
    "broken": "it ended without a result",
}
_VERDICTS = {
    "valid": "valid: no row lost, no row duplicated",
    "invalid": "invalid: the output is not the expected result",
    "unknown": "unknown: a check could not be made",
}
_WITHOUT_VERDICT = {"running": "running", "broken": "interrupted: it ended without a verdict"}


def verify_runs(home: str | os.PathLike[str]) -> list[RunSummary]:
    """The newest first."""
    root = Path(home) / "_verify"
    runs = [_summary(root / name) for name in names_in(root) if NAME.fullmatch(name)]
    known = [run for run in runs if run["began"] is not None or run["verdict"] is not None]
    return sorted(known, key=lambda run: str(run["began"]), reverse=True)


def verify_run(home: str | os.PathLike[str], run: str) -> Run:
    """A run with its events and, once it has ended, its result; `JobError` if there is none."""
    folder = Path(home) / "_verify" / check_name("run", run)
    if not folder.is_dir():
        raise JobError(f"there is no run {run}", hint="make one: onceflow verify")
    events, _ = last_rows(folder / "events.jsonl", _READ)
    kept = [e for e in events if e.get("event") != "progress"][-_EVENTS:]
    return {**_summary(folder), "events": kept, "result": read_json(folder / "result.json")}


def _summary(folder: Path) -> RunSummary:
    events, size = last_rows(folder / "events.jsonl", 256 * 2**10)
    ended: dict[str, Any] | None = read_json(folder / "result.json")
    result = ended or {}
    first = first_row(folder / "events.jsonl")
    quiet = seconds_since((events[-1] if events else {}).get("at"))
    running = quiet is not None and quiet < _SILENT
    state: RunState = "ended" if ended else "running" if running else "broken"
    progress = next((e for e in reversed(events) if e.get("event") == "progress"), None)
    return {
        "run": folder.name,
        "state": state,
        "says": _STATES[state],
        "began": result.get("began") or first.get("at"),
        "seconds": result.get("seconds"),
        "verdict": result.get("verdict"),
        "seed": result.get("seed"),
        "command": result.get("command") or first.get("command"),
        "struck": result.get("struck"),
        "violations": None if ended is None else len(result.get("violations") or ()),
        "progress": None if ended else progress,
        "report": (folder / "report.html").is_file(),
        "events_bytes": size,
    }


# ---------------------------------------------------------------- the view


def run_view(run: RunSummary) -> Row:
    """A run with its verdict in words, and its progress."""
    progress = run.get("progress") or {}
    state = _WITHOUT_VERDICT.get(run["state"], "unknown")
    now, share = "", 0.0
    if progress:
        of = progress.get("of") or 0
        share = (progress.get("faults") or 0) / of if of else 0.0
        now = (
            f"{progress.get('job')} to {progress.get('sinks')}: {progress.get('faults')} of {of} "
            f"faults, {progress.get('rows_in') or 0:,} rows in, {progress.get('rows_out') or 0:,} "
            f"rows out, {progress.get('violations')} violations so far"
        )
    return {
        **run,
        "words": _VERDICTS.get(str(run.get("verdict"))) or state,
        "now": now,
        "bar": Markup(charts.bar(share, "progress")),
    }


def faults(run: Run) -> list[Row]:
    """The faults, newest first: from the result, or from the events while the run goes on."""
    known = (run.get("result") or {}).get("faults") or [
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


def violations(run: Run) -> list[str]:
    found = (run.get("result") or {}).get("violations") or []
    lines = [
        f"{one.get('kind')}: {one.get('where')}: {one.get('message')}"
        if isinstance(one, dict)
        else str(one)
        for one in found
    ]
    more = len(lines) - _VIOLATIONS
    return lines[:_VIOLATIONS] + ([f"and {more} more"] if more > 0 else [])
