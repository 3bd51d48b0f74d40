"""An archive of Spark's classes (Java's class data sharing), with which Spark starts twice as fast.

Sessions use it if ONCEFLOW_CLASS_ARCHIVE names it; `onceflow.cli.class_archive` makes one. Java
checks that the archive belongs to this Java and these jars, and ignores it otherwise: a stale
archive costs only time.
"""

from __future__ import annotations

import os
from pathlib import Path

ARCHIVE = "ONCEFLOW_CLASS_ARCHIVE"
QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"


def java_options() -> str:
    """The JVM options with which Spark uses the archive; "" if there is none."""
    path = os.environ.get(ARCHIVE, "")
    blank = any(map(str.isspace, path))  # Spark splits the options at blanks
    if not path or blank or not Path(path).is_file():
        return ""
    return f"-XX:SharedArchiveFile={path} {QUIET}"
