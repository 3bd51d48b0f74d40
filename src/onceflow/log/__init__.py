"""The embedded log: a durable, partitioned log in a folder, for jobs without any server."""

from __future__ import annotations

from onceflow.log.embedded import DEFAULT_SCHEMA, EmbeddedLog
from onceflow.log.producing import Appended

__all__ = ["DEFAULT_SCHEMA", "Appended", "EmbeddedLog"]
