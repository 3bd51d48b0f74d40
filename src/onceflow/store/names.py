"""Names of jobs, queries, outputs and sources."""

from __future__ import annotations

import re

from onceflow.errors import JobError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_name(kind: str, name: str) -> str:
    """Names become folders and parts of ledger entries."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise JobError(
            f"{name!r} is not a name for a {kind}",
            hint="use letters, digits, '-', '_' and '.', beginning with a letter or a digit",
        )
    return name
