"""Counts ad impressions and clicks for each ad and minute, every event once.

    onceflow log create events
    onceflow run ads.py

reads JSON text such as {"id": "e7", "ad": "ad-03", "kind": "click"} from the log `events`. What
cannot be parsed goes to out/rejected. An event that was sent twice counts once. The counts go to
Parquet files in out/counts and to a table in out/counts.db, both by one decision for each epoch.
"""

from pyspark.sql import functions as F

from onceflow import Flow, job
from onceflow.sinks import Files, Sqlite
from onceflow.sources import Log

EVENT = "id string, ad string, kind string"
COMPLETE = "event.id is not null and event.ad is not null and event.kind is not null"


@job("ads")
def ads(flow: Flow) -> None:
    lines = flow.read("events", Log("events"))
    parsed = lines.select("event_time", "value", F.from_json("value", EVENT).alias("event"))

    rejected = parsed.where(f"not ({COMPLETE})").select("event_time", "value")
    flow.write("rejected", rejected, to=Files("out/rejected"))

    counts = (
        parsed.where(COMPLETE)
        .select("event_time", "event.*")
        .withWatermark("event_time", "30 seconds")  # no event comes later than that
        .dropDuplicatesWithinWatermark(["id"])
        .groupBy(F.window("event_time", "1 minute"), "ad", "kind")
        .count()
        .select(F.col("window.start").alias("minute"), "ad", "kind", "count")
    )
    targets = {
        "files": Files("out/counts"),
        "sqlite": Sqlite("out/counts.db", table="counts"),
    }
    to_each = F.explode(F.array(*map(F.lit, targets)))
    flow.write("counts", counts.withColumn("target", to_each), to=targets, by="target")
