"""Boards: what an application writes for the page, and the view of it.

<home>/_boards/<name>.jsonl   a head, then samples and marks

A board is made of samples of numbers over time, with the expected numbers (`truth_…`) beside them,
and of marks for what happened. The application may be of any version: what has another shape is
left out.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import cast

from markupsafe import Markup

from onceflow.errors import JobError
from onceflow.harness import charts
from onceflow.page import formatting
from onceflow.page.files import JsonLinesFile, Row, first_row, last_rows, names_in
from onceflow.page.shapes import Board, BoardSummary
from onceflow.store.names import NAME, check_name

_SAMPLES = 600
_KEPT = 2 * _SAMPLES
_MARKS = 200
_LISTED = 14  # marks, the newest first


def boards(home: str | os.PathLike[str]) -> list[BoardSummary]:
    folder = Path(home) / "_boards"
    found: list[BoardSummary] = []
    for name in names_in(folder):
        if name.endswith(".jsonl") and NAME.fullmatch(name.removesuffix(".jsonl")):
            rows, _ = last_rows(folder / name, 64 * 2**10)
            newest = next((row.get("at") for row in reversed(rows) if row.get("at")), None)
            title = _head(folder / name).get("title")
            board = name.removesuffix(".jsonl")
            found.append({"board": board, "title": title or board, "at": newest})
    return found


class BoardCache:
    """One board. Each of its lines is read once."""

    def __init__(self, home: str | os.PathLike[str], name: str) -> None:
        self._name = check_name("board", name)
        self._path = Path(home) / "_boards" / f"{name}.jsonl"
        self._samples: deque[Row] = deque(maxlen=_KEPT)
        self._marks: deque[Row] = deque(maxlen=_MARKS)
        self._head: Row = {}
        self._last: Row | None = None
        self._lines = JsonLinesFile(self._path, self._take, self._restart)

    def read(self) -> Board:
        """The head, some of the last samples, and the marks; `JobError` if there is no such
        board."""
        if not self._path.is_file():
            raise JobError(
                f"there is no board {self._name}",
                hint="start the application that writes it, such as onceflow demo",
            )
        self._lines.read()
        if not self._head:
            self._head = _head(self._path)
        found = {
            **self._head,
            "board": self._name,
            "samples": thinned(list(self._samples), _SAMPLES),
            "marks": list(self._marks),
            "last": self._last,
        }
        return cast(Board, found)  # with what else the application wrote into its head

    def _take(self, row: Row) -> None:
        if isinstance(row.get("mark"), str):
            self._marks.append(row)
        elif isinstance(row.get("totals"), dict):
            self._last = row
            kept = {k: v for k, v in row.items() if k != "campaigns"}  # they are large
            self._samples.append(kept)

    def _restart(self) -> None:
        self._samples.clear()
        self._marks.clear()
        self._head, self._last = {}, None


def thinned(rows: list[Row], keep: int) -> list[Row]:
    """At most `keep` rows, evenly spaced, with the first and the last."""
    if len(rows) <= keep:
        return rows
    step = (len(rows) - 1) / (keep - 1)
    return [rows[round(i * step)] for i in range(keep)]


def _head(path: Path) -> Row:
    first = first_row(path)
    return first if "board" in first else {}


# ---------------------------------------------------------------- the view


def board_view(board: Board) -> Row:
    """The values of a board's templates."""
    marks = board.get("marks") or []
    samples = thinned(board.get("samples") or [], charts.POINTS)
    last: Row = board.get("last") or {}
    found = board.get("unit")
    unit: Row = found if isinstance(found, dict) else {}
    currency = str(unit.get("spend") or "units")
    listed = last["campaigns"] if isinstance(last.get("campaigns"), list) else []
    campaigns = [one for one in listed if isinstance(one, dict)]
    return {
        "charts": [
            _chart("Clicks", "clicks", str(unit.get("clicks") or "clicks"), samples, marks),
            _chart("Spend", "spend_micros", currency, samples, marks, parts=1_000_000),
        ],
        "campaigns": campaigns,
        "expected": any(one.get("truth_clicks") is not None for one in campaigns),
        "currency": currency,
        "marks": list(reversed(marks))[:_LISTED],
        "verdict": next((m for m in reversed(marks) if m.get("mark") == "verdict"), None),
    }


def _chart(
    title: str, name: str, unit: str, samples: list[Row], marks: list[Row], *, parts: int = 1
) -> Row:
    """`parts`: how many of what the samples count make one of `unit`."""
    committed, expected = _points(samples, name, parts), _points(samples, f"truth_{name}", parts)
    lines = [charts.Line("expected", expected), charts.Line("committed", committed)]
    now = _value(committed[-1][1], unit) if committed else formatting.NOTHING
    beside = f"; expected {_value(expected[-1][1], unit)}" if expected else ""
    kills = sum(mark.get("mark") == "kill" for mark in marks)
    picture = charts.line_chart(
        [line for line in lines if line.points],
        [_mark(mark) for mark in marks if isinstance(mark.get("t"), int | float)],
        f"{title} over time: {now}{beside}",
    )
    shown: Row = {"title": title, "now": now, "expected": beside, "chart": None}
    if picture is not None:
        shown["chart"] = Markup(picture.svg)
        shown["strip"] = Markup(picture.strip)
        shown["scale"] = [_value(value, unit) for value in picture.scale]
        shown["first"] = formatting.elapsed(picture.first)
        shown["last"] = formatting.elapsed(picture.last)
        shown["says"] = f"{formatting.count(kills, 'kills')} so far" if kills else "no kill so far"
    return shown


def _mark(mark: Row) -> charts.Mark:
    kind = str(mark.get("mark") or "mark")
    return charts.Mark(
        at=float(mark["t"]),
        kind=kind,
        title=f"{mark['t']:.1f} s: {mark.get('what') or kind}",
        sign=formatting.MARKS.get(kind, "·"),
        word=formatting.MARK_WORDS.get(kind, kind),
    )


def _points(samples: list[Row], name: str, parts: int) -> list[tuple[float, float]]:
    found = []
    for sample in samples:
        at, value = sample.get("t"), (sample.get("totals") or {}).get(name)
        if isinstance(at, int | float) and isinstance(value, int | float):
            found.append((float(at), float(value) / parts))
    return found


def _value(value: float, unit: str) -> str:
    decimals = 0 if value == int(value) or value >= 1000 else 2
    return f"{value:,.{decimals}f} {unit}"


def budget_bar(campaign: Row) -> Markup:
    """How much of its budget a campaign has spent."""
    spent, budget = campaign.get("spend_micros"), campaign.get("budget_micros")
    if not isinstance(spent, int) or not isinstance(budget, int) or budget <= 0:
        return Markup(formatting.NOTHING)
    return Markup(charts.bar(spent / budget, "budget")) + Markup("<span>{}</span>").format(
        formatting.share(spent / budget)
    )
