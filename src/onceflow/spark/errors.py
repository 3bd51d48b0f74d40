"""Errors of Spark, in one readable line."""

from __future__ import annotations

import re

_LONGEST = 600


def readable(error: BaseException) -> str:
    """The type and the message of the error in one line, without plans and stack traces."""
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    first = re.sub(r"\s*SQLSTATE: \w+;?$", "", first)
    first = re.sub(r"^(\w+\.)+(?=\w+(Exception|Error)\b)", "", first)
    if java is None:
        first = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return first if len(first) <= _LONGEST else first[:_LONGEST] + " …"
