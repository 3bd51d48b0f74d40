"""The processes of a driver: their ids, how they ended, and their temporary files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from pathlib import Path

from onceflow.service.error_report import describe_exit

GONE_WITHIN = 20.0  # seconds, after kill -9
_PR_SET_CHILD_SUBREAPER = 36
# Quick to start: a process that is killed soon ends before the JVM's better compiler pays.
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.io.tmpdir="


def scratch_environment(scratch: Path) -> dict[str, str]:
    """An environment in which a JVM that is killed leaves its temporary files in `scratch`."""
    given = os.environ.get("JDK_JAVA_OPTIONS", "")
    return {
        **os.environ,
        "JDK_JAVA_OPTIONS": f'{given} {_JVM}"{scratch}"'.strip(),
        "SPARK_LOCAL_DIRS": str(scratch),
    }


def adopt_orphans() -> None:
    """Adopt the children of killed children, so that this process sees how they end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(roots: set[int]) -> dict[int, str]:
    """The driver, its JVM and its workers, parents first. Empty where there is no /proc."""
    everybody = processes()
    found: dict[int, str] = {}
    parents = roots
    while parents:
        children = [
            pid
            for pid, (parent, session, _) in everybody.items()
            if pid not in roots and pid not in found and (parent in parents or session in parents)
        ]
        for pid in children:
            found[pid] = "JVM" if everybody[pid][2] == "java" else "worker"
        parents = set(children)
    return found


def processes() -> dict[int, tuple[int, int, str]]:
    """pid -> (parent, session, name), without those that have ended and wait to be reaped."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            state, parent, _, session, *_ = rest.split()
            if state != "Z":
                found[int(path.parent.name)] = (int(parent), int(session), name)
    return found


def wait_for(pid: int) -> str:
    """How an adopted process ended; empty if it has another parent."""
    deadline = time.monotonic() + GONE_WITHIN
    while time.monotonic() < deadline:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return describe_exit(os.waitstatus_to_exitcode(status))
        except ChildProcessError:
            if pid not in processes():
                return ""
        time.sleep(0.01)
    return "is still there"
