"""A folder that grows: Parquet, JSON lines or CSV files, each read once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from onceflow.errors import BadInput, JobError
from onceflow.sinks.base import Sink
from onceflow.sources.base import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader
    from pyspark.sql.types import StructType

_MARK = "onceflow-bad-row:"
_CORRUPT = "_onceflow_corrupt"


class Files(Source):
    """Every row of every file that appears in the folder is read exactly once.

    A file that changes after it appeared is not noticed: write it elsewhere, then move it in.

    JSON (one object a line) and CSV need `schema`. A line that does not fit it stops the job
    with file and line (`on_bad="stop"`), or goes to the sink that `on_bad` names, as
    (file, record), through a query of its own. `header=True`: the first line of every CSV file
    is the header, and its names must be the schema's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "parquet",
        schema: str | StructType | None = None,
        on_bad: str | Sink = "stop",
        max_files_per_epoch: int | None = None,
        header: bool = False,
    ) -> None:
        if format not in ("parquet", "json", "csv"):
            raise JobError(f"Files does not read {format!r}", hint='use "parquet", "json" or "csv"')
        if format != "parquet" and schema is None:
            raise JobError(
                f"{format} needs a schema",
                hint='Files(path, format=…, schema="id long, name string")',
            )
        if on_bad != "stop" and not isinstance(on_bad, Sink):
            raise JobError(f"on_bad={on_bad!r} is neither 'stop' nor a sink")
        if format == "parquet" and on_bad != "stop":
            raise JobError(
                "a Parquet file is readable or it is not: it has no rows to reject",
                hint='leave on_bad="stop"',
            )
        if header and format != "csv":
            raise JobError("header= is for CSV")
        if max_files_per_epoch is not None and max_files_per_epoch < 1:
            raise JobError(f"max_files_per_epoch={max_files_per_epoch} must be at least 1")
        self.path = os.path.abspath(path)
        self.format = format
        self.schema = schema
        self.on_bad = on_bad
        self.max_files_per_epoch = max_files_per_epoch
        self.header = header

    def __str__(self) -> str:
        return f"Files({self.path!r})"

    def stream(self, spark: SparkSession, name: str) -> DataFrame:
        from pyspark.sql import functions as F

        if self.format == "parquet":
            reader = self._reader(spark, name).schema(self._parquet_schema(spark))
            return reader.parquet(self.path)
        rows = self._lines(spark, name)
        if self.on_bad == "stop":
            place = F.to_json(F.struct(F.col("file"), F.col("record")))
            stop = F.raise_error(F.concat(F.lit(_MARK), place)).cast("boolean")
            rows = rows.where(F.when(F.col("bad"), stop).otherwise(F.lit(True)))
        else:
            rows = rows.where(~F.col("bad"))
        return rows.select(*(f"row.`{field}`" for field in self._schema().fieldNames()))

    def rejected(self, spark: SparkSession, name: str) -> DataFrame:
        return self._lines(spark, name).where("bad").select("file", "record")

    def _lines(self, spark: SparkSession, name: str) -> DataFrame:
        """Every line that is not blank, parsed: (row, record, file, bad)."""
        from pyspark.sql import functions as F

        text = self._reader(spark, name).text(self.path)
        line = F.col("value")
        if self.format == "csv":
            line = F.regexp_replace(line, r"\r$", "")
        lines = text.select(line.alias("record"), F.col("_metadata.file_path").alias("file")).where(
            F.length(F.trim("record")) > 0
        )
        if self.header:
            lines = lines.where(F.col("record") != F.lit(",".join(self._schema().fieldNames())))
        lines = lines.withColumn("row", self._parse(F.col("record")))
        bad = F.col("row").isNull() | F.col(f"row.{_CORRUPT}").isNotNull()
        if self.format == "json":
            bad = bad | ~F.ltrim(F.col("record")).startswith("{")
        return lines.withColumn("bad", bad)

    def _parse(self, line: Column) -> Column:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StringType

        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        schema = self._schema().add(_CORRUPT, StringType())
        if self.format == "json":
            return F.from_json(line, schema, options)
        names = ", ".join(f"`{f.name}` {f.dataType.simpleString()}" for f in schema.fields)
        return F.from_csv(line, names, options)

    def _schema(self) -> StructType:
        from pyspark.errors import PySparkException
        from pyspark.sql.types import DataType, StructType

        if isinstance(self.schema, str):
            try:
                parsed = DataType.fromDDL(self.schema)
            except PySparkException as error:
                raise JobError(f"{self}: schema {self.schema!r} cannot be read: {error}") from error
        else:
            parsed = self.schema  # type: ignore[assignment]
        if not isinstance(parsed, StructType):
            raise JobError(
                f"{self}: the schema must name columns", hint='schema="id long, at timestamp"'
            )
        return StructType(list(parsed.fields))

    def _parquet_schema(self, spark: SparkSession) -> StructType:
        if self.schema is not None:
            return self._schema()
        if not any(Path(self.path).glob("**/*.parquet")):
            raise JobError(
                f"{self} is empty, so its columns cannot be seen",
                hint='name them: Files(path, schema="id long, at timestamp")',
            )
        return spark.read.parquet(self.path).schema

    def _reader(self, spark: SparkSession, name: str) -> DataStreamReader:
        if not os.path.isdir(self.path):
            raise JobError(f"{self}: there is no such folder", hint="create it; it may be empty")
        reader = spark.readStream.name(name)
        if self.max_files_per_epoch:
            reader = reader.option("maxFilesPerTrigger", self.max_files_per_epoch)
        return reader


def bad_input(error: BaseException) -> BadInput | None:
    """If a task stopped at a row that cannot be parsed: which one, with file and line."""
    found = re.search(re.escape(_MARK) + r"(\{.*\})", str(error))
    if found is None:
        return None
    try:
        place, _ = json.JSONDecoder().raw_decode(found[1])
    except ValueError:
        return BadInput(f"a row cannot be parsed: {found[1][:200]}")
    file = unquote(urlparse(place["file"]).path)
    record = place["record"]
    return BadInput(
        f"{file}, line {_line_number(file, record)} cannot be parsed: {record[:200]}",
        hint="mend or remove the line (write the file anew under another name), or let such rows "
        "go to an output: Files(…, on_bad=<a sink>)",
    )


def _line_number(file: str, record: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.rstrip("\r\n") == record.rstrip("\r"):
                    return str(number)
    except OSError:
        pass
    return "?"
