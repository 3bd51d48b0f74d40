"""The handle of a running job, and the thread that watches its queries."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onceflow.errors import OnceflowError, PlanChanged
from onceflow.jobs.stop_request import StopRequest
from onceflow.protocol.epoch import Epochs, Stopping
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lease import Lease

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_POLL = 0.1
_HUNG_AFTER = 30.0  # seconds
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedQuery:
    """A query that Spark runs, and the protocol around it."""

    epochs: Epochs
    query: StreamingQuery

    @property
    def active(self) -> bool:
        return bool(self.query.isActive)

    def failure(self) -> BaseException | None:
        """Why it ended. None if it runs, or was asked to stop."""
        error = self.query.exception() if self.epochs.failure is None else None
        if self.epochs.failure is not None:  # perhaps while Spark was asked for its own error
            stopped = isinstance(self.epochs.failure, Stopping)
            return None if stopped else self.epochs.failure
        return None if error is None else self.epochs.reason(error)


class Handle:
    """A running job. See its status, wait for its end, or stop it at the end of an epoch."""

    def __init__(self, name: str, folder: JobFolder, lease: Lease) -> None:
        self.name = name
        self.folder = folder
        self.started: dict[str, StartedQuery] = {}
        self.asked = False  # to stop, by another process
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
        """The state of the job and the last decided epoch of each query."""
        state = "running" if not self._ended.is_set() else "failed" if self._failure else "stopped"
        last = {name: s.epochs.log.last for name, s in self.started.items()}
        return {
            "job": self.name,
            "state": state,
            "queries": {name: None if d is None else d.epoch for name, d in last.items()},
        }

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end. False if the job still runs. Raises the error of a job that failed."""
        if not self._ended.wait(timeout):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def stop(self, timeout: float | None = 60) -> None:
        """Let the running epoch end, then stop. Does not raise the error of a job that failed."""
        self._stop.set()
        self._ended.wait(timeout)

    def wait_until_released(self, timeout: float) -> None:
        """Wait until the watching thread has given the lease back."""
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
        except Exception as error:  # of py4j: the JVM is gone
            self._failure = self._failure or PlanChanged(
                f"Spark's JVM is gone: {type(error).__name__}: {error}", hint="start the job again"
            )
        finally:
            with contextlib.suppress(OSError, OnceflowError):  # the lease shows the end, too
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
        """Close sources and sinks of every query. An earlier failure stays that of the job: a
        connection that cannot be closed must not hide that the driver was fenced."""
        for name, started in self.started.items():
            try:
                started.epochs.settle()
            except Exception as error:  # of any sink
                _logger.warning("closing the outputs of %s failed: %s", name, error)
                self._failure = self._failure or started.epochs.reason(error)

    def _first_failure(self) -> BaseException | None:
        return next((f for f in (s.failure() for s in self.started.values()) if f), None)

    def _sweep_failure(self) -> BaseException | None:
        """The error of the sweep after the last epoch, which no later epoch has reported."""
        for started in self.started.values():
            error = started.epochs.sweep_failure(timeout=_HUNG_AFTER)
            if error is not None:
                return started.epochs.reason(error)
        return None

    def _hung_body(self) -> BaseException | None:
        """The error if Spark has ended a query, but Python still works on an epoch."""
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
            with contextlib.suppress(Exception):  # the next start fences a body that hangs
                started.query.stop()

    @staticmethod
    def _let_spark_commit(epochs: Epochs) -> None:
        """Give Spark time to write commits/<N>. Otherwise the next opening writes it."""
        last, deadline = epochs.log.last, time.monotonic() + 5
        while last and last.epoch not in epochs.checkpoint.committed():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def refuse_if_asked_to_stop(self) -> None:
        """The watching thread does not run yet while epochs run again."""
        if self._request.heard():
            raise Stopping("the job was asked to stop before all epochs were run again")

    def abandon(self, error: BaseException) -> None:
        """The start has failed: stop the queries that run and give the lease back."""
        self._failure = error
        if isinstance(error, Stopping):
            self._request.say({}, None)
        for started in self.started.values():
            with contextlib.suppress(Exception):
                started.query.stop()
        self._lease.release()
        self._ended.set()
