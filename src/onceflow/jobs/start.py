"""Start a job, or a single streaming DataFrame without one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.ledger import Guarantee
from onceflow.contract.quantities import milliseconds
from onceflow.contract.sink import Sink
from onceflow.errors import JobError
from onceflow.jobs.fingerprint import fingerprint
from onceflow.jobs.flow import Flow, declare
from onceflow.jobs.handle import Handle, StartedQuery
from onceflow.jobs.job import Job
from onceflow.jobs.stop_request import StopRequest
from onceflow.protocol.epoch import Epochs, ReplayedEpoch
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

_running: dict[Path, Handle] = {}


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
    """Run a job from this process. `once`: stop when all input has been read. `fork`: run the fork
    of the job that has this name. `replaying` is called with the query and the epoch for each epoch
    that runs again after a restore, before this function returns."""
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
    for handle in list(_running.values()):  # even of a home that was moved since
        if not any(s.active for s in handle.started.values()):
            handle.wait_until_released(10)
    lease = Lease(folder.folder / "lease", folder.name)
    lease.acquire(take_over=take_over)
    if before is not None and take_over:
        before.stop(timeout=30)
    handle = Handle(folder.name, folder, lease)
    StopRequest(folder.folder, lease.lock).begin()
    try:
        lineage = folder.open_lineage(spark.version, f"process {os.getpid()} on {host_name()}")
        finish_restore(folder, lease)
        # By name: the end of the first query ends its lineage, so a driver that comes too late
        # for the first one opens none of the others.
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
                handle.refuse_if_asked_to_stop()
                if replaying is not None:
                    replaying(name, again)
                _run_once(writer, epochs)
            handle.started[name] = StartedQuery(epochs, writer.trigger(**trigger).start())
    except BaseException as error:
        handle.abandon(error)
        raise
    _running[folder.folder] = handle
    handle.watch()
    return handle


def refuse_no_fork(folder: JobFolder, job: str) -> None:
    """Refuse another name for a job that is not a fork: it would write to its targets twice."""
    if (folder.fork() or {}).get("of") != job:
        raise JobError(
            f"there is no fork {folder.name} of job {job}",
            hint=f"onceflow fork {job} --as {folder.name}",
        )


def run_again(query: Query, declared: QuerySpec) -> Decision:
    """Run the epochs that a query has to replay, and no others. Returns the last decision."""
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
    """Run the one epoch that the checkpoint has planned."""
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
    if once:
        return {"availableNow": True}
    return {"processingTime": f"{milliseconds(every)} milliseconds"}
