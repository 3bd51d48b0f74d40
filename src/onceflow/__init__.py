"""Exactly-once stream processing for Python, on Spark: not less, not more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onceflow.store.version import __version__

if TYPE_CHECKING:
    from onceflow.jobs.flow import Flow
    from onceflow.jobs.handle import Handle
    from onceflow.jobs.job import Job, job
    from onceflow.jobs.start import start, write
    from onceflow.spark.session import get_session, profile

__all__ = [
    "Flow",
    "Handle",
    "Job",
    "__version__",
    "get_session",
    "job",
    "profile",
    "start",
    "write",
]

# Imported when they are asked for: tasks import `onceflow.sources` and need none of them.
_WHERE = {
    "Flow": "jobs.flow",
    "Handle": "jobs.handle",
    "Job": "jobs.job",
    "get_session": "spark.session",
    "job": "jobs.job",
    "profile": "spark.session",
    "start": "jobs.start",
    "write": "jobs.start",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'onceflow' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"onceflow.{_WHERE[name]}"), name)
