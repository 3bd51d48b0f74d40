"""The interface of a sink: it makes each decided epoch visible once, and records that in a ledger.

A sink has three methods, `fence`, `published` and `publish`; optional abilities are in
`abilities.py`. A job declares a sink on the driver. The sink opens its target when a method needs
it, and holds nothing in between.
"""

from __future__ import annotations

import inspect
import json
import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from onceflow.contract.ledger import Ledger, Outcome, Publication
from onceflow.contract.secrets import is_secret
from onceflow.errors import JobError

# The keys that a fence entry has for an output beside the arguments of its sink.
NOT_ARGUMENTS = {"kind", "guarantee"}


class Sink(ABC):
    """Publishes each decided epoch exactly once.

    It does not promise an order among the rows of an epoch.
    """

    kind: ClassVar[str] = ""  # its entry point in the group `onceflow.sinks`; "": it has none
    modes: ClassVar[tuple[str, ...]] = ("append",)
    shared: ClassVar[bool] = False  # may several outputs write to one target?
    place: ClassVar[str] = ""  # the argument that names the target: path, table, topic
    no_rewind: str = ""  # the reason why its settings prevent a rewind
    _given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        sink = super().__new__(cls)
        sink._given = (args, kwargs)
        return sink

    @abstractmethod
    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        """Write `term` into the target's ledger and read the ledger, in one atomic step.

        From then on no older term can publish. Raise `Fenced` if the ledger has a term at or above
        ours with another token. The term in a ledger only grows.
        """

    @abstractmethod
    def published(self, output: str) -> Ledger:
        """Read the ledger. Never writes, never creates the target."""

    @abstractmethod
    def publish(self, publication: Publication) -> Outcome:
        """Make the rows and the new ledger entry visible in one atomic step, if `judge` agrees.

        onceflow may call it any number of times for one epoch. Raise `PublishFailed` if nothing
        became visible, and `PublishUnknown` if that cannot be known.
        """

    # -------------------------------------------------------------- before an epoch

    def prepare(self, output: str, schema: str, mode: str) -> None:
        """Check that the target fits, before Spark stages anything. Never changes rows."""
        self.refuse_mode(mode)

    def refuse_mode(self, mode: str, hint: str = "") -> None:
        if mode not in self.modes:
            raise JobError(
                f"{self} does not take output mode {mode!r}; it takes {' and '.join(self.modes)}",
                hint=hint or "choose another mode or another sink",
            )

    # -------------------------------------------------------------- how to build it again

    def __str__(self) -> str:
        return type(self).__name__

    def arguments(self) -> dict[str, Any]:
        """The arguments that build an equal sink, as JSON, without secrets.

        By default those of its constructor call; paths become absolute.
        """
        found = {}
        for name, value in self._named().items():
            if is_secret(name, value):
                raise JobError(
                    f"{self}: the home of the job would store argument {name}",
                    hint=f'pass {name}="env:NAME" and let the sink read the variable NAME',
                )
            is_path = isinstance(value, os.PathLike) or (name == self.place == "path")
            found[name] = os.path.abspath(value) if is_path else value
        try:
            arguments: dict[str, Any] = json.loads(json.dumps(found))
        except TypeError as error:
            raise JobError(
                f"{self} cannot be described by its arguments: {error}",
                hint=f"let {type(self).__name__}.arguments return values that JSON can hold",
            ) from error
        return arguments

    def describe(self) -> dict[str, Any]:
        """The facts that the fence of a driver records, so that commands find the sink
        (`open_target`)."""
        arguments = self.arguments()
        if taken := sorted(NOT_ARGUMENTS & set(arguments)):
            raise JobError(f"an argument of {self} is called {taken[0]}", hint="rename it")
        return {**arguments, "kind": self.kind or type(self).__name__}

    def _named(self) -> dict[str, Any]:
        """The arguments of its constructor call, by name."""
        signature = inspect.signature(type(self))
        args, kwargs = self._given
        found = dict(signature.bind(*args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                found |= found.pop(parameter.name, {})
        return found

    def moved(self, to: str) -> Self:
        """The same sink with another target, of the same kind."""
        self.refuse_move()
        return type(self)(**{**self._named(), self.place: to})

    def refuse_move(self) -> None:
        if not self.place:
            raise JobError(
                f"{self} cannot be moved: {type(self).__name__} does not say which argument names "
                "its target",
                hint=f'set place = "path" (the name of that argument) in {type(self).__name__}',
            )
