"""Lineages as a list to be read from top to bottom: each below the one that it came from."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

DEEPEST = 8  # how far one is drawn to the right; a job may be rolled back any number of times


def branches(lineages: list[Row]) -> list[Row]:
    """Each with a `depth`. One whose parent is not among them stands at the left."""
    known = {told["lineage"] for told in lineages}
    children: dict[str | None, list[Row]] = {}
    for told in lineages:
        parent = told["parent"] if told["parent"] in known else None
        children.setdefault(parent, []).append(told)
    found: list[Row] = []
    waiting = [(told, 0) for told in reversed(children.get(None, []))]
    while waiting:
        told, depth = waiting.pop()
        found.append({**told, "depth": min(depth, DEEPEST)})
        below = children.pop(told["lineage"], [])
        waiting += [(child, depth + 1) for child in reversed(below)]
    return found
