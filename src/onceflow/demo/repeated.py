"""A function that is called again and again in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Repeated:
    """Calls `turn` every few seconds until the block is left. If `turn` raises, the calls end, and
    `look` raises the same error in the thread of the run."""

    def __init__(self, turn: Callable[[], None], *, every: float) -> None:
        self._turn, self._every = turn, every
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Repeated:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """When it returns, no turn is under way and none follows."""
        self._over.set()
        self._thread.join()

    def look(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._over.wait(self._every):
            try:
                self._turn()
            except BaseException as error:
                self._error = error
                return
