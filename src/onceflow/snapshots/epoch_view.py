"""One epoch in detail: what its decision says, and what was kept beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onceflow.errors import JobError
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lineage import Origin
from onceflow.protocol.step_times import read_times
from onceflow.spark.state_schema import state_stores


def chosen_queries(folder: JobFolder, name: str | None, lineage: str | None = None) -> list[Query]:
    """The query of that name, or all that started; in that lineage, or in the current one."""
    found = folder.queries_of(lineage) if lineage else folder.queries()
    if not found:
        raise JobError(f"job {folder.name} has not started yet", hint="run it first")
    chosen = [query for query in found if name in (None, query.name)]
    if not chosen:
        raise JobError(
            f"job {folder.name} has no query {name!r}",
            hint="there are: " + ", ".join(query.name for query in found),
        )
    return chosen


def not_retained(query: Query, epoch: int, known: Iterable[int]) -> JobError:
    """With the nearest ones, below and above."""
    numbers = sorted(known)
    if not numbers:
        return JobError(f"{query.job}/{query.name} has decided no epoch yet", hint="let it run")
    below = [number for number in numbers if number < epoch][-1:]
    above = [number for number in numbers if number > epoch][:1]
    nearest = " and ".join(f"{number}" for number in below + above)
    return JobError(
        f"epoch {epoch} of {query.job}/{query.name} is not retained",
        hint=f"it has {numbers[0]} to {numbers[-1]}; the nearest: {nearest}",
    )


def look(
    folder: JobFolder, epoch: int, *, query: str | None = None, lineage: str | None = None
) -> list[dict[str, Any]]:
    """What is known of an epoch, of each query that has it."""
    found, missing = [], []
    for one in chosen_queries(folder, query, lineage):
        place, known = where_decided(folder, one, epoch, follow=lineage is None)
        decision = known.get(epoch)
        if decision is None:
            missing.append(not_retained(one, epoch, known))
        else:
            found.append(_about(place, decision))
    if not found:
        raise missing[0]
    return found


def where_decided(
    folder: JobFolder, query: Query, epoch: int, *, follow: bool = True
) -> tuple[Query, dict[int, Decision]]:
    """The query in the lineage that decided the epoch, and what is retained up to there and here.
    `follow`: also through the lineages that this one comes from."""
    log = query.epoch_log().read()
    known = {decision.epoch: decision for decision in log.decisions}
    origin = Origin.of(log)
    if origin is None:
        return query, known
    known = {number: decision for number, decision in known.items() if number > origin.cut}
    if follow and epoch <= origin.cut and origin.parent in folder.lineages():
        parent, before = where_decided(folder, folder.query(origin.parent, query.name), epoch)
        return parent, {n: d for n, d in before.items() if n <= origin.cut} | known
    return query, known


def _about(query: Query, decision: Decision) -> dict[str, Any]:
    kept = read_times(query.folder / "onceflow").get(decision.epoch, {})
    kinds = {store.operator: store.kind for store in state_stores(query.folder)}
    return {
        "job": query.job, "query": query.name, "lineage": query.lineage, "epoch": decision.epoch,
        "decision": {"term": decision.term, "nonce": decision.nonce, "at": decision.at},
        "input": [_input(decision, source) for source in sorted(decision.end)],
        "rows_in": kept.get("rows_in"),
        "rows_out": decision.rows,
        "outputs": [
            {
                "output": name, "rows": sum(file.rows for file in output.files),
                "files": len(output.files), "bytes": sum(file.bytes for file in output.files),
                "mode": output.mode, "guarantee": str(output.guarantee),
                "previous": None if output.previous is None else vars(output.previous),
            }
            for name, output in decision.outputs.items()
        ],
        "watermark_ms": decision.watermark or None,
        "state": [
            {
                "operator": int(operator), "kind": kinds.get(int(operator)),
                "partitions": len(partitions), "ids": partitions,
            }
            for operator, partitions in decision.state.items()
        ],
        "state_rows": kept.get("state_rows"),
        "keyed": [
            {
                "step": step, "rows": stood["rows"], "late": stood["late"],
                "fired": stood["fired"], "groups": stood["groups"],
                "watermark_ms": None if stood["watermark"] is None else stood["watermark"] // 1000,
                "manifest": stood["manifest"],
            }
            for step, stood in decision.keyed.items()
        ],
        "ms": kept.get("ms"),
        "spark_ms": kept.get("spark_ms"),
    }  # fmt: skip


def _input(decision: Decision, source: str) -> dict[str, Any]:
    entries = decision.sources.get(source)
    return {
        "source": source,
        "start": decision.start.get(source),
        "end": decision.end[source],
        "files": None if entries is None else sum(len(lines) for lines in entries.values()),
    }
