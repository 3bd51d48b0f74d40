"""The journal of a job: its progress and events, for people and pages that look at its home.

<home>/<job>/progress.json   about once a second: the progress of each query
<home>/<job>/events.jsonl    starts, restarts, errors and ends, as `onceflow run --json` tells them

Nothing depends on them: they are not synced, events that a crash loses are not written again, and
a write that fails stops no job. The driver writes `starting` and the progress, its supervisor the
other events. So a `starting` without an `ended`, `error` or `restarting` before it means that the
earlier driver was killed with its supervisor; its `seen` is when that driver wrote last.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onceflow.protocol.home import now
from onceflow.protocol.lease import host_name

PROGRESS, EVENTS = "progress.json", "events.jsonl"
KEPT = ("starting", "started", "restarting", "error", "stopping", "ended")
_KEEP = 1000  # lines
_TRIM_ABOVE = 1500
_LONGEST = 2000  # characters of a text
_FAILURES = (OSError, ValueError, TypeError)


class Journal:
    """The journal of one job, for its driver and its supervisor."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, folder.name

    def starting(self) -> None:
        """A driver has loaded the job and begins. No other driver leads the job."""
        with contextlib.suppress(*_FAILURES):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._trim()
            body = _read(self._folder / PROGRESS)
            seen = body.get("at") if isinstance(body, dict) else None
            self.event("starting", job=self._name, pid=os.getpid(), host=host_name(), seen=seen)

    def event(self, event: str, **fields: Any) -> None:
        """Write an event if it is one of `KEPT`."""
        if event not in KEPT:
            return
        with contextlib.suppress(*_FAILURES):
            fields.pop("queries" if event == "ended" else "", None)
            line = json.dumps({"event": event, "at": now(), **_short(fields)})
            with open(self._folder / EVENTS, "a") as file:
                file.write(line + "\n")

    def progress(self, queries: list[dict[str, Any]]) -> None:
        with contextlib.suppress(*_FAILURES):
            body = {"at": now(), "pid": os.getpid(), "job": self._name, "queries": queries}
            new = self._folder / f".{PROGRESS}.new"
            new.write_text(json.dumps(body))
            os.replace(new, self._folder / PROGRESS)

    def _trim(self) -> None:
        path = self._folder / EVENTS
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) > _TRIM_ABOVE:
            new = path.with_suffix(".new")
            new.write_text("".join(line + "\n" for line in lines[-_KEEP:]))
            os.replace(new, path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _short(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value[:_LONGEST] + " …" if isinstance(value, str) and len(value) > _LONGEST else value
        for name, value in fields.items()
    }
