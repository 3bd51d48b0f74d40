"""The progress of a job, read from its home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onceflow.protocol.epoch_log import Decision, EpochLog
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lease import Holder, Lease
from onceflow.spark.checkpoint import Checkpoint


class JobProgress:
    """A job in a home. What it returns of a query is of the last decided epoch."""

    def __init__(self, home: Path, job: str) -> None:
        self._folder = JobFolder(home, job)
        self._queries: dict[str, tuple[Query, EpochLog]] = {}

    def leader(self) -> Holder | None:
        """The driver that leads the job now."""
        lease = Lease(self._folder.folder / "lease", self._folder.name)
        holder = lease.holder()
        return holder if holder is not None and lease.alive(holder) else None

    def epochs(self) -> dict[str, int]:
        """The last decided epoch of each query that has one."""
        found = {name: self.last(name) for name in self.queries()}
        return {name: last.epoch for name, last in found.items() if last is not None}

    def queries(self) -> list[str]:
        """The queries that have ever started, in their order."""
        for query in self._folder.queries():
            if query.name not in self._queries:
                self._queries[query.name] = (query, query.epoch_log())
        return list(self._queries)

    def last(self, query: str) -> Decision | None:
        return self._queries[query][1].read().last if query in self.queries() else None

    def offsets(self) -> dict[str, dict[str, Any]]:
        """Source -> the offset to which it was read, as Spark has it."""
        found: dict[str, dict[str, Any]] = {}
        for query in self.queries():
            last = self.last(query)
            found |= last.end if last is not None else {}
        return found

    def under_way(self) -> tuple[str, int] | None:
        """A query, and its epoch that Spark has planned and not committed yet."""
        for name in self.queries():
            checkpoint = Checkpoint(self._queries[name][0].folder)
            following = max(checkpoint.committed(), default=-1) + 1
            if checkpoint.offsets(following) is not None:
                return name, following
        return None
