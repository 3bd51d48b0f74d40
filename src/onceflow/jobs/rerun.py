"""Run an epoch of a job again, on a temporary fork, and compare the rows of both runs.

If they are the same, the query is deterministic as far as this epoch shows, and `--published skip`
accepts it. If they are not, the epoch runs once more: columns in which the two runs differ are not
deterministic, and if there are none, code or input have changed since the epoch was decided.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.ledger import Ledger, Outcome, Publication
from onceflow.contract.sink import Sink
from onceflow.errors import JobError, PlanChanged
from onceflow.jobs.flow import Flow
from onceflow.jobs.job import Job
from onceflow.jobs.start import run_again
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.cut import Cut, cut_at
from onceflow.snapshots.epochs import chosen_queries, not_retained, where_decided
from onceflow.snapshots.new_lineage import make_job
from onceflow.spark.running_query import no_state_snapshots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COMPARED = 1_000_000  # rows; more are not compared column by column


@dataclass(frozen=True)
class RerunResult:
    """The rows of an epoch that ran again."""

    rows: int
    digest: int | None
    folder: Path  # of the rows, as Parquet files


@dataclass(frozen=True)
class _RerunInput:
    """What an epoch needs to run."""

    job: Job
    folder: JobFolder
    query: Query  # in the lineage that decided it
    cut: Cut
    decision: Decision


class _KeepingSink(Sink):
    """Keeps the rows of one epoch in a folder, and its ledger in memory."""

    modes = ("append", "update", "complete")

    def __init__(self, folder: Path) -> None:
        self._folder, self._ledger = folder, Ledger()

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        return self._ledger

    def published(self, output: str) -> Ledger:
        return self._ledger

    def publish(self, publication: Publication) -> Outcome:
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in publication.files:
            shutil.copy(file.path, self._folder)
        self._ledger = Ledger(publication.term, publication.position, publication.decision)
        return Outcome.PUBLISHED


def rerun(
    job: Job, folder: JobFolder, epoch: int, *, query: str, spark: SparkSession
) -> dict[str, Any]:
    """Run an epoch again with this code, and compare its rows with those that it had."""
    (one,) = chosen_queries(folder, query)
    decided_in, known = where_decided(folder, one, epoch)
    decision = known.get(epoch)
    if decision is None:
        raise not_retained(decided_in, epoch, known)
    cut = _before(folder, decided_in, epoch)
    home = tempfile.TemporaryDirectory(prefix=".rerun-", dir=folder.home)
    with home as place, no_state_snapshots(spark):
        begins = _RerunInput(job, folder, decided_in, cut, decision)
        once = _run(begins, Path(place, "1"), spark)
        same = decision.rows == once.rows and (
            decision.digest is None or decision.digest == once.digest
        )
        found = {
            "query": query, "epoch": epoch, "same": same, "rows": {"then": decision.rows,
            "now": once.rows}, "compared_by": "number" if decision.digest is None else "digest",
            "columns": None,
        }  # fmt: skip
        if not same and once.rows <= _COMPARED:
            twice = _run(begins, Path(place, "2"), spark)
            found["columns"] = _differ(once.folder, twice.folder)
    return found


def _before(folder: JobFolder, query: Query, epoch: int) -> Cut:
    """The cut that the epoch follows."""
    if epoch == 0:
        return Cut([], {}, {})
    place, known = where_decided(folder, query, epoch - 1)
    if epoch - 1 not in known:
        raise not_retained(place, epoch - 1, known)
    return cut_at(place, epoch - 1)


def _run(begins: _RerunInput, place: Path, spark: SparkSession) -> RerunResult:
    folder, query, cut, decision = begins.folder, begins.query, begins.cut, begins.decision
    lineage, nonce = str(uuid.uuid4()), cut.decisions[-1].nonce if cut.decisions else ""
    origin = Origin(
        lineage, query.lineage, decision.epoch - 1, nonce, query.lineage, {}, again=decision.epoch
    )
    home = JobFolder(place, folder.name)
    about = {"reason": f"epoch {decision.epoch} again"}
    make_job(home, {query.name: (origin, cut)}, folder.starts(), about=about, facts={})
    made = home.query(lineage, query.name)
    made.keep_for_replay(decision)
    flow = Flow(spark, home)
    begins.job.declare(flow)
    if query.name not in flow.queries:
        raise JobError(
            f"the job no longer has output {query.name}", hint="name the job file that has it"
        )
    rows = place / "rows"
    declared = flow.queries[query.name]
    bad = declared.on_bad if declared.bad_only else None  # bad rows stay in their own output
    outputs = {name: _KeepingSink(rows / name) for name in declared.outputs if name != bad}
    try:
        last = run_again(
            made,
            replace(
                declared,
                outputs=outputs,
                columns={name: of for name, of in declared.columns.items() if name != bad},
                guarantees={},
                on_bad=None,
                bad_only=False,
                inspect_only=True,
            ),
        )
    except PlanChanged as changed:
        raise JobError(
            f"epoch {decision.epoch} cannot be run again: its input has changed: {changed.message}",
            hint="bring back the files that it read",
        ) from changed
    return RerunResult(last.rows, last.digest, rows)


def _differ(first: Path, second: Path) -> list[str]:
    """Columns whose values differ, whatever their order."""
    one, two = _values(first), _values(second)
    return sorted(name for name in {*one, *two} if one.get(name) != two.get(name))


def _values(folder: Path) -> Mapping[str, Counter[str]]:
    import pyarrow.parquet as pq

    found: dict[str, Counter[str]] = {}
    for path in sorted(folder.rglob("*.parquet")):
        table = pq.ParquetFile(path).read()
        for name in table.column_names:
            found.setdefault(name, Counter()).update(map(repr, table.column(name).to_pylist()))
    return found
