"""The journal of a job: its events (`events.jsonl`) and what its driver reported (`progress.json`).

No job depends on its journal, and another version or another program may have written it. So a
field that has another shape is left out, and the other fields still count.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeGuard

from onceflow.page.files import Row
from onceflow.page.rates import timestamp
from onceflow.page.shapes import Mark, MarkKind
from onceflow.protocol.lease import host_name

_KEPT = 1000
_RUNNING = ("starting", "started", "stopping")  # after these a driver has not reported its end
_KILLS = ("DriverDied", "JvmDied")
_STARTS_WITHIN = 600.0  # seconds; a driver that has not started by then is not called starting
_MARGIN = 5.0

_NUMBERS = ("epochs", "rows_in", "rows_in_per_s", "lag_s", "late_rows", "rejected_rows")
_MAPS = ("outputs", "steps_s")
_LONGEST = 1e9  # seconds since rows were published


class JobEvents:
    """Starts, kills, restarts, errors and stops of a job. `take` must get each event once, in
    order."""

    def __init__(self) -> None:
        self.marks: deque[Mark] = deque(maxlen=_KEPT)
        self.clear()

    def clear(self) -> None:
        self.marks.clear()
        self.restarts = 0
        self.last: Row = {}
        self.error: str | None = None

    def take(self, event: Row) -> None:
        at, message = event.get("at"), str(event.get("message") or "")
        if timestamp(at) is None:
            return
        match event.get("event"):
            case "starting":
                if self.last.get("event") in _RUNNING:
                    seen = event.get("seen")
                    self._mark(seen if timestamp(seen) else at, "killed", _killed(self.last))
                    self.restarts += 1
            case "started":
                self.error = None
                self._mark(at, "start", _started(event))
            case "restarting":
                self.restarts += 1
                self.error = message
                kind: MarkKind = "killed" if event.get("kind") in _KILLS else "restart"
                wait = float(event.get("in_s") or 0)
                then = f"it restarts in {wait:g} s" if wait else "it restarts at once"
                self._mark(at, kind, f"{message}; {then}")
            case "error":
                self.error = message
                self._mark(at, "error", message)
            case "ended":
                self.error = None
                how = "at once" if event.get("at_once") else "at the end of an epoch"
                if self.last.get("event") != "ended":  # the driver and its supervisor both report
                    self._mark(at, "stop", f"stopped {how}")
            case "stopping":
                pass
            case _:
                return
        self.last = event

    def _mark(self, at: Any, kind: MarkKind, says: str) -> None:
        self.marks.append({"at": at, "kind": kind, "says": says})

    # ------------------------------------------------------------ now

    def is_starting(self) -> bool:
        """Has a driver been started that does not lead yet?"""
        if self.last.get("event") != "starting" or not self._is_within(_STARTS_WITHIN):
            return False
        return self.last.get("host") != host_name() or _is_alive(self.last.get("pid"))

    def is_restarting(self) -> bool:
        """Has its supervisor just announced a restart?"""
        waits = float(self.last.get("in_s") or 0) + _MARGIN
        return self.last.get("event") == "restarting" and self._is_within(waits)

    def _is_within(self, limit: float) -> bool:
        at = timestamp(self.last.get("at"))
        return at is not None and time.time() - at < limit


def _killed(last: Row) -> str:
    pid = f" (process {last['pid']})" if last.get("pid") else ""
    return f"the driver{pid} and its supervisor were killed: neither reported its end"


def _started(event: Row) -> str:
    queries = event.get("queries")
    rows: Iterable[Row] = queries.values() if isinstance(queries, dict) else ()
    parts = [query for query in rows if isinstance(query, dict)]
    terms = sorted(int(q["term"]) for q in parts if q.get("term") is not None)
    after = [q["resumes_after"] for q in parts if q.get("resumes_after") is not None]
    text = f"started, process {event.get('pid')}"
    if terms:
        text += f", term {terms[-1]}"
    return text + (f", resumes after epoch {max(after):,}" if after else ", from the beginning")


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, TypeError, OverflowError):
        return False
    return True


# ---------------------------------------------------------------- progress


def progress_of_queries(body: Row) -> dict[str, Row]:
    """Query -> its known fields in `progress.json`."""
    queries = body.get("queries")
    found = queries if isinstance(queries, list) else []
    return {str(q["query"]): _known(q) for q in found if isinstance(q, dict) and "query" in q}


def _known(query: Row) -> Row:
    known: Row = {name: query[name] for name in _NUMBERS if is_number(query.get(name))}
    known |= {name: numbers_in(query.get(name)) for name in _MAPS}
    since = query.get("published_s_ago")
    if is_number(since) and 0 <= since < _LONGEST:
        known["published_s_ago"] = since
    committed = query.get("committed_s")
    if isinstance(committed, dict) and _is_histogram(committed):
        known["committed_s"] = committed
    return known


def _is_histogram(found: Row) -> bool:
    at_most = found.get("at_most")
    return (
        is_number(found.get("epochs"))
        and is_number(found.get("sum"))
        and isinstance(at_most, list)
        and all(isinstance(p, list) and len(p) == 2 and all(map(is_number, p)) for p in at_most)
    )


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_in(value: Any) -> dict[str, Any]:
    """The numbers of an object, by name; none if it is not an object."""
    found = value if isinstance(value, dict) else {}
    return {name: one for name, one in found.items() if is_number(one)}
