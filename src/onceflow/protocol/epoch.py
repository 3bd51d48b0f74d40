"""The epoch protocol: how every row gets from a source to its targets exactly once.

An epoch is a micro-batch of Spark. A term is a fencing number: each driver that starts takes a
higher one. The epoch log holds the fences and the decisions of a query; every target holds a
ledger, which names the last epoch that was published to it.

**Opening a query** (every start, before Spark starts it):

1. lead     take the lease and, with it, a term above every term seen
2. fence    append fence(term) to the epoch log: from here on no older term can decide. After all
            queries of the job have done so, end the transactions that older drivers left open in
            the targets, then write the term into every ledger: from here on no older term can
            publish. Only then read the ledgers
3. recover  publish the last decision to every output whose ledger does not have it; then make
            Spark's files agree with the decisions. Spark does not evaluate the epoch again
4. sweep    remove the files that older terms staged: every decided row is published by now
5. no-data  if the watermark moved in the last epoch, plan the epoch without data that is due:
            Spark would have run it, but does not after a restart

**One epoch** (inside `foreachBatch`):

1. check    no newer driver leads; Spark planned the range that follows the last decision, and its
            offsets file agrees with its plan. Note the parts that have joined its sources
2. stage    one Spark action, or one for each keyed step, writes the rows and the state of one
            attempt where no reader sees them. Refuse files that hold another number of rows than
            Spark counted
3. harden   fsync rows, offsets and state
4. decide   append the decision: the commit point. From here on the epoch will be published
5. publish  each output, by compare-and-set from the ledger position that the decision names
6. sweep    remove staged files and free old entries of the log, while Spark continues

Then Spark writes `commits/<N>`. A crash before step 4 leaves only staged files. After a crash
behind step 4 the next opening finishes the epoch. `reach` marks the fault points.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from onceflow.contract.abilities import CanAdd, clean_up_of
from onceflow.contract.ledger import (
    Committable,
    Guarantee,
    Ledger,
    Outcome,
    Position,
    Publication,
)
from onceflow.contract.schema import columns, refuse_difference
from onceflow.contract.sink import Sink
from onceflow.contract.staged_files import harden, verify
from onceflow.errors import (
    CheckpointRefused,
    Damaged,
    Fenced,
    JobError,
    OnceflowError,
    OutOfRange,
    PlanChanged,
)
from onceflow.faults.points import reach
from onceflow.protocol.checkpoint_repair import CheckpointRepair
from onceflow.protocol.compute import EpochCompute, EpochResult
from onceflow.protocol.epoch_log import Decision, OutputDecision
from onceflow.protocol.failures import explain
from onceflow.protocol.home import Query, now
from onceflow.protocol.identity import refuse_other_checkpoint
from onceflow.protocol.lease import Lease
from onceflow.protocol.lineage import Origin, refuse_changed_rows, refuse_foreign
from onceflow.protocol.query_spec import QuerySpec
from onceflow.protocol.retained_decisions import RetainedDecisions
from onceflow.protocol.source_positions import SourcePositions
from onceflow.protocol.staging import staging_differs
from onceflow.protocol.step_times import StepTimes
from onceflow.spark.checkpoint import Checkpoint, offset_after, parse_offsets
from onceflow.spark.file_source_log import SourceEntries
from onceflow.spark.running_query import Plan, RunningQuery
from onceflow.spark.state_damage import find_damage, is_about_state


@contextlib.contextmanager
def _removed_upon(failure: type[BaseException], folder: Path) -> Iterator[None]:
    """Remove the staged files in `folder` if the block raises `failure`.

    Nobody will publish them, and the sweep of a successor may have run before they were written.
    """
    try:
        yield
    except failure:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class Stopping(Exception):
    """The driver was asked to stop, so it begins no further epoch."""


class ReplayedEpoch(NamedTuple):
    """An epoch of the parent lineage that is run again."""

    epoch: int
    last: int  # the last epoch that is run again


class Epochs:
    """The epochs of one query under one term. Spark calls it once for each epoch."""

    def __init__(self, query: Query, spec: QuerySpec, lease: Lease) -> None:
        self.query = query
        self.spec = spec
        self.lease = lease
        self.log = query.epoch_log()
        self.checkpoint = Checkpoint(query.folder)
        self._checkpoint_repair = CheckpointRepair.of(
            self.checkpoint, self.log, spec.df.sparkSession
        )
        self.schema = spec.schema
        self.term = 0
        self.opened_at: int | None = None  # the last epoch that was published before the start
        self.published_at: float | None = None  # when this driver published its last epoch
        self.failure: BaseException | None = None
        self._origin: Origin | None = None  # set if the lineage continues from a cut of another
        self._ledgers: dict[str, Ledger] = {}
        self._hardened: set[Path] = set()
        self._positions = SourcePositions(spec.sources, query, inspect_only=spec.inspect_only)
        self._retained = RetainedDecisions(query)
        self._reads: set[str] = set()  # the sources in Spark's last plan
        self._compute = EpochCompute(query, spec)
        self._running: RunningQuery | None = None
        self._busy = threading.Lock()
        self.times = StepTimes(query.folder / "onceflow", spec.keep_epochs)
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="onceflow sweep")
        self._sweeping: Future[None] | None = None
        self._stopping = False

    def observed(self, df: Any) -> Any:
        """Return the stream of the query with the counters that `stage` reads."""
        return self._compute.observed(df)

    # ================================================================ opening

    def fence(self) -> None:
        """Step 1, and step 2 up to the reading of ledgers.

        Call it for all queries of a job before the first of them is opened: a transaction that an
        older driver left open for one query can hide the ledger of another.
        """
        self._refuse_what_cannot_work()

        # 1. lead. Refuse a home that does not belong to its targets before it fences any driver.
        seen = {name: sink.published(self._id(name)) for name, sink in self._outputs}
        self._origin = Origin.of(self.log.read())
        self._refuse_foreign(seen)
        self._refuse_other_columns()
        self._compute.refuse_state(self.log.last)
        self.term = self.lease.next_term(max([self.log.term, *(s.term for s in seen.values())]))
        self._reach("open.led", query=self._id())

        # 2. fence: first the epoch log, then every ledger. A ledger that is read earlier can change
        self.log.fence(self.term, self.spec.facts(self.log.leader))
        refuse_other_checkpoint(self.query, self.log.last, self.checkpoint)
        self._reach("open.fenced", epoch=self._last_epoch)
        for name, sink in self._outputs:
            clean_up_of(sink).shut_out(self._id(name))
            self._reach("open.shut-out", output=name)

    def open(self) -> None:
        """The rest of step 2, and steps 3 to 5. Afterwards Spark may start the query from its
        checkpoint."""
        token = uuid.uuid4().hex
        for name, sink in self._outputs:
            self._ledgers[name] = sink.fence(self._id(name), term=self.term, token=token)
            self._reach("open.ledger-fenced", output=name)
        self._refuse_foreign(self._ledgers)
        self._reach("open.ledgers-read")
        if self._origin is not None:
            for name, sink in self._outputs:
                if self._is_exact(name):
                    self._ledgers[name] = self._origin.move_ledger(
                        sink,
                        self._id(name),
                        self._ledgers[name],
                        term=self.term,
                        schema=self.spec.schema_of(name),
                        mode=self.spec.mode_of(name),
                    )
                    self._reach("open.ledger-moved", output=name)

        # 3. recover: rows first, then Spark
        self._publish_last()
        self._reach("open.published")
        self._checkpoint_repair.repair()
        self._reach("open.spark-agrees")

        # 4. sweep
        self._sweep_staged()
        for name, sink in self._outputs:
            clean_up_of(sink).sweep(below_term=self.term)
            clean_up_of(sink).settled(self._id(name))
        self._reach("open.swept")

        self._positions.check(self._last_end)

        # 5. no-data
        self.opened_at = self.log.last.epoch if self.log.last else None
        self._checkpoint_repair.plan_no_data_epoch()
        self._compute.schedule_wakeup(self.log.last)
        self._reach("open.ready")
        self.log.check()  # a driver that was paused until here fails before it starts Spark

    def _refuse_what_cannot_work(self) -> None:
        self._compute.refuse_columns()
        for name, sink in self._outputs:
            sink.prepare(self._id(name), self.spec.schema_of(name), self.spec.mode_of(name))

    def _refuse_foreign(self, ledgers: Mapping[str, Ledger]) -> None:
        for name, sink in self._outputs:
            if self._origin is None or self._is_exact(name):  # others have no ledger to compare
                refuse_foreign(self.query, name, sink, self.log, ledgers[name])

    def _refuse_other_columns(self) -> None:
        """Compare the columns with those of the last decision, which may not be in the target
        yet."""
        for name, sink in self._outputs:
            decided = self.log.last and self.log.last.outputs.get(name)
            if decided:
                schema = self.spec.schema_of(name)
                refuse_difference(str(sink), columns(decided.schema), columns(schema))

    def _publish_last(self) -> None:
        last = self.log.last
        if last is None:
            return
        for name, output in last.outputs.items():
            sink = self.spec.outputs.get(name)
            if sink is None:
                self._refuse_dropped(name, output, last.epoch)
                continue
            if self._is_already_published(name, last.epoch):
                continue
            if output.guarantee is not Guarantee.EXACTLY_ONCE:
                self._add_again(name, sink, last)
                continue
            if self._ledgers[name].position != Position(self.query.lineage, last.epoch):
                for file in output.files:
                    if self._staged(file).exists():
                        verify(file, self._staged(file))
            self._publish(name, sink, last)
            self._reach("epoch.output-published", epoch=last.epoch, output=name)

    def _add_again(self, name: str, sink: Sink, last: Decision) -> None:
        """Add the rows again if the guarantee is at-least-once and Spark has not committed the
        epoch: no ledger says whether they were added, and Spark commits only after that."""
        again = last.outputs[name].guarantee is Guarantee.AT_LEAST_ONCE
        if again and last.epoch not in self.checkpoint.committed():
            self._publish(name, sink, last)

    def _refuse_dropped(self, name: str, output: OutputDecision, epoch: int) -> None:
        if any(self._staged(file).exists() for file in output.files):
            raise JobError(
                f"the job no longer has output {name!r} of {self.query.name}, but epoch {epoch} "
                "is decided for it and not published",
                hint="declare it again, run the job once, then drop it",
            )

    def _sweep_staged(self) -> None:
        self.query.store.sweep("log")
        self.query.store.sweep("past")
        self.log.prune()
        self._sweep_older()
        self._compute.sweep(self._with_state, term=self.term)
        if self._origin is not None and self._last_epoch >= self._origin.replays_to:
            self.query.forget_replay()

    def _sweep_older(self) -> None:
        """Remove the files that older terms staged. Called after every epoch, because tasks of a
        driver that has ended may write for a moment longer."""
        for folder in self.query.staged.glob("*-*-*-*"):
            if int(folder.name.rsplit("-", 2)[1]) < self.term:
                shutil.rmtree(folder, ignore_errors=True)

    def forget_running(self) -> None:
        """Forget Spark's query: it has ended, and another one of the same name follows."""
        self._running = None

    def replay_next(self) -> ReplayedEpoch | None:
        """Plan the next epoch of the parent lineage that is to be run again; None after the
        last."""
        wanted, last = self._before(self._last_epoch + 1), self.log.last
        if wanted is None or self._origin is None:
            if last is not None and last.epoch != self.opened_at:  # this driver ran epochs again
                self.opened_at = last.epoch
                self._checkpoint_repair.plan_no_data_epoch()
            return None
        self._checkpoint_repair.plan_epoch(wanted)
        return ReplayedEpoch(wanted.epoch, self._origin.replays_to)

    # ================================================================ one epoch

    def __call__(self, batch: Any, epoch: int) -> None:
        with self._busy:
            try:
                if self._stopping:
                    raise Stopping
                self._run(batch, epoch)
            except BaseException as error:
                self.failure = self.reason(error)
                if self.failure is error:
                    raise
                raise self.failure from error

    def reason(self, error: BaseException) -> BaseException:
        """Return the error to report. For a driver that was replaced it is `Fenced`, however it
        failed."""
        failure = explain(error)
        with contextlib.suppress(OnceflowError, OSError):
            successor = self.log.successor()
            if successor is not None:
                return successor
            if isinstance(failure, OutOfRange):
                ends = {**dict.fromkeys(self._reads), **self._last_end}
                return self._positions.find_gone_rows(ends, failure)
            return self._damaged_state(failure) or failure
        return failure

    def _damaged_state(self, failure: BaseException) -> Damaged | None:
        """Find the damaged state file: Spark does not name the file that it could not load."""
        last = self.log.last
        if last is None or isinstance(failure, OnceflowError) or not is_about_state(failure):
            return None
        spark = self.spec.df.sparkSession
        return find_damage(spark, self.checkpoint.root, last.epoch, last.state)

    def _run(self, batch: Any, epoch: int) -> None:
        failure = self.sweep_failure()
        if failure is not None:
            raise failure
        self.times.begin(epoch)

        # 1. check
        running, plan, offsets, entries = self._check(epoch)
        self._reach("epoch.checked", epoch=epoch)

        # 2. stage: the only action over `batch`
        tag = f"{self.query.lineage[:8]}-{epoch}-{self.term}-{uuid.uuid4().hex[:8]}"
        folder = self.query.staged / tag
        with _removed_upon(BaseException, folder):
            before = self._before(epoch)
            result = self._compute.run(
                batch, running, plan, folder=folder, last=self.log.last, before=before
            )
            self._reach("epoch.staged", epoch=epoch)

            # 3. harden
            decision = self._decision(plan, offsets, entries, result)
            if before is not None and self._origin is not None and not self._origin.is_fork:
                refuse_changed_rows(before, decision, self._id())
            self._harden(decision)
            self._reach("epoch.hardened", epoch=epoch)

        # 4. decide
        with _removed_upon(Fenced, folder):  # after any other failure it may be decided
            self.log.decide(decision)
        self._reach("epoch.decided", epoch=epoch)

        # 5. publish
        for name, sink in self._outputs:
            if not self._is_already_published(name, epoch):
                self._publish(name, sink, decision)
            self._reach("epoch.output-published", epoch=epoch, output=name)
        self.published_at = time.time()
        self._compute.schedule_wakeup(decision)
        self._reach("epoch.published", epoch=epoch)

        # 6. sweep, while Spark commits this epoch and plans the next
        self._hardened = {p for p in self._hardened if not p.is_relative_to(folder)}
        self._sweeping = self._sweeper.submit(self._sweep, folder, plan.end)

    def _sweep(self, folder: Path, end: Mapping[str, Any]) -> None:
        """Remove what no later step needs. The next epoch waits for it, so the work is bounded: see
        `keep_epochs` and `tidy`."""
        shutil.rmtree(folder, ignore_errors=True)
        self._sweep_older()
        keep = self.spec.keep_epochs
        if self.log.roll_up(keep=keep, slack=keep, before=self._retained.keep):
            self._retained.sweep()
            self._positions.hold(end, self._first_start)
        self._compute.sweep(self._with_state, term=self.term)
        for _, sink in self._outputs:
            clean_up_of(sink).tidy()
        self._positions.published(end)
        self._reach("epoch.swept")
        self.times.end(self._running)

    def _check(self, epoch: int) -> tuple[RunningQuery, Plan, str, SourceEntries]:
        self.log.check()
        first = self._running is None
        if self._running is None:
            self._running = RunningQuery(self.spec.df.sparkSession, self.query.spark_id)
        plan = self._running.plan()
        if first:
            self._running.refuse_shuffle_behind_state()
        offsets = self.checkpoint.offsets(epoch)
        where = f"{self.query.folder}/offsets/{epoch}"
        problem, entries = "", SourceEntries()
        before = self._before(epoch)
        if epoch != self._last_epoch + 1 or plan.epoch != epoch:
            problem = f"Spark runs epoch {epoch}, the last decision is epoch {self._last_epoch}"
        elif offsets is None:
            problem = f"{where} is missing"
        elif parse_offsets(offsets, where)[1] != plan.end:
            problem = f"{where} differs from Spark's plan: another driver wrote it"
        elif plan.start != self._last_end:
            problem = "Spark's plan does not begin where the last decision ends"
        elif offset_after(plan.start, plan.end):
            problem = "Spark's plan ends before it begins"
        elif before is not None and plan.end != before.end:
            problem = "this epoch is run again, but its plan does not end where the first one did"
        else:
            entries = self.checkpoint.source_entries(plan.start, plan.end)
            problem = plan.compare_files(entries)
        if problem or offsets is None:
            raise PlanChanged(f"{self._id()}: {problem}", hint="onceflow opens the query again")
        if first:
            self._positions.hold(plan.end, self._first_start)
        self._reads = set(plan.end)
        self._positions.remember(plan.end)
        self._reach("epoch.remembered", epoch=epoch)
        return self._running, plan, offsets, entries

    def _decision(
        self,
        plan: Plan,
        offsets: str,
        entries: SourceEntries,
        result: EpochResult,
    ) -> Decision:
        assert self._running is not None
        before = self._before(plan.epoch)
        return Decision(
            epoch=plan.epoch,
            term=self.term,
            at=now(),
            start=plan.start,
            end=plan.end,
            offsets=offsets,
            sources=entries,
            state=self._running.state_written(),
            watermark=self._running.next_watermark(),
            outputs={
                name: OutputDecision(
                    previous=self._ledgers[name].position,
                    files=tuple(self._relative(file) for file in result.staged[name]),
                    schema=self.spec.schema_of(name),
                    mode=self.spec.mode_of(name),
                    guarantee=self.spec.guarantee(name),
                )
                for name, _ in self._outputs
            },
            digest=result.digest,
            now=result.now,
            keyed=result.keyed,
            nonce=uuid.uuid4().hex if before is None else before.nonce,
        )

    def _harden(self, decision: Decision) -> None:
        outputs = decision.outputs.values()
        kept = [output for output in outputs if output.guarantee is not Guarantee.AT_MOST_ONCE]
        staged = [self._staged(file) for output in kept for file in output.files]
        try:
            spark = self.checkpoint.epoch_files(decision.epoch, decision.end, decision.state)
        except CheckpointRefused as missing:  # tasks of this epoch wrote the missing file
            raise staging_differs(missing.message) from missing
        snapshots = self.checkpoint.new_snapshots(spark)
        harden([*staged, *spark], self.query.folder, self._hardened, snapshots)

    def _publish(self, name: str, sink: Sink, decision: Decision) -> None:
        output = decision.outputs[name]
        publication = Publication(
            output=self._id(name),
            lineage=self.query.lineage,
            epoch=decision.epoch,
            term=self.term,
            previous=output.previous,
            files=tuple(replace(file, path=str(self._staged(file))) for file in output.files),
            schema=output.schema,
            mode=output.mode,
            decision=decision.nonce,
        )
        if output.guarantee is not Guarantee.EXACTLY_ONCE:
            assert isinstance(sink, CanAdd)  # otherwise the guarantee would have been refused
            sink.add(publication)
            return
        outcome = sink.publish(publication)
        if not isinstance(outcome, Outcome):  # a sink for another version may have done nothing
            raise JobError(
                f"publish of {sink} returned {outcome!r} and not an Outcome, so it is not known "
                f"whether epoch {decision.epoch} is published; its rows stay staged",
                hint="let publish return Outcome.PUBLISHED, or Outcome.ALREADY_PUBLISHED if judge "
                "says Verdict.ALREADY_PUBLISHED, and start the job again",
            )
        self._ledgers[name] = Ledger(self.term, publication.position, decision.nonce)

    # ================================================================ stopping

    def sweep_failure(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the sweep of the last epoch has ended. Return what it raised, or
        `TimeoutError` if it takes longer than `timeout`."""
        sweeping, self._sweeping = self._sweeping, None
        try:
            return None if sweeping is None else sweeping.exception(timeout)
        except TimeoutError as error:
            return error

    def settle(self) -> None:
        """Finish what was left for the end of the job, and close the sinks."""
        self.times.ask(self._running)
        self._positions.settle(self._last_end)
        if self.stop_after_epoch(timeout=0):  # otherwise an epoch still uses the sinks
            for _, sink in self._outputs:
                clean_up_of(sink).close()

    def stop_after_epoch(self, timeout: float | None = None) -> bool:
        """Begin no further epoch. Return whether the running one has ended within `timeout`."""
        self._stopping = True
        if not self._busy.acquire(timeout=-1 if timeout is None else timeout):
            return False
        self._busy.release()
        return True

    # ================================================================ names

    def _reach(self, point: str, **facts: Any) -> None:
        """Mark a fault point; a trace shows `facts` with it."""
        reach(point, term=self.term, **facts)
        self.times.passed(point)

    @property
    def _outputs(self) -> list[tuple[str, Sink]]:
        return list(self.spec.outputs.items())

    def _is_exact(self, output: str) -> bool:
        return self.spec.guarantee(output) is Guarantee.EXACTLY_ONCE

    def _is_already_published(self, output: str, epoch: int) -> bool:
        """Does the target have these rows from the parent lineage?"""
        return self._origin is not None and epoch <= self._origin.last_of(output)

    def _before(self, epoch: int) -> Decision | None:
        """The decision of this epoch in the parent lineage, if the epoch is to be run again."""
        again = self._origin is not None and epoch <= self._origin.replays_to
        return self.query.to_replay(epoch) if again else None

    @property
    def _with_state(self) -> list[Decision]:
        """The decisions whose state is here. A lineage that continues from a cut has older
        decisions, too, but not their state."""
        first = 0 if self._origin is None else self._origin.cut
        return [decision for decision in self.log.decisions if decision.epoch >= first]

    @property
    def _last_epoch(self) -> int:
        return self.log.last.epoch if self.log.last is not None else -1

    @property
    def _last_end(self) -> dict[str, Any]:
        """Where the last decision ends: source -> offset."""
        return self.log.last.end if self.log.last is not None else {}

    @property
    def _first_start(self) -> Mapping[str, Any]:
        """Where the oldest decision that is kept begins: source -> offset."""
        kept = [self._retained.oldest(), *self.log.decisions[:1]]
        return next((decision.start for decision in kept if decision is not None), {})

    def _id(self, output: str | None = None) -> str:
        parts = (self.query.job, self.query.name, output)
        return "/".join(part for part in parts if part is not None)

    def _staged(self, file: Committable) -> Path:
        return self.query.staged / file.path  # an absolute path stays what it is

    def _relative(self, file: Committable) -> Committable:
        """Name a staged file under the home relative to it, so that a home can be moved."""
        path = Path(file.path)
        inside = path.is_relative_to(self.query.staged)
        return replace(file, path=str(path.relative_to(self.query.staged))) if inside else file
