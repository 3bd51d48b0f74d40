"""What a sink is: something that makes a decided epoch visible once, and remembers that it did.

A sink needs three methods, `fence`, `published` and `publish`. The rest is optional. A sink is
declared on the driver, opens its target when it is asked to, and holds nothing in between.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from onceflow.contract.ledger import Committable, Guarantee, Ledger, Outcome, Position, Publication
from onceflow.contract.schema import quoted
from onceflow.errors import JobError


@dataclass(frozen=True)
class Staged:
    """The rows of one epoch of one output, staged as Parquet where no reader sees them."""

    files: tuple[Committable, ...]
    folder: Path  # of this output; what a sink adds goes beside it, under `scratch`
    scratch: Path
    tag: str  # <lineage>-<epoch>-<term>-<attempt>: part of the name of whatever is staged
    schema: str
    read: Callable[[], Any]  # the staged rows as a Spark DataFrame, for sinks that convert


class Sink(ABC):
    """Publishes each decided epoch exactly once.

    It does not promise an order among the rows of an epoch.
    """

    guarantees: ClassVar[tuple[Guarantee, ...]] = (Guarantee.EXACTLY_ONCE,)  # what it can promise
    modes: ClassVar[tuple[str, ...]] = ("append",)
    shared: ClassVar[bool] = False  # may several outputs have it as their target?
    by: tuple[str, ...] = ()  # what makes sub-folders of the target
    roll_bytes: int | None = None  # about how large one staged file may become
    rewinds: bool = False  # does it have `rewind`?
    no_rewind: str = ""  # why not, where there is more to say
    place: ClassVar[str] = ""  # the argument that says where the target is: path, table, topic
    _made: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._made = (args, kwargs)
        return made

    @abstractmethod
    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        """Write `term` into the target's ledger and read the ledger, in one atomic step.

        From then on no older term can publish. A term at or above ours that carries another
        token is `Fenced`. The term in a ledger only grows.
        """

    @abstractmethod
    def published(self, output: str) -> Ledger:
        """Read the ledger. Never writes, never creates the target."""

    @abstractmethod
    def publish(self, publication: Publication) -> Outcome:
        """Make the rows and the new ledger entry visible in one atomic step, if `judge` agrees.

        May be called any number of times for one epoch. Raises `PublishFailed` if nothing became
        visible and `PublishUnknown` if that cannot be known.
        """

    # -------------------------------------------------------------- optional

    def add(self, publication: Publication) -> None:
        """Make the rows visible once, whatever was before; a second call makes them visible twice.

        For outputs that chose a weaker guarantee; a sink that has it says so in `guarantees`.
        Staged files that are gone had been added: they are swept after that. A call that was
        killed leaves nothing that keeps a later one from its work.
        """
        raise NotImplementedError

    def shut_out(self, output: str) -> None:
        """End what older drivers of this output left open in the target.

        All outputs of a job are asked before the first of them is fenced: what one driver left
        open for one output can hide the ledger of another. `fence` does without it.
        """

    def prepare(self, output: str, schema: str, mode: str) -> None:
        """Check, before anything is staged, that the target fits. Never changes rows."""

    def by_columns(self) -> list[Any]:
        """A Spark column for each part of `by`."""
        from pyspark.sql import functions as F

        return [F.col(quoted(name)) for name in self.by]

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        """Turn the staged Parquet files into what `publish` wants. Raises `BadRows`."""
        return staged.files

    def unfit(self, file: Committable, schema: str) -> dict[int, str]:
        """Rows of a staged file that the target can never take: number in the file -> why.

        They go to the output that `on_bad` names. Only asked for if it names one; else it is
        `stage` that refuses them.
        """
        return {}

    def settled(self, output: str) -> None:
        """All decided epochs are published: the last chance to notice a foreign hand."""

    def tidy(self) -> None:
        """Housekeeping after an epoch, beside other work: what must not grow with their number."""

    def sweep(self, *, below_term: int) -> None:
        """Remove what older terms staged in the target itself."""

    def close(self) -> None:
        """The job has ended: let go of connections. What is called later connects anew."""

    def rewind(self, output: str, *, cut: Position, to: Position, term: int, decision: str) -> None:
        """Take back what `output` published after `cut`, and nobody else's rows, and move its
        ledger to `to`, in one atomic step.

        `to` is the cut in a new lineage, `decision` the nonce of the cut's own decision. If the
        ledger is in that lineage already, it was done before: nothing changes. A term above ours
        is `Fenced`; a ledger that has not come to the cut is `TargetBehind`.
        """
        raise self.cannot_rewind()

    def refuse_rewind(self, output: str, cut: Position) -> None:
        """Say why `rewind` cannot go back to this cut, if it cannot. Changes nothing."""
        if not self.rewinds:
            raise self.cannot_rewind()

    def cannot_rewind(self) -> JobError:
        why = f": {self.no_rewind}" if self.no_rewind else ""
        return JobError(
            f"{self} cannot take back what it published{why}",
            hint="choose --published skip: its rows stay and are not published again",
        )

    def moved(self, to: str) -> Sink:
        """The same sink with another target, of the same kind."""
        if not self.place:
            raise JobError(
                f"{self} cannot be moved", hint="fork a job whose sinks come with onceflow"
            )
        args, kwargs = self._made
        arguments = inspect.signature(type(self)).bind(*args, **kwargs).arguments
        return type(self)(**{**arguments, self.place: to})

    def target(self) -> dict[str, Any]:
        """How to find the target again (`onceflow ledger` does). No secrets."""
        return {}

    def __str__(self) -> str:
        return f"{type(self).__name__}"

    def refuse_mode(self, mode: str, hint: str = "") -> None:
        if mode not in self.modes:
            raise JobError(
                f"{self} does not take output mode {mode!r}; it takes {' and '.join(self.modes)}",
                hint=hint or "choose another mode or another sink",
            )
