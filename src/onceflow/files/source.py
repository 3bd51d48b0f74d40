"""A folder to which files are added: Parquet, JSON lines or CSV, each read once."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from onceflow.contract.bad_rows import (
    CORRUPT,
    OPTIONS,
    parse_json,
    row_schema,
    stop_at,
    with_corrupt,
)
from onceflow.contract.schema import quoted
from onceflow.contract.sink import Sink
from onceflow.contract.source import Source
from onceflow.errors import BadInput, JobError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader
    from pyspark.sql.types import DataType, StructType


class Files(Source):
    """Every row of every file that appears in the folder is read exactly once.

    The source does not notice if a file changes after it appeared: write it elsewhere, then move it
    in. Sub-folders are read too; their names do not become partition columns.

    JSON (one object a line) and CSV need `schema`. A line that does not fit it stops the job
    with file and line (`on_bad="stop"`), or goes to the sink that `on_bad` names, as
    (file, record), through a query of its own. `header=True`: the first line of every CSV file
    is the header, and its names must be the schema's; such a file is read as a whole, so it must
    fit into a task's memory. Quoted line breaks in CSV are not supported: such a record is bad.
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
                "a Parquet file has no rows to reject: on_bad= is for JSON and CSV",
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
            # In the filter, for queries that read no column, and in the row, for queries with
            # filters: Spark may move their filters below ours.
            rows = rows.where(F.when(F.col("bad"), _stop("boolean")).otherwise(F.lit(True)))
            good = F.when(F.col("bad"), _stop(self._schema())).otherwise(F.col("row"))
            rows = rows.withColumn("row", good)
        else:
            rows = rows.where(~F.col("bad"))
        return rows.select(*(f"row.{quoted(field)}" for field in self._schema().fieldNames()))

    def rejected(self, spark: SparkSession, name: str) -> DataFrame:
        return self._lines(spark, name).where("bad").select("file", "record")

    def _lines(self, spark: SparkSession, name: str) -> DataFrame:
        """Every line that is not blank, parsed: (row, record, file, bad)."""
        from pyspark.sql import functions as F

        reader, file = self._reader(spark, name), F.col("_metadata.file_path").alias("file")
        doubt = F.lit(False).alias("doubt")
        if self.header:  # the whole file, so that its first line is known
            whole = reader.text(self.path, wholetext=True).where("value != ''")
            lines = self._without_header(whole.withColumn("file", F.col("_metadata.file_path")))
        else:
            line = F.col("value")
            if self.format == "csv":
                line = F.regexp_replace(line, r"\r$", "")
            lines = reader.text(self.path).select(line.alias("record"), file, doubt)
        lines = lines.where(F.length(F.trim("record")) > 0)
        return self._parse_json(lines) if self.format == "json" else self._parse_csv(lines)

    def _without_header(self, whole: DataFrame) -> DataFrame:
        """If the header names other columns, every line of the file is bad, the header too."""
        from pyspark.sql import functions as F

        names = ",".join(self._schema().fieldNames())
        whole = whole.withColumn("lines", F.split("value", "\r?\n"))
        header = F.translate(F.col("lines")[0], '"\ufeff', "")
        whole = whole.select("file", (header != F.lit(names)).alias("doubt"), "lines")
        rows = whole.select("file", "doubt", F.posexplode("lines"))
        rows = rows.where(F.col("doubt") | (F.col("pos") > 0))
        return rows.select(F.col("col").alias("record"), "file", "doubt")

    def _parse_json(self, lines: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        return self._judged(parse_json(lines, "record", self._schema()), F.col("parsed_fits"))

    def _parse_csv(self, lines: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        fields = with_corrupt(self._schema()).fields
        names = ", ".join(f"{quoted(f.name)} {f.dataType.simpleString()}" for f in fields)
        options = {**OPTIONS, "escape": '"'}  # a quote in quotes is doubled, as in RFC 4180
        lines = lines.withColumn("parsed", F.from_csv("record", names, options))
        quotes = F.length("record") - F.length(F.replace(F.col("record"), F.lit('"'), F.lit("")))
        good = (
            F.col("parsed").isNotNull()
            & F.col(f"parsed.{CORRUPT}").isNull()
            & (quotes % 2 == 0)  # a record that continues in the next line is torn
        )
        return self._judged(lines, good)

    def _judged(self, lines: DataFrame, good: Column) -> DataFrame:
        from pyspark.sql import functions as F

        row = F.struct(*(F.col(f"parsed.{quoted(n)}").alias(n) for n in self._schema().names))
        return lines.withColumn("bad", F.col("doubt") | ~good).withColumn("row", row)

    def _schema(self) -> StructType:
        return row_schema(self.schema, str(self), json=self.format == "json")

    def _parquet_schema(self, spark: SparkSession) -> StructType:
        if self.schema is not None:
            return self._schema()
        if not any(Path(self.path).glob("**/*.parquet")):
            raise JobError(
                f"{self} is empty, so its columns are not known",
                hint='name them: Files(path, schema="id long, at timestamp")',
            )
        return spark.read.option("recursiveFileLookup", "true").parquet(self.path).schema

    def _reader(self, spark: SparkSession, name: str) -> DataStreamReader:
        if not os.path.isdir(self.path):
            raise JobError(f"{self}: there is no such folder", hint="create it; it may be empty")
        if re.search(r"[\[\]{}*?\\]", self.path):
            raise JobError(
                f"{self}: Spark reads *, ?, [, ], {{, }} and \\ in a path as a pattern",
                hint="rename the folder",
            )
        # By default Spark skips files that are a week older than the newest one.
        reader = spark.readStream.name(name).option("maxFileAge", "36500d")
        # Otherwise Spark skips sub-folders, and reads files twice because of names like a[1].
        reader = reader.option("recursiveFileLookup", "true")
        if self.max_files_per_epoch:
            reader = reader.option("maxFilesPerTrigger", self.max_files_per_epoch)
        return reader


def _stop(kind: str | DataType) -> Column:
    from pyspark.sql import functions as F

    return stop_at(F.struct(F.col("file"), F.col("record")), kind)


def bad_line(place: dict[str, Any]) -> BadInput:
    """The error for the line at which a task stopped."""
    file = unquote(urlparse(place["file"]).path)
    record = place["record"]
    return BadInput(
        f"{file}, line {_line_number(file, record)} cannot be parsed: {record[:200]}",
        hint="correct or remove the line (write the file again under another name), or send such "
        "rows to a sink: Files(…, on_bad=<a sink>)",
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
