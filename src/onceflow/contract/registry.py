"""Find a sink class by its kind, for commands that know an output only by what its driver wrote.

A package offers its sinks as entry points of the group `onceflow.sinks`, named by their kind.
onceflow offers its own in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from onceflow.contract.sink import Sink

GROUP = "onceflow.sinks"


def open_target(target: Mapping[str, Any]) -> Sink | None:
    """The sink that a fence entry describes. None: no installed package offers its kind."""
    for found in entry_points(group=GROUP, name=str(target.get("kind", ""))):
        kind: type[Sink] = found.load()
        settings = {key: value for key, value in target.items() if key not in _NOT_SETTINGS}
        return kind(**settings)
    return None


_NOT_SETTINGS = {"kind", "guarantee"}
