"""What Spark raises, in one line that a person can read."""

from __future__ import annotations

import re

_LONGEST = 600


def readable(error: BaseException) -> str:
    """One line: what it is and what it says, without plans and stacks."""
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    first = re.sub(r"\s*SQLSTATE: \w+;?$", "", first)
    first = re.sub(r"^(\w+\.)+(?=\w+(Exception|Error)\b)", "", first)
    if java is None:
        first = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return first if len(first) <= _LONGEST else first[:_LONGEST] + " …"
