"""Where an output goes to."""

from __future__ import annotations

from typing import Any

from onceflow.ledger import Committable, Ledger, Outcome, Position, Publication, judge
from onceflow.sinks.base import Sink, Staged
from onceflow.sinks.files import Files
from onceflow.sinks.log import Log
from onceflow.sinks.sqlite import Sqlite

__all__ = [
    "Committable",
    "Files",
    "Ledger",
    "Log",
    "Outcome",
    "Position",
    "Publication",
    "Sink",
    "Sqlite",
    "Staged",
    "judge",
    "open_target",
]

_KINDS: dict[str, type[Files] | type[Log] | type[Sqlite]] = {
    "files": Files, "log": Log, "sqlite": Sqlite,
}  # fmt: skip


def open_target(target: dict[str, Any]) -> Sink | None:
    """The sink that a fence entry describes; None for one that onceflow does not ship."""
    kind = _KINDS.get(target.get("kind", ""))
    if kind is None:
        return None
    settings = {name: value for name, value in target.items() if name not in ("kind", "path")}
    return kind(target["path"], **settings)
