"""The counts and the digest that Spark observes of the rows of an epoch while it stages them.

Spark counts the rows of each output, so that onceflow can refuse staged files that hold another
number of rows. It takes a digest of all rows that does not depend on their order, so that an epoch
that runs again can be compared with the first run. Both are on top of the plan: the tasks that
stage the rows count them, and Spark adds the counts of one attempt of each task. A task that runs
twice counts once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onceflow.contract.schema import quoted

NAME = "onceflow"  # the name of the observation in Spark
_BITS = 36  # of each hash: the sum of 134 million rows fits into a long
_ROWS, _DIGEST = "rows", "digest"


@dataclass(frozen=True)
class Observed:
    """The values that Spark observed of one epoch."""

    rows: Mapping[str, int]  # output -> its rows
    unrouted: int  # rows that belong to no output
    digest: int | None  # None: not taken, or too many rows

    @property
    def total(self) -> int:
        return self.unrouted + sum(self.rows.values())


@dataclass(frozen=True)
class Observer:
    """Adds the observation to a DataFrame. `by`: the column that names the output of each row, if
    there are several outputs."""

    outputs: Sequence[str]
    by: str | None = None
    digest: bool = True

    def stream(self, df: Any) -> Any:
        """Observe a stream under `NAME`; `read` decodes the values. The rows stay the same."""
        return df.observe(NAME, *self._metrics(df))

    def batch(self, df: Any) -> tuple[Any, Callable[[], Observed]]:
        """Observe a batch. Return the same rows, and a function that returns the observed values
        after the action."""
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
        """The observed columns, as SQL texts: building a column in Python takes many JVM calls."""
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
    """The column, as JSON if Spark cannot hash it: it hashes neither maps nor variants."""
    column, kind = quoted(field["name"]), json.dumps(field["type"])
    is_hashed = '"map"' not in kind and '"variant"' not in kind
    return column if is_hashed else f"to_json(struct({column}))"
