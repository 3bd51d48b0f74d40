"""`DataFrame.mapInArrow` without pandas, which Spark's own method asks for and does not use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


def map_in_arrow(
    rows: DataFrame, function: Callable[[Iterator[Any]], Iterator[Any]],
    schema: str | StructType, *, barrier: bool = False,
) -> DataFrame:  # fmt: skip
    """The rows that `function` makes, in each task, of the record batches that it gets."""
    from pyspark.sql import DataFrame
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    udf = UserDefinedFunction(
        function, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF
    )
    column = udf(*[rows[name] for name in rows.columns])
    return DataFrame(rows._jdf.mapInArrow(column._jc, barrier, None), rows.sparkSession)
