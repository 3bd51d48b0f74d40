"""Start a job, or a single streaming DataFrame, and hold on to what runs."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.ledger import Guarantee
from onceflow.contract.quantities import milliseconds
from onceflow.contract.sink import Sink
from onceflow.errors import JobError, OnceflowError, PlanChanged
from onceflow.jobs.fingerprint import fingerprint
from onceflow.jobs.flow import Flow, declare
from onceflow.jobs.job import Job
from onceflow.jobs.stop_request import StopRequest
from onceflow.protocol.epoch import Epochs, ReplayedEpoch, Stopping
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import DEFAULT_HOME, JobFolder, Query
from onceflow.protocol.keyed_spec import Keyed
from onceflow.protocol.lease import Lease, host_name
from onceflow.protocol.query_spec import QuerySpec
from onceflow.snapshots.restore import finish_restore
from onceflow.spark.session import check_session, get_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_POLL = 0.1
_HUNG_AFTER = 30.0  # seconds
_running: dict[Path, Handle] = {}
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """A query that Spark runs, and the protocol around it."""

    epochs: Epochs
    query: StreamingQuery

    @property
    def active(self) -> bool:
        return bool(self.query.isActive)

    def failure(self) -> BaseException | None:
        """Why it ended; None if it was asked to, or runs."""
        if self.epochs.failure is not None:
            stopped = isinstance(self.epochs.failure, Stopping)
            return None if stopped else self.epochs.failure
        error = self.query.exception()
        return None if error is None else self.epochs.reason(error)


class Handle:
    """A running job: look at it, wait for it, stop it at an epoch's end."""

    def __init__(self, name: str, folder: JobFolder, lease: Lease) -> None:
        self.name = name
        self.folder = folder
        self.started: dict[str, Started] = {}
        self.asked = False  # to stop, from outside of this process
        self._lease = lease
        self._request = StopRequest(folder.folder, lease.lock)
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._stop = threading.Event()

    @property
    def queries(self) -> dict[str, StreamingQuery]:
        return {name: started.query for name, started in self.started.items()}

    @property
    def status(self) -> dict[str, Any]:
        """State of the job and, for each query, the epoch that was decided last."""
        state = "running" if not self._ended.is_set() else "failed" if self._failure else "stopped"
        last = {name: s.epochs.log.last for name, s in self.started.items()}
        return {
            "job": self.name,
            "state": state,
            "queries": {name: None if d is None else d.epoch for name, d in last.items()},
        }

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end. False: it still runs. Raises what made it fail."""
        if not self._ended.wait(timeout):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def stop(self, timeout: float | None = 60) -> None:
        """Let the running epoch end, then stop. Raises nothing that happened before."""
        self._stop.set()
        self._ended.wait(timeout)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -------------------------------------------------------------- the watching thread

    def watch(self) -> None:
        threading.Thread(target=self._watch, name=f"onceflow {self.name}", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._wait_for_end()
            self._failure = self._failure or self._hung_body() or self._first_failure()
            self._failure = self._failure or self._sweep_failure()
            self._settle()
        except Exception as error:  # the JVM is gone: the edge where we notice it
            self._failure = self._failure or PlanChanged(
                f"Spark's JVM is gone: {type(error).__name__}: {error}", hint="start the job again"
            )
        finally:
            with contextlib.suppress(OSError, OnceflowError):  # who asked sees that we ended
                self._request.say(self.status["queries"], self._failure)
            self._lease.release()
            self._ended.set()

    def _wait_for_end(self) -> None:
        while any(s.active for s in self.started.values()):
            self._failure = self._first_failure()
            if self._request.heard():
                self.asked = True
                self._stop.set()
            if self._stop.is_set() or self._failure is not None:
                self._stop_all()
                break
            time.sleep(_POLL)
        while any(s.active for s in self.started.values()):
            time.sleep(_POLL)

    def _settle(self) -> None:
        """Close sources and sinks of every query. What the job failed with before stays what it
        failed with: a connection that cannot be closed must not hide that the driver was fenced."""
        for name, started in self.started.items():
            try:
                started.epochs.settle()
            except Exception as error:  # of anybody's sink
                _logger.warning("closing the outputs of %s failed: %s", name, error)
                self._failure = self._failure or started.epochs.reason(error)

    def _first_failure(self) -> BaseException | None:
        return next((f for f in (s.failure() for s in self.started.values()) if f), None)

    def _sweep_failure(self) -> BaseException | None:
        """Of the last epoch: no further one has seen it."""
        for started in self.started.values():
            error = started.epochs.sweep_failure(timeout=_HUNG_AFTER)
            if error is not None:
                return started.epochs.reason(error)
        return None

    def _hung_body(self) -> BaseException | None:
        """Spark gave the query up, but Python still works on an epoch: a driver to be fenced."""
        for name, started in self.started.items():
            if not started.epochs.stop_after_epoch(timeout=_HUNG_AFTER):
                return PlanChanged(
                    f"an epoch of {name} still runs {_HUNG_AFTER:.0f} s after its query ended",
                    hint="end this process; the next start fences what hangs",
                )
        return None

    def _stop_all(self) -> None:
        for started in self.started.values():
            if started.active and started.epochs.stop_after_epoch(timeout=300):
                self._let_spark_commit(started.epochs)
            with contextlib.suppress(Exception):  # a stop that times out leaves a fenced body
                started.query.stop()

    @staticmethod
    def _let_spark_commit(epochs: Epochs) -> None:
        """Give Spark the time to write commits/<N>. If it can't, the next opening does."""
        last, deadline = epochs.log.last, time.monotonic() + 5
        while last and last.epoch not in epochs.checkpoint.committed():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def refuse_to_go_on(self) -> None:
        """While epochs are run again nobody watches."""
        if self._request.heard():
            raise Stopping("the job was asked to stop before all epochs were run again")

    def abandon(self, error: BaseException) -> None:
        """Starting failed half way: stop what had started, give the lease back."""
        self._failure = error
        if isinstance(error, Stopping):
            self._request.say({}, None)
        for started in self.started.values():
            with contextlib.suppress(Exception):
                started.query.stop()
        self._lease.release()
        self._ended.set()


def start(
    job: Job,
    *,
    home: str | os.PathLike[str] = DEFAULT_HOME,
    fork: str | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    once: bool = False,
    every: str | None = None,
    take_over: bool = False,
    replaying: Callable[[str, ReplayedEpoch], None] | None = None,
) -> Handle:
    """Run a job from this process. `once`: stop when the input is used up. `fork`: run the fork
    of it that has this name. `replaying` hears of each epoch that is run again after a restore,
    with its query, before this function returns."""
    session = _session(spark, master)
    folder = JobFolder(home, fork or job.name)
    if fork is not None:
        refuse_no_fork(folder, job.name)
    flow = Flow(session, folder)
    job.declare(flow)
    if not flow.queries:
        raise JobError(f"job {job.name} writes nothing", hint="call flow.write(…) in it")
    code = fingerprint(job.declare)
    queries = {
        name: replace(
            declared,
            keep_epochs=job.keep_epochs,
            sources=flow.sources,
            digests=job.digests,
            code=code,
        )
        for name, declared in flow.queries.items()
    }
    trigger = _trigger(every or job.every, once)
    return _start(session, folder, queries, trigger, take_over=take_over, replaying=replaying)


def write(
    df: DataFrame | Keyed,
    name: str,
    *,
    to: Sink | Mapping[str, Sink],
    home: str | os.PathLike[str] = DEFAULT_HOME,
    mode: str = "append",
    by: str | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    on_bad: str | Sink | None = None,
    once: bool = False,
    every: str = "1 second",
    take_over: bool = False,
    guarantee: str | Mapping[str, str] = Guarantee.EXACTLY_ONCE,
    digests: bool = True,
) -> StreamingQuery:
    """Run one streaming DataFrame without a job; `name` under `home` is its identity. `digests`
    as in `@job`."""
    session = _session((df.df if isinstance(df, Keyed) else df).sparkSession, None)
    folder = JobFolder(home, name)
    declared = declare(
        name, df, to, mode=mode, by=by, columns=columns, on_bad=on_bad, guarantee=guarantee
    )
    declared = replace(declared, digests=digests)
    return _start(
        session, folder, {name: declared}, _trigger(every, once), take_over=take_over
    ).queries[name]


def _start(
    spark: SparkSession,
    folder: JobFolder,
    queries: Mapping[str, QuerySpec],
    trigger: dict[str, Any],
    *,
    take_over: bool,
    replaying: Callable[[str, ReplayedEpoch], None] | None = None,
) -> Handle:
    before = _running.get(folder.folder)
    for handle in list(_running.values()):  # also one whose home was moved since
        if not any(s.active for s in handle.started.values()):
            handle._ended.wait(10)  # its watcher gives the lease back
    lease = Lease(folder.folder / "lease", folder.name)
    lease.acquire(take_over=take_over)
    if before is not None and take_over:
        before.stop(timeout=30)
    handle = Handle(folder.name, folder, lease)
    StopRequest(folder.folder, lease.lock).begin()
    try:
        lineage = folder.open_lineage(spark.version, f"process {os.getpid()} on {host_name()}")
        finish_restore(folder, lease)
        # By name: the first one's end is the end of its lineage, so whoever comes too late to it
        # opens none of the others.
        opening = {
            name: Epochs(folder.query(lineage, name), queries[name], lease)
            for name in sorted(queries)
        }
        for epochs in opening.values():
            epochs.fence()
        for name, epochs in opening.items():
            epochs.open()
            writer = _writer(epochs)
            while (again := epochs.replay_next()) is not None:
                handle.refuse_to_go_on()
                if replaying is not None:
                    replaying(name, again)
                _run_once(writer, epochs)
            handle.started[name] = Started(epochs, writer.trigger(**trigger).start())
    except BaseException as error:
        handle.abandon(error)
        raise
    _running[folder.folder] = handle
    handle.watch()
    return handle


def refuse_no_fork(folder: JobFolder, job: str) -> None:
    """Run under another name, a job would write to its own targets, and twice."""
    if (folder.fork() or {}).get("of") != job:
        raise JobError(
            f"there is no fork {folder.name} of job {job}",
            hint=f"onceflow fork {job} --as {folder.name}",
        )


def run_again(query: Query, declared: QuerySpec) -> Decision:
    """Run the epochs that are put in for a query, and no other; the last decision."""
    lease = Lease(query.home / query.job / "lease", query.job)
    lease.acquire()
    try:
        epochs = Epochs(query, declared, lease)
        epochs.fence()
        epochs.open()
        writer = _writer(epochs)
        while epochs.replay_next() is not None:
            _run_once(writer, epochs)
        epochs.settle()
    finally:
        lease.release()
    assert epochs.log.last is not None
    return epochs.log.last


def _writer(epochs: Epochs) -> Any:
    declared, query = epochs.spec, epochs.query
    df = declared.df
    if declared.ticks:
        from onceflow.protocol.ticks import with_ticks

        df = with_ticks(df, query.ticks)
    writer = epochs.observed(df).writeStream.outputMode(declared.mode).foreachBatch(epochs)
    writer = writer.option("checkpointLocation", str(query.folder))
    return writer.queryName(f"{query.job}/{query.name}")


def _run_once(writer: Any, epochs: Epochs) -> None:
    """Run the one epoch that is put in."""
    try:
        writer.trigger(once=True).start().awaitTermination()
    except Exception:
        if epochs.failure is not None:
            raise epochs.failure from None
        raise
    epochs.forget_running()


def _session(spark: SparkSession | None, master: str | None) -> SparkSession:
    if spark is None:
        return get_session(master)
    check_session(spark)
    return spark


def _trigger(every: str, once: bool) -> dict[str, Any]:
    return (
        {"availableNow": True}
        if once
        else {"processingTime": f"{milliseconds(every)} milliseconds"}
    )
