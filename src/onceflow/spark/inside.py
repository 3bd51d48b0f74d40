"""Everything that knows Spark's inside: its files, their formats, and calls into its JVM.

Fits the versions in `SUPPORTED`; `tests/spark/test_spark_inside.py` holds it to each fact.
Nothing else in onceflow names a file of Spark's checkpoint or a method of its JVM classes.

While `foreachBatch` runs, Spark's query knows three things that Spark itself writes down only
later, or never: the range that it really planned, the ids of the state that this attempt wrote
(state checkpoint format 2), and the watermark of the next epoch. A decision carries them, so
that after a crash `offsets/<N>` and `commits/<N>` can be written from it.
"""

from __future__ import annotations

import re

from onceflow.errors import SetupError
from onceflow.spark.checkpoint import Checkpoint, advance_watermark, offset_after, parse_offsets
from onceflow.spark.file_source_log import COMPACT_INTERVAL, SourceEntries
from onceflow.spark.running_query import (
    Load,
    Plan,
    RunningQuery,
    end_jvm,
    has_raw_files,
    is_classic,
    is_deterministic,
    jvm_process,
    keep_no_checksums,
    keep_quiet,
    no_state_snapshots,
    register_data_source,
    stateful_operations,
)

SUPPORTED = ((4, 2), (4, 3))

__all__ = [
    "COMPACT_INTERVAL",
    "SUPPORTED",
    "Checkpoint",
    "Load",
    "Plan",
    "RunningQuery",
    "SourceEntries",
    "advance_watermark",
    "check_version",
    "end_jvm",
    "has_raw_files",
    "is_classic",
    "is_deterministic",
    "jvm_process",
    "keep_no_checksums",
    "keep_quiet",
    "no_state_snapshots",
    "offset_after",
    "parse_offsets",
    "register_data_source",
    "stateful_operations",
]


def check_version(version: str) -> None:
    parts = version.split(".")
    if tuple(int(re.sub(r"\D.*", "", p)) for p in parts[:2]) not in SUPPORTED:
        known = ", ".join(f"{a}.{b}" for a, b in SUPPORTED)
        raise SetupError(
            f"Spark {version} is not supported: onceflow knows the inside of {known}",
            hint="pip install 'pyspark>=4.2,<4.4'",
        )
