"""The choice for rows that an output published after a cut, and what a restore does with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onceflow.contract.ledger import Guarantee
from onceflow.contract.registry import open_target
from onceflow.contract.sink import Sink
from onceflow.errors import JobError
from onceflow.protocol.lineage import CHOICES, OutputOrigin


@dataclass(frozen=True)
class Output:
    """An output of a lineage that ends, and the choice for its rows."""

    name: str
    sink: Sink
    exact: bool
    choice: str

    @classmethod
    def of(cls, query: str, name: str, target: Mapping[str, Any], choice: str) -> Output:
        """`target`: as the driver that led last described it."""
        try:
            sink = open_target(target)
        except JobError as refused:
            message = f"output {query}/{name}: {refused.message}"
            raise JobError(message, hint=refused.hint) from refused
        exact = target.get("guarantee", Guarantee.EXACTLY_ONCE) == Guarantee.EXACTLY_ONCE
        return cls(name, sink, exact, choice)


@dataclass(frozen=True)
class OutputPlan:
    """What a restore will do with the rows of one output that were published after the cut."""

    query: str
    output: str
    target: str
    cut: int
    published: int
    choice: str
    says: str

    @classmethod
    def of(cls, query: str, output: Output, cut: int, published: int) -> OutputPlan:
        count = published - cut
        epochs = f"{count} epoch{'s' * (count != 1)}"
        says = {
            "rewind": f"the rows of {epochs} are taken back",
            "skip": f"the rows of {epochs} stay; they are computed again, compared, not published",
            "replay": f"the rows of {epochs} stay and are published once more: duplicates",
        }[output.choice]
        says = says if count else "nothing was published after the cut"
        return cls(query, output.name, str(output.sink), cut, published, output.choice, says)

    def by_number(self) -> OutputPlan:
        """The same plan for a job that takes no digests of its rows."""
        if self.choice != "skip":
            return self
        return replace(self, says=f"{self.says} (by number alone: the job takes no digests)")


def choice_for(choices: Mapping[str, str], query: str, output: str) -> str:
    """`choices`: `query/output` -> the choice for its rows; that of all others is at ``""``."""
    choice = choices.get(f"{query}/{output}") or choices.get("")
    if choice is None:
        raise JobError(
            f"--published does not say what happens to the rows of {query}/{output}",
            hint=f"add --published {' or '.join(CHOICES)}",
        )
    if choice not in CHOICES:
        raise JobError(
            f"{choice!r} is not a choice for the published rows of {query}/{output}",
            hint=f"use one of {', '.join(CHOICES)}",
        )
    return choice


def output_origin(
    choice: str, known: str, position: tuple[str, int, str], cut: int
) -> OutputOrigin:
    """What the new lineage records of an output. `position`: where its target is. If nothing was
    published after the cut, nothing is taken back, so any sink will do."""
    _, epoch, _ = position
    return OutputOrigin(choice if epoch > cut else "skip", known, *position)
