"""Where a lineage comes from: the cut of another that it goes on from, and what becomes of the rows
that were published after that cut.

- rewind   they are taken back
- skip     they stay; their epochs are run again, are the same, and are not published
- replay   they stay, and are published once more
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from onceflow.contract.abilities import require_rewind
from onceflow.contract.ledger import Ledger, Position, Publication
from onceflow.contract.sink import Sink
from onceflow.errors import RowsDiffer
from onceflow.protocol.epoch_log import Decision, EpochLog
from onceflow.protocol.home import Query
from onceflow.protocol.identity import refuse_foreign_ledger

CHOICES = ("rewind", "skip", "replay")


@dataclass(frozen=True)
class OutputOrigin:
    """Where the target of an output stood, and what becomes of its rows after the cut."""

    choice: str
    known: str  # the lineage under which it knows the cut
    lineage: str
    epoch: int  # the last one that it has
    decision: str  # the nonce of that epoch's decision


@dataclass(frozen=True)
class Origin:
    """What the first entry of a query's log says, if the lineage did not begin with nothing."""

    lineage: str  # ours
    parent: str  # the lineage that the cut is in
    cut: int  # the epoch
    decision: str  # the nonce of its decision
    ended: str  # the lineage that the job was in
    outputs: Mapping[str, OutputOrigin]  # those that had published; none for a fork
    again: int = -1  # an epoch that a fork runs again, to look at it

    @classmethod
    def of(cls, log: EpochLog) -> Origin | None:
        if log.begun is None:
            return None
        fields = dict(log.begun["origin"])
        outputs = {name: OutputOrigin(**stood) for name, stood in fields.pop("outputs").items()}
        return cls(**fields, outputs=outputs)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_fork(self) -> bool:
        """Of another job: its targets are new, and know nothing of the cut."""
        return not self.outputs

    @property
    def certain(self) -> int:
        """Up to here all targets have what there is, before this lineage has published."""
        return min((self.last_of(name) for name in self.outputs), default=self.cut)

    @property
    def replays_to(self) -> int:
        """The last epoch that is to be run again; the cut, if none is."""
        return max([self.cut, self.again, *(self.last_of(name) for name in self.outputs)])

    def last_of(self, output: str) -> int:
        """The last epoch of an output that its target has from before this lineage."""
        stood = self.outputs.get(output)
        return stood.epoch if stood and stood.choice == "skip" else self.cut

    def knows(self, output: str, at: Position, decision: str) -> bool:
        """Is this where a ledger stands before this lineage has published anything?"""
        stood = self.outputs.get(output)
        if stood is None or at.epoch != stood.epoch:
            return False
        ours = at.lineage == self.lineage and decision == stood.decision
        return ours or at.lineage == stood.lineage

    def move_ledger(
        self, sink: Sink, output: str, ledger: Ledger, *, term: int, schema: str, mode: str
    ) -> Ledger:
        """Move the ledger of an output into this lineage, if that is not done, and take back what
        is to be taken back: one atomic step of the target."""
        at, stood = ledger.position, self.outputs.get(output.rpartition("/")[2])
        if self.is_fork and at is None:
            stood = OutputOrigin("replay", self.lineage, self.lineage, self.cut, self.decision)
        elif at is None or stood is None or at.lineage == self.lineage:
            return ledger
        if stood.choice == "rewind":
            to, cut = Position(self.lineage, self.cut), Position(stood.known, self.cut)
            taking_back = require_rewind(sink)
            taking_back.rewind(output, cut=cut, to=to, term=term, decision=self.decision)
            return Ledger(term, to, self.decision)
        stays = stood.choice == "skip"
        empty = Publication(
            output=output,
            lineage=self.lineage,
            epoch=stood.epoch if stays else self.cut,
            term=term,
            previous=at,
            files=(),
            schema=schema,
            mode=mode,
            decision=stood.decision if stays else self.decision,
        )
        sink.publish(empty)
        return Ledger(term, empty.position, empty.decision)


def target_position(
    log: EpochLog, lineage: str, output: str, ledger: Ledger
) -> tuple[str, int, str]:
    """Where the target of an output stands, or will stand when what was decided last is published:
    lineage, epoch, and the nonce of its decision."""
    last, origin, at = log.last, Origin.of(log), ledger.position
    assert last is not None
    stood = origin.outputs.get(output) if origin is not None else None
    if stood is not None and (not log.opened if at is None else at.lineage != lineage):
        return stood.lineage, stood.epoch, stood.decision  # nobody has touched it in this lineage
    if at is not None and (at.epoch >= last.epoch or output not in last.outputs):
        return lineage, at.epoch, ledger.decision
    return lineage, last.epoch, last.nonce


def refuse_changed_rows(before: Decision, again: Decision, query: str) -> None:
    """An epoch that is run again must have the rows that it had."""
    told = f"epoch {again.epoch} of {query} was run again, and its rows are not those that it had"
    hint = (
        "the query is not deterministic, or its code or its input changed since. Restore once "
        "more, with --published rewind or replay, or with the code that published these rows"
    )
    for output in {*before.outputs} & {*again.outputs}:
        then, now = (
            sum(file.rows for file in decision.outputs[output].files)
            for decision in (before, again)
        )
        if then != now:
            raise RowsDiffer(f"{told}: {then} for {output} then, {now} now", hint=hint)
    if None not in (before.digest, again.digest) and before.digest != again.digest:
        raise RowsDiffer(f"{told}: as many, {again.rows}, with other values", hint=hint)


def refuse_foreign(query: Query, output: str, sink: Sink, log: EpochLog, ledger: Ledger) -> None:
    """What a target remembers must be of this lineage, or what it goes on from."""
    at, origin = ledger.position, Origin.of(log)
    if at is None or (origin is not None and origin.knows(output, at, ledger.decision)):
        return
    what = f"{sink}, output {query.job}/{query.name}/{output}"
    refuse_foreign_ledger(query, log.last, ledger, what)
