"""Rows that cannot be parsed: check JSON, and report the row at which a task stopped."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from onceflow.contract.schema import leaf_types
from onceflow.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

_MARK = "onceflow-bad-row:"
CORRUPT = "_onceflow_corrupt"
FLAT = r"\A[ \t\r\n]*\{[^{}]*\}[ \t\r\n]*\z"  # nothing but an object without others in it
OPTIONS = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": CORRUPT,
    "dateFormat": "yyyy-MM-dd",  # otherwise Spark reads 20260101 as a year
}


def row_schema(schema: str | StructType | None, what: str, *, json: bool) -> StructType:
    """The columns in `schema`. `json`: refuse types that Spark misreads from JSON."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DataType, StructType

    if isinstance(schema, str):
        try:
            parsed = DataType.fromDDL(schema)
        except PySparkException as error:
            raise JobError(f"{what}: schema {schema!r} cannot be read: {error}") from error
    else:
        parsed = schema  # type: ignore[assignment]
    if not isinstance(parsed, StructType):
        raise JobError(
            f"{what}: the schema must name columns", hint='schema="id long, at timestamp"'
        )
    if json and any("byte" in types for types in leaf_types(parsed.json()).values()):
        raise JobError(f"{what}: Spark reads 200 as the byte -56 from JSON", hint="use short")
    return StructType(list(parsed.fields))


def with_corrupt(schema: StructType) -> StructType:
    from pyspark.sql.types import StringType, StructType

    return StructType(list(schema.fields)).add(CORRUPT, StringType())


def parse_json(rows: DataFrame, text: str, schema: StructType, into: str = "parsed") -> DataFrame:
    """Add the column `into`, the object in `text`, and `<into>_fits`: is it one that fits?

    Spark's parser stops at the end of the object, so a second parse looks for text behind it. It is
    not needed if the only closing brace ends the text, as in most rows.
    """
    from pyspark.sql import functions as F

    flat = F.col(text).rlike(FLAT)
    marked = F.from_json(F.concat(F.lit("["), text, F.lit(f',"{_MARK}"]')), "array<string>")
    parsed = F.from_json(text, with_corrupt(schema), OPTIONS)
    rows = rows.withColumn(into, parsed).withColumn(f"{into}_alone", F.when(~flat, marked))
    alone = F.size(f"{into}_alone").eqNullSafe(2) & F.col(f"{into}_alone")[1].eqNullSafe(_MARK)
    fits = (
        F.col(text).rlike(r"^\s*\{")
        & F.col(into).isNotNull()
        & F.col(f"{into}.{CORRUPT}").isNull()
        & (flat | alone)
    )
    return rows.withColumn(f"{into}_fits", fits).drop(f"{into}_alone")


def stop_at(place: Column, kind: str | DataType) -> Column:
    """An expression of type `kind` that fails the task and reports `place`, a struct."""
    from pyspark.sql import functions as F

    return F.raise_error(F.concat(F.lit(_MARK), F.to_json(place))).cast(kind)


def stopped_at(error: BaseException) -> dict[str, Any] | None:
    """The place that a task reported when it stopped at a row that cannot be parsed."""
    found = re.search(re.escape(_MARK) + r"(\{.*\})", str(error))
    if found is None:
        return None
    try:
        place, _ = json.JSONDecoder().raw_decode(found[1])
    except ValueError:
        return {"record": found[1]}
    return dict(place)
