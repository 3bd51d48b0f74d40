"""A function that is called again and again in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Repeated:
    """Calls `turn` every few seconds until the block is left. If `turn` raises, the calls end, and
    `raise_failure` raises the same error in another thread."""

    def __init__(self, turn: Callable[[], object], *, every: float) -> None:
        self.every = every
        self.failure: BaseException | None = None
        self._turn = turn
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Repeated:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """When it returns, no turn is under way and none follows."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while not self._over.wait(self.every):
            try:
                self._turn()
            except BaseException as error:
                self.failure = error
                return
