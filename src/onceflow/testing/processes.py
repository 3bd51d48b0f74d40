"""Work of a test in another process, which may be killed in the middle of it.

Children are forked from a server that has one thread and has imported all modules, so a child
costs some milliseconds and no test forks a process that has threads. Children find their work by
its name: the class of a test must be importable, not defined inside a function.
"""

from __future__ import annotations

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
# Modules that are not installed are skipped. Arrow imports pandas, slowly, for some tables.
CONTEXT.set_forkserver_preload(
    ["pytest", "pyarrow.parquet", "pandas", "onceflow.sinks", "onceflow.testing.contract"]
)
_SECONDS = 60


class Killed(Exception):
    """The process was killed before its work was done."""


@dataclass(frozen=True)
class Child:
    """A process that talks with the test through a pipe."""

    process: Any
    pipe: Connection

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def ask(self, question: Any = None) -> Any:
        self.pipe.send(question)
        return self.hear()

    def hear(self) -> Any:
        """What the child says next; what it raised is raised here. EOFError if it has ended."""
        assert self.pipe.poll(_SECONDS), "the child says nothing"
        answer = self.pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def ended(self) -> int:
        """The exit code, as `subprocess` gives it: -9 for `kill -9`."""
        self.process.join(_SECONDS)
        assert self.process.exitcode is not None, "the child continues"
        return int(self.process.exitcode)


@contextmanager
def child(work: Callable[..., Any], *args: Any) -> Iterator[Child]:
    """A child that runs `work(pipe, *args)`; it is gone when the block ends."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_main, args=(theirs, work, args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def in_another_process(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work(*args)` there; return its result, or raise its error."""
    with child(_answer, work, args) as process:
        try:
            (answer,) = process.hear()
        except EOFError:
            code = process.ended()
            if code == -signal.SIGKILL:
                raise Killed from None
            raise AssertionError(f"{work.__qualname__} has no answer: exit code {code}") from None
        return answer


def is_killed(work: Callable[..., Any], *args: Any) -> bool:
    """Run the work in another process. Was it killed (by itself)?"""
    try:
        in_another_process(work, *args)
    except Killed:
        return True
    return False


def run_and_kill(point: str, work: Callable[..., Any], *args: Any, visit: int = 1) -> None:
    """Run `work(*args)` in a child that is killed (`kill -9`) at a fault point."""
    if not is_killed(_armed, point, visit, work, args):
        raise AssertionError(f"{point} was not reached")


def _main(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        work(pipe, *args)
    except EOFError:
        os._exit(0)  # the test has ended
    except BaseException as error:
        pipe.send(error)


def _answer(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send((work(*args),))


def _armed(point: str, visit: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    faults.arm(point, "kill", visit=visit)
    work(*args)
