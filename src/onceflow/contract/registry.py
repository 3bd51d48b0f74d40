"""Find a sink by the facts that its driver recorded, for commands that do not run the job.

A package offers its sinks as entry points of the group `onceflow.sinks`, named by their kind.
onceflow offers its own in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from onceflow.contract.sink import NOT_ARGUMENTS, Sink
from onceflow.errors import JobError, OnceflowError, SetupError

GROUP = "onceflow.sinks"


def open_target(description: Mapping[str, Any]) -> Sink:
    """The sink that a fence entry describes. `JobError` if no installed package offers it."""
    kind = str(description.get("kind", ""))
    found = _load(kind)
    settings = {key: value for key, value in description.items() if key not in NOT_ARGUMENTS}
    try:
        return found(**settings)
    except TypeError as error:
        raise JobError(
            f"the sink of kind {kind!r} does not take the settings that a driver recorded: {error}",
            hint="install the version of its package that the job ran with",
        ) from error


@cache
def place_argument(kind: str) -> str:
    """The argument of a sink of this kind that says where its target is; "" if nobody knows."""
    try:
        return _load(kind).place
    except OnceflowError:
        return ""


def _load(kind: str) -> type[Sink]:
    offered = list(entry_points(group=GROUP, name=kind))
    if not offered:
        raise JobError(
            f"no package that is installed here offers a sink of kind {kind!r}",
            hint=f"install the package that does; it names {kind!r} among its entry points "
            f'[project.entry-points."{GROUP}"]',
        )
    try:
        found: type[Sink] = offered[0].load()
    except Exception as error:  # whatever the modules of its package raise
        raise SetupError(
            f"the sink of kind {kind!r} cannot be imported: {error}",
            hint=f"install what {offered[0].value} imports",
        ) from error
    return found
