"""The driver process of `onceflow run`: runs one job and tells its parent how it goes.

Events are JSON lines on a file descriptor of their own. The process ends with its parent: it
must not go on unseen. Its exit code says what happened (`errors.py`); 75 means that starting
again can mend it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from onceflow.errors import JobError, OnceflowError
from onceflow.job import load, where
from onceflow.runtime.progress import ProgressMeter, as_json
from onceflow.session import get_session
from onceflow.start import Handle, start
from onceflow.testing import faults

_PR_SET_PDEATHSIG = 1
_EVERY = 1.0
RETRY = 75


def main() -> None:
    options = _options()
    die_with_parent()
    faults.arm_from_environment()
    tell = _Teller(options.events)
    try:
        code = _run(options, tell)
    except OnceflowError as error:
        tell("error", kind=type(error).__name__, message=error.message, hint=error.hint,
             exit_code=error.exit_code, retryable=error.retryable)  # fmt: skip
        code = error.exit_code
    except Exception as error:  # the edge: whatever the user's code or Spark raised
        retryable = type(error).__name__ not in ("AnalysisException", "ParseException")
        tell("error", kind=type(error).__name__, message=_shorten(error), hint="",
             exit_code=1, retryable=retryable)  # fmt: skip
        code = RETRY if retryable else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a body that hangs must not keep the process


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="onceflow-driver")
    parser.add_argument("job")
    parser.add_argument("--home", required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--master")
    parser.add_argument("--every")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--take-over", action="store_true")
    return parser.parse_args()


class _Teller:
    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w", buffering=1)

    def __call__(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._file.write(json.dumps({"event": event, **fields}) + "\n")


def _run(options: argparse.Namespace, tell: _Teller) -> int:
    job = load(options.job)
    log = Path(options.home) / job.name / "spark.log"
    spark = get_session(options.master, log=log)
    tell("session", spark=spark.version, master=spark.sparkContext.master, log=str(log))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        handle = start(
            job, home=options.home, spark=spark, once=options.once, every=options.every,
            take_over=options.take_over,
        )  # fmt: skip
    except OnceflowError:
        raise
    except Exception as error:
        path = Path(options.job.partition(":")[0])
        if type(error).__name__ == "AnalysisException" or _is_users(error, path):
            raise JobError(f"{where(error, path)}: {_shorten(error)}") from error
        raise
    _tell_started(handle, tell)
    meter, shown = ProgressMeter(handle), None
    while not handle.wait(0.2 if shown is None else _EVERY if not stop.is_set() else 0.2):
        if stop.is_set():
            tell("stopping")
            handle.stop(timeout=None)
            continue
        looked = as_json(meter.look())
        if looked != shown:
            tell("progress", queries=looked)
            shown = looked
    tell("ended", queries=as_json(meter.look()))
    return 0


def _tell_started(handle: Handle, tell: _Teller) -> None:
    queries = {
        name: {
            "term": started.epochs.term,
            "resumes_after": started.epochs.opened_at,
            "outputs": {
                output: {"target": str(sink), "guarantee": sink.guarantee}
                for output, sink in started.epochs.declared.outputs.items()
            },
        }
        for name, started in handle.started.items()
    }
    tell("started", job=handle.name, pid=os.getpid(), home=str(handle.folder.home), queries=queries)


def _is_users(error: BaseException, path: Path) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).absolute() == path.absolute()


def _shorten(error: BaseException) -> str:
    """The lines a person needs: no JVM stack."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.lstrip().startswith(("at ", "..."))]
    return f"{type(error).__name__}: " + "\n".join(kept[:12])


def die_with_parent() -> None:
    """The kernel kills us when our parent ends; where it can't, the end of stdin tells us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
