"""Turn errors of Spark into errors that name the cause and the fix."""

from __future__ import annotations

import re
from typing import Any

from onceflow import errors
from onceflow.contract.bad_rows import stopped_at
from onceflow.errors import BadInput, DiskFull, OnceflowError
from onceflow.files.source import bad_line
from onceflow.kafka.errors import explain_connector
from onceflow.kafka.source_rows import bad_message


def explain(error: BaseException) -> BaseException:
    """Return the `OnceflowError` for a bad row, a full disk or an error of Kafka; any other error
    unchanged."""
    if isinstance(error, OnceflowError):
        return error
    ours = _raised_in_python(str(error))
    if ours is not None:
        return ours
    place = stopped_at(error)
    if place is not None:
        return _bad_row(place)
    if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
        return DiskFull(
            "no space left where Spark writes (home, output or spark.local.dir)",
            hint="make space and start the job again; it continues from its last epoch",
        )
    return explain_connector(str(error)) or error


def _bad_row(place: dict[str, Any]) -> BadInput:
    if "topic" in place:
        return bad_message(place)
    if "file" in place:
        return bad_line(place)
    return BadInput(f"a row cannot be parsed: {place['record'][:200]}")


def _raised_in_python(text: str) -> OnceflowError | None:
    """The error that our code raised in a Python process of Spark, read from its traceback."""
    message = r"onceflow\.errors\.(\w+): ((?:.|\n(?=  - ))+)(?:\n  fix: (.*))?"
    found = re.search(message, text)
    kind = getattr(errors, found[1], None) if found else None
    if found is None or not (isinstance(kind, type) and issubclass(kind, OnceflowError)):
        return None
    return kind(found[2], hint=found[3] or "")
