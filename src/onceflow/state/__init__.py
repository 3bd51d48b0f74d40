"""Keyed state: a table with one row for each key, kept as immutable sorted runs and manifests.

Lives here: what authors of keyed processes write, and the files behind it. May not live here: Spark
jobs and decisions, which run it (see `protocol/keyed_runner.py`). Start reading in `process.py`,
then `store.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceflow.state.process import KeyedProcess
    from onceflow.state.ready.join_last import JoinLast
    from onceflow.state.ready.running import Deduplicate, Last, TopN, Totals
    from onceflow.state.ready.sessions import Sessions
    from onceflow.state.states import ListState, MapState, ReducingState, Timer, ValueState

__all__ = [
    "Deduplicate",
    "JoinLast",
    "KeyedProcess",
    "Last",
    "ListState",
    "MapState",
    "ReducingState",
    "Sessions",
    "Timer",
    "TopN",
    "Totals",
    "ValueState",
]

# Imported when they are asked for: they load Arrow, and commands import this package without it.
_NAMES = {
    "process": ("KeyedProcess",),
    "states": ("ListState", "MapState", "ReducingState", "Timer", "ValueState"),
    "ready.join_last": ("JoinLast",),
    "ready.running": ("Deduplicate", "Last", "TopN", "Totals"),
    "ready.sessions": ("Sessions",),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'onceflow.state' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"onceflow.state.{_WHERE[name]}"), name)
