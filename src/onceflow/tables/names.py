"""Names that the sinks for tables of SQL databases share."""

from __future__ import annotations

# Of the tables that keep what epochs changed.
THERE = "_onceflow_there"  # was the row there?
WHOLE, PART = -1, -2  # instead, in the first row of a step: is it the whole table?


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
