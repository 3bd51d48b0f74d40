"""Going back to a cut: a new lineage goes on from it, and the old one ends.

1. lead and fence the old lineage, like any driver: nobody decides in it any more
2. publish what it has decided, so that "published up to" means one thing for each output
3. make the new lineage: its checkpoint, and the first entry of each log. Nobody knows it yet
4. end the old lineage, query by query in the order of their names. The first of these entries is
   the commit point: from here on the job is in the new lineage

Who is killed before 4 has changed nothing; what it made is swept by the next one. Who is killed
later is finished by the next start of the job. What becomes of rows that were published after the
cut is in the new lineage's first entries; it is done when it is opened (`lineage.py`).

A lineage that was never opened has touched no target: a restore out of it leaves it aside, and
goes on from where the targets stand. So the old lineage can be had back until the new one begins.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from onceflow.contract.abilities import CanAdd, clean_up_of, require_rewind
from onceflow.contract.ledger import Guarantee, Ledger, Position, Publication
from onceflow.contract.registry import open_target
from onceflow.contract.sink import Sink
from onceflow.errors import JobError, LeaseHeld, TargetBehind, TargetError
from onceflow.faults.points import reach
from onceflow.log.sink import Log
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query, now
from onceflow.protocol.lease import Lease
from onceflow.protocol.lineage import CHOICES, Origin, OutputOrigin, refuse_foreign, target_position
from onceflow.protocol.retained_decisions import RetainedDecisions
from onceflow.snapshots.cut import Cut, cut_of, place_files
from onceflow.snapshots.log_readers import refuse_reader_past
from onceflow.snapshots.published_history import History
from onceflow.spark.checkpoint import Checkpoint
from onceflow.spark.file_source_log import SourceLog


@dataclass(frozen=True)
class Answer:
    """What will become of the rows of one output that were published after the cut."""

    query: str
    output: str
    target: str
    cut: int
    published: int
    choice: str
    says: str


@dataclass(frozen=True)
class Output:
    """An output of the lineage that ends."""

    name: str
    sink: Sink
    exact: bool
    choice: str


def choice_for(choices: Mapping[str, str], query: str, output: str) -> str:
    """`choices`: `query/output` -> what becomes of its rows; those of all others are at ``""``."""
    choice = choices.get(f"{query}/{output}") or choices.get("")
    if choice is None:
        raise JobError(
            f"nothing is said about the published rows of {query}/{output}",
            hint=f"--published {' or '.join(CHOICES)}",
        )
    if choice not in CHOICES:
        raise JobError(
            f"{choice!r} is no choice for the published rows of {query}/{output}",
            hint=f"use one of {', '.join(CHOICES)}",
        )
    return choice


def output_of(query: str, name: str, target: dict[str, Any], choice: str) -> Output:
    """`target`: as the driver that led last described it."""
    try:
        sink = open_target(target)
    except JobError as refused:
        raise JobError(f"output {query}/{name}: {refused.message}", hint=refused.hint) from refused
    exact = target.get("guarantee", Guarantee.EXACTLY_ONCE) == Guarantee.EXACTLY_ONCE
    return Output(name, sink, exact, choice)


def answer(query: str, output: Output, cut: int, published: int) -> Answer:
    """What will become of the rows after the cut, in words."""
    count = published - cut
    epochs = f"{count} epoch{'s' * (count != 1)}"
    says = {
        "rewind": f"the rows of {epochs} are taken back",
        "skip": f"the rows of {epochs} stay; they are computed again, compared, not published",
        "replay": f"the rows of {epochs} stay and are published once more: duplicates",
    }[output.choice]
    says = says if count else "nothing was published after the cut"
    return Answer(query, output.name, str(output.sink), cut, published, output.choice, says)


def _by_number(answer: Answer) -> Answer:
    if answer.choice != "skip":
        return answer
    return replace(answer, says=f"{answer.says} (by number alone: the job takes no digests)")


class _Going:
    """One query of the lineage that ends, and the cut that it goes back to."""

    def __init__(
        self,
        folder: JobFolder,
        query: Query,
        outputs: list[Output],
        cut: tuple[str, Cut] | None,
    ) -> None:
        """`cut`: its lineage, and the cut; None: the query began after the snapshot, and stays
        where it is."""
        self._folder, self.query, self.outputs = folder, query, outputs
        # Ledgers first (of exact outputs): a plan may be made while the job runs, and what a
        # target has was decided before, so a log that is read later knows it.
        self.ledgers = {o.name: self.published(o) for o in outputs if o.exact}
        self.log = query.epoch_log().read()
        self.history = History(folder, query.name, query.lineage)
        self.lineage, self.cut = cut or (query.lineage, self._last())

    def _last(self) -> Cut:
        assert self.log.last is not None
        cut = cut_of(self.query, self.log.last.epoch)
        assert cut is not None
        return cut

    def published(self, output: Output) -> Ledger:
        return output.sink.published(self.id(output.name))

    @property
    def epoch(self) -> int:
        return self.cut.decision.epoch

    def stands(self, output: str) -> tuple[str, int, str]:
        ledger = self.ledgers.get(output, Ledger())
        return target_position(self.log, self.query.lineage, output, ledger)

    def replayed(self) -> list[Decision]:
        """The epochs that are to be run again for the outputs that skip."""
        ends = [self.stands(output.name)[:2] for output in self.outputs if output.choice == "skip"]
        at, end = max(ends, key=lambda end: end[1], default=("", self.epoch))
        found: dict[int, Decision] = {}
        for lineage, first, last in self.history.run_in(at, self.epoch + 1, end) if ends else ():
            past = RetainedDecisions(self._folder.query(lineage, self.query.name)).after(self.epoch)
            kept = (*past, *self.history.log(lineage).decisions)
            found |= {d.epoch: d for d in kept if first <= d.epoch <= last}
        for epoch in range(self.epoch + 1, end + 1):  # it may have been about to run them itself
            waiting = None if epoch in found else self.query.to_replay(epoch)
            found |= {} if waiting is None else {epoch: waiting}
        missing = [epoch for epoch in range(self.epoch + 1, end + 1) if epoch not in found]
        if missing:
            raise JobError(
                f"epochs {missing[0]} to {missing[-1]} of {self.query.name} are no longer "
                "retained, so they cannot be run again",
                hint="choose --published rewind, or a newer snapshot",
            )
        return [found[epoch] for epoch in sorted(found)]

    def id(self, output: str) -> str:
        return f"{self.query.job}/{self.query.name}/{output}"


class Restore:
    """A restore, planned and then done. Hold no driver of the job meanwhile."""

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

    def plan(self) -> list[Answer]:
        """What will be done, for each output. Refuses what a sink cannot do. Changes nothing."""
        self._queries = self._find_queries()
        found = []
        for going in self._queries:
            for output in going.outputs:
                self._refuse_taken_back(going, output)
                self._refuse_impossible(going, output)
                _, published, _ = going.stands(output.name)
                found.append(answer(going.query.name, output, going.epoch, published))
            if any(d.rows and d.digest is None for d in going.replayed()):
                found = [_by_number(a) if a.query == going.query.name else a for a in found]
        unknown = sorted(set(self._choices) - {""} - {f"{a.query}/{a.output}" for a in found})
        if unknown:
            raise JobError(
                f"the job has no output {unknown[0]}",
                hint=f"it has {', '.join(f'{a.query}/{a.output}' for a in found)}",
            )
        return found

    def _find_queries(self) -> list[_Going]:
        queries = [q for q in self._folder.queries() if q.epoch_log().read().last is not None]
        missing = sorted(set(self._cuts) - {q.name for q in queries})
        if missing:
            raise JobError(
                f"the snapshot has queries that job {self._folder.name} has not: "
                f"{', '.join(missing)}",
                hint="restore a snapshot of what the job does now; if the job has not decided "
                f"anything here, remove {self._folder.folder} and restore again",
            )
        found = []
        for query in queries:
            targets = History(self._folder, query.name, query.lineage).targets()
            outputs = [
                output_of(query.name, name, target, choice_for(self._choices, query.name, name))
                for name, target in targets.items()
            ]
            going = _Going(self._folder, query, outputs, self._cuts.get(query.name))
            for output in going.outputs:
                if output.exact:
                    ledger = going.ledgers[output.name]
                    refuse_foreign(query, output.name, output.sink, going.log, ledger)
                    self._refuse_gone(going, output)
            found.append(going)
        return found

    @staticmethod
    def _refuse_gone(going: _Going, output: Output) -> None:
        last, origin = going.log.last, Origin.of(going.log)
        assert last is not None
        decided = last.outputs.get(output.name)
        own = origin is None or not origin.is_fork or last.epoch > origin.cut
        if not own or decided is None or decided.previous is None:
            return
        if going.ledgers[output.name].position is not None:
            return
        # Its first epoch may have been published while we looked: then it is there by now.
        if going.published(output).position is None:
            raise TargetBehind(
                f"output {going.query.name}/{output.name}: {output.sink} has nothing of the job "
                f"any more, which had published up to epoch {decided.previous.epoch} and beyond",
                hint="bring back the target as it was, or fork a job with new targets",
            )

    def _refuse_taken_back(self, going: _Going, output: Output) -> None:
        at, epoch, _ = going.stands(output.name)
        if not going.history.holds(going.lineage, going.epoch, output.name, at, epoch):
            raise JobError(
                f"epoch {going.epoch} of lineage {going.lineage[:8]} is not part of what "
                f"{going.query.job}/{going.query.name} has published: the job went back behind "
                "it since, or it is of another job",
                hint="fork a job of its own from it: "
                f"onceflow fork {going.query.job} --as NAME --from SAVEPOINT --outputs DIR",
            )

    def _refuse_impossible(self, going: _Going, output: Output) -> None:
        _, published, _ = going.stands(output.name)
        if output.choice != "rewind" or published <= going.epoch:
            return
        known = going.history.known_as(going.lineage, going.epoch, output.name)
        cut = Position(known, going.epoch)
        whole = f"{going.query.name}/{output.name}"
        hint = f"--published {whole}=skip: its rows stay and are not published again"
        weaker = [
            decision.epoch
            for decision in going.log.decisions
            if decision.epoch > going.epoch and output.name in decision.outputs
            if decision.outputs[output.name].guarantee is not Guarantee.EXACTLY_ONCE
        ]
        if not output.exact or weaker:
            when = f" in epoch {weaker[0]}" if weaker else ""
            raise JobError(
                f"output {whole}: {output.sink} kept no ledger{when}, by choice, so it cannot take "
                "back what it published",
                hint=hint,
            )
        try:
            require_rewind(output.sink).refuse_rewind(going.id(output.name), cut)
        except JobError as refused:
            raise JobError(f"output {whole}: {refused.message}", hint=hint) from refused
        except TargetError as refused:
            raise JobError(f"output {whole}: {refused.message}", hint=refused.hint) from refused
        if isinstance(output.sink, Log):
            ends = {query: cut.decision.end for query, (_, cut) in self._cuts.items()}
            refuse_reader_past(output.sink, going.id(output.name), cut, self._folder.name, ends)

    # -------------------------------------------------------------- doing it

    def run(self, facts: Mapping[str, Any]) -> str:
        """The new lineage."""
        lease = Lease(self._folder.folder / "lease", self._folder.name)
        try:
            lease.acquire()
        except LeaseHeld as held:
            raise LeaseHeld(held.message, hint=f"onceflow stop {self._folder.name}") from held
        try:
            return self._run(lease, facts)
        finally:
            lease.release()

    def _run(self, lease: Lease, facts: Mapping[str, Any]) -> str:
        finish(self._folder, lease)
        self._lineage = self._folder.lineage()

        # 1. lead and fence. Planned again: now nobody changes anything any more
        self.plan()
        seen = [ledger.term for going in self._queries for ledger in going.ledgers.values()]
        logs = {query.name: query.epoch_log().read() for query in self._folder.queries()}
        logs |= {going.query.name: going.log for going in self._queries}
        term = lease.next_term(max([*(log.term for log in logs.values()), *seen]))
        for name in sorted(logs):
            logs[name].fence(term, {**(logs[name].leader or {}), **facts, "at": now()})
        reach("restore.fenced")
        self._sweep()

        # 2. publish
        for going in self._queries:
            for output in going.outputs:
                self._publish(going, output, term)
        reach("restore.published")
        for going in self._queries:
            for output in going.outputs:
                self._refuse_impossible(going, output)

        # 3. make
        child = str(uuid.uuid4())
        for going in self._queries:
            self._make(going, child)
        self._folder.put_lineage(child, self._parent(facts))
        reach("restore.made")

        # 4. end
        end = {"at": now(), "to": child, "reason": self._reason}
        for name in sorted(logs):
            logs[name].end(end)
            reach("restore.ended-one")
        return child

    def _publish(self, going: _Going, output: Output, term: int) -> None:
        """As every opening does: the ledger is fenced, and has what was decided last. A target that
        the lineage has not touched yet is left as it is: where it stands is known."""
        whole, last, query = going.id(output.name), going.log.last, going.query
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
        origin = Origin.of(going.log)
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
        refuse_foreign(query, output.name, output.sink, going.log, ledger)
        at = ledger.position
        if publication is not None and (
            at is None or at.lineage == query.lineage or origin is None
        ):
            output.sink.publish(publication)
            ledger = output.sink.published(whole)
        going.ledgers[output.name] = ledger

    def _make(self, going: _Going, child: str) -> None:
        """The checkpoint of a query in the new lineage, and the first entry of its log."""
        made = self._folder.query(child, going.query.name)
        known_as = partial(going.history.known_as, going.lineage, going.epoch)
        origin = Origin(
            lineage=child,
            parent=going.lineage,
            cut=going.epoch,
            decision=going.cut.decision.nonce,
            ended=going.query.lineage,
            outputs={
                output.name: stood(
                    output.choice, known_as(output.name), going.stands(output.name), going.epoch
                )
                for output in going.outputs
            },
        )
        for decision in going.replayed():
            made.keep_for_replay(decision)
        begin(made, going.cut, {"at": now(), "origin": origin.as_json()})

    def _parent(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "parent": {going.query.name: {"lineage": going.lineage, "epoch": going.epoch}
                       for going in self._queries},
            "ended": self._lineage, "reason": self._reason, "at": now(), **facts,
        }  # fmt: skip

    def _sweep(self) -> None:
        """Lineages that were made and that nobody ended for. Nobody makes one while we lead."""
        found = self._folder.store.list("lineages")
        known = set(self._folder.lineages())
        for name in found:
            if name not in known:
                shutil.rmtree(self._folder.folder / "lineages" / name, ignore_errors=True)


def stood(choice: str, known: str, stands: tuple[str, int, str], cut: int) -> OutputOrigin:
    """Where nothing was published after the cut, nothing is to be taken back: any sink can."""
    _, epoch, _ = stands
    return OutputOrigin(choice if epoch > cut else "skip", known, *stands)


def begin(made: Query, cut: Cut, facts: dict[str, Any]) -> None:
    """Make the checkpoint of a query at that cut, and the first entry of its log. All of it is on
    the disk when this returns; files that never change are linked, all others are new."""
    place_files(cut, made.folder)
    for name, lines in cut.sources.items():
        SourceLog(made.folder / "sources" / name).rewrite(lines)
    Checkpoint(made.folder).set_query_id(made.spark_id)
    made.epoch_log().begin(facts, cut.decisions)


def finish(folder: JobFolder, lease: Lease) -> None:
    """End all queries of a lineage whose first one has ended: somebody was killed in between.
    All that they decided is published; what else they left, nobody removes but us."""
    lineages = folder.lineages()
    for lineage in lineages[-2:-1]:
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
