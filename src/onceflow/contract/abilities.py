"""Abilities of a sink beside publishing: each is a small class that a sink inherits from.

    CanStage        convert the files that Spark staged into those that `publish` needs
    CanRefuseRows   name the rows that the target can never store
    CanPartition    divide rows into sub-folders, and into files of some size
    CanAdd          make rows visible without a ledger: the weaker guarantees
    CanRewind       take back the epochs that were published after a cut
    HasReaders      know which jobs have read rows that a rewind would take back
    CanReadBack     give its rows to `onceflow verify`
    CanCleanUp      remove the leftovers of older drivers, and data that grows with every epoch

Code checks for an ability, never for the class of a sink.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.contract.ledger import Committable, Guarantee, Position, Publication
from onceflow.contract.sink import Sink
from onceflow.errors import JobError


@dataclass(frozen=True)
class Staged:
    """The rows of one epoch of one output, staged as Parquet where no reader sees them."""

    files: tuple[Committable, ...]
    folder: Path
    scratch: Path  # for files that the sink adds in `stage`
    tag: str  # <lineage>-<epoch>-<term>-<attempt>: part of the name of every staged file
    schema: str
    read: Callable[[], Any]  # the staged rows as a Spark DataFrame, for sinks that convert


class CanStage(ABC):
    @abstractmethod
    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        """Convert the staged Parquet files into those that `publish` needs. Raises `BadRows`."""


class CanRefuseRows(ABC):
    """A sink that refuses rows in `stage` and can also name them, for `on_bad`."""

    @abstractmethod
    def unstorable(self, file: Committable, schema: str) -> dict[int, str]:
        """The rows of a staged file that the target can never store: number in the file -> why.

        onceflow moves them to the output that `on_bad` names. Without `on_bad` it does not call
        this method; then `stage` must refuse such rows.
        """


class CanPartition(ABC):
    """A sink that publishes the staged files themselves."""

    by: tuple[str, ...] = ()  # each makes a level of sub-folders
    roll_bytes: int | None = None  # the approximate size at which a new staged file begins

    @abstractmethod
    def by_columns(self) -> list[Any]:
        """A Spark column for each part of `by`."""


class CanAdd(ABC):
    @abstractmethod
    def add(self, publication: Publication) -> None:
        """Make the rows visible; a second call makes them visible once more.

        For outputs with a weaker guarantee. If staged files are missing, their rows were added
        before: onceflow sweeps files only after that. A call that was killed must not prevent a
        later one.
        """


class CanRewind(ABC):
    """A sink whose settings prevent a rewind sets `no_rewind`; then onceflow never calls it."""

    @abstractmethod
    def rewind(self, output: str, *, cut: Position, to: Position, term: int, decision: str) -> None:
        """Take back the rows that `output` published after `cut`, but no rows of others, and move
        its ledger to `to`, in one atomic step.

        `to` is the cut in a new lineage, `decision` the nonce of the cut's own decision. If the
        ledger is in that lineage already, an earlier call did it: change nothing. Raise `Fenced`
        for a term above ours, and `TargetBehind` if the ledger has not reached the cut.
        """

    @abstractmethod
    def refuse_rewind(self, output: str, cut: Position) -> None:
        """Raise the error of `rewind` if it cannot go back to this cut. Changes nothing."""


class HasReaders(ABC):
    """A sink whose target jobs read by offsets that they keep in their own homes."""

    @abstractmethod
    def refuse_readers(
        self, output: str, cut: Position, offsets: Callable[[str, str], list[int] | None]
    ) -> None:
        """Raise `JobError` if a job has read rows that `rewind` to this cut would take back.

        `offsets`: home and name of a reader -> the next offset of each partition that it reads;
        None if its home does not have them.
        """


class CanReadBack(ABC):
    """A sink whose rows `onceflow verify` can compare with the expected result of a job."""

    key: tuple[str, ...] = ()  # columns, if the target keeps one row of each of their values

    @abstractmethod
    def read_back(self) -> Iterable[Mapping[str, Any]]:
        """The rows that any reader of the target sees now; none if there is no target yet.

        They are read from the target itself: not from staged files, and not by what the ledger
        says. A column `_epoch` has the epoch of each row, if the target keeps that. Never writes.
        """


class CanCleanUp(ABC):  # noqa: B024 - a sink may leave out each of these methods
    def shut_out(self, output: str) -> None:
        """End the transactions that older drivers of this output left open in the target.

        onceflow calls it for all outputs of a job before it fences the first of them: an open
        transaction of one output can hide the ledger of another. `fence` must work without it.
        """

    def sweep(self, *, below_term: int) -> None:
        """Remove the files that older terms staged in the target itself."""

    def settled(self, output: str) -> None:
        """Notice foreign writes if you can: all decided epochs are published now."""

    def tidy(self) -> None:
        """Remove data that grows with every epoch. Called after an epoch, beside other work."""

    def close(self) -> None:
        """Close connections: the job has ended. A later call connects again."""


def offered_guarantees(sink: Sink) -> tuple[Guarantee, ...]:
    return tuple(Guarantee) if isinstance(sink, CanAdd) else (Guarantee.EXACTLY_ONCE,)


def partition_names(sink: Sink) -> tuple[str, ...]:
    """The names of the sub-folder levels in the target of a sink."""
    return sink.by if isinstance(sink, CanPartition) else ()


def stage(sink: Sink, staged: Staged) -> tuple[Committable, ...]:
    return sink.stage(staged) if isinstance(sink, CanStage) else staged.files


def clean_up_of(sink: Sink) -> CanCleanUp:
    """The sink itself, or an object that does nothing if the sink cannot clean up."""
    return sink if isinstance(sink, CanCleanUp) else _NO_CLEAN_UP


_NO_CLEAN_UP = CanCleanUp()


def refuse_unused_methods(sink: Sink) -> None:
    """Raise `JobError` if a sink defines a method of an ability that it does not inherit from:
    onceflow would never call it."""
    for ability in ABILITIES:
        named = [name for name in vars(ability) if not name.startswith("_")]
        unused = [name for name in named if callable(getattr(type(sink), name, None))]
        if unused and not isinstance(sink, ability):
            kind, name = type(sink).__name__, ability.__name__
            raise JobError(
                f"{kind} defines {unused[0]} but does not inherit from {name}: it is not called",
                hint=f"class {kind}(Sink, {name}), with {name} from onceflow.sinks",
            )


ABILITIES: tuple[type, ...] = (
    CanStage, CanRefuseRows, CanPartition, CanAdd, CanRewind, HasReaders, CanReadBack, CanCleanUp,
)  # fmt: skip


def can_rewind(sink: Sink) -> bool:
    return isinstance(sink, CanRewind) and not sink.no_rewind


def require_rewind(sink: Sink) -> CanRewind:
    """The sink, if it can take rows back. `JobError` if it cannot."""
    if isinstance(sink, CanRewind) and not sink.no_rewind:
        return sink
    why = f": {sink.no_rewind}" if sink.no_rewind else ""
    raise JobError(
        f"{sink} cannot take back what it published{why}",
        hint="choose --published skip: its rows stay and are not published again",
    )
