"""Counts words in five-second windows of event time, each window published exactly once.

    onceflow log append data/lines lines.txt
    onceflow run examples/word_count.py

reads lines from the log data/lines and writes Parquet files to out/counts.
"""

from pyspark.sql import functions as F

from onceflow import Flow, job
from onceflow.sinks import Files
from onceflow.sources import Log


@job("word-count")
def word_count(flow: Flow) -> None:
    lines = flow.read("lines", Log("data/lines"))
    counts = (
        lines.select("event_time", F.explode(F.split("value", r"\s+")).alias("word"))
        .withWatermark("event_time", "5 seconds")
        .groupBy(F.window("event_time", "5 seconds"), "word")
        .count()
    )
    flow.write("counts", counts, to=Files("out/counts"))
