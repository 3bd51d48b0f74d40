"""The driver process of `onceflow run`: runs one job and reports to its parent.

Events are JSON lines on a file descriptor of their own, apart from what the job prints. The process
ends with its parent, so that no job runs unwatched. Its exit code says what happened (`errors.py`);
75 means that another start can help.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onceflow import faults
from onceflow.contract.quantities import milliseconds
from onceflow.errors import DiskFull, JobError, SetupError
from onceflow.jobs.handle import Handle
from onceflow.jobs.job import Job, import_root, load
from onceflow.jobs.start import refuse_no_fork, start
from onceflow.protocol.epoch import ReplayedEpoch, Stopping
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lease import Lease
from onceflow.service.error_report import ErrorReport, describe_error
from onceflow.service.journal import Journal
from onceflow.service.progress import REPORTS_KEPT, ProgressMeter, as_json
from onceflow.spark.running_query import jvm_process
from onceflow.spark.session import get_session

Tell = Callable[..., None]

_PR_SET_PDEATHSIG = 1
_EVERY = 1.0  # seconds from one progress event to the next
_POLL = 0.1
_MASTER = re.compile(
    r"local(\[(\*|\d+)(,\d+)?\])?|local-cluster\[\d+,\d+,\d+\]|spark://[^/]+:\d+|yarn|k8s://.+"
)


def main() -> None:
    options = _options()
    die_with_parent()
    faults.arm_from_environment()
    keep_libraries_quiet()
    tell, stop = EventWriter(options.events), StopSignal()
    code = run_job(options, tell, stop)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an epoch that hangs must not keep the process alive


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="onceflow-driver")
    parser.add_argument("job")
    parser.add_argument("--home", required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--as", dest="fork")
    parser.add_argument("--master")
    parser.add_argument("--every")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--take-over", action="store_true")
    return parser.parse_args()


class EventWriter:
    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w", buffering=1)

    def __call__(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._file.write(json.dumps({"event": event, **fields}) + "\n")


class StopSignal(threading.Event):
    """Set when the driver is asked to stop. Until it listens, SIGTERM ends the process at once."""

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.set())


class _ReportFacts:
    """Facts for a report about an error: each as soon as it is known."""

    def __init__(self) -> None:
        self.jvm: int | None = None
        self.log: Path | None = None
        self.meter: ProgressMeter | None = None


def run_job(options: argparse.Namespace, tell: Tell, stop: StopSignal) -> int:
    """Run the job and return the exit code. An error becomes one event."""
    facts = _ReportFacts()
    try:
        _run(options, tell, stop, facts)
    except (Exception, SystemExit) as error:  # of the job, Spark or onceflow: reported here
        file = Path(options.job.partition(":")[0])
        problem: ErrorReport = describe_error(error, file, jvm=facts.jvm, log=facts.log)
        epochs = facts.meter.count() if facts.meter else 0
        tell("error", **problem.as_json(), epochs=epochs)
        return problem.exit_code
    return 0


def _run(options: argparse.Namespace, tell: Tell, stop: StopSignal, facts: _ReportFacts) -> None:
    if options.every is not None:
        milliseconds(options.every)
    refuse_master(options.master or os.environ.get("SPARK_MASTER"))
    job = _load_early(options.job)
    home = Path(os.path.abspath(options.home))
    refuse_home(home)
    if job is not None and options.fork is not None:
        refuse_no_fork(JobFolder(home, options.fork), job.name)
    if job is not None and not options.take_over:
        _refuse_if_led(JobFolder(home, options.fork or job.name))
    file = options.job.partition(":")[0]
    find_by_workers(file)
    name = options.fork or (job.name if job is not None else "")
    facts.log = home / name / "spark.log"
    if job is not None:
        _tell_loaded(home / name, tell)
    spark = get_session(options.master, log=facts.log)
    facts.jvm = jvm_process()
    spark.conf.set(*REPORTS_KEPT)
    if job is None:
        job = load(options.job)
        name = options.fork or job.name
        _tell_loaded(home / name, tell)
    send_to_workers(file)
    tell("session", job=name, spark=spark.version, master=spark.sparkContext.master,
         log=str(facts.log))  # fmt: skip
    stop.listen()

    def replaying(query: str, again: ReplayedEpoch) -> None:
        tell("replaying", query=query, epoch=again.epoch, last=again.last)
        if stop.is_set():
            raise Stopping

    try:
        handle = start(
            job, home=home, spark=spark, once=options.once, every=options.every,
            take_over=options.take_over, fork=options.fork, replaying=replaying,
        )  # fmt: skip
    except Stopping:
        if not stop.is_set():
            tell("stopping", at_once=False)
        tell("ended", queries=[])
        return
    _tell_started(handle, tell)
    facts.meter = ProgressMeter(handle)
    _follow(handle, facts.meter, tell, stop)


def _follow(handle: Handle, meter: ProgressMeter, tell: Tell, stop: StopSignal) -> None:
    turns, told_stopping, journal = 0, False, Journal(handle.folder.folder)
    while True:
        try:
            if handle.wait(_POLL):
                break
        finally:  # even if the job fails now: it was asked to stop, so nobody restarts it
            if handle.asked and not told_stopping:
                told_stopping = True
                tell("stopping", at_once=False)
        meter.count()
        if stop.is_set():
            handle.stop(timeout=None)
        elif turns % round(_EVERY / _POLL) == 0:
            queries = as_json(meter.look())
            tell("progress", queries=queries)
            journal.progress(queries)
        turns += 1
    tell("ended", queries=as_json(meter.look()))


def _tell_loaded(folder: Path, tell: Tell) -> None:
    """Tell the supervisor where the journal of the job is."""
    Journal(folder).starting()
    tell("loaded", job=folder.name)


def _tell_started(handle: Handle, tell: Tell) -> None:
    queries = {
        name: {
            "term": started.epochs.term,
            "resumes_after": started.epochs.opened_at,
            "outputs": {
                output: {
                    "target": str(sink),
                    "guarantee": started.epochs.spec.guarantee(output),
                }
                for output, sink in started.epochs.spec.outputs.items()
            },
        }
        for name, started in handle.started.items()
    }
    tell("started", job=handle.name, pid=os.getpid(), home=str(handle.folder.home), queries=queries)


# ---------------------------------------------------------------- refused before Spark starts


def refuse_master(master: str | None) -> None:
    """Refuse a master that Spark does not know or that does not answer."""
    if master is None:
        return
    if not _MASTER.fullmatch(master):
        raise JobError(
            f"{master!r} is not a Spark master",
            hint="use local[2], local[*], spark://host:7077, yarn or k8s://https://host:443",
        )
    if not master.startswith("spark://"):
        return
    problem = ""
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port or 0)), timeout=5).close()
            return
        except (OSError, ValueError, OverflowError) as error:
            problem = str(error)
    raise MasterSilent(
        f"no Spark master answers at {master}: {problem}",
        hint="start it, or name another with --master",
    )


class MasterSilent(SetupError):
    """The master may come back, so the supervisor tries again."""

    retryable = True
    away = True


def refuse_home(home: Path) -> None:
    """Refuse a home that cannot be written to."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"no space left in home {home}", hint="make space and start the job again"
            ) from error
        raise SetupError(
            f"home {home} cannot be written to: {error.strerror}",
            hint="give yourself write access, or name another folder with --home DIR",
        ) from error


def _refuse_if_led(folder: JobFolder) -> None:
    """Refuse before Spark has started. `start` takes the lease that counts."""
    lease = Lease(folder.folder / "lease", folder.name)
    lease.acquire()
    lease.release()


# ---------------------------------------------------------------- the job's code


def _load_early(spec: str) -> Job | None:
    """Load the job before Spark starts, so that an error in its file is reported at once. None if
    the file needs a session, as a UDF does."""
    try:
        return load(spec)
    except JobError as error:
        if "SESSION_OR_CONTEXT_NOT_EXISTS" not in error.message:
            raise
        return None


def find_by_workers(file: str) -> None:
    """Put the folder in which the job file's imports begin on PYTHONPATH, for local workers."""
    folder, paths = str(import_root(Path(file))), os.environ.get("PYTHONPATH", "")
    if folder not in paths.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, paths)))


def send_to_workers(file: str) -> None:
    """Send what the job file defines by value, because workers cannot import the file itself."""
    from pyspark.cloudpickle import register_pickle_by_value

    for module in list(sys.modules.values()):
        if os.path.abspath(getattr(module, "__file__", None) or "") == os.path.abspath(file):
            register_pickle_by_value(module)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- the process


def keep_libraries_quiet() -> None:
    """Silence libraries that log stack traces of errors that are reported in one line."""
    for name in ("py4j", "DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # py4j also logs to the root logger
    logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)


def killed_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_parent() -> None:
    """End with the parent: by the kernel, and elsewhere when stdin ends."""
    killed_with_parent()

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
