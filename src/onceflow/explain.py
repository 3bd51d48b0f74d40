"""Turn what Spark raises into what a person can act on."""

from __future__ import annotations

from onceflow.errors import DiskFull, OnceflowError
from onceflow.sources.files import bad_input


def explain(error: BaseException) -> BaseException:
    """A bad row or a full disk by its name; anything else as it is."""
    if isinstance(error, OnceflowError):
        return error
    bad = bad_input(error)
    if bad is not None:
        return bad
    if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
        return DiskFull(
            "no space left where Spark writes (home, output or spark.local.dir)",
            hint="make space and start the job again; it goes on where it stood",
        )
    return error
