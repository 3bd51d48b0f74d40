"""Charts as SVG, for the report of `onceflow verify` and for the page. No script and no style.

Shapes are drawn in a picture that is stretched to the available width (`svg`). Text would be
stretched too, so it stands outside: signs and names in `strip`, above the picture, and the ends of
the scales in what the caller writes around it. Every picture has a label or titles for people who
do not see it. The kind of a shape is its CSS class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

POINTS = 240  # of a line, at most
_LABEL = 0.1  # of the width: the place that the word of a mark takes
_SMALLEST, _LARGEST = 1e-9, 1e300  # values that a scale is made for
_CUT_OFF = 2.5  # a column that is so many times as high as most is cut off, and marked


@dataclass(frozen=True)
class Mark:
    """Something that happened, as an upright line."""

    at: float
    kind: str
    title: str
    sign: str = ""  # in the strip, before the word; no sign, no text
    word: str = ""


@dataclass(frozen=True)
class Line:
    kind: str
    points: Sequence[tuple[float, float]]  # seconds, value
    steps: bool = False  # a value stays until the next point
    name: str = ""


@dataclass(frozen=True)
class Band:
    """A part of the time with a name. Bands that overlap are only named, side by side."""

    first: float
    last: float
    name: str


@dataclass(frozen=True)
class LineChart:
    svg: str
    strip: str
    scale: list[float]  # top to bottom
    first: float  # seconds
    last: float


def line_chart(
    lines: Sequence[Line], marks: Sequence[Mark], label: str, bands: Sequence[Band] = ()
) -> LineChart | None:
    """Values over time. None if there is no point."""
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    times = [t for t, _ in points] + [t for band in bands for t in (band.first, band.last)]
    first, last = min(times), max(times)
    span = max(last - first, 1.0)
    most = round_up(max(value for _, value in points))

    def x(t: float) -> float:
        return 1000 * (t - first) / span

    shapes, strip = [], []
    apart = all(b.first >= a.last for a, b in pairwise(bands))
    for number, band in enumerate(bands):
        left, right = x(band.first), x(band.last)
        middle = (left + right) / 20 if apart else 100 * (number + 0.5) / len(bands)
        if apart:
            shapes.append(
                f'<rect class="band-{number % 2}" x="{left:.1f}" width="{right - left:.1f}" '
                f'height="100">{_title(band.name)}</rect>'
            )
        strip.append(
            f'<text x="{middle:.2f}%" y="11" text-anchor="middle">{escape(band.name)}</text>'
        )
    shapes += [f'<line class="grid" x1="0" x2="1000" y1="{y}" y2="{y}"/>' for y in (0, 50, 100)]
    shown = [mark for mark in marks if 0 <= x(mark.at) <= 1000]
    shapes += [_upright(mark, x(mark.at), 12) for mark in shown]
    strip += _signs([(x(mark.at) / 1000, mark) for mark in shown])
    for line in lines:
        path = [(x(t), 100 - 100 * (value / most)) for t, value in _thinned(line.points)]
        corners = _stairs(path) if line.steps and path else path
        drawn = " ".join(f"{a:.1f},{b:.2f}" for a, b in corners)
        shapes.append(
            f'<polyline class="line l-{line.kind}" points="{drawn}">{_title(line.name)}</polyline>'
        )
    return LineChart(
        _picture(1000, f'role="img" aria-label="{escape(label)}"', shapes),
        _strip(strip),
        [most, most / 2, 0.0],
        first,
        last,
    )


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    corners = [(b, y) for (_, y), (b, _) in pairwise(points)]
    return [point for pair in zip(points, [*corners, points[-1]], strict=True) for point in pair]


def _signs(marks: Sequence[tuple[float, Mark]]) -> list[str]:
    """The texts above marks; a word is left out where the one before it would be covered."""
    found, free = [], -1.0
    for at, mark in marks:
        if not mark.sign:
            continue
        anchor = "end" if at > 1 - _LABEL else "start"
        left = at - _LABEL if anchor == "end" else at
        word = "" if left < free else f'<tspan class="word"> {escape(mark.word)}</tspan>'
        free = max(free, left + _LABEL)
        found.append(
            f'<text class="m-{escape(mark.kind)}" x="{100 * at:.2f}%" y="11" '
            f'text-anchor="{anchor}">{mark.sign}{word}</text>'
        )
    return found


# ---------------------------------------------------------------- columns


@dataclass(frozen=True)
class Column:
    """A stack of parts, which links to a page of its own."""

    parts: Sequence[tuple[str, float]]  # kind, value
    title: str
    id: str
    href: str

    @property
    def total(self) -> float:
        return sum(value for _, value in self.parts)


@dataclass(frozen=True)
class ColumnChart:
    svg: str
    strip: str
    top: float  # of the scale


def column_chart(slots: Sequence[Column | Mark], label: str) -> ColumnChart:
    """Columns, and marks between them, from left to right. The last column takes the focus."""
    columns = [slot for slot in slots if isinstance(slot, Column)]
    totals = sorted(column.total for column in columns)
    usual = totals[int(0.9 * (len(totals) - 1))]
    most = max(1.0, totals[-1] if totals[-1] <= _CUT_OFF * usual else 1.5 * usual)
    shapes, strip = [], []
    for index, slot in enumerate(slots):
        middle, sign, kind = 100 * (index + 0.5) / len(slots), "", ""
        if isinstance(slot, Mark):
            shapes.append(_upright(slot, index * 10 + 5, 10))
            sign, kind = slot.sign, f"m-{escape(slot.kind)}"
        else:
            shapes.append(_column(slot, index * 10, most, focus=slot is columns[-1]))
            if slot.total > most:
                sign, kind = "▴", "over"
        if sign:
            strip.append(f'<text class="{kind}" x="{middle:.2f}%" y="11">{sign}</text>')
    return ColumnChart(
        _picture(10 * len(slots), f'role="group" aria-label="{escape(label)}"', shapes),
        _strip(strip),
        most,
    )


def _column(column: Column, x: int, most: float, *, focus: bool) -> str:
    shapes, y = [], 100.0
    for kind, value in column.parts:
        height = 100 * value / most
        if height > 0.05:
            y -= height
            top, tall = (y, height) if y >= 0 else (0.0, max(0.0, y + height))
            shapes.append(
                f'<rect class="s-{kind}" x="{x + 1}" y="{top:.1f}" width="8" height="{tall:.1f}"/>'
            )
    return (
        f'<a id="{escape(column.id)}" class="column" href="{escape(column.href)}" '
        f'tabindex="{0 if focus else -1}"><title>{escape(column.title)}</title>'
        f'<rect class="hit" x="{x}" width="10" height="100"/>{"".join(shapes)}</a>'
    )


# ---------------------------------------------------------------- small pictures


def sparkline(values: Sequence[float], label: str) -> str:
    """A small line without scales, from zero to its largest value."""
    if not values:
        return ""
    most = max(*values, 1e-9)
    step = 100 / max(1, len(values) - 1)
    line = " ".join(f"{i * step:.1f},{28 - 26 * v / most:.1f}" for i, v in enumerate(values))
    return (
        '<svg class="spark" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}"><polygon points="0,29 {line} 100,29"/>'
        f'<polyline points="{line}"/></svg>'
    )


def bar_chart(bars: Sequence[tuple[float, str]], label: str) -> str:
    """Bars side by side, each with its title. Nothing if all are zero."""
    most = max((value for value, _ in bars), default=0)
    if not most:
        return ""
    shapes = "".join(
        f'<rect x="{i * 10 + 1}" width="8" y="{100 - 100 * value / most:.1f}" '
        f'height="{100 * value / most:.1f}"><title>{escape(title)}</title></rect>'
        for i, (value, title) in enumerate(bars)
    )
    return (
        f'<svg class="groups" viewBox="0 0 {10 * len(bars)} 100" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(label)}">{shapes}</svg>'
    )


def bar(part: float, kind: str) -> str:
    """A part of a whole."""
    width = 100 * min(1.0, max(0.0, part))
    return (
        f'<svg class="{kind}" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="of" width="100" height="10"/><rect class="is" width="{width:.1f}" '
        'height="10"/></svg>'
    )


def fan(count: int, *, inwards: bool) -> str:
    """Edges between one thing and `count` others."""
    lines = [(100 * (i + 0.5) / count, 50.0) for i in range(count)]
    ends = lines if inwards else [(b, a) for a, b in lines]
    drawn = "".join(f'<line x1="0" y1="{a:.1f}" x2="100" y2="{b:.1f}"/>' for a, b in ends)
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'


# ---------------------------------------------------------------- parts


def _picture(width: int, about: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {width} 100" preserveAspectRatio="none" {about}>'
        f"{''.join(shapes)}</svg>"
    )


def _strip(texts: Sequence[str]) -> str:
    return f'<svg class="strip" aria-hidden="true">{"".join(texts)}</svg>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _upright(mark: Mark, x: float, width: float) -> str:
    return (
        f'<g class="mark m-{escape(mark.kind)}"><title>{escape(mark.title)}</title>'
        f'<rect class="hit" x="{x - width / 2:.1f}" width="{width}" height="100"/>'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="100"/></g>'
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most as many points as a screen shows; the first and the last stay."""
    every = -(-len(points) // POINTS)
    return list(points) if every <= 1 else [*points[:-1:every], points[-1]]


def round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten. Where no scale can be made, 1 or the value."""
    if not _SMALLEST < value < _LARGEST:
        return value if _LARGEST <= value < math.inf else 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value)
