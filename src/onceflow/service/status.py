"""The status of each query of a job, read from its home, for the command line and the page."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from onceflow.errors import OnceflowError
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lease import Lease


def status(folder: JobFolder) -> dict[str, Any]:
    lease = Lease(folder.folder / "lease", folder.name)
    found: dict[str, Any] = {
        "job": folder.name, "state": "stopped", "leader": None, "term": 0, "lineage": None,
        "queries": [], "error": None,
    }  # fmt: skip
    try:
        holder = lease.holder()
        if holder is not None:
            found["term"] = holder.term
            if lease.alive(holder):
                leader = {"pid": holder.pid, "host": holder.host, "since": holder.since}
                found.update(state="running", leader=leader)
        found["lineage"] = folder.lineage()
        found["queries"] = [_query(query) for query in folder.queries()]
    except OnceflowError as error:
        found.update(state="damaged", error=str(error))
    return found


def _query(query: Query) -> dict[str, Any]:
    log = query.epoch_log().read()
    last = log.last
    return {
        "query": query.name,
        "epoch": last.epoch if last else None,
        "decided": last.at if last else None,
        "rows": last.rows if last else 0,
        "watermark_ms": last.lowest_watermark if last else None,
        "end": last.end if last else {},
        "retained_epochs": len(log.decisions),
        "log_entries": log.entries,
        "log_bytes": folder_size(query.folder / "onceflow" / "log")[1],
        "staged_bytes": folder_size(query.staged)[1],
        "checkpoint_files": folder_size(query.folder)[0],
        "state_bytes": folder_size(query.folder / "state")[1],
        "outputs": {
            name: _commits(target)
            for name, target in ((log.leader or {}).get("outputs") or {}).items()
        },
    }


def _commits(target: dict[str, Any]) -> dict[str, Any]:
    """What an output keeps beside its rows: commits and manifests, if it is a folder with them."""
    found: dict[str, Any] = {"kind": target.get("kind"), "path": target.get("path")}
    folder = Path(str(found["path"]))
    if found["path"] and (folder / "_commits").is_dir():
        commits, manifests = folder_size(folder / "_commits"), folder_size(folder / "_manifests")
        found.update(
            commits=commits[0], manifests=manifests[0], ledger_bytes=commits[1] + manifests[1]
        )
    return found


def folder_size(folder: Path) -> tuple[int, int]:
    """The number of files and their bytes. A running job may remove some meanwhile."""
    files = total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(place, name))
                files += 1
    return files, total
