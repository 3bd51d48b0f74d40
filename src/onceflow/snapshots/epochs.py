"""Retained epochs: the last decided ones of each query, which a job can go back to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from onceflow.errors import JobError
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.checkpoint_view import ReadCheckpoint
from onceflow.snapshots.cut import Cut, cut_of
from onceflow.snapshots.epoch_view import not_retained


def decisions(query: Query) -> list[Decision]:
    """Those that a query could go on from, oldest first. A lineage that goes on from a cut has the
    state of its cut and none from before; what Spark planned, it has from its first start on. Spark
    asks for the plan of the epoch before, too, so of the oldest decision in the log nobody can."""
    log, planned = query.epoch_log().read(), set(ReadCheckpoint(query.folder).planned())
    origin = Origin.of(log)
    if origin is not None and not log.opened:
        planned.add(origin.cut)
    first = 0 if origin is None else origin.cut
    known = log.decisions
    followed = known if known and known[0].epoch == 0 else known[1:]
    return [d for d in followed if d.epoch in planned and d.epoch >= first]


@dataclass(frozen=True)
class Kept:
    """The retained epochs of a query, without reading each."""

    count: int
    first: Decision
    last: Decision


def kept(query: Query) -> Kept | None:
    """None: there is none."""
    planned, log = ReadCheckpoint(query.folder).planned(), query.epoch_log()
    oldest = log.ends(0)
    if not planned or oldest is None:
        return None
    followed = oldest[0].epoch + 1 if oldest[0].epoch else 0  # as in `decisions`
    ends = log.ends(max(planned[0], followed))
    if ends is None or ends[0].epoch > ends[1].epoch:
        return None
    first, last = ends
    count = sum(first.epoch <= epoch <= last.epoch for epoch in planned)
    return Kept(count, first, last)


def retained(
    folder: JobFolder, to: str, *, lineage: str | None = None
) -> dict[str, tuple[str, Cut]]:
    """The cut of each query at an epoch, or at the last one that was decided before a time; of the
    lineage that the job is in, or of another."""
    found = {}
    for query in folder.queries_of(lineage) if lineage else folder.queries():
        if query.epoch_log().read().last is None:
            continue
        epoch = _epoch(query, to)
        cut = cut_of(query, epoch)
        assert cut is not None
        found[query.name] = (query.lineage, cut)
    return found


def _epoch(query: Query, to: str) -> int:
    known = decisions(query)
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
            hint="a number, or a time like 2026-11-15T10:00:00Z",
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
