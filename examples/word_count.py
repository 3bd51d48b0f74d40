"""Counts words in five-second windows of event time, each window published exactly once.

    onceflow run examples/word_count.py

reads JSON lines such as {"event_time": "2026-01-01T00:00:01Z", "value": "to be or not"} from
data/lines and writes Parquet files to out/counts.
"""

from pyspark.sql import functions as F

from onceflow import Flow, job, sources
from onceflow.sinks import Files


@job("word-count")
def word_count(flow: Flow) -> None:
    lines = flow.read(
        "lines",
        sources.Files("data/lines", format="json", schema="event_time timestamp, value string"),
    )
    counts = (
        lines.select("event_time", F.explode(F.split("value", r"\s+")).alias("word"))
        .withWatermark("event_time", "5 seconds")
        .groupBy(F.window("event_time", "5 seconds"), "word")
        .count()
    )
    flow.write("counts", counts, to=Files("out/counts"))
