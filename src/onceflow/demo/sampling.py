"""The board that the page shows: samples of the outputs, and marks of kills and starts."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from onceflow.demo.application import Application
from onceflow.demo.feed import Feed
from onceflow.errors import ServerSilent

EVERY = 0.5  # seconds
_REST = 10  # pauses so many times as long as a sample took, because the table grows
_LONGEST = 3.0  # seconds; a sample takes long while jobs start or a writer locks the file


class Sampling:
    """Writes the board of a home. If an output cannot be read now (a writer locks the database, or
    was killed in the middle of a write), the next sample reads it."""

    def __init__(
        self,
        app: Application,
        feed: Feed,
        home: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._feed, self._clock = app, feed, clock
        self._board = app.module("board").Board(home)
        self._lock = threading.Lock()
        self._due = 0.0

    def turn(self) -> None:
        began = self._clock()
        if began >= self._due:
            with contextlib.suppress(sqlite3.OperationalError, ServerSilent):
                self.sample()
            ended = self._clock()
            self._due = ended + min(_REST * (ended - began), _LONGEST)

    def sample(self, *, now: bool = False) -> None:
        """Read charges and clicks first, then the expected sums, which must not be older."""
        served = self._app.clicks_served()
        campaigns = [
            replace(campaign, clicks=served.get(campaign.campaign, 0))
            for campaign in self._app.campaigns()
        ]
        with self._feed.lock:
            clicks = self._feed.truth.clicks_by_campaign()
            spend = self._feed.truth.spend_micros_by_campaign()
        if campaigns:  # none before the budget service has begun
            with self._lock:
                self._board.sample(
                    campaigns, truth_clicks=clicks, truth_spend_micros=spend, now=now
                )

    def mark(self, kind: str, what: str, **more: Any) -> None:
        with self._lock:
            self._board.mark(kind, what, **more)
