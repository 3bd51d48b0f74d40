"""Where an output goes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onceflow.contract.ledger import Committable, Ledger, Outcome, Position, Publication, judge
from onceflow.contract.sink import Sink, Staged
from onceflow.files.sink import Files
from onceflow.kafka.sink import Kafka
from onceflow.log.sink import Log
from onceflow.postgres.sink import Postgres
from onceflow.sqlite.sink import Sqlite

__all__ = [
    "Committable",
    "Files",
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
    "judge",
    "open_target",
]

_KINDS: dict[str, Callable[..., Sink]] = {
    "files": Files, "kafka": Kafka, "log": Log, "postgres": Postgres, "sqlite": Sqlite,
}  # fmt: skip


def open_target(target: dict[str, Any]) -> Sink | None:
    """The sink that a fence entry describes; None for one that onceflow does not ship."""
    kind = _KINDS.get(target.get("kind", ""))
    if kind is None:
        return None
    return kind(**{name: value for name, value in target.items() if name != "kind"})
