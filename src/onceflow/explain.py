"""Turn what Spark raises into what a person can act on."""

from __future__ import annotations

import re

from onceflow import errors
from onceflow.errors import DiskFull, OnceflowError
from onceflow.sources.files import bad_input


def explain(error: BaseException) -> BaseException:
    """A bad row or a full disk by its name; anything else as it is."""
    if isinstance(error, OnceflowError):
        return error
    ours = _raised_in_python(str(error))
    if ours is not None:
        return ours
    bad = bad_input(error)
    if bad is not None:
        return bad
    if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
        return DiskFull(
            "no space left where Spark writes (home, output or spark.local.dir)",
            hint="make space and start the job again; it goes on where it stood",
        )
    return error


def _raised_in_python(text: str) -> OnceflowError | None:
    """What one of our own processes that Spark started has raised, from the traceback it left."""
    said = r"onceflow\.errors\.(\w+): ((?:.|\n(?=  - ))+)(?:\n  fix: (.*))?"
    found = re.search(said, text)
    kind = getattr(errors, found[1], None) if found else None
    if found is None or not (isinstance(kind, type) and issubclass(kind, OnceflowError)):
        return None
    return kind(found[2], hint=found[3] or "")
