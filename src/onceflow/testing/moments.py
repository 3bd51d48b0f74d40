"""The moments at which some work calls code outside of Python: for files, sockets, databases.

A sink of another package has no fault points. But it changes its target only by calls that leave
Python, and the interpreter reports each of them, before and after. So a test can interrupt the
work, or look at the target, between every two of its effects.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_SYSTEM = {"_io", "_socket", "_ssl", "fcntl", "io", "posix", "socket", "sqlite3", "ssl"}
# These change nothing: the target is the same before and after them.
_LOOKS = {
    "fetchall", "fetchone", "fileno", "fspath", "fstat", "getpid", "listdir", "lstat", "read",
    "readall", "readinto", "readline", "readlines", "scandir", "seek", "stat", "tell", "urandom",
    "__enter__",
}  # fmt: skip
_STILL = 0.05  # seconds


@contextmanager
def at_moments(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with 1, 2, 3 … at each moment of what this thread does in the block.

    Calls by `act` itself and by other threads do not count.
    """
    count = 0

    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal count
        if event in ("c_call", "c_return") and _lasts(called) and not _imports(frame):
            count += 1
            act(count)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def kill_at(moment: int) -> AbstractContextManager[None]:
    """End this process, as by `kill -9`, at that moment of the block."""

    def act(number: int) -> None:
        if number == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return at_moments(act)


def _lasts(called: Any) -> bool:
    if called.__name__ in _LOOKS:
        return False
    module = called.__module__ or type(getattr(called, "__self__", None)).__module__
    package = module.partition(".")[0]
    return package in _SYSTEM or package not in sys.stdlib_module_names


def _imports(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith("<frozen importlib")


class Aside:
    """Work in another thread that runs first, unless it waits for something that we hold."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._moments = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with at_moments(self._note):
                self._work()
        except BaseException as error:
            self._failure = error

    def _note(self, moment: int) -> None:
        self._moments = moment

    def let_go_first(self) -> None:
        """Return when the work has ended, or waits for something, such as a lock that we hold."""
        seen = -1
        while self._thread.is_alive() and not (seen == self._moments and self._waits()):
            seen = self._moments
            self._thread.join(_STILL)

    def _waits(self) -> bool:
        """It did nothing for a while: does it wait, or did the machine not run it?"""
        try:
            stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        except OSError:
            return True  # not on Linux
        return stat.rpartition(") ")[2].startswith("S")

    def end(self) -> None:
        """Wait for its end, and raise the error that it raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()
