"""The embedded log: a durable, partitioned log in a folder, for jobs without any server.

Lives here: its commits, segments, producers, readers and retention, and the log as a source and as
a sink. May not live here: what `Files` needs too (see `folders/`). Start reading in `embedded.py`,
then `commits.py`.
"""

from __future__ import annotations

from onceflow.log.append import Appended
from onceflow.log.embedded import DEFAULT_SCHEMA, EmbeddedLog

__all__ = ["DEFAULT_SCHEMA", "Appended", "EmbeddedLog"]
