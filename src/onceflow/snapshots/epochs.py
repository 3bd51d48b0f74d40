"""Retained epochs: which ones a job can go back to, where each was decided, and one in detail."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from onceflow.errors import JobError
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lineage import Origin
from onceflow.protocol.step_times import read_times
from onceflow.snapshots.checkpoint_view import ReadCheckpoint
from onceflow.snapshots.cut import Cut, cut_at
from onceflow.snapshots.shapes import Epoch, EpochInput
from onceflow.spark.state_schema import state_stores

# ---------------------------------------------------------------- finding an epoch


def chosen_queries(folder: JobFolder, name: str | None, lineage: str | None = None) -> list[Query]:
    """The query of that name, or all that started, in that lineage or in the current one."""
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
    """The error for an epoch that is not retained. It names the nearest ones."""
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


def where_decided(
    folder: JobFolder, query: Query, epoch: int, *, follow: bool = True
) -> tuple[Query, dict[int, Decision]]:
    """The query in the lineage that decided the epoch, and the decisions that are retained from
    there to here. `follow`: search the lineages that this one comes from, too."""
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


# ---------------------------------------------------------------- going back to one


def restorable_decisions(query: Query) -> list[Decision]:
    """The decisions that a query could continue from, oldest first. A lineage that begins with a
    cut has no state from before the cut, and has Spark's plans from its first start on. Spark needs
    the plan of the epoch before as well, so the oldest decision in the log is not among them."""
    log, planned = query.epoch_log().read(), set(ReadCheckpoint(query.folder).planned())
    origin = Origin.of(log)
    if origin is not None and not log.opened:
        planned.add(origin.cut)
    first = 0 if origin is None else origin.cut
    known = log.decisions
    followed = known if known and known[0].epoch == 0 else known[1:]
    return [d for d in followed if d.epoch in planned and d.epoch >= first]


@dataclass(frozen=True)
class RestorableRange:
    """The retained epochs of a query: how many, the first and the last, without reading each."""

    count: int
    first: Decision
    last: Decision


def restorable_range(query: Query) -> RestorableRange | None:
    """The retained epochs of a query, or None."""
    planned, log = ReadCheckpoint(query.folder).planned(), query.epoch_log()
    oldest = log.decisions_around(0)
    if not planned or oldest is None:
        return None
    followed = oldest[0].epoch + 1 if oldest[0].epoch else 0  # as in `restorable_decisions`
    ends = log.decisions_around(max(planned[0], followed))
    if ends is None or ends[0].epoch > ends[1].epoch:
        return None
    first, last = ends
    count = sum(first.epoch <= epoch <= last.epoch for epoch in planned)
    return RestorableRange(count, first, last)


def cuts_at(
    folder: JobFolder, to: str, *, lineage: str | None = None
) -> dict[str, tuple[str, Cut]]:
    """The cut of each query at an epoch, or at the last epoch that was decided before a time.
    `lineage`: in another lineage than the current one."""
    found = {}
    for query in folder.queries_of(lineage) if lineage else folder.queries():
        if query.epoch_log().read().last is None:
            continue
        found[query.name] = (query.lineage, cut_at(query, _epoch(query, to)))
    return found


def _epoch(query: Query, to: str) -> int:
    known = restorable_decisions(query)
    if not known:
        raise JobError(f"{query.job}/{query.name} has decided nothing", hint="let it run first")
    if re.fullmatch(r"\d+", to):
        epochs = {decision.epoch for decision in known}
        if int(to) not in epochs:
            raise not_retained(query, int(to), epochs)
        return int(to)
    when = _time(to)
    before = [d.epoch for d in known if datetime.fromisoformat(d.at) <= when]
    if not before:
        raise JobError(
            f"no retained epoch of {query.job}/{query.name} was decided before {to}",
            hint=f"the first is {known[0].epoch}, decided at {known[0].at}",
        )
    return before[-1]


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise JobError(
            f"{text!r} is neither an epoch nor a time",
            hint="give a number, or a time like 2026-11-15T10:00:00Z",
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


# ---------------------------------------------------------------- one epoch in detail


def describe_epoch(
    folder: JobFolder, epoch: int, *, query: str | None = None, lineage: str | None = None
) -> list[Epoch]:
    """An epoch in detail, for each query that has it."""
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


def _about(query: Query, decision: Decision) -> Epoch:
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
                "step": step, "rows": record["rows"], "late": record["late"],
                "fired": record["fired"], "groups": record["groups"],
                "watermark_ms": _milliseconds(record["watermark"]),
                "manifest": record["manifest"],
            }
            for step, record in decision.keyed.items()
        ],
        "ms": kept.get("ms"),
        "spark_ms": kept.get("spark_ms"),
    }  # fmt: skip


def _milliseconds(microseconds: int | None) -> int | None:
    return None if microseconds is None else microseconds // 1000


def _input(decision: Decision, source: str) -> EpochInput:
    entries = decision.sources.get(source)
    return {
        "source": source,
        "start": decision.start.get(source),
        "end": decision.end[source],
        "files": None if entries is None else sum(len(lines) for lines in entries.values()),
    }
