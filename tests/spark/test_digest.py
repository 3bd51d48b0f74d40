"""The digest of an epoch: the same for the same rows in any order, another for any other rows."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from onceflow.contract.digest import NAME, with_digest

COLUMNS = {
    "long": "id",
    "string": "concat('é-', id)",
    "double": "id / 7",
    "decimal": "cast(id AS decimal(38,10))",
    "binary": "encode(cast(id AS string), 'UTF-8')",
    "time": "timestamp_micros(id)",
    "null": "if(id % 2 = 0, id, null)",
    "array": "array(id, null)",
    "struct": "named_struct('a.b', id, 'b', 'x')",
    "map": "map('k', id)",
    "deep": "array(named_struct('m', map(id, 1)))",
    "variant": "parse_json(concat('{\"a\": ', id, '}'))",
    "with ` and .": "id",
}


def digest(df: Any) -> int:
    rows = with_digest(df)
    rows.collect()
    found = rows._jdf.queryExecution().observedMetrics().get(NAME).get()
    return int(found.get(0))


@pytest.mark.parametrize("name", COLUMNS)
def test_it_is_of_the_rows_and_not_of_their_order(spark: SparkSession, name: str) -> None:
    def rows(first: int, last: int, parts: int) -> Any:
        return spark.range(first, last, 1, parts).select(F.expr(COLUMNS[name]).alias(name))

    whole = digest(rows(0, 1000, 3))
    assert digest(rows(500, 1000, 1).union(rows(0, 500, 2))) == whole
    assert digest(rows(0, 999, 3)) != whole
    assert digest(rows(1, 1001, 3)) != whole
    assert digest(rows(0, 1000, 3).union(rows(5, 6, 1))) != whole


def test_columns_that_change_places_between_rows_are_noticed(spark: SparkSession) -> None:
    plain = spark.range(100).select("id", (F.col("id") + 1).alias("next"))
    mixed = spark.range(100).select("id", ((F.col("id") + 1) % 100 + 1).alias("next"))
    assert digest(plain) != digest(mixed)


def test_no_row_has_a_digest_too(spark: SparkSession) -> None:
    rows = with_digest(spark.range(0))
    rows.collect()
    assert rows._jdf.queryExecution().observedMetrics().get(NAME).get().get(0) is None
