"""What happened to a job, from its journal: starts, kills, restarts, errors, stops."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from onceflow.page.files import Row
from onceflow.page.times import seconds
from onceflow.protocol.lease import host_name

_KEPT = 1000
_OPEN = ("starting", "started", "stopping")  # a life that has not ended by its own account
_KILLS = ("DriverDied", "JvmDied")
_STARTS_WITHIN = 600.0  # seconds; a job that starts for longer is taken for one that does not
_MARGIN = 5.0


class Story:
    """Is told each event once, in order."""

    def __init__(self) -> None:
        self.marks: deque[Row] = deque(maxlen=_KEPT)
        self.clear()

    def clear(self) -> None:
        self.marks.clear()
        self.restarts = 0
        self.last: Row = {}
        self.error: str | None = None

    def take(self, event: Row) -> None:
        at, message = event.get("at"), str(event.get("message") or "")
        if seconds(at) is None:
            return
        match event.get("event"):
            case "starting":
                if self.last.get("event") in _OPEN:
                    seen = event.get("seen")
                    self._mark(seen if seconds(seen) else at, "killed", _killed(self.last))
                    self.restarts += 1
            case "started":
                self.error = None
                self._mark(at, "start", _started(event))
            case "restarting":
                self.restarts += 1
                self.error = message
                kind = "killed" if event.get("kind") in _KILLS else "restart"
                wait = float(event.get("in_s") or 0)
                then = f"it starts again in {wait:g} s" if wait else "it starts again at once"
                self._mark(at, kind, f"{message}; {then}")
            case "error":
                self.error = message
                self._mark(at, "error", message)
            case "ended":
                self.error = None
                how = "at once" if event.get("at_once") else "at the end of an epoch"
                if self.last.get("event") != "ended":  # driver and supervisor both say so
                    self._mark(at, "stop", f"stopped {how}")
            case "stopping":
                pass
            case _:
                return
        self.last = event

    def _mark(self, at: Any, kind: str, says: str) -> None:
        self.marks.append({"at": at, "kind": kind, "says": says})

    # ------------------------------------------------------------ now

    def starting(self) -> bool:
        """Is a driver on its way that does not lead yet?"""
        if self.last.get("event") != "starting" or not self._within(_STARTS_WITHIN):
            return False
        return self.last.get("host") != host_name() or _lives(self.last.get("pid"))

    def restarting(self) -> bool:
        """Has its supervisor said that it will start it again, just now?"""
        waits = float(self.last.get("in_s") or 0) + _MARGIN
        return self.last.get("event") == "restarting" and self._within(waits)

    def _within(self, limit: float) -> bool:
        at = seconds(self.last.get("at"))
        return at is not None and time.time() - at < limit


def _killed(last: Row) -> str:
    pid = f" (process {last['pid']})" if last.get("pid") else ""
    return f"the driver{pid} and its supervisor were killed: they ended without a word"


def _started(event: Row) -> str:
    queries = event.get("queries")
    told: Iterable[Row] = queries.values() if isinstance(queries, dict) else ()
    parts = [query for query in told if isinstance(query, dict)]
    terms = sorted(int(q["term"]) for q in parts if q.get("term") is not None)
    after = [q["resumes_after"] for q in parts if q.get("resumes_after") is not None]
    text = f"started, process {event.get('pid')}"
    if terms:
        text += f", term {terms[-1]}"
    return text + (f", goes on after epoch {max(after):,}" if after else ", from the beginning")


def _lives(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, TypeError, OverflowError):
        return False
    return True
