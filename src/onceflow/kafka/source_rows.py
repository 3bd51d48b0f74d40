"""How a message of Kafka becomes a row, or why it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onceflow.contract.bad_rows import parse_json, row_schema, stop_at
from onceflow.contract.schema import quoted
from onceflow.errors import BadInput, JobError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

_PLACE = ("_topic", "_partition", "_offset", "_timestamp", "_headers")
_TOMBSTONE = "_tombstone"
_REJECTED = ("topic", "partition", "offset", "timestamp", "key", "value", "reason")


@dataclass(frozen=True)
class Form:
    """The forms of key and value: None for bytes, "string", or the fields of a JSON object."""

    value: str | StructType | None
    key: str | StructType | None

    @classmethod
    def of(cls, value: Any, key: Any, what: str) -> Form:
        """Parse the schemas. `what`: the source, for messages."""
        parsed = {
            name: form if form in (None, "string") else row_schema(form, what, json=True)
            for name, form in (("value", value), ("key", key))
        }
        taken = {"_key", *_PLACE, _TOMBSTONE}.intersection(map(str.lower, _names(parsed["value"])))
        if taken:
            raise JobError(
                f"{what}: the value has a field {min(taken)!r}, but that is a column of every row",
                hint="read the value as a string, and parse it in the job",
            )
        return cls(**parsed)

    def judged(self, messages: DataFrame) -> DataFrame:
        """Add `key_row` and `value_row`, decoded, and the `reason` why they cannot be, or null."""
        from pyspark.sql import functions as F

        rows, reasons = messages, [F.lit(None).cast("string")]
        for column, form in (("value", self.value), ("key", self.key)):
            row, text, parsed = f"{column}_row", f"{column}_text", f"{column}_parsed"
            if form is None:
                rows = rows.withColumn(row, F.col(column))
                continue
            rows = rows.withColumn(text, F.col(column).cast("string"))
            there = F.col(column).isNotNull()
            reasons += [_unless(F.is_valid_utf8(text), there, f"the {column} is not UTF-8")]
            if isinstance(form, str):
                rows = rows.withColumn(row, F.col(text))
                continue
            rows = parse_json(rows, text, form, into=parsed)
            wrong = f"the {column} is not a JSON object that fits the schema"
            reasons += [_unless(F.col(f"{parsed}_fits"), there, wrong)]
            fields = (F.col(f"{parsed}.{quoted(name)}").alias(name) for name in form.names)
            rows = rows.withColumn(row, F.when(there, F.struct(*fields)))
        return rows.withColumn("reason", F.coalesce(*reasons))

    def good(self, rows: DataFrame, *, stop: bool) -> DataFrame:
        """The rows for a job. `stop`: a bad row fails the task; else bad rows are left out."""
        from pyspark.sql import functions as F

        bad = F.col("reason").isNotNull()
        if stop:
            # In the columns too: Spark may move a filter of the query below ours.
            rows = rows.where(F.when(bad, _stop("boolean")).otherwise(F.lit(True)))
            for name in ("value_row", "key_row"):
                stopping = F.when(bad, _stop(rows.schema[name].dataType))
                rows = rows.withColumn(name, stopping.otherwise(F.col(name)))
        else:
            rows = rows.where(~bad)
        place = [F.col(name[1:]).alias(name) for name in _PLACE]
        names = _names(self.value)
        if not names:
            return rows.select(
                F.col("value_row").alias("value"), F.col("key_row").alias("_key"), *place
            )
        fields = [F.col(f"value_row.{quoted(name)}").alias(name) for name in names]
        gone = F.col("value").isNull().alias(_TOMBSTONE)
        return rows.select(*fields, F.col("key_row").alias("_key"), *place, gone)

    def bad(self, rows: DataFrame) -> DataFrame:
        return rows.where("reason IS NOT NULL").select(*_REJECTED)


def bad_message(place: dict[str, Any]) -> BadInput:
    """The error for the message at which a task stopped."""
    return BadInput(
        f"topic {place['topic']}, partition {place['partition']}, offset {place['offset']} cannot "
        f"be parsed: {place['reason']}: {place.get('record', '')}",
        hint="send such rows to a sink: Kafka(…, on_bad=<a sink>); the job then continues",
    )


def _names(form: Any) -> list[str]:
    return [] if form is None or isinstance(form, str) else list(form.names)


def _unless(good: Column, there: Column, reason: str) -> Column:
    from pyspark.sql import functions as F

    return F.when(there & ~F.coalesce(good, F.lit(False)), F.lit(reason))


def _stop(kind: str | DataType) -> Column:
    from pyspark.sql import functions as F

    record = F.substring(F.col("value").cast("string"), 1, 200).alias("record")
    return stop_at(F.struct("topic", "partition", "offset", "reason", record), kind)
