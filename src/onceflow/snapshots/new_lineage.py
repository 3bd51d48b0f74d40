"""Make a query of a new lineage, or a whole job (a fork, or a job on a new machine), from a cut.

A job exists as soon as its `job.json` does, which is put last. If a command is killed before that,
the same command, given again, removes the leftovers and makes the job.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from onceflow.errors import JobError
from onceflow.faults.points import reach
from onceflow.protocol.home import JobFolder, Query, now
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.cut import Cut, place_files
from onceflow.spark.checkpoint import Checkpoint
from onceflow.spark.file_source_log import SourceLog
from onceflow.store.posix import seal

_MAKING = "making.json"


def begin_query(made: Query, cut: Cut, origin: Origin) -> None:
    """Make the checkpoint of a query at that cut, and the first entry of its log. When this
    returns, all of it is on the disk. Files that never change are linked, all others are new."""
    place_files(cut, made.folder)
    reach("restore.placed")
    for name, lines in cut.sources.items():
        SourceLog(made.folder / "sources" / name).rewrite(lines)
    Checkpoint(made.folder).set_query_id(made.spark_id)
    reach("restore.written")
    made.epoch_log().begin({"at": now(), "origin": origin.as_json()}, cut.decisions)


def refuse_taken(folder: JobFolder) -> None:
    if folder.first_lineage() is not None:
        raise JobError(f"job {folder.name} exists already", hint="choose another name")


def make_job(
    folder: JobFolder,
    origins: Mapping[str, tuple[Origin, Cut]],
    starts: dict[str, dict[str, Any]],
    *,
    about: Mapping[str, Any],
    facts: dict[str, Any],
) -> str:
    """Make a job, and return the lineage that it is in. The caller holds the lease of the job.

    `about` is recorded in the lineage, `facts` in the job."""
    refuse_taken(folder)
    (lineage,) = {origin.lineage for origin, _ in origins.values()}
    if folder.store.read(_MAKING) is not None:
        for name in ("lineages", "starts"):
            shutil.rmtree(folder.folder / name, ignore_errors=True)
    elif folder.store.list("lineages"):
        raise JobError(
            f"{folder.folder} has lineages and no job.json",
            hint="restore job.json from a backup of the home",
        )
    folder.store.put_if_absent(_MAKING, seal("making", folder.name, {"at": now()}))
    reach("job.begun")
    for query, (origin, cut) in origins.items():
        begin_query(folder.query(lineage, query), cut, origin)
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
            raise JobError(f"another command is creating job {folder.name}", hint="try again")
    if not folder.put_job(lineage, facts):
        refuse_taken(folder)
    reach("job.listed")
    folder.store.delete(_MAKING)
    return lineage
