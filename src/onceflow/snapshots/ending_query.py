"""A query whose lineage a restore ends: where its targets are, and what they cannot do."""

from __future__ import annotations

from collections.abc import Callable

from onceflow.contract.abilities import HasReaders, require_rewind
from onceflow.contract.ledger import Guarantee, Ledger, Position
from onceflow.errors import JobError, TargetBehind, TargetError
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lineage import Origin, refuse_foreign, target_position
from onceflow.protocol.retained_decisions import RetainedDecisions
from onceflow.snapshots.cut import Cut, cut_at
from onceflow.snapshots.published_history import History
from onceflow.snapshots.published_rows import Output


class EndingQuery:
    """One query of the lineage that ends, and the cut that it goes back to."""

    def __init__(
        self,
        folder: JobFolder,
        query: Query,
        outputs: list[Output],
        cut: tuple[str, Cut] | None,
    ) -> None:
        """`cut`: its lineage, and the cut. None: the query began after the snapshot, and does not
        go back."""
        self._folder, self.query, self.outputs = folder, query, outputs
        # The ledgers of exact outputs are read before the log. The job may run while a plan is
        # made, and an epoch is decided before a target has it, so the log knows it.
        self.ledgers = {o.name: self.published(o) for o in outputs if o.exact}
        self.log = query.epoch_log().read()
        self.history = History(folder, query.name, query.lineage)
        assert self.log.last is not None
        self.lineage, self.cut = cut or (query.lineage, cut_at(query, self.log.last.epoch))

    def published(self, output: Output) -> Ledger:
        return output.sink.published(self.id(output.name))

    def id(self, output: str) -> str:
        return f"{self.query.job}/{self.query.name}/{output}"

    @property
    def epoch(self) -> int:
        """Of the cut."""
        return self.cut.decision.epoch

    def position(self, output: str) -> tuple[str, int, str]:
        """Where the target of an output is: lineage, epoch, and the nonce of its decision."""
        ledger = self.ledgers.get(output, Ledger())
        return target_position(self.log, self.query.lineage, output, ledger)

    def replayed(self) -> list[Decision]:
        """The epochs that will run again for the outputs that skip."""
        skipping = [output.name for output in self.outputs if output.choice == "skip"]
        ends = [self.position(output)[:2] for output in skipping]
        at, end = max(ends, key=lambda end: end[1], default=("", self.epoch))
        found: dict[int, Decision] = {}
        for lineage, first, last in self.history.run_in(at, self.epoch + 1, end) if ends else ():
            retained = RetainedDecisions(self._folder.query(lineage, self.query.name))
            known = (*retained.after(self.epoch), *self.history.log(lineage).decisions)
            found |= {d.epoch: d for d in known if first <= d.epoch <= last}
        for epoch in range(self.epoch + 1, end + 1):  # this lineage may have had to run them, too
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

    # -------------------------------------------------------------- what cannot be done

    def refuse_targets(self) -> None:
        """Refuse targets that are not of this job, or have lost what it published."""
        for output in self.outputs:
            if output.exact:
                ledger = self.ledgers[output.name]
                refuse_foreign(self.query, output.name, output.sink, self.log, ledger)
                self._refuse_gone(output)

    def _refuse_gone(self, output: Output) -> None:
        last, origin = self.log.last, Origin.of(self.log)
        assert last is not None
        decided = last.outputs.get(output.name)
        own = origin is None or not origin.is_fork or last.epoch > origin.cut
        if not own or decided is None or decided.previous is None:
            return
        if self.ledgers[output.name].position is not None:
            return
        # Its first epoch may have been published after the ledger was read: then it is there now.
        if self.published(output).position is None:
            raise TargetBehind(
                f"output {self.query.name}/{output.name}: {output.sink} no longer has anything of "
                f"the job, which has published epoch {decided.previous.epoch} there",
                hint="bring back the target as it was, or fork a job with new targets",
            )

    def refuse_other_branch(self, output: Output) -> None:
        """Refuse a cut that is not among the epochs that the target has."""
        at, epoch, _ = self.position(output.name)
        if not self.history.holds(self.lineage, self.epoch, output.name, at, epoch):
            job = self.query.job
            raise JobError(
                f"epoch {self.epoch} of lineage {self.lineage[:8]} is not part of what "
                f"{job}/{self.query.name} has published: the job has gone back to an earlier "
                "epoch since, or the epoch is of another job",
                hint="fork a job of its own from it: "
                f"onceflow fork {job} --as NAME --from SAVEPOINT --outputs DIR",
            )

    def refuse_rewind(
        self, output: Output, offsets: Callable[[str, str], list[int] | None]
    ) -> None:
        """Refuse to take back rows if the sink cannot, or if a job has read them. `offsets`: see
        `HasReaders`."""
        _, published, _ = self.position(output.name)
        if output.choice != "rewind" or published <= self.epoch:
            return
        cut = Position(self.history.known_as(self.lineage, self.epoch, output.name), self.epoch)
        whole = f"{self.query.name}/{output.name}"
        hint = f"--published {whole}=skip: its rows stay and are not published again"
        weaker = [
            decision.epoch
            for decision in self.log.decisions
            if decision.epoch > self.epoch and output.name in decision.outputs
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
            require_rewind(output.sink).refuse_rewind(self.id(output.name), cut)
        except JobError as refused:
            raise JobError(f"output {whole}: {refused.message}", hint=hint) from refused
        except TargetError as refused:
            raise JobError(f"output {whole}: {refused.message}", hint=refused.hint) from refused
        if isinstance(output.sink, HasReaders):
            output.sink.refuse_readers(self.id(output.name), cut, offsets)
