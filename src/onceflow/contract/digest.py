"""A digest of the rows of an epoch, whatever their order: has an epoch that runs again the same?

It is the sum of a hash of each row, taken by Spark on the way, and stands in the decision.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from onceflow.contract.schema import quoted

NAME = "onceflow"  # of what Spark observes
_BITS = 36  # of each hash: the sum of 134 million rows fits into a long


def with_digest(df: Any) -> Any:
    """The same rows; when all have passed, Spark knows their digest by the name `NAME`."""
    return df.observe(NAME, _digest(df))


def _digest(df: Any) -> Any:
    """As one text: each part of a column that is put together in Python is a call to the JVM."""
    from pyspark.sql import functions as F

    values = ", ".join(_hashable(field) for field in df.schema.jsonValue()["fields"])
    return F.expr(f"try_sum(xxhash64({values}) & {(1 << _BITS) - 1}L)").alias("digest")


def observed(rows: Any) -> tuple[Any, Callable[[], int | None]]:
    """As `with_digest`, for rows that are no stream: and what gives the digest after an action."""
    from pyspark.sql import Observation

    watch = Observation(NAME)
    return rows.observe(watch, _digest(rows)), lambda: watch.get["digest"]


def _hashable(field: dict[str, Any]) -> str:
    """Spark hashes neither maps nor variants."""
    column, kind = quoted(field["name"]), json.dumps(field["type"])
    is_hashed = '"map"' not in kind and '"variant"' not in kind
    return column if is_hashed else f"to_json(struct({column}))"
