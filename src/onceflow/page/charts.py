"""Pictures as SVG that the server draws: no script, no style of its own, words for each.

Shapes lie in an inner picture that is stretched to the width there is; text lies outside of it, so
that it keeps its size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from onceflow.page import words
from onceflow.page.times import seconds

Row = dict[str, Any]

POINTS = 240  # of a line, at most
_LABEL = 0.1  # of the width that the words of a mark take
_MARKS = 20  # between epochs
_STEPS = tuple(words.STEPS)
_SMALLEST, _LARGEST = 1e-9, 1e300  # values that a scale is made for
_CAP = 2.5  # an epoch that took so many times as long as most is cut off, and says so


def sparkline(values: Sequence[float]) -> Markup:
    """Rows a second of the last two minutes."""
    if not values:
        return Markup("")
    most = max(*values, 1e-9)
    step = 100 / max(1, len(values) - 1)
    line = " ".join(f"{i * step:.1f},{28 - 26 * v / most:.1f}" for i, v in enumerate(values))
    says = (
        f"rows published a second over the last two minutes: now {words.rate(values[-1])}, "
        f"at most {words.rate(max(values))}"
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" '
        'aria-label="{}"><polygon points="0,29 {} 100,29"/><polyline points="{}"/></svg>'
    ).format(says, line, line)


# ---------------------------------------------------------------- epochs, step by step


@dataclass(frozen=True)
class Timeline:
    """A picture of epochs, and what its frame says."""

    picture: Markup
    strip: Markup  # the signs of marks, above it
    top: str  # of the scale
    first: Markup
    last: Markup
    shares: list[tuple[str, str]]  # step -> how much of all the time
    focus: str  # the epoch that is told at first


def timeline(query: Row, marks: Iterable[Row], place: str) -> Timeline | None:
    """The last epochs of a query as stacked columns; what happened between them, where it did.
    `place`: the address of an epoch, without its number."""
    steps: list[Row] = [step for step in query.get("steps") or () if step.get("ms")]
    if not steps:
        return None
    slots = _slots(steps, marks)
    totals = sorted(_total(step) for step in steps)
    usual = totals[int(0.9 * (len(totals) - 1))]
    most = max(1.0, totals[-1] if totals[-1] <= _CAP * usual else 1.5 * usual)
    shapes, strip = [], []
    for index, slot in enumerate(slots):
        middle = 100 * (index + 0.5) / len(slots)
        if "ms" in slot:
            last = slot is steps[-1]
            shapes.append(_column(query["query"], slot, index * 10, most, place, last=last))
            if _total(slot) > most:
                strip.append(f'<text class="over" x="{middle:.2f}%" y="11">▴</text>')
        else:
            kind = escape(slot["kind"])
            says = escape(_mark_says(slot))
            shapes.append(
                f'<g class="mark m-{kind}"><title>{says}</title>'
                f'<rect class="hit" x="{index * 10}" width="10" height="100"/>'
                f'<line x1="{index * 10 + 5}" x2="{index * 10 + 5}" y1="0" y2="100"/></g>'
            )
            sign = words.MARKS.get(slot["kind"], "·")
            strip.append(f'<text class="m-{kind}" x="{middle:.2f}%" y="11">{sign}</text>')
    width = 10 * len(slots)
    says = escape(f"the last {len(steps)} epochs of {query['query']}, each with its steps")
    all_of_it = sum(totals) or 1.0
    return Timeline(
        Markup(
            f'<svg class="plot" viewBox="0 0 {width} 100" preserveAspectRatio="none" role="group" '
            f'aria-label="{says}">{"".join(shapes)}</svg>'
        ),
        Markup(f'<svg class="strip" aria-hidden="true">{"".join(strip)}</svg>'),
        words.ms(most),
        words.clock(steps[0].get("at")),
        words.clock(steps[-1].get("at")),
        [
            (step, words.share(sum((s["ms"].get(step) or 0) for s in steps) / all_of_it))
            for step in _STEPS
        ],
        epoch_says(steps[-1]),
    )


def _slots(steps: list[Row], marks: Iterable[Row]) -> list[Row]:
    """Epochs and what happened since the first of them, in the order of time."""
    begin = seconds(steps[0].get("at"))
    if begin is None:
        return list(steps)
    since = [m for m in marks if (at := seconds(m.get("at"))) is not None and at >= begin]
    timed = [(seconds(slot.get("at")) or begin, slot) for slot in [*steps, *since[-_MARKS:]]]
    return [slot for _, slot in sorted(timed, key=lambda pair: pair[0])]


def _column(query: str, step: Row, x: int, most: float, place: str, *, last: bool) -> str:
    shapes, y = [], 100.0
    for name in _STEPS:
        height = 100 * (step["ms"].get(name) or 0) / most
        if height > 0.05:
            y -= height
            top, tall = (y, height) if y >= 0 else (0.0, max(0.0, y + height))
            shapes.append(
                f'<rect class="s-{name}" x="{x + 1}" y="{top:.1f}" width="8" height="{tall:.1f}"/>'
            )
    says = escape(epoch_says(step))
    number = int(step["epoch"])
    return (
        f'<a id="e-{escape(query)}-{number}" class="column" href="{escape(place)}{number}" '
        f'tabindex="{0 if last else -1}"><title>{says}</title>'
        f'<rect class="hit" x="{x}" width="10" height="100"/>'
        f"{''.join(shapes)}</a>"
    )


def epoch_says(step: Row) -> str:
    """An epoch in one line."""
    parts = ", ".join(f"{n} {words.ms(step['ms'][n])}" for n in _STEPS if n in step["ms"])
    known = step.get("rows_in") is not None
    rows_in = f"{words.rows(step['rows_in'])} in" if known else "rows in not known"
    rows = f"{rows_in}, {words.rows(step.get('rows_out'))} out"
    return (
        f"epoch {words.epoch(step['epoch'])} at {str(step.get('at'))[11:19]} UTC: "
        f"{words.ms(_total(step))} ({parts}); {rows}; term {step.get('term')}"
    )


def _total(step: Row) -> float:
    return float(sum(ms or 0 for ms in step["ms"].values()))


def _mark_says(mark: Row) -> str:
    return f"{str(mark.get('at'))[11:19]} UTC: {mark.get('says') or mark['kind']}"


# ---------------------------------------------------------------- lines over time


@dataclass(frozen=True)
class Line:
    """One of the lines of a chart: (seconds, value)."""

    kind: str  # committed, or truth
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A picture of lines, and what its frame says."""

    picture: Markup
    strip: Markup
    scale: list[float]  # top to bottom
    first: float  # seconds
    last: float


def chart(lines: Sequence[Line], marks: Sequence[Row], says: str) -> Chart | None:
    """Lines over time, with upright marks that say what happened."""
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    first, last = min(t for t, _ in points), max(t for t, _ in points)
    span = max(last - first, 1.0)
    most = nice(max(value for _, value in points))

    def x(t: float) -> float:
        return 1000 * (t - first) / span

    shapes = [f'<line class="grid" x1="0" x2="1000" y1="{y}" y2="{y}"/>' for y in (0, 50, 100)]
    strip, free = [], -1.0
    for mark in marks:
        moment = mark.get("t")
        at = x(moment) / 1000 if isinstance(moment, int | float) else -1.0
        if not 0 <= at <= 1:
            continue
        kind = escape(mark.get("mark") or "mark")
        told = escape(f"{moment:.1f} s: {mark.get('what') or kind}")
        shapes.append(
            f'<g class="mark m-{kind}"><title>{told}</title>'
            f'<rect class="hit" x="{1000 * at - 6:.1f}" width="12" height="100"/>'
            f'<line x1="{1000 * at:.1f}" x2="{1000 * at:.1f}" y1="0" y2="100"/></g>'
        )
        sign = words.MARKS.get(str(mark.get("mark")), "·")
        word = words.MARK_WORDS.get(str(mark.get("mark")), str(kind))
        anchor = "end" if at > 1 - _LABEL else "start"
        left = at - _LABEL if anchor == "end" else at
        text = sign if left < free else f'{sign}<tspan class="word"> {escape(word)}</tspan>'
        free = max(free, left + _LABEL)
        strip.append(
            f'<text class="m-{kind}" x="{100 * at:.2f}%" y="11" text-anchor="{anchor}">'
            f"{text}</text>"
        )
    for line in lines:
        path = " ".join(
            f"{x(t):.1f},{100 - 100 * (value / most):.2f}" for t, value in _thin(line.points)
        )
        shapes.append(f'<polyline class="line l-{line.kind}" points="{path}"/>')
    return Chart(
        Markup(
            '<svg class="plot" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(says)}">{"".join(shapes)}</svg>'
        ),
        Markup(f'<svg class="strip" aria-hidden="true">{"".join(strip)}</svg>'),
        [most, most / 2, 0.0],
        first,
        last,
    )


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Not more than a screen shows; the first and the last stay."""
    every = -(-len(points) // POINTS)
    if every <= 1:
        return list(points)
    return [*points[:-1:every], points[-1]]


def nice(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten; of what no scale is for, 1 or the value."""
    if not _SMALLEST < value < _LARGEST:
        return value if _LARGEST <= value < math.inf else 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value)
