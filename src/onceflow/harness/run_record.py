"""The record of a run of `onceflow verify`, for the page: its events, its result, its report.

<folder>/<run>/events.jsonl, result.json, report.html

A record that cannot be written stops no run. The newest 100 runs are kept.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

from onceflow.protocol.home import now

KEEP = 100  # runs
_PROGRESS_EVERY = 2.0  # seconds


class RunRecord:
    """One run. The first event makes its folder, so that a refused run leaves nothing."""

    def __init__(self, root: Path, command: str) -> None:
        self._root, self._command = root, command
        self._folder: Path | None = None
        self._said = float("-inf")

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            if time.monotonic() - self._said < _PROGRESS_EVERY:
                return
            self._said = time.monotonic()
        if event["event"] == "verdict":  # the rest is in result.json
            event = {"event": "verdict", "verdict": event["verdict"], "at_s": event.get("at_s")}
        with contextlib.suppress(OSError, TypeError, ValueError):
            first = self._folder is None
            line = {**event, "at": now(), **({"command": self._command} if first else {})}
            with open(self._made() / "events.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def ended(self, result: dict[str, Any]) -> None:
        from onceflow.harness.report import html

        with contextlib.suppress(OSError, TypeError, ValueError):
            folder = self._made()
            (folder / "report.html").write_text(html(result))
            new = folder / ".result.new"
            new.write_text(json.dumps(result) + "\n")
            new.replace(folder / "result.json")

    def _made(self) -> Path:
        if self._folder is None:
            found = self._root / now().replace(":", "").replace(".", "-")
            found.mkdir(parents=True)
            self._folder = found
            runs = sorted(path for path in self._root.iterdir() if path.is_dir())
            for old in runs[:-KEEP]:
                shutil.rmtree(old, ignore_errors=True)
        return self._folder
