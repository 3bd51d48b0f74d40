"""Compute and stage the rows of an epoch, through the keyed steps of the query if it has any.

Without keyed steps that is one action over the batch. With them it is one action for each step, and
one for the rows that the last step emits. Each action reads only files that an earlier one staged,
so that all rows and all state of an epoch are of one attempt, however often Spark repeats tasks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.abilities import Staged, stage
from onceflow.contract.ledger import Committable
from onceflow.contract.observation import NAME, Observed, Observer
from onceflow.errors import StagingDiffers
from onceflow.protocol.columns import refuse_columns
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import Query
from onceflow.protocol.keyed_spec import EpochContext
from onceflow.protocol.query_spec import QuerySpec
from onceflow.protocol.staging import Stager, refuse_other_rows
from onceflow.spark.running_query import Plan, RunningQuery

if TYPE_CHECKING:
    from onceflow.protocol.keyed_runner import KeyedRunner


@dataclass(frozen=True)
class EpochResult:
    """The staged files of an epoch, which no reader sees, and what its decision says of them."""

    staged: dict[str, tuple[Committable, ...]]  # output -> files
    digest: int | None  # this and the next two as in `Decision`
    now: int = 0
    keyed: dict[str, dict[str, Any]] = field(default_factory=dict)


class EpochCompute:
    """Computes the epochs of one query."""

    def __init__(self, query: Query, spec: QuerySpec) -> None:
        self._spec = spec
        late = spec.late
        self._outputs = {n: sink for n, sink in spec.outputs.items() if n not in late}
        self._stager = Stager(
            self._outputs,
            spec.by,
            spec.schema,
            spec.on_bad,
            spec.columns,
            bad_only=spec.bad_only,
        )
        self._observer = Observer(tuple(self._stager.routes), spec.by, spec.digests)
        self._keyed: KeyedRunner | None = None
        if spec.keyed:
            from onceflow.protocol.keyed_runner import KeyedRunner  # loads Arrow

            self._keyed = KeyedRunner(query, spec.keyed, spec.df)

    def observed(self, df: Any) -> Any:
        """Add the counters to the stream. With keyed steps, `run` adds them to their output
        instead."""
        return df if self._keyed is not None else self._observer.stream(df)

    def refuse_columns(self) -> None:
        """Refuse, before the query starts, columns that could not be staged later."""
        refuse_columns(
            self._spec.schema,
            self._stager.routes,
            self._spec.by,
            self._spec.columns,
        )

    def refuse_state(self, last: Decision | None) -> None:
        """Refuse keyed state that does not fit what the job declares now."""
        if self._keyed is not None:
            self._keyed.open(last)

    def run(
        self,
        batch: Any,
        running: RunningQuery,
        plan: Plan,
        *,
        folder: Path,
        last: Decision | None,
        before: Decision | None,
    ) -> EpochResult:
        """Compute one epoch and stage it in `folder`.

        `last`: the decision of the epoch before. `before`: the decision of this epoch in the parent
        lineage, if it is run again. The name of every file that is written contains the name of
        `folder`.
        """
        load = running.load(plan)
        if self._keyed is None:
            plan_observed = cache(partial(self._plan_observed, running))
            staged = self._stager.stage(batch, folder, load, plan_observed, running)
            return EpochResult(staged, plan_observed().digest)
        now = int(time.time() * 1e6) if before is None else before.now
        now = now if last is None else max(now, last.now)  # the machine's clock may go back
        result = self._keyed.run(batch, EpochContext(plan.epoch, now, folder), last)
        rows, observed = self._observer.batch(result.rows)
        staged = self._stager.stage(rows, folder, load, observed)
        for name, (files, read) in result.late.items():
            schema = self._spec.schema_of(name)
            late = Staged(files, folder, folder / name, folder.name, schema, read)
            staged[name] = stage(self._spec.outputs[name], late)
            rows_late = sum(file.rows for file in files)
            refuse_other_rows(f"output {name!r}", rows_late, staged[name], folder)
        return EpochResult(staged, observed().digest, now, result.keyed)

    def _plan_observed(self, running: RunningQuery) -> Observed:
        values = running.observed(NAME)
        if values is None:
            raise StagingDiffers(
                "Spark ran the plan of this epoch and did not count its rows; nothing is decided",
                hint="remove what rewrites Spark's plans (spark.sql.extensions, "
                "spark.sql.optimizer.excludedRules) and start the job again",
            )
        return self._observer.read(values)

    def schedule_wakeup(self, last: Decision | None) -> None:
        """Have Spark run an epoch when a timer is due, even if no rows come."""
        if self._keyed is not None:
            self._keyed.set_wake(last)

    def sweep(self, retained: Sequence[Decision], *, term: int) -> None:
        """Remove keyed state that no retained decision names, except that of newer terms."""
        if self._keyed is not None:
            self._keyed.sweep(retained, term)
