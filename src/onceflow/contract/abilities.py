"""What a sink may do beside publishing: each ability is a small class that a sink inherits from.

    CanStage        turn what Spark staged into what `publish` wants
    CanRefuseRows   name the rows that the target can never take
    CanPartition    divide rows into sub-folders, and into files of some size
    CanAdd          make rows visible without a ledger: the weaker guarantees
    CanRewind       take back what was published after a cut
    HasReaders      know which jobs have read what it would take back
    CanCleanUp      remove what older drivers left, and what grows with the number of epochs

The code asks for an ability and never for the class of a sink.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
    folder: Path  # of this output; what a sink adds goes beside it, under `scratch`
    scratch: Path
    tag: str  # <lineage>-<epoch>-<term>-<attempt>: part of the name of every staged file
    schema: str
    read: Callable[[], Any]  # the staged rows as a Spark DataFrame, for sinks that convert


class CanStage(ABC):
    @abstractmethod
    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        """Turn the staged Parquet files into what `publish` wants. Raises `BadRows`."""


class CanRefuseRows(ABC):
    """A sink that refuses rows in `stage` and can also name them, for `on_bad`."""

    @abstractmethod
    def unstorable(self, file: Committable, schema: str) -> dict[int, str]:
        """Rows of a staged file that the target can never take: number in the file -> why.

        They go to the output that `on_bad` names. Only asked for if it names one; else it is
        `stage` that refuses them.
        """


class CanPartition(ABC):
    """A sink that publishes the staged files themselves."""

    by: tuple[str, ...] = ()  # each makes a level of sub-folders
    roll_bytes: int | None = None  # about how large one staged file may become

    @abstractmethod
    def by_columns(self) -> list[Any]:
        """A Spark column for each part of `by`."""


class CanAdd(ABC):
    @abstractmethod
    def add(self, publication: Publication) -> None:
        """Make the rows visible once, whatever was before; a second call makes them visible twice.

        For outputs that chose a weaker guarantee. Staged files that are gone had been added: they
        are swept after that. A call that was killed leaves nothing that prevents a later one.
        """


class CanRewind(ABC):
    """A sink whose settings prevent it sets `no_rewind`, and is not asked."""

    @abstractmethod
    def rewind(self, output: str, *, cut: Position, to: Position, term: int, decision: str) -> None:
        """Take back what `output` published after `cut`, and nobody else's rows, and move its
        ledger to `to`, in one atomic step.

        `to` is the cut in a new lineage, `decision` the nonce of the cut's own decision. If the
        ledger is in that lineage already, it was done before: nothing changes. A term above ours
        is `Fenced`; a ledger that has not come to the cut is `TargetBehind`.
        """

    @abstractmethod
    def refuse_rewind(self, output: str, cut: Position) -> None:
        """Raise what `rewind` would raise if it cannot go back to this cut. Changes nothing."""


class HasReaders(ABC):
    """A sink whose target jobs read by offsets that they keep in their own homes."""

    @abstractmethod
    def refuse_readers(
        self, output: str, cut: Position, offsets: Callable[[str, str], list[int] | None]
    ) -> None:
        """`JobError` if a job has read rows that `rewind` to this cut would take back.

        `offsets`: home and name of a reader -> the next offset of each partition that it reads;
        None if its home does not tell.
        """


class CanCleanUp(ABC):  # noqa: B024 - each of these may be left out
    def shut_out(self, output: str) -> None:
        """End what older drivers of this output left open in the target.

        All outputs of a job are asked before the first of them is fenced: what one driver left
        open for one output can hide the ledger of another. `fence` works without it.
        """

    def sweep(self, *, below_term: int) -> None:
        """Remove what older terms staged in the target itself."""

    def settled(self, output: str) -> None:
        """All decided epochs are published: the last chance to notice what somebody else wrote."""

    def tidy(self) -> None:
        """Housekeeping after an epoch, beside other work: what must not grow with their number."""

    def close(self) -> None:
        """The job has ended: let go of connections. A later call connects again."""


def offered_guarantees(sink: Sink) -> tuple[Guarantee, ...]:
    return tuple(Guarantee) if isinstance(sink, CanAdd) else (Guarantee.EXACTLY_ONCE,)


def partition_names(sink: Sink) -> tuple[str, ...]:
    """What makes sub-folders of its target."""
    return sink.by if isinstance(sink, CanPartition) else ()


def stage(sink: Sink, staged: Staged) -> tuple[Committable, ...]:
    return sink.stage(staged) if isinstance(sink, CanStage) else staged.files


def clean_up_of(sink: Sink) -> CanCleanUp:
    """The sink; one that does nothing, if it cannot clean up."""
    return sink if isinstance(sink, CanCleanUp) else _NO_CLEAN_UP


_NO_CLEAN_UP = CanCleanUp()


def refuse_unused_methods(sink: Sink) -> None:
    """`JobError` if a sink defines a method of an ability that it does not inherit from: nobody
    would call it."""
    for ability in _ABILITIES:
        named = [name for name in vars(ability) if not name.startswith("_")]
        unused = [name for name in named if callable(getattr(type(sink), name, None))]
        if unused and not isinstance(sink, ability):
            kind, name = type(sink).__name__, ability.__name__
            raise JobError(
                f"{kind} defines {unused[0]} but does not inherit from {name}: it is not called",
                hint=f"class {kind}(Sink, {name}), with {name} from onceflow.sinks",
            )


_ABILITIES = (CanStage, CanRefuseRows, CanPartition, CanAdd, CanRewind, HasReaders, CanCleanUp)


def can_rewind(sink: Sink) -> bool:
    return isinstance(sink, CanRewind) and not sink.no_rewind


def require_rewind(sink: Sink) -> CanRewind:
    """The sink, as one that takes rows back. `JobError` if it cannot."""
    if isinstance(sink, CanRewind) and not sink.no_rewind:
        return sink
    why = f": {sink.no_rewind}" if sink.no_rewind else ""
    raise JobError(
        f"{sink} cannot take back what it published{why}",
        hint="choose --published skip: its rows stay and are not published again",
    )
