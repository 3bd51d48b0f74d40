"""What a driver told of its queries last, as far as it has the shape that we know.

Nothing depends on `progress.json`, and whatever wrote it may be of another version or no driver at
all: a field that is not what it should be is left out, and takes no other away.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from onceflow.page.files import Row

_NUMBERS = ("epochs", "rows_in", "rows_in_per_s", "lag_s", "late_rows", "rejected_rows")
_MAPS = ("outputs", "steps_s")
_LONGEST = 1e9  # seconds since something was published


def of_queries(body: Row | None) -> dict[str, Row]:
    """Query -> what was told of it."""
    queries = (body or {}).get("queries")
    found = queries if isinstance(queries, list) else []
    return {str(q["query"]): _known(q) for q in found if isinstance(q, dict) and "query" in q}


def _known(query: Row) -> Row:
    known: Row = {name: query[name] for name in _NUMBERS if is_number(query.get(name))}
    known |= {name: numbers(query.get(name)) for name in _MAPS}
    since = query.get("published_s_ago")
    if is_number(since) and 0 <= since < _LONGEST:
        known["published_s_ago"] = since
    committed = query.get("committed_s")
    if isinstance(committed, dict) and _is_histogram(committed):
        known["committed_s"] = committed
    return known


def _is_histogram(found: Row) -> bool:
    at_most = found.get("at_most")
    return (
        is_number(found.get("epochs"))
        and is_number(found.get("sum"))
        and isinstance(at_most, list)
        and all(isinstance(p, list) and len(p) == 2 and all(map(is_number, p)) for p in at_most)
    )


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers(value: Any) -> dict[str, Any]:
    """Those of an object that are numbers; none, if it is no object."""
    found = value if isinstance(value, dict) else {}
    return {name: one for name, one in found.items() if is_number(one)}
