"""What Spark counts of the rows of an epoch, and the digest that it takes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from onceflow.contract.observation import NAME, Observed, Observer

ONE = Observer(("out",))
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


def observed(df: Any, observer: Observer = ONE) -> Observed:
    """As a stream's plan is observed."""
    rows = observer.stream(df)
    rows.collect()
    found = rows._jdf.queryExecution().observedMetrics().get(NAME).get()
    return observer.read(json.loads(found.json()))


def digest(df: Any) -> int | None:
    return observed(df).digest


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
    assert observed(spark.range(0)) == Observed({"out": 0}, 0, None)


def test_rows_are_counted_for_each_output_with_a_digest_and_without(spark: SparkSession) -> None:
    rows = spark.range(100).selectExpr(
        "id", "case when id < 70 then 'a' when id < 90 then 'b' when id < 95 then '?' end as to"
    )
    for digests in (True, False):
        observer = Observer(("a", "b", "none"), "to", digests)
        found = observed(rows, observer)
        assert (found.rows, found.unrouted) == ({"a": 70, "b": 20, "none": 0}, 10)
        assert (found.digest is not None) is digests
        watched, of_batch = observer.batch(rows)
        watched.collect()
        assert of_batch() == found
