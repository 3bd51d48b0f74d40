"""Savepoints, retained epochs and state, as the command line and the page show them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query, select_jobs
from onceflow.snapshots import shapes
from onceflow.snapshots.epochs import restorable_decisions, restorable_range
from onceflow.snapshots.savepoint import Savepoint
from onceflow.snapshots.savepoints import Savepoints
from onceflow.snapshots.shapes import RetainedEpoch, RetainedEpochs, SavepointSummary, State
from onceflow.snapshots.state_view import states_at


def find_savepoint(home: str | os.PathLike[str], job: str, savepoint: str) -> Savepoint:
    """A savepoint of a job by its name, or by its folder even in a home that does not know the
    job."""
    if JobFolder(home, job).first_lineage() is None and Path(savepoint).is_dir():
        found = Savepoint.at(Path(savepoint))
        found.refuse_other_job(job)
        return found
    return Savepoints(select_jobs(home, job)[0]).find(savepoint)


def savepoint_summary(savepoint: Savepoint) -> SavepointSummary:
    body = savepoint.body
    return {
        "name": savepoint.name, "job": body["job"], "at": body["at"], "lineage": body["lineage"],
        "epochs": {name: part["epoch"] for name, part in body["queries"].items()},
        "bytes": savepoint.bytes, "files": sum(1 for _ in savepoint.paths()),
        "spark": body["spark"], "code": body["code"], "onceflow": body["onceflow"],
        "who": body.get("who"), "path": str(savepoint.folder.absolute()),
    }  # fmt: skip


def savepoint_details(savepoint: Savepoint) -> dict[str, Any]:
    queries = {}
    for name, part in savepoint.body["queries"].items():
        last = Decision.from_json(part["decisions"][-1])
        queries[name] = {
            "epoch": part["epoch"], "decided": last.at, "watermark_ms": last.lowest_watermark,
            "end": last.end, "files": len(part["files"]),
            "bytes": sum(entry["bytes"] for entry in part["files"]),
            "operators": sorted(last.state), "outputs": savepoint.body["outputs"][name],
        }  # fmt: skip
    return {**savepoint_summary(savepoint), "queries": queries}


def list_savepoints(folder: JobFolder, *, each: bool = False) -> shapes.Savepoints:
    """Savepoints of a job in the order of their creation, and its retained epochs: each, or only
    how many and which are the first and the last."""
    savepoints: list[dict[str, Any]] = [
        {**savepoint_summary(found)}
        if isinstance(found, Savepoint)
        else {"name": name, "error": found.message}
        for name, found in Savepoints(folder).all()
    ]
    retained = [_epochs(query, each) for query in folder.queries()]
    return {"job": folder.name, "savepoints": savepoints, "retained": retained}


def _epochs(query: Query, each: bool) -> RetainedEpochs:
    """The epochs that a query can go back to. Reading each of thousands takes long."""
    found = restorable_range(query)
    epochs: RetainedEpochs = {"query": query.name, "count": 0, "first": None, "last": None}
    if found is not None:
        first, last = _epoch(found.first), _epoch(found.last)
        epochs = {"query": query.name, "count": found.count, "first": first, "last": last}
    if each:
        epochs["epochs"] = [_epoch(decision) for decision in restorable_decisions(query)]
    return epochs


def _epoch(decision: Decision) -> RetainedEpoch:
    return {"epoch": decision.epoch, "at": decision.at, "rows": decision.rows}


def describe_states(
    folder: JobFolder, *, query: str | None = None, epoch: int | None = None
) -> list[State]:
    """Keyed steps and their key groups, Spark's operators and their stores; of each query that has
    the epoch, or of the last one that each has decided."""
    return [
        {
            "query": state.query.name, "lineage": state.query.lineage,
            "epoch": state.decision.epoch, "decided": state.decision.at,
            "retained": [state.epochs[0], state.epochs[-1]],
            "stores": [
                {
                    "operator": store.operator, "kind": store.kind, "store": store.name,
                    "partitions": store.partitions, "key": store.key, "value": store.value,
                    "bytes": state.bytes(store),
                }
                for store in state.stores
            ],
            "keyed": [step.about() for step in state.keyed],
        }
        for state in states_at(folder, query=query, epoch=epoch)
    ]  # fmt: skip
