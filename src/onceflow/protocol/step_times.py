"""Times of the steps of the last epochs and their numbers of rows, for people.

`onceflow/times.jsonl` of a query has one line for each published epoch, with the time it began, and
another one when Spark has reported on it. Nothing depends on this file: it is not fsynced, and
lines that a crash loses are not written again.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from onceflow.protocol.home import now

_FILE = "times.jsonl"
_STEPS = {
    "epoch.checked": "check", "epoch.staged": "stage", "epoch.hardened": "harden",
    "epoch.decided": "decide", "epoch.published": "publish", "epoch.swept": "sweep",
}  # fmt: skip
TO_PUBLISHED = tuple(_STEPS.values())[:-1]
# Seconds: the upper bounds of the histogram of the time until an epoch is published.
CLASSES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass
class Sums:
    """Sums over all epochs of one driver, in seconds. They only grow."""

    steps: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_STEPS.values(), 0.0))
    epochs: int = 0
    to_published: float = 0.0
    classes: list[int] = field(default_factory=lambda: [0] * len(CLASSES))  # cumulative counts

    def add(self, took: dict[str, float]) -> None:
        for step, ms in took.items():
            self.steps[step] += ms / 1000
        seconds = sum(took.get(step, 0.0) for step in TO_PUBLISHED) / 1000
        self.epochs += 1
        self.to_published += seconds
        for i, most in enumerate(CLASSES):
            self.classes[i] += seconds <= most

    def as_json(self) -> dict[str, Any]:
        return {
            "steps_s": {step: round(seconds, 4) for step, seconds in self.steps.items()},
            "committed_s": {
                "epochs": self.epochs, "sum": round(self.to_published, 4),
                "at_most": [list(pair) for pair in zip(CLASSES, self.classes, strict=True)],
            },
        }  # fmt: skip


class Reports(Protocol):
    def report(self, epoch: int) -> dict[str, Any] | None:
        """Spark's report on an epoch, if Spark has finished the epoch and still has the report."""


class StepTimes:
    """The times of one query, as its driver writes them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._path, self._keep = folder / _FILE, keep
        self._lines: int | None = None  # in the file
        self._epoch, self._at, self._began = -1, 0.0, ""
        self._took: dict[str, float] = {}
        self.sums = Sums()
        self._unreported: deque[int] = deque(maxlen=3)
        self._asking = threading.Lock()  # an epoch and the job may end at the same time

    def begin(self, epoch: int) -> None:
        self._epoch, self._at, self._took, self._began = epoch, time.monotonic(), {}, now()

    def passed(self, point: str) -> None:
        """Note the time at a fault point that ends a step."""
        if point in _STEPS:
            at = time.monotonic()
            self._took[_STEPS[point]] = round((at - self._at) * 1000, 1)
            self._at = at

    def end(self, running: Reports | None) -> None:
        """Write the times of the epoch. Spark reports on it a moment later."""
        with self._asking:
            self._unreported.append(self._epoch)
        self._write({"epoch": self._epoch, "at": self._began, "ms": self._took})
        self.sums.add(self._took)
        self.ask(running)

    def ask(self, running: Reports | None) -> None:
        """Write Spark's reports on the epochs that it has not reported on before."""
        with self._asking:
            self._ask(running)

    def _ask(self, running: Reports | None) -> None:
        for epoch in list(self._unreported):
            found = None
            with contextlib.suppress(Exception):  # Spark may be shutting down: others report that
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
    """Epoch -> the facts from all its lines."""
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
