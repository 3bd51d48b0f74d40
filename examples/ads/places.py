"""Where each stream and each table of the application is.

Embedded, they are logs, a database file and Parquet folders under one folder. With servers, streams
are Kafka topics and tables are in PostgreSQL; the warehouse and the late events stay in the folder:

    ADS_KAFKA=host:port           the broker
    ADS_POSTGRES_FILE=file        a file with the connection string, which is a secret
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from ads.world import ATTRIBUTED, COUNT, EVENT, PARTITIONS, RAW, RAW_KEY, REGIONS, REJECTED
from onceflow.errors import JobError, ServerSilent
from onceflow.log import EmbeddedLog
from onceflow.sinks import Files, Postgres, Sink, Sqlite
from onceflow.sinks import Kafka as TopicSink
from onceflow.sinks import Log as LogSink
from onceflow.sources import Kafka, Log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from onceflow import Flow

STREAMS = {
    "raw": RAW,
    "events": EVENT,
    "counts": COUNT,
    "rejected": REJECTED,
    "attributed": ATTRIBUTED,
}
# Of messages. Whoever reads events judges lateness by raw partition, and may see what a transaction
# brought to one partition before what it brought to another: so a raw partition's are in one.
KEYS = {"events": ["raw_partition"], "counts": ["ad"], "attributed": ["order_id"]}
# How the application's commands are typed: in a checkout, or where `onceflow demo` has copied it.
COMMAND = f"python -m {'examples.' if Path(__file__).parents[1].name == 'examples' else ''}ads"
AD_MINUTES, ATTRIBUTIONS = "ad_minutes", "attributions"  # the tables


def columns(schema: str) -> list[str]:
    """The names in a schema of `world`."""
    return [column.split()[0].strip("`") for column in schema.split(", ")]


@dataclass(frozen=True)
class Places:
    """All places of one run. Without servers everything is under `folder`."""

    folder: Path = Path()
    kafka: str | None = None  # host:port
    dsn: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(
        cls, folder: str | os.PathLike[str] = ".", environment: Mapping[str, str] = os.environ
    ) -> Places:
        secret = environment.get("ADS_POSTGRES_FILE")
        return cls(
            folder=Path(folder),
            kafka=environment.get("ADS_KAFKA") or None,
            dsn=_secret(Path(secret)) if secret else None,
        )

    # ---------------------------------------------------------------- streams

    def log(self, stream: str, region: str) -> Path:
        return self.folder / stream / region

    def topic(self, stream: str, region: str) -> str:
        return f"ads.{stream}.{region}"

    def read(self, flow: Flow, stream: str) -> DataFrame:
        """The rows of all regions, each with its region."""
        from pyspark.sql import functions as F

        if self.kafka is not None:
            topics = [self.topic(stream, region) for region in REGIONS]
            value = None if stream == "raw" else STREAMS[stream]
            rows = flow.read(stream, Kafka(topics, servers=self.kafka, value=value))
            if stream == "raw":  # a line that is no text is rejected, like others that are no event
                text = F.try_validate_utf8(F.col("value").cast("string"))
                other = F.concat(F.lit("not UTF-8: "), F.hex("value"))
                rows = rows.withColumn("value", F.coalesce(text, other))
            return rows.withColumn("region", F.substring_index("_topic", ".", -1))
        regions = [
            flow.read(f"{stream}_{region}", Log(self.log(stream, region))).withColumn(
                "region", F.lit(region)
            )
            for region in REGIONS
        ]
        return reduce(lambda one, other: one.unionByName(other), regions)

    @property
    def received(self) -> str:
        """The column of a raw line that says when it was received."""
        return "_timestamp" if self.kafka else "event_time"

    def sink(self, stream: str, region: str) -> Sink:
        if self.kafka is None:
            return LogSink(self.log(stream, region), partitions=PARTITIONS)
        topic, value = self.topic(stream, region), columns(STREAMS[stream])
        return TopicSink(topic, servers=self.kafka, key=KEYS.get(stream), value=value)

    def late_log(self, job: str) -> Path:
        return self.folder / "late" / job

    def late(self, job: str) -> Sink:
        """Lines, or events, that came too late for a job. There are none: `check` looks."""
        return LogSink(self.late_log(job))

    def create(self) -> None:
        """Create all logs or topics. Existing ones stay as they are."""
        if self.kafka is None:
            for stream, schema in STREAMS.items():
                for region in REGIONS:
                    path = self.log(stream, region)
                    key = RAW_KEY if stream == "raw" else ()
                    EmbeddedLog.create(path, schema, partitions=PARTITIONS, key=key, exist_ok=True)
        else:
            create_topics(
                self.kafka, [self.topic(stream, region) for stream in STREAMS for region in REGIONS]
            )

    # ---------------------------------------------------------------- tables

    @property
    def serving_file(self) -> Path:
        return self.folder / "serving.db"

    def serving(self, table: str) -> Sink:
        if self.dsn is None:
            return Sqlite(self.serving_file, table=table, key="record_id")
        return Postgres(self.dsn, table=table, key="record_id")

    @property
    def answers(self) -> Path | str:
        """Where the answers of the order service are staged, for `Answers`."""
        return self.dsn or self.folder.absolute() / "answers.db"

    def warehouse_folder(self, table: str) -> Path:
        return self.folder / "warehouse" / table

    def warehouse(self, table: str) -> Sink:
        return Files(self.warehouse_folder(table), by=["region", "day"])


def _secret(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            f"no connection string can be read from {path}: {error}",
            hint="ADS_POSTGRES_FILE names a file that holds one, and nothing else",
        ) from error


def create_topics(servers: str, names: list[str]) -> None:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    keep = {"retention.ms": "-1"}  # the time of a raw line is the stream's, which is long ago
    made = admin.create_topics([NewTopic(name, PARTITIONS, config=keep) for name in names])
    for future in made.values():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise ServerSilent(
                    f"the topics can't be created in Kafka at {servers}: {error}",
                    hint="is ADS_KAFKA right, does the broker run, and may we create topics?",
                ) from error
