"""Loads the results of both regions into a serving table and a warehouse.

    onceflow run examples/ads/load.py

Counts and attributions go to a serving table, by record id, and to the warehouse: Parquet files by
region and day. One decision publishes the rows of an epoch to both.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from ads.places import AD_MINUTES, ATTRIBUTIONS, Places, columns
from ads.world import ATTRIBUTED, COUNT
from onceflow import Flow, job


@job("load", every="1 second")
def load(flow: Flow) -> None:
    places = Places.from_environment()

    counts = places.read(flow, "counts").select(columns(COUNT))
    publish(flow, places, "counts", counts, table=AD_MINUTES, day_of="minute")

    attributions = places.read(flow, "attributed").select(columns(ATTRIBUTED))
    publish(flow, places, "attributions", attributions, table=ATTRIBUTIONS, day_of="ordered_at")


def publish(
    flow: Flow, places: Places, name: str, rows: DataFrame, *, table: str, day_of: str
) -> None:
    targets = {"serving": places.serving(table), "warehouse": places.warehouse(table)}
    dated = rows.withColumn("day", F.date_format(day_of, "yyyy-MM-dd"))
    flow.write(
        name,
        dated.withColumn("target", F.explode(F.array(*map(F.lit, targets)))),
        to=targets,
        by="target",
        columns={"serving": rows.columns, "warehouse": dated.columns},
    )
