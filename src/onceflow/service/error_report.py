"""Describe in one line why a driver ended, without a stack trace of the JVM or of Python."""

from __future__ import annotations

import builtins
import errno
import os
import re
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onceflow.errors import JobError, OnceflowError, SessionRefused, SetupError, StagingDiffers
from onceflow.jobs.job import where
from onceflow.protocol.failures import explain
from onceflow.spark.errors import readable

RETRY = 75
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
# Spark refuses the job: another start gives the same answer.
_WRONG_JOB = ("AnalysisException", "ParseException", "IllegalArgumentException",
              "UnsupportedOperationException", "PySparkTypeError", "PySparkValueError",
              "PySparkAttributeError")  # fmt: skip
# Spark runs Python even while a job is declared (a log's schema), so the job's code may be in the
# traceback.
_DEAD_WORKER = (
    "Python worker exited unexpectedly",
    "Python worker failed to connect back",
    "IOException: Stream closed",  # Spark hands out an idle worker that was killed
)
_TRACEBACK = "Traceback (most recent call last):"
_LONGEST = 600


@dataclass(frozen=True)
class ErrorReport:
    """Why a driver ended, what fixes it, and whether starting it again can help."""

    kind: str
    message: str
    hint: str
    exit_code: int
    retryable: bool
    away: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_error(
    error: BaseException,
    file: Path,
    *,
    jvm: int | None = None,
    log: Path | None = None,
) -> ErrorReport:
    """Report `error` of the job in `file`, whose JVM writes to `log`.

    A final error stays final, even if another one was raised from it or hides it."""
    error = _final_cause(error) or error
    ended = None if jvm is None or _is_final(error) else _how_it_ended(jvm, error)
    if ended is not None:
        hint = f"if it happens again: see {log}, and dmesg for a lack of memory"
        return ErrorReport("JvmDied", f"Spark's JVM (process {jvm}) {ended}", hint, RETRY, True)
    error = explain(error)
    if isinstance(error, OnceflowError):
        message = error.message
        if isinstance(error, JobError) and _passed(error, file) and str(file) not in message:
            message = f"{where(error, file)}: {message}"
        hint = error.hint or ("edit that line" if re.search(r", line \d+: ", message) else "")
        return ErrorReport(type(error).__name__, message, hint, error.exit_code, error.retryable,
                           error.away)  # fmt: skip
    kind, see = type(error).__name__, f"its log is {log}" if log else ""
    in_task = _in_python_task(str(error), file)
    if in_task is not None:
        place, raised = in_task
        hint = f"correct {place}; the epoch was not decided and runs again"
        can_pass = not _is_a_mistake(raised)
        code = RETRY if can_pass else 1
        return ErrorReport("UserCodeError", f"{place}: {raised}", hint, code, can_pass)
    if any(sign in str(error) for sign in _DEAD_WORKER):
        hint = f"if it happens again: see {log}, and dmesg for a lack of memory"
        return ErrorReport("WorkerDied", readable(error), hint, RETRY, True)
    if _passed(error, file) or kind in _WRONG_JOB:
        place = f"{where(error, file)}: " if _passed(error, file) else ""
        return ErrorReport(
            "JobError",
            place + readable(error),
            "edit that line" if place else f"edit {file}",
            2,
            False,
        )
    if "JAVA_GATEWAY_EXITED" in str(error) or "stopped SparkContext" in str(error):
        message = f"Spark did not start: {_last_words(log) or readable(error)}"
        return ErrorReport("SetupError", message, f"{see}; onceflow doctor looks at Java and Spark",
                         4, True)  # fmt: skip
    if isinstance(error, OSError) and error.errno in _DENIED:
        message = f"cannot use {error.filename}: {error.strerror}"
        return ErrorReport("SetupError", message, "give yourself access to it", 4, False)
    return ErrorReport(kind, readable(error), see, RETRY, True)


def describe_exit(code: int) -> str:
    """How a process ended, by its code as Popen has it."""
    if code < 0:
        with_name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
        return f"was ended by {with_name}"
    return f"ended with exit code {code}"


def _is_final(error: BaseException) -> bool:
    """Is this an error of the protocol, a target or the input, which another start cannot fix?
    Errors of the job or the machine are not meant: a JVM that dies can cause them."""
    if isinstance(error, StagingDiffers):
        return True
    ours = isinstance(error, OnceflowError) and not error.retryable
    return ours and not isinstance(error, (JobError, SessionRefused, SetupError))


def _final_cause(error: BaseException) -> BaseException | None:
    """The final error that this one was raised from, or while it was handled. None if there is
    none."""
    seen: BaseException | None = error
    passed: set[int] = set()
    while seen is not None and id(seen) not in passed:
        if _is_final(seen):
            return seen
        passed.add(id(seen))
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None


def _how_it_ended(jvm: int, error: BaseException) -> str | None:
    """How the JVM ended, or None if it runs. Its sockets close a moment before it has ended."""
    lost = "JVM is gone" in str(error) or type(error).__name__.startswith("Py4J")
    deadline = time.monotonic() + (1.0 if lost or isinstance(error, ConnectionError) else 0.0)
    while True:
        try:
            found = os.waitid(os.P_PID, jvm, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread has waited for it
            return "is gone"
        if found is not None:
            return describe_exit(
                found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            )
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def _passed(error: BaseException, file: Path) -> bool:
    """Is the job's own code in the traceback?"""
    frames = traceback.extract_tb(error.__traceback__)
    return any(os.path.abspath(frame.filename) == os.path.abspath(file) for frame in frames)


def _in_python_task(text: str, file: Path) -> tuple[str, str] | None:
    """Where code of the job raised in a Python worker, and what. None if it did not."""
    _, found, trace = text.rpartition(_TRACEBACK)
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    raised = re.search(r"^([A-Za-z_][\w.]*(?:: .*)?)$", trace, re.MULTILINE)
    if not found or not frames or raised is None:
        return None
    beside = os.path.dirname(os.path.abspath(file))
    mine = [f for f in frames if os.path.abspath(f[0]).startswith(beside + os.sep)
            and "site-packages" not in f[0]]  # fmt: skip
    path, line = (mine or frames)[-1]
    return f"{os.path.relpath(path)}, line {line}", raised[1]


def _is_a_mistake(raised: str) -> bool:
    """Is this a built-in error that the same row raises again? Errors of files, networks and memory
    are not."""
    kind = getattr(builtins, raised.partition(":")[0], None)
    return isinstance(kind, type) and not issubclass(kind, (OSError, MemoryError))


def _last_words(log: Path | None) -> str:
    """The last line of the JVM's log that names an error."""
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        lines = file.read().decode(errors="replace").splitlines()
    named = [line.strip() for line in lines if re.search(r"(Exception|Error|ERROR)\b.*: \S", line)]
    return named[-1][:_LONGEST] if named else ""
