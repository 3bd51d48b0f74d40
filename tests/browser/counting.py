"""The job on the page: words counted by key, long words to a log, short words to files."""

from pyspark.sql import functions as F

from onceflow import Flow, job
from onceflow.sinks import Files
from onceflow.sinks import Log as ToLog
from onceflow.sources import Log
from onceflow.state import KeyedProcess, ReducingState


class Seen(KeyedProcess):
    times = ReducingState("long", "count")


@job("words", every="500ms")
def words(flow: Flow) -> None:
    lines = flow.read("lines", Log("data/lines"))
    found = lines.select(
        "event_time", "_partition", "_offset", F.explode(F.split("value", " ")).alias("word")
    )
    counts = flow.keyed(
        found, by="word", process=Seen(), name="seen", event_time="event_time", watermark="1 minute"
    )
    length = F.when(F.length("word") > 5, "long").otherwise("short")
    flow.write(
        "counts",
        counts.then(lambda df: df.withColumn("length", length)),
        to={"long": ToLog("out/long"), "short": Files("out/short")},
        by="length",
    )
