"""How the page says things: numbers with their units, moments, states in words and a sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from onceflow.service.units import age, brief, number

NOTHING = "-"

# A state is told by its word and its sign; colour comes third.
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
    "check": "nobody above us, and Spark planned what follows",
    "stage": "rows and state are written where no reader sees them",
    "harden": "made durable",
    "decide": "one entry in the epoch log: the commit point",
    "publish": "each target takes rows and ledger in one step",
    "sweep": "what was staged and not used goes",
}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _with(say: Callable[[float], str]) -> Callable[[Any], str]:
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


rate = _with(lambda value: brief(value, "rows/s"))
rows = _with(lambda value: number(value, "rows"))
seconds = _with(age)
size = _with(_size)
ms = _with(_ms)
share = _with(lambda value: f"{100 * value:.0f} %")
money = _with(lambda value: f"{value / 1e6:,.2f}")  # of micro-units
whole = _with(lambda value: f"{value:,.0f}")


def count(value: Any, unit: str) -> str:
    """Some of something: 3 faults, 1 fault."""
    found = _number(value)
    if found is None:
        return NOTHING
    return f"{found:,.0f} {unit.removesuffix('s') if found == 1 else unit}"


def epoch(value: Any) -> str:
    found = _number(value)
    return "none yet" if found is None else f"{found:,.0f}"


def clock(at: Any, *, ago: bool = False) -> Markup:
    """A moment: the time of the day, and the whole of it to whoever asks. `ago`: where scripts
    run, as so many seconds ago, which needs no news from us."""
    if not isinstance(at, str) or len(at) < 19:
        return Markup(NOTHING)
    kind = "ago" if ago else "at"
    return Markup('<time class="{}" datetime="{}" title="{}">{} UTC</time>').format(
        kind, at, at, at[11:19]
    )


def day(at: Any) -> Markup:
    """A moment that may be long ago."""
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


FILTERS: dict[str, Callable[..., Any]] = {
    "rate": rate, "rows": rows, "seconds": seconds, "size": size, "ms": ms, "share": share,
    "money": money, "whole": whole, "epoch": epoch, "clock": clock, "day": day, "state": state,
    "count": count,
}  # fmt: skip
