"""How far the demo's job has come, read from its home as anybody can."""

from __future__ import annotations

from pathlib import Path

from onceflow.epoch_log import Decision, EpochLog
from onceflow.home import JobFolder, Query
from onceflow.runtime.lease import Holder, Lease
from onceflow.spark_inside import Checkpoint


class Observed:
    """The job under a home. What it says of a query is of its last decided epoch."""

    def __init__(self, home: Path) -> None:
        self._folder = JobFolder(home, "ads")
        self._queries: dict[str, tuple[Query, EpochLog]] = {}

    def leader(self) -> Holder | None:
        """The driver that leads the job now."""
        lease = Lease(self._folder.folder / "lease", self._folder.name)
        holder = lease.holder()
        return holder if holder is not None and lease.alive(holder) else None

    def last(self, query: str = "counts") -> Decision | None:
        found = self._query(query)
        return found[1].read().last if found else None

    def epoch(self) -> int | None:
        last = self.last()
        return last.epoch if last else None

    def rows_read(self, query: str = "counts") -> int:
        """How many rows of the log are in its epochs."""
        last = self.last(query)
        return sum(last.end["events"]["next"]) if last else 0

    def under_way(self) -> int | None:
        """The epoch that Spark has planned and not committed: staged, decided, published or not."""
        found = self._query("counts")
        if found is None:
            return None
        checkpoint = Checkpoint(found[0].folder)
        following = max(checkpoint.committed(), default=-1) + 1
        return None if checkpoint.offsets(following) is None else following

    def drained(self, *, rows: int, watermark_ms: float) -> bool:
        """All rows are read, and an epoch has run since the watermark passed the last window."""
        found = self._query("counts")
        decisions = found[1].read().decisions if found else []
        return (
            self.rows_read("rejected") == self.rows_read() == rows
            and len(decisions) > 1
            and decisions[-2].watermark >= watermark_ms
        )

    def _query(self, name: str) -> tuple[Query, EpochLog] | None:
        if name not in self._queries:
            self._queries |= {q.name: (q, q.epoch_log()) for q in self._folder.queries()}
        return self._queries.get(name)
