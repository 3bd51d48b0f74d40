"""The state of a job at the end of any retained epoch, whether the job runs or not: Spark's own,
and that of keyed steps (`keyed_state_view.py`).

Spark's state is not read from the checkpoint, which a running job changes and which may lack
Spark's commit of the last decided epoch. It is read from a folder with links to the files of state
that the decision of the epoch names, and with offsets and commit as the decision has them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.errors import CheckpointRefused, JobError, OnceflowError
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.checkpoint_view import ReadCheckpoint
from onceflow.snapshots.epochs import chosen_queries, not_retained, where_decided
from onceflow.spark.checkpoint import Checkpoint
from onceflow.spark.errors import readable
from onceflow.spark.state_reader import state_rows
from onceflow.spark.state_schema import StateStore, state_stores

if TYPE_CHECKING:
    from onceflow.snapshots.keyed_state_view import KeyedState


@dataclass(frozen=True)
class EpochState:
    """The state of one query at the end of one epoch."""

    query: Query
    decision: Decision
    epochs: list[int]  # the retained ones
    files: list[Path]

    @property
    def keyed(self) -> list[KeyedState]:
        from onceflow.snapshots.keyed_state_view import KeyedState  # loads Arrow

        return [
            KeyedState(self.query, self.decision, self.epochs, step) for step in self.decision.keyed
        ]

    @property
    def stores(self) -> list[StateStore]:
        kept = self.decision.state
        return [s for s in state_stores(self.query.folder) if str(s.operator) in kept]

    def bytes(self, store: StateStore) -> int:
        """The bytes of all files that this store is loaded from."""
        folders = {self.query.folder / store.folder(n) for n in range(store.partitions)}
        files = [f for f in self.files if f.parent in folders or f.parent.parent in folders]
        total = 0
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    def rows(
        self, spark: Any, store: StateStore, *, key: str | None, limit: int
    ) -> list[dict[str, Any]]:
        epoch = self.decision.epoch
        with self._checkpoint() as checkpoint:
            try:
                return state_rows(spark, checkpoint, store, epoch, key=key, limit=limit)
            except OnceflowError:
                raise
            except Exception as error:  # of Spark
                raise CheckpointRefused(
                    f"Spark cannot read operator {store.operator}, store {store.name} of "
                    f"{self.query.job}/{self.query.name} after epoch {epoch}: {readable(error)}",
                    hint="choose another epoch: "
                    f"onceflow state list {self.query.job} shows the retained ones",
                ) from error

    @contextlib.contextmanager
    def _checkpoint(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="onceflow-state-") as name:
            root = Path(name)
            for file in self.files:
                target = root / file.relative_to(self.query.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(file, target)
                except FileNotFoundError:
                    raise self._gone() from None
                except OSError:  # another file system
                    target.symlink_to(file)
            checkpoint, decision = Checkpoint(root), self.decision
            checkpoint.set_query_id(self.query.spark_id)
            checkpoint.set_offsets(decision.epoch, decision.offsets)
            checkpoint.set_commit(decision.epoch, decision.watermark, decision.state)
            yield root

    def _gone(self) -> JobError:
        others = [epoch for epoch in self.epochs if epoch != self.decision.epoch]
        return not_retained(self.query, self.decision.epoch, others)


def states_at(folder: JobFolder, *, query: str | None, epoch: int | None) -> list[EpochState]:
    """The state of each query that has that epoch, or at the last epoch that each has decided."""
    found, missing = [], []
    for one in chosen_queries(folder, query):
        try:
            found.append(_state(folder, one, epoch))
        except JobError as error:
            missing.append(error)
    if not found:
        raise missing[0]
    return found


def _state(folder: JobFolder, query: Query, epoch: int | None) -> EpochState:
    log = query.epoch_log().read()
    number = epoch if epoch is not None else -1 if log.last is None else log.last.epoch
    place, known = where_decided(folder, query, number)
    origin = Origin.of(log)
    if origin is not None and number == origin.cut:
        # The state that a lineage begins with may be another than the one that its parent had.
        own = {d.epoch: d for d in log.decisions if d.epoch == number and d.keyed}
        place, known = query if own else place, known | own
    decision = known.get(number)
    if decision is None:
        raise not_retained(query, number, known)
    try:
        files = ReadCheckpoint(place.folder).state_files(number, decision.state)
    except CheckpointRefused:
        others = [other for other in known if other != number]
        raise not_retained(query, number, others) from None
    return EpochState(place, decision, sorted(known), files if decision.state else [])


def choose_stores(found: list[EpochState], operator: int | None, name: str | None) -> list[
    tuple[EpochState, StateStore]
]:  # fmt: skip
    """The chosen stores. `JobError` that lists all if there is none."""
    every = [(state, store) for state in found for store in state.stores]
    if not every:
        names = ", ".join(state.query.name for state in found)
        raise JobError(
            f"{names} keeps no state that can be shown",
            hint="onceflow state list JOB shows what keeps state",
        )
    chosen = [
        (state, store) for state, store in every
        if operator in (None, store.operator) and name in (None, store.name)
    ]  # fmt: skip
    if not chosen:
        there = ", ".join(f"--operator {store.operator} --store {store.name}" for _, store in every)
        raise JobError("no state of that operator and store", hint=f"there are: {there}")
    return chosen
