"""Stage the rows of an epoch where no reader sees them, in one Spark action.

Spark's own Parquet writer does it: it stays in the JVM and picks the winning task attempts, the
same attempts whose state counts. Several outputs share the action; an integer column says which
output a row goes to. (Partitioning by the user's own string would turn "" into null.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onceflow.committables import BY as _BY
from onceflow.committables import COMMITTER, NO_GLOB, describe
from onceflow.errors import BadRows, JobError
from onceflow.ledger import Committable
from onceflow.schema import columns, leaf_types, quoted
from onceflow.sinks.base import Sink, Staged

_ROUTE = "_onceflow_route"
_NOWHERE = -1
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
_WIDTHS = {
    "boolean": 1,
    "byte": 1,
    "short": 2,
    "integer": 4,
    "float": 4,
    "string": 24,
    "binary": 24,
}


class Stager:
    """Stages one epoch after the other for the outputs of a query."""

    def __init__(self, outputs: Mapping[str, Sink], by: str | None, schema: str) -> None:
        self._outputs = outputs
        self._route_by = by
        self._schema = schema
        self._by_columns = max((len(sink.by) for sink in outputs.values()), default=0)
        self._bytes_per_row = float(sum(_WIDTHS.get(t, 8) for t in columns(schema).values()))

    def stage(self, batch: Any, folder: Path, tag: str) -> dict[str, tuple[Committable, ...]]:
        """Run the one action over `batch`; output -> what it staged."""
        spark = batch.sparkSession
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        spark.conf.set("spark.sql.maxConcurrentOutputFileWriters", "16")
        rows = self._with_routes(batch)
        writer = rows.write.options(**COMMITTER)
        rolls = [sink.roll_bytes for sink in self._outputs.values() if sink.roll_bytes]
        if rolls:
            writer = writer.option(
                "maxRecordsPerFile", max(1, int(min(rolls) / max(self._bytes_per_row, 1.0)))
            )
        partitions = [c for c in rows.columns if c.startswith(_ROUTE) or c.startswith(_BY)]
        if partitions:
            writer = writer.partitionBy(*partitions)
        writer.parquet(str(folder / "rows"))
        self._refuse_unrouted(folder / "rows")
        staged = {}
        for route, (name, sink) in enumerate(self._outputs.items()):
            root = folder / "rows" / f"{_ROUTE}={route}" if self._routed else folder / "rows"
            files = describe(root, sink.by)
            self._learn(files)
            read = self._reader(spark, root, sink)
            scratch = folder / f"{route}"
            staged[name] = sink.stage(Staged(files, folder, scratch, tag, self._schema, read))
        return staged

    @property
    def _routed(self) -> bool:
        return len(self._outputs) > 1

    def _with_routes(self, batch: Any) -> Any:
        from pyspark.sql import functions as F

        rows = batch
        route = F.lit(0)
        if self._routed:
            assert self._route_by is not None
            value = F.col(quoted(self._route_by))
            route = F.lit(_NOWHERE)
            for number, name in enumerate(self._outputs):
                route = F.when(value == F.lit(name), F.lit(number)).otherwise(route)
            rows = rows.withColumn(_ROUTE, route)
        for i in range(self._by_columns):
            folder = F.lit(None).cast("string")
            for number, sink in enumerate(self._outputs.values()):
                if i < len(sink.by):
                    text = sink.by_columns()[i].cast("string")
                    # These share a folder with null; as values of their own they would share a
                    # file with it, too. The files keep the column, so nothing is lost.
                    text = F.when(~text.isin("", _NULL_FOLDER), text)
                    mine = F.col(_ROUTE) == F.lit(number) if self._routed else F.lit(True)
                    folder = F.when(mine, text).otherwise(folder)
            rows = rows.withColumn(f"{_BY}{i}", folder)
        return rows

    def _refuse_unrouted(self, root: Path) -> None:
        lost = describe(root / f"{_ROUTE}={_NOWHERE}", ())
        if not lost:
            return
        import pyarrow.parquet as pq

        assert self._route_by is not None
        values: set[str] = set()
        for file in lost:
            column = pq.ParquetFile(file.path).read([self._route_by]).column(0)
            values |= {repr(v) for v in column.unique().to_pylist()[:5]}
        raise BadRows(
            f"{sum(f.rows for f in lost)} rows have no output: their {self._route_by!r} is "
            f"{', '.join(sorted(values)[:5])}",
            hint=f"give every row one of {', '.join(map(repr, self._outputs))}; null is none",
        )

    def _learn(self, files: tuple[Committable, ...]) -> None:
        rows = sum(file.rows for file in files)
        if rows >= 1000:
            self._bytes_per_row = sum(file.bytes for file in files) / rows

    def _reader(self, spark: Any, root: Path, sink: Sink) -> Callable[[], Any]:
        def read() -> Any:
            from pyspark.sql.types import StringType, StructType

            schema = StructType.fromJson(json.loads(self._schema))
            for i in range(len(sink.by)):
                schema = schema.add(f"{_BY}{i}", StringType())
            reader = spark.read.schema(schema).options(**NO_GLOB).option("basePath", str(root))
            rows = reader.parquet(str(root))
            return rows.select(*(quoted(f.name) for f in schema.fields))

        return read


def refuse_columns(schema: str, outputs: Mapping[str, Sink], by: str | None) -> None:
    """Say before the query starts what could not be staged later."""
    names = [field["name"] for field in json.loads(schema)["fields"]]
    lowered = [name.lower() for name in names]
    twice = sorted({name for name in names if lowered.count(name.lower()) > 1})
    if twice:
        raise JobError(
            f"column {', '.join(twice)} is there twice", hint="rename one with .alias(…)"
        )
    ours = [name for name in names if name.lower().startswith("_onceflow_")]
    if ours:
        raise JobError(f"column {', '.join(ours)} has a name that onceflow uses", hint="rename it")
    kinds = columns(schema)
    untyped = [
        f"{name} ({kinds[name]})"
        for name, leaves in leaf_types(schema).items()
        if any(leaf == "void" or "interval" in leaf for leaf in leaves)
    ]
    if untyped or not names:
        raise JobError(
            f"column {', '.join(untyped) or '(none)'} cannot be written to a file",
            hint="cast it: F.lit(None).cast('string')",
        )
    if len(outputs) > 1:
        if by is None:
            raise JobError(
                "several outputs need by=: the column that names each row's output",
                hint='flow.write(name, df, to={"valid": …, "rejected": …}, by="outcome")',
            )
        if columns(schema).get(by) != "string":
            raise JobError(f"by={by!r} must be a string column of the rows", hint="add or cast it")
