"""What the page shows of the application: samples of its outputs, and marks of what happened."""

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
_REST = 10  # times as long as a sample took: of a table that grows without end it is rare
_LONGEST = 3.0  # seconds; while jobs start, and while a writer locks its file, one takes long


class Sampling:
    """Writes the board of a home. Nothing depends on it: what cannot be read now (a database that
    its writer locks, or has left in the middle of a write) is read the next time."""

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
        """Charged spend and served clicks, then the truth, which is never behind them."""
        served = self._app.clicks_served()
        campaigns = [
            replace(campaign, clicks=served.get(campaign.campaign, 0))
            for campaign in self._app.campaigns()
        ]
        with self._feed.lock:
            clicks = self._feed.truth.clicks_by_campaign()
            spend = self._feed.truth.spend_micros_by_campaign()
        if campaigns:  # else the budget service has not begun
            with self._lock:
                self._board.sample(
                    campaigns, truth_clicks=clicks, truth_spend_micros=spend, now=now
                )

    def mark(self, kind: str, what: str, **more: Any) -> None:
        with self._lock:
            self._board.mark(kind, what, **more)
