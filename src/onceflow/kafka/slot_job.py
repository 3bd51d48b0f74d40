"""Publish the slots of an epoch in parallel: a Spark job with a task for each slot.

It is a barrier stage, because Spark does not speculate these: two attempts of one slot would shut
each other out again and again (and still publish once). A producer stays in its Python worker for
the next epoch. A task that finds none there takes the slot, reads its ledger, and continues.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from onceflow.errors import Fenced, OnceflowError, PublishFailed, PublishUnknown, TargetBehind
from onceflow.kafka.ledger import Record
from onceflow.kafka.slot import Part, Slot, Target
from onceflow.spark.arrow_map import map_in_arrow

if TYPE_CHECKING:
    import pyarrow as pa

_KEPT = 8  # producers of a Python worker
# If several slots fail, the first of these is raised.
_WORST = (Fenced, TargetBehind, PublishUnknown, PublishFailed)

_kept: dict[tuple[str, str, int, str], Slot] = {}


def publish_parts(session: Any, target: Target, parts: list[Part]) -> dict[int, Record]:
    """Slot -> its new record. Raises the worst error of the tasks."""
    tasks = min(len(parts), max(1, session.sparkContext.defaultParallelism))
    dynamic = session.conf.get("spark.dynamicAllocation.enabled", "false") == "true"
    task = partial(_publish, target, tuple(parts))
    each = session.range(0, len(parts), 1, tasks)
    rows = map_in_arrow(each, task, "slot int, said binary", barrier=not dynamic)
    said = {row.slot: pickle.loads(row.said) for row in rows.collect()}
    raised = [answer for answer in said.values() if isinstance(answer, BaseException)]
    for kind in (*_WORST, BaseException):
        for error in raised:
            if isinstance(error, kind):
                raise error
    return {slot: answer for slot, answer in said.items() if isinstance(answer, Record)}


def _publish(
    target: Target, parts: tuple[Part, ...], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        for n in batch.column(0).to_pylist():
            said = pickle.dumps(_attempt(target, parts[n]))
            slots = pa.array([parts[n].slot], pa.int32())
            yield pa.record_batch([slots, pa.array([said], pa.binary())], names=["slot", "said"])


def _attempt(target: Target, part: Part) -> Record | OnceflowError:
    """Returns errors: if a task failed, Spark would run all of them again."""
    name = (target.ledger, part.publication.output, part.slot, part.token)
    slot = _kept.pop(name, None) or Slot(target, part.publication.output, part.slot)
    try:
        record = slot.publish(part)
    except OnceflowError as error:
        return error
    _kept[name] = slot
    for oldest in list(_kept)[:-_KEPT]:
        _kept.pop(oldest).close()
    return record
