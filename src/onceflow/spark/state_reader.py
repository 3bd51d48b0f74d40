"""Read rows of state with Spark's own reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onceflow.errors import JobError
from onceflow.spark.state_schema import StateStore


def state_rows(
    spark: Any, checkpoint: Path, store: StateStore, epoch: int, *, key: str | None, limit: int
) -> list[dict[str, Any]]:
    """At most `limit` rows of a store after an epoch, each with `key`, `value` and `partition`."""
    from pyspark.sql import functions as F

    # Create the coordinator that stores report to: without streaming queries a session has none.
    assert spark.streams.active is not None
    reader = spark.read.format("statestore").option("batchId", epoch)
    reader = reader.option("operatorId", store.operator).option("storeName", store.name)
    rows = reader.load(str(checkpoint))
    if key is not None:
        rows = rows.where(_matches(rows.schema["key"].dataType, key))
    rows = rows.select("key", "value", F.col("partition_id").alias("partition")).limit(limit)
    options = {"ignoreNullFields": "false", "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"}
    texts = rows.select(F.to_json(F.struct("*"), options)).collect()
    return [json.loads(row[0]) for row in texts]


def _matches(schema: Any, wanted: str) -> Any:
    """A condition for `wanted`: the value of one of the key's columns, or a JSON object with some
    of the columns."""
    from pyspark.sql import functions as F

    columns = {".".join(path): (path, kind) for path, kind in _leaves(schema, ())}
    try:
        named = json.loads(wanted)
    except ValueError:
        named = None
    if not isinstance(named, dict):
        one = F.lit(False)
        for path, kind in columns.values():
            one = one | _equal(path, kind, wanted)
        return one
    every = F.lit(True)
    for name, value in _flat(named, ""):
        if name not in columns:
            raise JobError(
                f"the key of this state has no column {name!r}",
                hint="it has " + ", ".join(columns),
            )
        every = every & _equal(*columns[name], value)
    return every


def _equal(path: tuple[str, ...], kind: Any, value: Any) -> Any:
    """Null equals only null. A text that cannot be cast to the column's type equals nothing."""
    from pyspark.sql import functions as F

    column = F.col(".".join("`" + part.replace("`", "``") + "`" for part in ("key", *path)))
    if value is None:
        return column.isNull()
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    if kind.typeName() in ("array", "variant", "void"):
        same = F.to_json(column) == F.lit(text) if kind.typeName() == "array" else F.lit(False)
    else:
        same = column == F.lit(text).try_cast(kind)
    return F.coalesce(same, F.lit(False))


def _leaves(schema: Any, before: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for field in schema.fields:
        if field.dataType.typeName() == "struct":
            yield from _leaves(field.dataType, (*before, field.name))
        else:
            yield (*before, field.name), field.dataType


def _flat(named: dict[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in named.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value
