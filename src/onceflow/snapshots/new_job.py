"""A job that begins with a cut, where none of its name was: a fork, or a job on a new machine.

It is made where nobody looks, and is there from its `job.json` on. Who is killed before that is
made again by the same command.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from onceflow.errors import JobError
from onceflow.faults.points import reach
from onceflow.protocol.home import JobFolder, now
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.cut import Cut
from onceflow.snapshots.restore import begin
from onceflow.store.posix import seal

_MAKING = "making.json"


def refuse_taken(folder: JobFolder) -> None:
    if folder.first_lineage() is not None:
        raise JobError(f"there is a job {folder.name} already", hint="choose another name")


def make_job(
    folder: JobFolder,
    origins: Mapping[str, tuple[Origin, Cut]],
    starts: dict[str, dict[str, Any]],
    *,
    about: Mapping[str, Any],
    facts: dict[str, Any],
) -> str:
    """The lineage that it is in. Hold the lease of the job meanwhile.

    `about`: what is said of the lineage; `facts`: of the job."""
    refuse_taken(folder)
    (lineage,) = {origin.lineage for origin, _ in origins.values()}
    if folder.store.read(_MAKING) is not None:
        for name in ("lineages", "starts"):
            shutil.rmtree(folder.folder / name, ignore_errors=True)
    elif folder.store.list("lineages"):
        raise JobError(
            f"{folder.folder} has lineages and no job.json",
            hint="put job.json back from a backup of the home",
        )
    folder.store.put_if_absent(_MAKING, seal("making", folder.name, {"at": now()}))
    reach("job.begun")
    for query, (origin, cut) in origins.items():
        begin(folder.query(lineage, query), cut, {"at": now(), "origin": origin.as_json()})
    folder.put_starts(starts)
    parents = {
        query: {"lineage": origin.parent, "epoch": origin.cut}
        for query, (origin, _) in origins.items()
    }
    folder.put_lineage(lineage, {"parent": parents, "at": now(), **about})
    reach("job.made")
    for query in origins:
        begun = folder.query(lineage, query).epoch_log().read().begun
        if begun is None or begun["origin"]["lineage"] != lineage:
            raise JobError(
                f"somebody else makes job {folder.name} at the same time", hint="try again"
            )
    if not folder.put_job(lineage, facts):
        refuse_taken(folder)
    reach("job.listed")
    folder.store.delete(_MAKING)
    return lineage
