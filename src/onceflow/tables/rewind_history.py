"""The history of a target that can undo its epochs: how it came to its state, and how it goes back.

Each publication is a step. Epochs are numbered through all lineages, but `replay` publishes some
numbers twice, so undo data is found by the number of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from onceflow.contract.ledger import Position, Publication
from onceflow.errors import TargetBehind


@dataclass(frozen=True)
class Stretch:
    """Epochs of one lineage that were published one after the other, each by a step."""

    lineage: str
    first: int  # the epoch that it continued from
    last: int
    step: int  # of the last epoch


_NOTHING = Stretch("", -1, -1, 0)  # the state before the first epoch


@dataclass(frozen=True)
class RewindHistory:
    """The stretches that still count, oldest first; the last ends at the ledger's position."""

    done: int = 0  # number of the last step
    known: int = 0  # the steps above this one can be undone
    stretches: tuple[Stretch, ...] = ()

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> RewindHistory:
        stretches = tuple(Stretch(**stretch) for stretch in said["stretches"])
        return cls(said["done"], said["known"], stretches)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def after(self, publication: Publication) -> RewindHistory:
        """With one step more."""
        lineage, epoch, step = publication.lineage, publication.epoch, self.done + 1
        began = Stretch(lineage, epoch, epoch, step)
        top = self.stretches[-1] if self.stretches else None
        if publication.previous is None:
            nothing = replace(_NOTHING, step=self.done)
            return RewindHistory(step, self.done, (nothing, replace(began, first=epoch - 1)))
        if top is None or publication.previous != Position(top.lineage, top.last):
            return RewindHistory(
                step, step, (began,)
            )  # older epochs were published without a history
        if top.lineage != lineage:
            return replace(self, done=step, stretches=(*self.stretches, began))
        if top.last + 1 != epoch:
            return RewindHistory(step, step, (began,))
        longer = replace(top, last=epoch, step=step)
        return replace(self, done=step, stretches=(*self.stretches[:-1], longer))

    def forgetting(self, known: int) -> RewindHistory:
        """The steps up to `known` can no longer be undone."""
        left = tuple(stretch for stretch in self.stretches if stretch.step >= known)
        return self if known <= self.known else replace(self, known=known, stretches=left)

    def back_to(self, cut: Position, target: str) -> RewindHistory:
        """The history as it was at the cut. `TargetBehind` if the table cannot go back to there."""
        left = list(self.stretches)
        while left and left[-1].lineage != cut.lineage:
            left.pop()
        if (left and left[-1].last < cut.epoch) or not (left or self.known):
            raise TargetBehind(
                f"{target} has not published epoch {cut.epoch} of that lineage, or has taken it "
                "back",
                hint="go back to an epoch whose rows are there, or bring back an older copy",
            )
        while left and left[-1].first > cut.epoch:
            left.pop()
        last = min(left[-1].last, cut.epoch) if left else -1
        step = left[-1].step - (left[-1].last - last) if left else -1
        if step < self.known:
            raise TargetBehind(
                f"{target} no longer keeps what epoch {cut.epoch + 1} changed, so it "
                f"cannot go back to epoch {cut.epoch}",
                hint="go back less far, or choose --published skip: its rows stay and are not "
                "published again; keep_before=… sets how many epochs can be taken back",
            )
        stands = (*left[:-1], replace(left[-1], last=last, step=step))
        return replace(self, done=step, stretches=stands)

    def begin(self, to: Position) -> RewindHistory:
        """A new lineage continues from here."""
        began = Stretch(to.lineage, to.epoch, to.epoch, self.done)
        return replace(self, stretches=(*self.stretches, began))

    def gone(self, later: RewindHistory) -> list[tuple[str, int]]:
        """The epochs that only `later` has: each lineage, and the epoch above which they are."""
        here = {stretch.lineage: stretch.last for stretch in self.stretches}
        return [
            (stretch.lineage, here.get(stretch.lineage, stretch.first))
            for stretch in later.stretches
        ]
