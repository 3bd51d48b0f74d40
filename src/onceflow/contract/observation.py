"""What Spark observes of the rows of an epoch while the one action over them runs.

It counts the rows of each output, so that a decision whose staged files hold other rows is refused,
and it takes a digest of all rows, whatever their order, so that an epoch that runs again can be
compared with what it was. Both stand on top of the plan: the tasks that stage the rows count them,
and Spark adds what one attempt of each task counted. A task that runs twice is counted once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onceflow.contract.schema import quoted

NAME = "onceflow"  # of what Spark observes
_BITS = 36  # of each hash: the sum of 134 million rows fits into a long
_ROWS, _DIGEST = "rows", "digest"


@dataclass(frozen=True)
class Observed:
    """What Spark observed of one epoch."""

    rows: Mapping[str, int]  # output -> its rows
    unrouted: int  # rows that belong to no output
    digest: int | None  # None: not taken, or too many rows

    @property
    def total(self) -> int:
        return self.unrouted + sum(self.rows.values())


@dataclass(frozen=True)
class Observer:
    """Adds to a DataFrame what is to be observed of it. `by`: the column that names the output of
    each row, if there are several."""

    outputs: Sequence[str]
    by: str | None = None
    digest: bool = True

    def stream(self, df: Any) -> Any:
        """The same rows. `read` understands what Spark then observes by the name `NAME`."""
        return df.observe(NAME, *self._metrics(df))

    def batch(self, df: Any) -> tuple[Any, Callable[[], Observed]]:
        """The same rows, and a function that returns what was observed, after the action."""
        from pyspark.sql import Observation

        watch = Observation(NAME)
        return df.observe(watch, *self._metrics(df)), lambda: self.read(watch.get)

    def read(self, values: Mapping[str, Any]) -> Observed:
        total = values[_ROWS]
        if len(self.outputs) == 1:
            rows = {self.outputs[0]: total}
        else:
            rows = {name: values[f"{_ROWS}_{n}"] for n, name in enumerate(self.outputs)}
        return Observed(rows, total - sum(rows.values()), values.get(_DIGEST))

    def _metrics(self, df: Any) -> list[Any]:
        """As texts: each part of a column that is put together in Python is a call to the JVM."""
        from pyspark.sql import functions as F

        metrics = [F.expr(f"count(1) as {_ROWS}")]
        if len(self.outputs) > 1:
            assert self.by is not None
            metrics += [
                F.expr(f"count_if({quoted(self.by)} = '{name}') as {_ROWS}_{number}")
                for number, name in enumerate(self.outputs)
            ]
        if self.digest:
            values = ", ".join(_hashable(field) for field in df.schema.jsonValue()["fields"])
            hashed = f"xxhash64({values}) & {(1 << _BITS) - 1}L"
            metrics.append(F.expr(f"try_sum({hashed}) as {_DIGEST}"))
        return metrics


def _hashable(field: dict[str, Any]) -> str:
    """Spark hashes neither maps nor variants."""
    column, kind = quoted(field["name"]), json.dumps(field["type"])
    is_hashed = '"map"' not in kind and '"variant"' not in kind
    return column if is_hashed else f"to_json(struct({column}))"
