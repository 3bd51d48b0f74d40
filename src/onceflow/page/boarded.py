"""A board as its view needs it: charts with the truth beside, campaigns, marks, the verdict."""

from __future__ import annotations

from typing import Any

from onceflow.page import charts, words
from onceflow.page.boards import thinned
from onceflow.page.html import since

Row = dict[str, Any]

_MARKS = 14  # that are listed, the newest first


def shown(board: Row) -> Row:
    """What the templates of a board are given."""
    marks = board.get("marks") or []
    board = {**board, "samples": thinned(board.get("samples") or [], charts.POINTS)}
    last: Row = board.get("last") or {}
    unit: Row = board["unit"] if isinstance(board.get("unit"), dict) else {}
    currency = str(unit.get("spend") or "units")
    listed = last["campaigns"] if isinstance(last.get("campaigns"), list) else []
    campaigns = [one for one in listed if isinstance(one, dict)]
    return {
        "charts": [
            _chart("Clicks", "clicks", str(unit.get("clicks") or "clicks"), 1, board),
            _chart("Spend", "spend_micros", currency, 1_000_000, board),
        ],
        "campaigns": campaigns,
        "truth": any(one.get("truth_clicks") is not None for one in campaigns),
        "currency": currency,
        "marks": list(reversed(marks))[:_MARKS],
        "verdict": next((m for m in reversed(marks) if m.get("mark") == "verdict"), None),
    }


def _chart(title: str, name: str, unit: str, parts: int, board: Row) -> Row:
    samples, marks = board.get("samples") or [], board.get("marks") or []
    committed, truth = _points(samples, name, parts), _points(samples, f"truth_{name}", parts)
    lines = [charts.Line("truth", truth), charts.Line("committed", committed)]
    now = _value(committed[-1][1], unit) if committed else words.NOTHING
    beside = f"; truth {_value(truth[-1][1], unit)}" if truth else ""
    picture = charts.chart(
        [line for line in lines if line.points], marks, f"{title} over time: {now}{beside}"
    )
    told: Row = {"title": title, "now": now, "truth": beside, "chart": picture}
    if picture is not None:
        told.update(
            scale=[_value(value, unit) for value in picture.scale],
            first=since(picture.first),
            last=since(picture.last),
            says=_told(marks),
        )
    return told


def _told(marks: list[Row]) -> str:
    kills = sum(mark.get("mark") == "kill" for mark in marks)
    return "no kill so far" if not kills else f"{kills} {'kill' if kills == 1 else 'kills'} so far"


def _points(samples: list[Row], name: str, parts: int) -> list[tuple[float, float]]:
    found = []
    for sample in samples:
        at, value = sample.get("t"), (sample.get("totals") or {}).get(name)
        if isinstance(at, int | float) and isinstance(value, int | float):
            found.append((float(at), float(value) / parts))
    return found


def _value(value: float, unit: str) -> str:
    return (
        f"{value:,.0f} {unit}" if value == int(value) or value >= 1000 else f"{value:,.2f} {unit}"
    )
