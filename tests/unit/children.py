"""Child processes of tests, and what runs in them.

They are forked from a server that has one thread and has imported what they need, so a child
costs some milliseconds and no test forks a process that has threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from onceflow import faults

CONTEXT = multiprocessing.get_context("forkserver")
# pandas: Arrow imports it, slowly, for the first table that is made of lists.
CONTEXT.set_forkserver_preload(["pytest", "pyarrow.parquet", "pandas", "onceflow.sinks"])


@dataclass(frozen=True)
class Child:
    process: Any
    pipe: Connection

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def ask(self, question: Any = None) -> Any:
        self.pipe.send(question)
        return self.hear()

    def hear(self) -> Any:
        """What the child says next; what it raised is raised here."""
        assert self.pipe.poll(60), "the child says nothing"
        answer = self.pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def ended(self) -> int:
        """The exit code, as `subprocess` gives it: -9 for `kill -9`."""
        self.process.join(60)
        assert self.process.exitcode is not None, "the child goes on"
        return int(self.process.exitcode)


@contextmanager
def child(function: Callable[..., Any], *args: Any) -> Iterator[Child]:
    """A child that runs `function(pipe, *args)`; it is gone when the block ends."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_main, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _main(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        function(pipe, *args)
    except EOFError:
        os._exit(0)  # the test has ended
    except BaseException as error:
        pipe.send(error)


def run_and_kill(point: str, function: Callable[..., Any], *args: Any, visit: int = 1) -> None:
    """Run `function(*args)` in a child that is killed (`kill -9`) at a fault point."""
    with child(_armed, point, visit, function, args) as process:
        if process.ended() != -signal.SIGKILL:
            with contextlib.suppress(EOFError):
                process.hear()
            raise AssertionError(f"{point} was not reached")


def _armed(
    pipe: Connection, point: str, visit: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    faults.arm(point, "kill", visit=visit)
    function(*args)
