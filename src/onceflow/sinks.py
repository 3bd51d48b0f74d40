"""Where an output goes to."""

from __future__ import annotations

from onceflow.contract.abilities import (
    CanAdd,
    CanCleanUp,
    CanPartition,
    CanReadBack,
    CanRefuseRows,
    CanRewind,
    CanStage,
    HasReaders,
    Staged,
)
from onceflow.contract.ledger import (
    Committable,
    Ledger,
    Outcome,
    Position,
    Publication,
    Verdict,
    judge,
)
from onceflow.contract.registry import open_target
from onceflow.contract.sink import Sink
from onceflow.files.sink import Files
from onceflow.kafka.sink import Kafka
from onceflow.log.sink import Log
from onceflow.postgres.sink import Postgres
from onceflow.sqlite.sink import Sqlite

__all__ = [
    "CanAdd",
    "CanCleanUp",
    "CanPartition",
    "CanReadBack",
    "CanRefuseRows",
    "CanRewind",
    "CanStage",
    "Committable",
    "Files",
    "HasReaders",
    "Kafka",
    "Ledger",
    "Log",
    "Outcome",
    "Position",
    "Postgres",
    "Publication",
    "Sink",
    "Sqlite",
    "Staged",
    "Verdict",
    "judge",
    "open_target",
]
