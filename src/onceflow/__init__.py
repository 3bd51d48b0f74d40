"""Exactly-once stream processing for Python, on Spark: not less, not more."""

__version__ = "0.1.0"

from onceflow.flow import Flow
from onceflow.job import Job, job
from onceflow.session import get_session, profile
from onceflow.start import Handle, start, write

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
