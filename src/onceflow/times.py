"""How long each step of the last epochs took and how many rows went in: kept for people to look at.

`onceflow/times.jsonl` of a query has a line for each epoch that was published, and one more when
Spark has reported on it. Nothing depends on it: it is not made durable, and what a crash takes is
not written again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

_FILE = "times.jsonl"
_STEPS = {
    "epoch.checked": "check", "epoch.staged": "stage", "epoch.hardened": "harden",
    "epoch.decided": "decide", "epoch.published": "publish", "epoch.swept": "sweep",
}  # fmt: skip


class Reports(Protocol):
    def report(self, epoch: int) -> dict[str, Any] | None:
        """What Spark says of an epoch, if it has finished it and still knows."""


class Times:
    """The times of one query, as its driver writes them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._path, self._keep = folder / _FILE, keep
        self._lines: int | None = None  # in the file
        self._epoch, self._at = -1, 0.0
        self._took: dict[str, float] = {}
        self._unreported: deque[int] = deque(maxlen=3)

    def begin(self, epoch: int) -> None:
        self._epoch, self._at, self._took = epoch, time.monotonic(), {}

    def passed(self, point: str) -> None:
        """A fault point, which stands at the end of a step."""
        if point in _STEPS:
            at = time.monotonic()
            self._took[_STEPS[point]] = round((at - self._at) * 1000, 1)
            self._at = at

    def end(self, running: Reports | None) -> None:
        """The epoch is published and swept. Spark reports on it a moment later."""
        self._unreported.append(self._epoch)
        self._write({"epoch": self._epoch, "ms": self._took})
        self.ask(running)

    def ask(self, running: Reports | None) -> None:
        """Write what Spark has reported since."""
        for epoch in list(self._unreported):
            found = None
            with contextlib.suppress(Exception):  # Spark may be going: that is noticed elsewhere
                found = None if running is None else running.report(epoch)
            if found is not None:
                self._unreported.remove(epoch)
                states = [operator["numRowsTotal"] for operator in found["stateOperators"]]
                self._write({
                    "epoch": epoch, "rows_in": found["numInputRows"],
                    "state_rows": sum(states) if states else None,
                    "spark_ms": found["durationMs"],
                })  # fmt: skip

    def _write(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk stops the job elsewhere
            if self._lines is None:
                self._lines = len(_lines(self._path))
            if self._lines > 4 * self._keep:
                kept = _lines(self._path)[-2 * self._keep :]
                new = self._path.with_suffix(".new")
                new.write_text("".join(text + "\n" for text in kept))
                os.replace(new, self._path)
                self._lines = len(kept)
            with open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")
            self._lines += 1


def read_times(folder: Path) -> dict[int, dict[str, Any]]:
    """Epoch -> what is known of it."""
    found: dict[int, dict[str, Any]] = {}
    for text in _lines(folder / _FILE):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, after a crash
            line = json.loads(text)
            found.setdefault(line["epoch"], {}).update(line)
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
