"""Feeds events at a rate, whether jobs run or not, and adds them to the expected result."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

_MOST = 120  # chunks in one batch, when it is late
_WINDOW = 5.0  # seconds over which the rate is taken

Lines = dict[str, list[Any]]  # by region


class Sender(Protocol):
    """The feed of the application. It notes what it sends, so that anybody can repeat it."""

    def send(self, chunks: int) -> Lines: ...

    def close(self) -> Lines: ...


class Feed:
    """Sends what is due by the clock, and adds it to `truth`, the expected result.

    The number of chunks is not known before, because a run lasts until all strikes are over. Read
    an output first and then `truth`, under `lock`: then `truth` has everything that the output has.
    """

    def __init__(
        self,
        sender: Sender,
        truth: Any,
        *,
        chunks_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chunks = self.rows = 0
        self.truth, self.lock = truth, threading.Lock()
        self._sender, self._per_s, self._clock = sender, chunks_per_s, clock
        self._began: float | None = None
        self._sent: deque[tuple[float, int]] = deque()

    def turn(self) -> None:
        """Send what is due."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        due = 1 + int((now - self._began) * self._per_s) - self.chunks
        if due > 0:
            chunks = min(due, _MOST)
            with self.lock:
                self._add(self._sender.send(chunks))
            self.chunks += chunks

    def close(self) -> None:
        """Send the last lines, which close everything that is open."""
        with self.lock:
            self._add(self._sender.close())

    def rows_per_s(self) -> float:
        """Over the last seconds."""
        now = self._clock()
        recent = [(at, rows) for at, rows in list(self._sent) if now - at < _WINDOW]
        since = now - max(now - _WINDOW, self._began or now)
        return sum(rows for _, rows in recent) / since if since > 0 else 0.0

    def _add(self, lines: Lines) -> None:
        rows = sum(map(len, lines.values()))
        self.truth.add(lines)
        self.rows += rows
        self._sent.append((self._clock(), rows))
        while self._sent[0][0] < self._sent[-1][0] - _WINDOW:
            self._sent.popleft()
