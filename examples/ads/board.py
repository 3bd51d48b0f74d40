"""The board of the application on the page: a file of samples and marks in the home of its jobs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ads.budget import Campaign
from ads.world import CURRENCY

NAME = "ads"
_EVERY = 0.5  # seconds: at most two samples a second


class Board:
    """Appends to <home>/_boards/ads.jsonl. A crash may lose the last line."""

    def __init__(
        self,
        home: str | os.PathLike[str],
        *,
        title: str = "Ads",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(home) / "_boards" / f"{NAME}.jsonl"
        self._clock, self._began, self._sampled = clock, clock(), 0.0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = {
            "board": NAME,
            "title": title,
            "unit": {"clicks": "clicks", "spend": CURRENCY},
            "at": _text(self._began),
        }
        self.path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def sample(
        self,
        campaigns: Iterable[Campaign],
        *,
        truth_clicks: Mapping[str, int] | None = None,
        truth_spend_micros: Mapping[str, int] | None = None,
        now: bool = False,
    ) -> bool:
        """Add a sample: charges, and the expected sums if they are known. Less than half a second
        after the last sample it does nothing, unless `now`."""
        at = self._clock()
        if at - self._sampled < _EVERY and not now:
            return False
        self._sampled = at
        rows: list[dict[str, Any]] = [
            {
                "campaign": each.campaign,
                "clicks": each.clicks,
                "spend_micros": each.spent_micros,
                "budget_micros": each.budget_micros,
                "paused": each.paused,
                "truth_clicks": truth_clicks and truth_clicks[each.campaign],
                "truth_spend_micros": truth_spend_micros and truth_spend_micros[each.campaign],
            }
            for each in campaigns
        ]
        totals = {
            "clicks": sum(row["clicks"] for row in rows),
            "spend_micros": sum(row["spend_micros"] for row in rows),
            "truth_clicks": truth_clicks and sum(truth_clicks.values()),
            "truth_spend_micros": truth_spend_micros and sum(truth_spend_micros.values()),
        }
        self._write(at, {"totals": totals, "campaigns": rows})
        return True

    def mark(self, kind: str, what: str, **more: object) -> None:
        """Add a mark: kill, start, savepoint or verdict."""
        self._write(self._clock(), {"mark": kind, "what": what, **more})

    def _write(self, at: float, what: dict[str, Any]) -> None:
        line = json.dumps({"at": _text(at), "t": round(at - self._began, 3), **what})
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
