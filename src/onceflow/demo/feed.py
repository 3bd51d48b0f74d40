"""Appends the demo's stream to its log, commit by commit, while the job runs or is down."""

from __future__ import annotations

import time
from collections.abc import Callable

from onceflow.demo.stream import COMMITS, Row, Stream, table
from onceflow.log.embedded import EmbeddedLog

_APPEND_EVERY = 0.1  # seconds


class Feed:
    """Each life of the job has a part of the stream, and the log gets the rest of it while the
    job is down. So a job that is to be killed always has rows ahead: an epoch to be killed in.
    """

    def __init__(
        self,
        stream: Stream,
        log: EmbeddedLog,
        *,
        lives: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = len(stream.rows)
        self.appended = 0
        self._stream, self._log = stream, log
        self._left = list(enumerate(stream.commits()))[::-1]
        self._part = self.rows / lives
        self._clock = clock
        self._due = 0.0

    @property
    def done(self) -> bool:
        return not self._left

    def append_while_down(self, life: int) -> None:
        """Before the first life a little, before each other the rest of the part of the last."""
        self._append_up_to(max(self._part * life, self._part / 3))

    def append(self, *, read: int) -> None:
        """Not so far ahead of a job that has read so many rows that nothing would be left."""
        self._append_up_to(min(read + self._part / 3, 0.9 * self.rows))

    def append_the_rest(self) -> None:
        self._append_up_to(self.rows)

    def half_of_part(self, life: int) -> float:
        """The rows that are read when half of what is meant for this life is."""
        return self._part * (life + 0.5)

    def close(self) -> int:
        """Append the event that closes the windows; how many rows the log has then."""
        self._log.append(table([self._stream.closing]), producer="demo", sequence=COMMITS)
        return self.rows + 1

    def _append_up_to(self, rows: float) -> None:
        now = self._clock()
        if self._left and self.appended < rows and now >= self._due:
            self._due = now + _APPEND_EVERY
            number, commit = self._left.pop()
            self._append(number, commit)

    def _append(self, number: int, commit: list[Row]) -> None:
        self._log.append(table(commit), producer="demo", sequence=number)
        self.appended += len(commit)
