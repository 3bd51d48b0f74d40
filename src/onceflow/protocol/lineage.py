"""The origin of a lineage: the cut of another lineage from which it continues, and what happens to
the rows that were published after that cut.

- rewind   the target takes them back
- skip     they stay; their epochs are run again, must give the same rows, and are not published
- replay   they stay, and their epochs are published once more
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
    """The position of an output's target, and what happens to its rows after the cut."""

    choice: str
    known: str  # the lineage under which the target knows the cut
    lineage: str
    epoch: int  # the last epoch that the target has
    decision: str  # the nonce of that epoch's decision


@dataclass(frozen=True)
class Origin:
    """The origin in the `begin` entry of a query's log, if the lineage continues from a cut."""

    lineage: str  # ours
    parent: str  # the lineage that the cut is in
    cut: int  # the epoch of the cut
    decision: str  # the nonce of its decision
    ended: str  # the lineage that the job was in
    outputs: Mapping[str, OutputOrigin]  # the outputs that had published; none for a fork
    again: int = -1  # an epoch that a fork runs again, to inspect it

    @classmethod
    def of(cls, log: EpochLog) -> Origin | None:
        if log.begun is None:
            return None
        fields = dict(log.begun["origin"])
        outputs = {name: OutputOrigin(**body) for name, body in fields.pop("outputs").items()}
        return cls(**fields, outputs=outputs)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_fork(self) -> bool:
        """Does it continue another job? Then its targets are new and do not know the cut."""
        return not self.outputs

    @property
    def certain(self) -> int:
        """The last epoch that all targets had before this lineage published."""
        return min((self.last_of(name) for name in self.outputs), default=self.cut)

    @property
    def replays_to(self) -> int:
        """The last epoch that is to be run again; the cut if there is none."""
        return max([self.cut, self.again, *(self.last_of(name) for name in self.outputs)])

    def last_of(self, output: str) -> int:
        """The last epoch of an output that its target keeps from before this lineage."""
        origin = self.outputs.get(output)
        return origin.epoch if origin and origin.choice == "skip" else self.cut

    def knows(self, output: str, at: Position, decision: str) -> bool:
        """Is this the position of the output's ledger before this lineage publishes anything?"""
        origin = self.outputs.get(output)
        if origin is None or at.epoch != origin.epoch:
            return False
        ours = at.lineage == self.lineage and decision == origin.decision
        return ours or at.lineage == origin.lineage

    def move_ledger(
        self, sink: Sink, output: str, ledger: Ledger, *, term: int, schema: str, mode: str
    ) -> Ledger:
        """Move the ledger of an output into this lineage, unless that was done before. With
        `rewind` the target takes its rows back in the same atomic step."""
        at, origin = ledger.position, self.outputs.get(output.rpartition("/")[2])
        if self.is_fork and at is None:
            origin = OutputOrigin("replay", self.lineage, self.lineage, self.cut, self.decision)
        elif at is None or origin is None or at.lineage == self.lineage:
            return ledger
        if origin.choice == "rewind":
            to, cut = Position(self.lineage, self.cut), Position(origin.known, self.cut)
            rewindable = require_rewind(sink)
            rewindable.rewind(output, cut=cut, to=to, term=term, decision=self.decision)
            return Ledger(term, to, self.decision)
        is_skip = origin.choice == "skip"
        empty = Publication(
            output=output,
            lineage=self.lineage,
            epoch=origin.epoch if is_skip else self.cut,
            term=term,
            previous=at,
            files=(),
            schema=schema,
            mode=mode,
            decision=origin.decision if is_skip else self.decision,
        )
        sink.publish(empty)
        return Ledger(term, empty.position, empty.decision)


def target_position(
    log: EpochLog, lineage: str, output: str, ledger: Ledger
) -> tuple[str, int, str]:
    """The position of an output's target after the last decision is published: lineage, epoch, and
    the nonce of its decision."""
    last, origin, at = log.last, Origin.of(log), ledger.position
    assert last is not None
    before = origin.outputs.get(output) if origin is not None else None
    if before is not None and (not log.opened if at is None else at.lineage != lineage):
        return before.lineage, before.epoch, before.decision  # not yet touched in this lineage
    if at is not None and (at.epoch >= last.epoch or output not in last.outputs):
        return lineage, at.epoch, ledger.decision
    return lineage, last.epoch, last.nonce


def refuse_changed_rows(before: Decision, again: Decision, query: str) -> None:
    """Raise `RowsDiffer` unless an epoch that was run again has the same rows as before."""
    problem = (
        f"epoch {again.epoch} of {query} was run again, and its rows are not those that it had"
    )
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
            raise RowsDiffer(f"{problem}: {then} for {output} then, {now} now", hint=hint)
    if None not in (before.digest, again.digest) and before.digest != again.digest:
        raise RowsDiffer(f"{problem}: as many, {again.rows}, with other values", hint=hint)


def refuse_foreign(query: Query, output: str, sink: Sink, log: EpochLog, ledger: Ledger) -> None:
    """Refuse a target whose ledger is neither of this lineage nor of the cut it continues from."""
    at, origin = ledger.position, Origin.of(log)
    if at is None or (origin is not None and origin.knows(output, at, ledger.decision)):
        return
    what = f"{sink}, output {query.job}/{query.name}/{output}"
    refuse_foreign_ledger(query, log.last, ledger, what)
