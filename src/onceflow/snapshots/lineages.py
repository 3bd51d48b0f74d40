"""The lineages of a job: which came from which cut, why, and what was done in each."""

from __future__ import annotations

from collections.abc import Callable

from onceflow.errors import JobError
from onceflow.protocol.epoch_log import EpochLog
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.savepoints import Savepoints
from onceflow.snapshots.shapes import Lineage, LineageFacts, LineageSavepoint


def describe_lineages(
    folder: JobFolder, read: Callable[[Query], EpochLog] = lambda query: query.epoch_log().read()
) -> list[Lineage]:
    """All lineages that the job was ever in, from the first to the current one. `read`: a page that
    asks again and again keeps the logs."""
    known = folder.lineages()
    savepoints: dict[str, list[LineageSavepoint]] = {}
    for savepoint in Savepoints(folder).readable():
        body = savepoint.body
        epochs = {query: part["epoch"] for query, part in body["queries"].items()}
        found: LineageSavepoint = {"name": savepoint.name, "at": body["at"], "epochs": epochs}
        savepoints.setdefault(body["lineage"], []).append(found)
    return [
        {
            **_about(folder, lineage, read),
            "current": lineage == known[-1],
            "savepoints": savepoints.get(lineage, []),
        }
        for lineage in known
    ]


def _about(folder: JobFolder, lineage: str, read: Callable[[Query], EpochLog]) -> LineageFacts:
    facts = folder.about(lineage)
    logs = {query.name: read(query) for query in folder.queries_of(lineage)}
    leader = next((log.leader for log in logs.values() if log.leader), {})
    parents = facts.get("parent") or {}
    return {
        "lineage": lineage,
        "parent": next((cut["lineage"] for cut in parents.values()), None),
        "from": {query: cut["epoch"] for query, cut in parents.items()},
        "reason": facts["reason"],
        "at": facts["at"],
        "who": facts.get("who"),
        "code": facts.get("code") or leader.get("code"),
        "spark": leader.get("spark") or facts.get("spark"),
        "queries": {name: decided_in(log) for name, log in logs.items()},
        "ended": next((log.ended["at"] for log in logs.values() if log.ended), None),
    }  # fmt: skip


def decided_in(log: EpochLog) -> dict[str, int] | None:
    """The first and the last epoch that were decided in this lineage, not in one before it."""
    origin = Origin.of(log)
    first = 0 if origin is None else origin.cut + 1
    if log.last is None or log.last.epoch < first:
        return None
    return {"first": first, "last": log.last.epoch}


def find_lineage(folder: JobFolder, beginning: str) -> str:
    """The lineage whose id has this beginning."""
    known = folder.lineages()
    found = [lineage for lineage in known if lineage.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    raise JobError(
        f"job {folder.name} has {'no' if not found else 'more than one'} lineage {beginning!r}",
        hint="there are: " + ", ".join(lineage[:8] for lineage in found or known),
    )
