"""Write the rows of an epoch directly from Spark's plan, as Spark's file sink does.

The DataFrame that Spark passes to `foreachBatch` would copy every row of that plan once more.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any


def write_parquet(jvm: Any, execution: Any, root: str, options: Mapping[str, str]) -> None:
    """Run the plan of `execution` and write its rows to a new folder `root`."""
    datasources = jvm.org.apache.spark.sql.execution.datasources
    writer = getattr(datasources, "FileFormatWriter$").__getattr__("MODULE$")
    session = execution.sparkSession()
    nothing = getattr(jvm.scala.collection.immutable, "Map$").__getattr__("MODULE$").empty()
    settings = nothing
    for name, value in options.items():
        settings = settings.updated(name, value)
    none = jvm.scala.jdk.javaapi.CollectionConverters.asScala(jvm.java.util.ArrayList()).toSeq()
    state = session.sessionState()
    committer = jvm.org.apache.spark.internal.io.FileCommitProtocol.instantiate(
        state.conf().fileCommitProtocolClass(), str(uuid.uuid4()), root, False
    )
    columns = execution.analyzed().output()
    writer.write(
        session,
        execution.executedPlan(),
        datasources.parquet.ParquetFileFormat(),
        committer,
        getattr(datasources, "FileFormatWriter$OutputSpec")(root, nothing, columns),
        state.newHadoopConfWithOptions(settings),
        none,  # partition columns
        jvm.scala.Option.empty(),  # buckets
        none,  # trackers of statistics
        settings,
        0,  # static partition columns
        getattr(writer, "write$default$12")(),
    )
