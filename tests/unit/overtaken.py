"""A put that others overtake: between it and the look at what became of it, they act."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from onceflow.store.posix import LocalStore

WHEN = ("before", "after", "after, and the answer is lost")


class Overtaken(LocalStore):
    """Others do something before or after the first put, before it is looked at."""

    def __init__(self, root: Path, others: Callable[[], None], when: str) -> None:
        super().__init__(root)
        self._others, self._when = others, when

    def put_if_absent(self, name: str, data: bytes) -> bool:
        others, self._others = self._others, lambda: None
        if self._when == "before":
            others()
        won = super().put_if_absent(name, data)
        if self._when != "before":
            others()
        return won and self._when != "after, and the answer is lost"
