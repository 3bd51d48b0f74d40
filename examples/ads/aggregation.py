"""Counts impressions and clicks by ad and minute, each event once.

    onceflow run examples/ads/aggregation.py

It reads the raw lines of all regions and makes three streams of each region by one decision:
`events`, each accepted event once; `counts`, what an epoch adds to an ad's minute, as a pane of its
own; and `rejected`, lines that are no events, with the reason. A late event makes a further pane of
its minute, so panes are added up and never changed.
"""

from __future__ import annotations

import json
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from ads.places import Places, columns
from ads.world import (
    ADS,
    AHEAD,
    COUNT,
    EVENT,
    FIELD_MISSING,
    FIELD_TOO_LONG,
    FREE,
    FROM_THE_FUTURE,
    KINDS,
    LINE,
    LONGEST_FIELD,
    LONGEST_LINE,
    MAX_AGE,
    NAMESPACE,
    NOT_A_TIME,
    NOT_JSON,
    NULL_CHARACTER,
    REGIONS,
    REJECTED,
    REMEMBERED,
    REQUIRED,
    TOO_OLD,
    UNKNOWN_AD,
    UNKNOWN_KIND,
    UNSTEADY,
)
from onceflow import Flow, job
from onceflow.state import KeyedProcess, ValueState

STREAMS = {"events": EVENT, "counts": COUNT, "rejected": REJECTED}
FLAT = r"\A\{[^{}]*\}\z"  # almost all lines; to parse each of them twice more takes its time
DAY_AND_TIME = r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}"
CAMPAIGNS = json.dumps({ad.name: ad.campaign for ad in ADS.values()})


@job("aggregation", every="1 second")
def aggregation(flow: Flow) -> None:
    places = Places.from_environment()
    once = flow.keyed(
        checked(places.read(flow, "raw"), received=places.received),
        by=["region", "identity"],
        process=Once(),
        event_time="received",
        watermark=f"{UNSTEADY.total_seconds():.0f} seconds",
        order=("region", "raw_partition", "raw_offset"),
        late=places.late("aggregation"),
    )
    outputs = {f"{stream}_{region}": (stream, region) for stream in STREAMS for region in REGIONS}
    flow.write(
        "ads",
        once.then(with_panes),
        to={name: places.sink(*stream) for name, stream in outputs.items()},
        by="output",
        columns={name: columns(STREAMS[stream]) for name, (stream, _) in outputs.items()},
    )


# ---------------------------------------------------------------- is it an event?


def checked(lines: DataFrame, *, received: str) -> DataFrame:
    """Each line with the event that it says, or with the reason why it is none.

    A line comes from anywhere: nothing that it may say can stop the job or pass for another line.
    """
    schema = f"{LINE}, broken string"  # where Spark puts a text that is not what it should be
    options = {"columnNameOfCorruptRecord": "broken", "allowNonNumericNumbers": "false"}
    parsed = lines.select(
        "region",
        "value",
        F.col(received).alias("received"),
        F.col("_partition").alias("raw_partition"),
        F.col("_offset").alias("raw_offset"),
        F.from_json("value", schema, options).alias("line"),
        is_one().alias("is_one"),
    )
    campaign = F.from_json(F.lit(CAMPAIGNS), "map<string, string>")[F.col("line.ad")]
    # Without a day Spark would take that of its clock.
    at = F.when(F.col("line.at").rlike(DAY_AND_TIME), F.try_to_timestamp("line.at"))
    known = parsed.withColumn("at", at).withColumn("campaign", campaign)
    judged = known.withColumn("reason", reason())
    accepted, is_order = F.col("reason").isNull(), F.col("line.kind") == "order"
    identity = (
        F.when(~accepted, F.concat_ws("/", F.lit("line"), "raw_partition", "raw_offset"))
        .when(is_order, F.concat_ws("/", F.lit("order"), "line.order"))
        .otherwise(F.concat_ws("/", F.lit("event"), "line.id"))
    )
    return judged.select(
        "line.id",
        "line.kind",
        "at",
        "received",
        "line.user",
        "line.restaurant",
        "line.ad",
        F.col("line.order").alias("order_id"),
        "region",
        "raw_partition",
        "raw_offset",
        "campaign",
        F.date_trunc("minute", "at").alias("minute"),
        F.when(~accepted, F.substring("value", 1, LONGEST_LINE)).alias("value"),
        "reason",
        identity.alias("identity"),
        F.concat_ws("_", F.when(accepted, "events").otherwise("rejected"), "region").alias(
            "output"
        ),
    )


def is_one() -> Column:
    """Is there nothing behind the object? Spark's parser stops there.

    Where the only brace that closes is the last character, there is no room for anything. Else the
    text is counted as an element of an array; one that ends our array itself counts one more in the
    second, not two.
    """
    length = "json_array_length(concat('{}', value, '{}'))"
    alone, among = length.format("[", "]"), length.format("[0,", ",0]")
    counted = F.expr(f"{alone} <=> 1 and {among} <=> 3")
    return F.when(F.col("value").rlike(FLAT), True).otherwise(counted)


def reason() -> Column:
    """Why a line is no event that counts: the first that applies, or null."""
    line, at, received = F.col("line"), F.col("at"), F.col("received")
    is_order = line["kind"] == "order"
    text = F.concat_ws("", *(line[name] for name in columns(LINE)))
    free = {name: F.length(line[name]) for name in FREE}
    one = F.col("is_one") & line.isNotNull() & line["broken"].isNull()
    found = F.when(~one, NOT_JSON).when(text.contains("\0"), NULL_CHARACTER)
    for name in REQUIRED:
        missing = line[name].isNull()
        found = found.when(missing | (free[name] == 0) if name in free else missing,
                           FIELD_MISSING + name)  # fmt: skip
    for name, length in free.items():
        found = found.when(length > LONGEST_FIELD, FIELD_TOO_LONG + name)
    return (
        found.when(~line["kind"].isin(*KINDS), UNKNOWN_KIND)
        .when(is_order & F.coalesce(free["order"] == 0, F.lit(True)), FIELD_MISSING + "order")
        .when(~is_order & line["ad"].isNull(), FIELD_MISSING + "ad")
        .when(at.isNull(), NOT_A_TIME)
        .when(~is_order & F.col("campaign").isNull(), UNKNOWN_AD)
        .when(received.isNull(), FIELD_MISSING + "received")
        .when(at < received - F.lit(MAX_AGE), TOO_OLD)
        .when(at > received + F.lit(AHEAD), FROM_THE_FUTURE)
    )


# ---------------------------------------------------------------- has it come before?


class Once(KeyedProcess):
    """Lets the first row of each key pass, as part of this epoch's panes; later ones fall out.

    It remembers a key on the clock of receipts, which stands still while the job does: however long
    it was down, a copy finds the event that came before. A copy is too old, and rejected, long
    before the event is forgotten. A rejected line has a key of its own and is not remembered.
    """

    seen = ValueState("boolean", ttl=REMEMBERED, ttl_on="event")

    def bind(self, keys: pa.Schema, rows: pa.Schema) -> None:
        self.output = rows.append(pa.field("pane", pa.int64()))

    def process(self, keys: pa.Table, rows: pa.Table) -> tuple[pa.Table, dict[str, pa.Array]]:
        first = rows.take(pa.array(self.starts))
        new = first.filter(pc.is_null(keys["seen"]))
        pane = pa.repeat(pa.scalar(self.time.epoch, pa.int64()), len(new))
        remembered = pc.if_else(pc.is_null(first["reason"]), True, None)
        return new.append_column("pane", pane), {"seen": remembered}


# ---------------------------------------------------------------- what does it add?


def with_panes(rows: DataFrame) -> DataFrame:
    """The rows of an epoch, and what they add to each minute of an ad.

    It is called for each epoch; expressions as text are one call to Spark each.
    """
    minute = "date_format(minute, \"yyyy-MM-dd'T'HH:mm:ss'Z'\")"
    name = f"concat_ws('/', 'aggregation', region, ad, {minute}, pane)"
    counts = (
        rows.where("reason is null and kind != 'order'")
        .groupBy("region", "ad", "campaign", "minute", "pane")
        .agg(
            F.expr("count_if(kind = 'impression') as impressions"),
            F.expr("count_if(kind = 'click') as clicks"),
        )
        .selectExpr(
            "*", f"{uuid5(NAMESPACE, name)} as record_id", "concat('counts_', region) as output"
        )
    )
    return rows.unionByName(counts, allowMissingColumns=True)


def uuid5(namespace: UUID, name: str) -> str:
    """In SQL, as Python's `uuid.uuid5`: of the SHA-1 of both, with version and variant in their
    places. `name` is in SQL, too."""
    digest = f"sha1(concat(X'{namespace.hex}', encode({name}, 'UTF-8')))"
    variant = f"translate(substr({digest}, 17, 1), '0123456789abcdef', '89ab89ab89ab89ab')"
    marked = f"overlay(overlay({digest} placing '5' from 13) placing {variant} from 17)"
    parts = "(.{8})(.{4})(.{4})(.{4})(.{12}).*"
    return f"regexp_replace({marked}, '^{parts}$', '$1-$2-$3-$4-$5')"
