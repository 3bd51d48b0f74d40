"""A driver process of `onceflow verify`: it starts Spark, then it runs jobs as it is ordered to.

It runs a job by the code of the driver of `onceflow run`. Orders are JSON lines on standard input:

    {"do": "live", "job": …, "folder": …, "environment": {…}, …}   one life of a job
    {"do": "declare", "job": …, "folder": …, "schemas": {…}}       list its sources and outputs
    {"do": "arm", "fault": "epoch.decided:kill:2"}                 in the running life
    {"do": "arm-tasks", "fault": "task.merged:kill:FOLDER"}        in keyed tasks, from now on
    {"do": "stop"}                                                 at the end of the epoch

It writes events to standard output: those of `onceflow run`, and the end of each life. What the job
prints goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onceflow import faults
from onceflow.errors import JobError
from onceflow.harness.within import within
from onceflow.jobs.flow import Flow
from onceflow.jobs.job import load
from onceflow.log.embedded import EmbeddedLog
from onceflow.log.source import Log
from onceflow.service.driver import EventWriter, StopSignal, keep_libraries_quiet, run_job
from onceflow.service.error_report import describe_error
from onceflow.spark.running_query import jvm_process
from onceflow.spark.session import get_session

Order = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="onceflow-verify-driver")
    parser.add_argument("--master", required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    keep_libraries_quiet()
    tell, orders = EventWriter(os.dup(1)), _Orders()
    os.dup2(2, 1)
    spark = get_session(options.master, options.settings, log=options.log)
    orders.workers = spark.sparkContext.environment
    jvm, conf = jvm_process(), spark.sparkContext.getConf()
    address = f"{conf.get('spark.driver.host')}:{conf.get('spark.driver.port')}"
    tell("ready", jvm=jvm, address=address, spark=spark.version)
    while True:
        order = orders.lives.get()
        if order["do"] == "declare":
            _declare(order, spark, tell)
            continue
        code = _live(order, options.master, tell, orders.stop)
        tell("life", code=code)
        if jvm is None or _has_ended(jvm):  # Spark is gone
            os._exit(code)


def _has_ended(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _live(order: Order, master: str, tell: EventWriter, stop: StopSignal) -> int:
    os.chdir(order["folder"])
    asked = argparse.Namespace(
        job=order["job"], home="home", master=master, every=order.get("every"),
        once=order.get("once", False), take_over=order["take_over"], fork=order.get("fork"),
    )  # fmt: skip
    stop.clear()
    with _environment(order["environment"]), within():
        faults.disarm()
        faults.arm_from_environment()
        return run_job(asked, tell, stop)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """The environment of one life."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _declare(order: Order, spark: Any, tell: EventWriter) -> None:
    os.chdir(order["folder"])
    try:
        job = load(order["job"])
        flow = _Declared(spark, order["schemas"])
        job.declare(flow)
        keyed = any(declared.keyed for declared in flow.queries.values())
        tell("declared", sources=flow.found, outputs=list(flow.outputs()), keyed=keyed)
    except (Exception, SystemExit) as error:  # whatever the job or Spark raised
        said = describe_error(error, Path(order["job"].partition(":")[0]))
        tell("declared", error=said.as_json())


class _Declared(Flow):
    """Collects the logs that a job reads, and creates those that do not exist.

    Only logs are read under `onceflow verify`, because it makes their rows itself and can write
    nothing else.
    """

    def __init__(self, spark: Any, schemas: dict[str, str]) -> None:
        super().__init__(spark)
        self.found: dict[str, dict[str, str]] = {}
        self._schemas = schemas

    def read(self, name: str, source: Any) -> Any:
        kind = "log" if isinstance(source, Log) else str(source)
        path = str(getattr(source, "path", ""))
        self.found[name] = {"kind": kind, "path": path}
        if kind == "log" and not Path(path).is_relative_to(Path.cwd()):
            raise JobError(
                f"source {name!r} reads {path}, and verify runs the job in a folder of its own",
                hint="make the path relative: it is taken from the working directory",
            )
        schema = self._schemas.get(name, self._schemas.get("", ""))
        if kind == "log" and schema and not os.path.exists(path):
            EmbeddedLog.create(path, schema)
        return super().read(name, source)

    def outputs(self) -> Iterator[dict[str, Any]]:
        for query, declared in self.queries.items():
            for output, sink in declared.outputs.items():
                mode = "append" if output in declared.late else declared.mode
                yield {"query": query, "output": output, "sink": str(sink), "mode": mode,
                       "target": sink.describe()}  # fmt: skip


class _Orders:
    """Reads orders in a thread of its own; ends the process at the end of its input."""

    def __init__(self) -> None:
        self.lives: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.stop = StopSignal()
        self.workers: dict[str, str] = {}  # the environment of Python workers
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            match order["do"]:
                case "live" | "declare":
                    self.lives.put(order)
                case "arm":
                    faults.disarm()
                    os.environ["ONCEFLOW_FAULT"] = order["fault"]
                    faults.arm_from_environment()
                case "arm-tasks":
                    self.workers.pop("ONCEFLOW_TASK_FAULT", None)
                    if order["fault"]:
                        self.workers["ONCEFLOW_TASK_FAULT"] = order["fault"]
                case "stop":
                    self.stop.set()
        os._exit(1)


if __name__ == "__main__":
    main()
