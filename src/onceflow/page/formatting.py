"""Text for people: numbers with units, times, states and guarantees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from onceflow.contract.ledger import Guarantee
from onceflow.service.number_format import age, brief, number

NOTHING = "-"
_LONGEST = 200  # characters of an offset

# A state is shown as a word and a sign; its colour only repeats them.
SIGNS = {
    "running": "●", "starting": "◌", "restarting": "↻", "stopped": "■", "damaged": "▲",
    "valid": "✓", "invalid": "✕", "unknown": "?", "interrupted": "■",
}  # fmt: skip
MARKS = {
    "start": "▸", "killed": "✕", "kill": "✕", "restart": "↻", "error": "▲", "stop": "■",
    "savepoint": "◆", "verdict": "✓",
}  # fmt: skip
MARK_WORDS = {
    "start": "started", "killed": "killed", "kill": "killed", "restart": "restarted",
    "error": "failed", "stop": "stopped", "savepoint": "savepoint", "verdict": "verdict",
}  # fmt: skip
STEPS = {
    "check": "no newer driver leads, and Spark planned the next offsets",
    "stage": "tasks write rows and state to files that no reader sees",
    "harden": "the staged files are made durable",
    "decide": "one entry in the epoch log: the commit point",
    "publish": "each target takes rows and ledger in one step",
    "sweep": "staged files that are not used are deleted",
}
_PROMISES = {
    Guarantee.EXACTLY_ONCE: "every row reaches its target exactly once, even after a crash",
    Guarantee.AT_LEAST_ONCE: "no row is lost; after a crash, an epoch's rows may be there twice",
    Guarantee.AT_MOST_ONCE: "no row is there twice; after a crash, an epoch's rows may be missing",
}
_WEAKEST_FIRST = (Guarantee.AT_MOST_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _or_nothing(say: Callable[[float], str]) -> Callable[[Any], str]:
    def said(value: Any) -> str:
        found = _number(value)
        return NOTHING if found is None else say(found)

    return said


def _size(value: float) -> str:
    for least, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= least:
            return f"{value / least:,.1f} {unit}"
    return number(value, "bytes")


def _ms(value: float) -> str:
    return f"{value / 1000:,.1f} s" if value >= 1000 else f"{value:.0f} ms"


def _elapsed(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{int(value // 60)} min {int(value % 60)} s"


rate = _or_nothing(lambda value: brief(value, "rows/s"))
rows = _or_nothing(lambda value: number(value, "rows"))
seconds = _or_nothing(age)
size = _or_nothing(_size)
ms = _or_nothing(_ms)
share = _or_nothing(lambda value: f"{100 * value:.0f} %")
money = _or_nothing(lambda value: f"{value / 1e6:,.2f}")  # of micro-units
whole = _or_nothing(lambda value: f"{value:,.0f}")
elapsed = _or_nothing(_elapsed)  # since the beginning of a board


def count(value: Any, unit: str) -> str:
    """A number of things: 3 faults, 1 fault."""
    found = _number(value)
    if found is None:
        return NOTHING
    return f"{found:,.0f} {unit.removesuffix('s') if found == 1 else unit}"


def epoch(value: Any) -> str:
    found = _number(value)
    return "none yet" if found is None else f"{found:,.0f}"


def clock(at: Any, *, ago: bool = False) -> Markup:
    """The time of day; the full time is its title. `ago`: a script shows it as seconds ago."""
    if not isinstance(at, str) or len(at) < 19:
        return Markup(NOTHING)
    kind = "ago" if ago else "at"
    return Markup('<time class="{}" datetime="{}" title="{}">{} UTC</time>').format(
        kind, at, at, at[11:19]
    )


def day(at: Any) -> Markup:
    """Date and time of day, for times that may be long ago."""
    if not isinstance(at, str) or len(at) < 19:
        return Markup(NOTHING)
    return Markup('<time datetime="{}" title="{}">{} {} UTC</time>').format(
        at, at, at[:10], at[11:19]
    )


def state(name: Any, says: Any = None) -> Markup:
    """A state as a word with its sign and colour."""
    word = str(name or "unknown")
    return Markup('<span class="state is-{}"><i aria-hidden="true">{}</i> {}</span>').format(
        word if word in SIGNS else "unknown", SIGNS.get(word, "?"), says or word
    )


def short_path(path: Any) -> str:
    """The end of a long path, which tells more than its beginning."""
    text = str(path)
    parts = text.split("/")
    return text if len(parts) <= 3 else "…/" + "/".join(parts[-2:])


def offset(value: Any) -> str:
    if value is None:
        return "the beginning"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def promise(outputs: Mapping[str, str | None]) -> tuple[str | None, str]:
    """The weakest guarantee of a job's outputs, and a sentence; None if no output is known yet."""
    for weakest in _WEAKEST_FIRST:
        having = [name for name, guarantee in outputs.items() if guarantee == weakest]
        if not having:
            continue
        says = _PROMISES[weakest]
        if len(having) < len(outputs):
            says = f"{says} (output {', '.join(sorted(having))}; the others promise more)"
        return str(weakest), says
    return None, "no output has been opened yet, so nothing is promised yet"


FILTERS: dict[str, Callable[..., Any]] = {
    "rate": rate, "rows": rows, "seconds": seconds, "size": size, "ms": ms, "share": share,
    "money": money, "whole": whole, "epoch": epoch, "clock": clock, "day": day, "state": state,
    "count": count, "elapsed": elapsed, "short_path": short_path, "offset": offset,
}  # fmt: skip
