"""What a running job ends with, whatever fails while its queries are closed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.errors import Fenced, OnceflowError
from onceflow.jobs.handle import Handle, StartedQuery
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lease import Lease


class Epochs:
    """The epochs of a query that has ended, whose sink cannot be closed."""

    def __init__(self, failure: BaseException | None, *, fenced: bool = False) -> None:
        self.failure, self._fenced = failure, fenced
        self.log = SimpleNamespace(last=None)
        self.settled = 0

    def reason(self, error: BaseException) -> BaseException:
        return Fenced("term 2 leads") if self._fenced else error

    def stop_after_epoch(self, timeout: float | None = None) -> bool:
        return True

    def sweep_failure(self, timeout: float | None = None) -> None:
        return None

    def settle(self) -> None:
        self.settled += 1
        raise ConnectionError("the connection is gone")


class Query:
    isActive = False  # noqa: N815 - Spark's name

    def exception(self) -> None:
        return None


def ended(folder: Path, *queries: Epochs) -> Handle:
    home = JobFolder(folder, "shop")
    lease = Lease(home.folder / "lease", home.name)
    lease.acquire()
    handle = Handle(home.name, home, lease)
    for number, epochs in enumerate(queries):
        made: Any = StartedQuery(epochs, Query())  # type: ignore[arg-type]
        handle.started[f"q{number}"] = made
    handle.watch()
    return handle


def test_a_sink_that_cannot_be_closed_does_not_hide_that_the_driver_was_fenced(
    tmp_path: Path,
) -> None:
    fenced, other = Epochs(Fenced("term 2 leads")), Epochs(None)
    with pytest.raises(Fenced):
        ended(tmp_path, fenced, other).wait(10)
    assert (fenced.settled, other.settled) == (1, 1)  # each is closed, whatever the first raised


def test_nor_does_it_if_nobody_knew_yet(tmp_path: Path) -> None:
    with pytest.raises(Fenced):
        ended(tmp_path, Epochs(None, fenced=True)).wait(10)


def test_a_sink_that_cannot_be_closed_is_named_as_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="the connection is gone") as caught:
        ended(tmp_path, Epochs(None)).wait(10)
    assert not isinstance(caught.value, OnceflowError)


def test_an_epoch_that_fails_while_spark_is_asked_for_its_error_is_what_the_job_ends_with() -> None:
    """Spark's error only wraps that of the epoch, and says nothing of what fixes it."""
    epochs = Epochs(None)

    class Failing(Query):
        def exception(self) -> Any:
            epochs.failure = Fenced("term 2 leads")
            return RuntimeError("an exception was raised by the Python Proxy")

    started = StartedQuery(epochs, Failing())  # type: ignore[arg-type]
    assert isinstance(started.failure(), Fenced)
