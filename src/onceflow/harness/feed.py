"""The producer: appends an input to its logs, commit by commit, while the job is broken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from onceflow.errors import DiskFull
from onceflow.harness.repeated import Repeated
from onceflow.harness.targets import Away
from onceflow.harness.workload import SCHEMA, Row, Workload, table
from onceflow.log.embedded import EmbeddedLog

if TYPE_CHECKING:
    import pyarrow as pa

_PRODUCER = "verify"
_PAUSE = 0.2  # seconds from commit to commit, and before an append is repeated


class Input(Protocol):
    """Rows for the logs of a job: the same commits at every call."""

    @property
    def logs(self) -> dict[str, dict[str, Any]]:
        """Path of each log -> arguments to create it, or a topic and its servers."""

    def commit(self, number: int) -> dict[str, pa.Table] | None:
        """Rows for each log in this commit. None at the end of the input."""

    def last(self, number: int) -> dict[str, pa.Table]:
        """Rows for each log, if any, when the input ends here."""


class BuiltIn:
    """The rows of a seed, and last rows that close every window."""

    def __init__(self, seed: int, *, size: int = 20, topic: dict[str, Any] | None = None) -> None:
        """`topic`: a Kafka topic and its servers, instead of a log."""
        self._workload, self._size = Workload(seed), size
        log = {"schema": SCHEMA, "partitions": 2, "key": ["key"]}
        self.logs: dict[str, dict[str, Any]] = {"in": topic or log}

    def commit(self, number: int) -> dict[str, pa.Table] | None:
        first = number * self._size
        return {"in": table(self._workload.row(n) for n in range(first, first + self._size))}

    def last(self, number: int) -> dict[str, pa.Table]:
        return {"in": table(self._workload.closing(number * self._size))}

    def rows(self, commits: int) -> Iterator[Row]:
        """All rows of an input that ended after so many commits, in order."""
        for number in range(commits * self._size):
            yield self._workload.row(number)
        yield from self._workload.closing(commits * self._size)


class Feed(Repeated):
    """Appends from its start until `end`. It repeats an append that fails."""

    def __init__(
        self, folder: Path, source: Input, *, pause: float = _PAUSE, most: int | None = None
    ) -> None:
        """`most`: append only so many commits."""
        super().__init__(self._commit, every=pause)
        self.full = threading.Event()  # all commits before `end` are appended
        self.commits = self.rows = 0
        self.retried = 0  # appends that were repeated
        self._input, self._most = source, most
        self._logs = {path: _open(folder / path, how) for path, how in source.logs.items()}
        self._ended = self._abandoned = False

    def _commit(self) -> None:
        done = self.full.is_set() or self.commits == self._most
        tables = None if done else self._input.commit(self.commits)
        if tables is None:
            self.full.set()
            self.every = _PAUSE
            return
        self._append(tables)
        self.commits += 1

    def end(self) -> None:
        """Append the last rows."""
        self.stop()
        self.raise_failure()
        if not self._ended:
            self._ended = True
            self._append(self._input.last(self.commits))

    def abandon(self) -> None:
        """Append nothing more."""
        self._abandoned = self._ended = True
        self.stop()

    def heads(self) -> dict[str, list[int]]:
        """The next offsets of each log."""
        return {path: log.heads() for path, log in self._logs.items()}

    def _append(self, tables: dict[str, pa.Table]) -> None:
        for path, rows in tables.items():
            while not self._abandoned:
                try:
                    self._logs[path].append(rows, producer=_PRODUCER, sequence=self.commits)
                    break
                except (DiskFull, Away):
                    self.retried += 1
                    time.sleep(_PAUSE)
            self.rows += rows.num_rows


class _Log:
    """The embedded log, with the methods that the feed needs."""

    def __init__(self, log: EmbeddedLog) -> None:
        self._log = log
        self.append = log.append

    def heads(self) -> list[int]:
        return list(self._log.refresh().view.next)


def _open(path: Path, how: dict[str, Any]) -> Any:
    if "topic" not in how:
        return _Log(EmbeddedLog.create(path, **how))
    from onceflow.harness.topic import TopicLog

    return TopicLog(how["servers"], how["topic"])
