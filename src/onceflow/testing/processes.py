"""Work of a test in another process, which may be killed in the middle of it.

Children are forked from a server that has one thread and has imported what they need, so a child
costs some milliseconds and no test forks a process that has threads. What they run is found by its
name: the class of a test must be importable, not defined inside a function.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# What is not there is left out. Arrow imports pandas, slowly, for some tables.
_CONTEXT.set_forkserver_preload(
    ["pytest", "pyarrow.parquet", "pandas", "onceflow.sinks", "onceflow.testing.contract"]
)
_SECONDS = 60


class Killed(Exception):
    """The process was killed before its work was done."""


def in_another_process(work: Callable[..., Any], *args: Any) -> Any:
    """What `work(*args)` returns there; what it raises is raised here."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_answer, args=(theirs, work, args), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(_SECONDS) else None
    except EOFError:
        answer = None
    finally:
        ours.close()
        process.join(_SECONDS)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
    if answer is None:
        if code == -signal.SIGKILL:
            raise Killed
        raise AssertionError(f"{work.__qualname__} has no answer: exit code {code}")
    returned, raised = answer
    if raised is not None:
        raise raised
    return returned


def is_killed(work: Callable[..., Any], *args: Any) -> bool:
    """Is a process killed (by itself) that does the work?"""
    try:
        in_another_process(work, *args)
    except Killed:
        return True
    return False


def _answer(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((work(*args), None))
    except BaseException as error:
        pipe.send((None, error))
