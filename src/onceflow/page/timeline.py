"""The last epochs of a query as a chart: a column for each, and what happened between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from onceflow.harness import charts
from onceflow.page import formatting
from onceflow.page.rates import timestamp
from onceflow.page.shapes import EpochSteps, Mark, Query

_MARKS = 20
_STEPS = tuple(formatting.STEPS)


@dataclass(frozen=True)
class Timeline:
    """A chart and the texts around it."""

    picture: Markup
    strip: Markup
    top: str  # of the scale
    first: Markup
    last: Markup
    focus: str  # the epoch that is described first


def timeline(query: Query, marks: Iterable[Mark], place: str) -> Timeline | None:
    """`place`: the address of an epoch, without its number."""
    steps = [step for step in query.get("steps") or () if step.get("ms")]
    if not steps:
        return None
    label = f"the last {len(steps)} epochs of {query['query']}, each with its steps"
    chart = charts.column_chart(_slots(query["query"], steps, marks, place), label)
    return Timeline(
        Markup(chart.svg),
        Markup(chart.strip),
        formatting.ms(chart.top),
        formatting.clock(steps[0].get("at")),
        formatting.clock(steps[-1].get("at")),
        describe(steps[-1]),
    )


def _slots(
    query: str, steps: list[EpochSteps], marks: Iterable[Mark], place: str
) -> list[charts.Column | charts.Mark]:
    """Columns of epochs and what happened since the first of them, in order of time."""
    columns = [_column(query, step, place) for step in steps]
    begin = timestamp(steps[0].get("at"))
    if begin is None:
        return [*columns]
    timed: list[tuple[float, charts.Column | charts.Mark]] = [
        (timestamp(step.get("at")) or begin, column)
        for step, column in zip(steps, columns, strict=True)
    ]
    since = [_mark(at, m) for m in marks if (at := timestamp(m.get("at"))) and at >= begin]
    timed += [(mark.at, mark) for mark in since[-_MARKS:]]
    return [slot for _, slot in sorted(timed, key=lambda pair: pair[0])]


def _column(query: str, step: EpochSteps, place: str) -> charts.Column:
    number = int(step["epoch"])
    parts = [(name, step["ms"].get(name) or 0.0) for name in _STEPS]
    return charts.Column(parts, describe(step), f"e-{query}-{number}", f"{place}{number}")


def _mark(at: float, mark: Mark) -> charts.Mark:
    title = f"{mark['at'][11:19]} UTC: {mark.get('says') or mark['kind']}"
    return charts.Mark(at, mark["kind"], title, formatting.MARKS.get(mark["kind"], "·"))


def describe(step: EpochSteps) -> str:
    """An epoch in one line."""
    parts = ", ".join(f"{n} {formatting.ms(step['ms'][n])}" for n in _STEPS if n in step["ms"])
    total = formatting.ms(sum(ms or 0 for ms in step["ms"].values()))
    known = step.get("rows_in") is not None
    rows_in = f"{formatting.rows(step['rows_in'])} in" if known else "rows in not known"
    return (
        f"epoch {formatting.epoch(step['epoch'])} at {str(step.get('at'))[11:19]} UTC: "
        f"{total} ({parts}); {rows_in}, {formatting.rows(step.get('rows_out'))} out; "
        f"term {step.get('term')}"
    )
