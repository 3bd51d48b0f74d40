"""Go back to a cut: a new lineage continues from it, and the old one ends.

1. lead and fence the old lineage, like any driver: nobody decides in it any longer
2. publish what it has decided, so that "published up to" means one thing for each output
3. make the new lineage: its checkpoint, and the first entry of each log. Nothing refers to it yet
4. end the old lineage, query by query in the order of their names. The first of these entries is
   the commit point: from here on the job is in the new lineage

A restore that is killed before step 4 has changed nothing, and the next one removes what it made.
A restore that is killed later is finished by the next start of the job. The first entries of the
new lineage say what becomes of rows that were published after the cut; that is done when it is
opened (`lineage.py`).

A lineage that was never opened has touched no target. A restore out of it leaves it aside and
continues from where the targets are, so one can return to the old lineage until the new one begins.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from onceflow.contract.abilities import CanAdd, clean_up_of
from onceflow.contract.ledger import Guarantee, Publication
from onceflow.errors import JobError, LeaseHeld, OnceflowError
from onceflow.faults.points import reach
from onceflow.protocol.home import JobFolder, now
from onceflow.protocol.lease import Lease
from onceflow.protocol.lineage import Origin, refuse_foreign
from onceflow.snapshots.cut import Cut
from onceflow.snapshots.ending_query import EndingQuery
from onceflow.snapshots.new_lineage import begin_query
from onceflow.snapshots.published_history import History
from onceflow.snapshots.published_rows import Output, OutputPlan, choice_for, output_origin
from onceflow.spark.checkpoint import Checkpoint


class Restore:
    """A restore, planned and then run. No driver of the job may lead while it runs."""

    def __init__(
        self,
        folder: JobFolder,
        cuts: Mapping[str, tuple[str, Cut]],
        choices: Mapping[str, str],
        reason: str,
    ) -> None:
        """`cuts`: query -> the lineage of the cut, and the cut. `choices`: see `choice_for`."""
        self._folder, self._cuts, self._choices, self._reason = folder, cuts, choices, reason
        self._lineage = folder.lineage()

    # -------------------------------------------------------------- the plan

    def plan(self) -> list[OutputPlan]:
        """What will be done, for each output. Refuses what a sink cannot do. Changes nothing."""
        self._queries = self._find_queries()
        found = []
        for query in self._queries:
            plans = [self._plan_of(query, output) for output in query.outputs]
            if any(d.rows and d.digest is None for d in query.replayed()):
                plans = [plan.by_number() for plan in plans]
            found += plans
        names = [f"{plan.query}/{plan.output}" for plan in found]
        unknown = sorted(set(self._choices) - {"", *names})
        if unknown:
            raise JobError(f"the job has no output {unknown[0]}", hint=f"it has {', '.join(names)}")
        return found

    def _plan_of(self, query: EndingQuery, output: Output) -> OutputPlan:
        query.refuse_other_branch(output)
        query.refuse_rewind(output, self._read_up_to)
        _, published, _ = query.position(output.name)
        return OutputPlan.of(query.query.name, output, query.epoch, published)

    def _find_queries(self) -> list[EndingQuery]:
        queries = [q for q in self._folder.queries() if q.epoch_log().read().last is not None]
        missing = sorted(set(self._cuts) - {q.name for q in queries})
        if missing:
            raise JobError(
                f"the snapshot has queries that job {self._folder.name} does not "
                f"have: {', '.join(missing)}",
                hint="restore a snapshot of what the job does now; if the job has not decided "
                f"anything here, remove {self._folder.folder} and restore again",
            )
        found = []
        for query in queries:
            targets = History(self._folder, query.name, query.lineage).targets()
            outputs = [
                Output.of(query.name, name, target, choice_for(self._choices, query.name, name))
                for name, target in targets.items()
            ]
            ending = EndingQuery(self._folder, query, outputs, self._cuts.get(query.name))
            ending.refuse_targets()
            found.append(ending)
        return found

    def _read_up_to(self, home: str, reader: str) -> list[int] | None:
        """How far a query has read a log (`HasReaders`). A query that goes back as well has read up
        to its own cut."""
        job, name, source = reader.split("/", 2)
        try:
            queries = {query.name: query for query in JobFolder(home, job).queries()}
            last = queries[name].epoch_log().read().last if name in queries else None
            end = last.end if last else {}
            if job == self._folder.name and name in self._cuts:
                end = self._cuts[name][1].decision.end
            return list(end[source]["next"])
        except (OnceflowError, OSError, KeyError, TypeError):
            return None

    # -------------------------------------------------------------- running it

    def run(self, facts: Mapping[str, Any]) -> str:
        """Go back, and return the new lineage, in which `facts` are recorded."""
        lease = Lease(self._folder.folder / "lease", self._folder.name)
        try:
            lease.acquire()
        except LeaseHeld as error:
            raise LeaseHeld(error.message, hint=f"onceflow stop {self._folder.name}") from error
        try:
            return self._run(lease, facts)
        finally:
            lease.release()

    def _run(self, lease: Lease, facts: Mapping[str, Any]) -> str:
        finish_restore(self._folder, lease)
        self._lineage = self._folder.lineage()

        # 1. lead and fence. Planned again, because now nobody else changes anything
        self.plan()
        seen = [ledger.term for ending in self._queries for ledger in ending.ledgers.values()]
        logs = {query.name: query.epoch_log().read() for query in self._folder.queries()}
        logs |= {ending.query.name: ending.log for ending in self._queries}
        term = lease.next_term(max([*(log.term for log in logs.values()), *seen]))
        for name in sorted(logs):
            logs[name].fence(term, {**(logs[name].leader or {}), **facts, "at": now()})
        reach("restore.fenced")
        self._sweep()

        # 2. publish
        for ending in self._queries:
            for output in ending.outputs:
                self._publish(ending, output, term)
        reach("restore.published")
        for ending in self._queries:
            for output in ending.outputs:
                ending.refuse_rewind(output, self._read_up_to)

        # 3. make
        child = str(uuid.uuid4())
        for ending in self._queries:
            self._make(ending, child)
        self._folder.put_lineage(child, self._parent(facts))
        reach("restore.made")

        # 4. end
        end = {"at": now(), "to": child, "reason": self._reason}
        for name in sorted(logs):
            logs[name].end(end)
            reach("restore.ended-one")
        return child

    def _publish(self, ending: EndingQuery, output: Output, term: int) -> None:
        """Do as every opening does: fence the ledger, and publish the last decision. A target that
        the lineage has not touched yet stays as it is, because its position is known."""
        whole, last, query = ending.id(output.name), ending.log.last, ending.query
        assert last is not None
        decided = last.outputs.get(output.name)
        publication = None
        if decided is not None:
            publication = Publication(
                output=whole,
                lineage=query.lineage,
                epoch=last.epoch,
                term=term,
                previous=decided.previous,
                files=tuple(replace(f, path=str(query.staged / f.path)) for f in decided.files),
                schema=decided.schema,
                mode=decided.mode,
                decision=last.nonce,
            )
        origin = Origin.of(ending.log)
        if origin is not None and last.epoch <= origin.last_of(output.name):
            publication = None  # of the lineage before
        if not output.exact:
            again = decided is not None and decided.guarantee is Guarantee.AT_LEAST_ONCE
            if publication and again and last.epoch not in Checkpoint(query.folder).committed():
                assert isinstance(output.sink, CanAdd)
                output.sink.add(publication)
            return
        clean_up_of(output.sink).shut_out(whole)
        ledger = output.sink.fence(whole, term=term, token=uuid.uuid4().hex)
        refuse_foreign(query, output.name, output.sink, ending.log, ledger)
        at = ledger.position
        if publication is not None and (
            at is None or at.lineage == query.lineage or origin is None
        ):
            output.sink.publish(publication)
            ledger = output.sink.published(whole)
        ending.ledgers[output.name] = ledger

    def _make(self, ending: EndingQuery, child: str) -> None:
        """Make the checkpoint of a query in the new lineage, and the first entry of its log."""
        made = self._folder.query(child, ending.query.name)
        known_as = partial(ending.history.known_as, ending.lineage, ending.epoch)
        origin = Origin(
            lineage=child,
            parent=ending.lineage,
            cut=ending.epoch,
            decision=ending.cut.decision.nonce,
            ended=ending.query.lineage,
            outputs={
                output.name: output_origin(
                    output.choice,
                    known_as(output.name),
                    ending.position(output.name),
                    ending.epoch,
                )
                for output in ending.outputs
            },
        )
        for decision in ending.replayed():
            made.keep_for_replay(decision)
        begin_query(made, ending.cut, origin)

    def _parent(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        cuts = {q.query.name: {"lineage": q.lineage, "epoch": q.epoch} for q in self._queries}
        about = {"ended": self._lineage, "reason": self._reason, "at": now()}
        return {"parent": cuts, **about, **facts}

    def _sweep(self) -> None:
        """Remove lineages that killed restores left. Nobody makes one while we lead."""
        known = set(self._folder.lineages())
        for name in self._folder.store.list("lineages"):
            if name not in known:
                shutil.rmtree(self._folder.folder / "lineages" / name, ignore_errors=True)


def finish_restore(folder: JobFolder, lease: Lease) -> None:
    """End all queries of a lineage whose first one has ended: a restore was killed in between.
    All that they decided is published. Nobody else removes their staged files."""
    for lineage in folder.lineages()[-2:-1]:
        queries = folder.queries_of(lineage)
        for query in queries:
            shutil.rmtree(query.staged, ignore_errors=True)
            query.store.sweep("log")
            query.store.sweep("past")
        logs = [query.epoch_log().read() for query in queries]
        for log in logs[1:]:
            if log.ended is None:
                log.fence(lease.next_term(log.term), {**(log.leader or {}), "at": now()})
                log.end({k: (logs[0].ended or {})[k] for k in ("at", "to", "reason")})
