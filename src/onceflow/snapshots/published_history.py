"""What a query has published through all its lineages: which epochs, and in which lineage.

A lineage continues from the cut of another. Rows after that cut were taken back, or published once
more, or they stayed and their epochs ran again (`lineage.py`). In the last case the targets
identify an epoch by the lineage that published it, not by the one that ran it again.
"""

from __future__ import annotations

from typing import Any

from onceflow.errors import JobError
from onceflow.protocol.epoch_log import EpochLog
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lineage import Origin


class History:
    """The history of one query of a job, back from one of its lineages."""

    def __init__(self, folder: JobFolder, query: str, lineage: str) -> None:
        self._folder, self._query, self._lineage = folder, query, lineage
        self._logs: dict[str, EpochLog] = {}

    def log(self, lineage: str) -> EpochLog:
        if lineage not in self._logs:
            self._logs[lineage] = self._folder.query(lineage, self._query).epoch_log().read()
        return self._logs[lineage]

    def leader(self) -> dict[str, Any]:
        """What the last driver that opened the query recorded: versions, code, outputs."""
        lineage: str | None = self._lineage
        while lineage is not None:
            log, origin = self.log(lineage), Origin.of(self.log(lineage))
            if log.opened:
                return log.leader or {}
            if lineage in self._folder.store.list("lineages"):  # else it is another job's
                said = self._folder.about(lineage).get("outputs", {})
                if self._query in said:  # it came from a savepoint of another home
                    return {"term": 0, "outputs": said[self._query]}
            lineage = None if origin is None else origin.ended
        raise JobError(
            f"{self._folder.name}/{self._query} was never started here, so its targets are "
            "not known",
            hint="start the job once",
        )

    def targets(self) -> dict[str, dict[str, Any]]:
        """Output -> how to find its target, even of outputs that the code no longer has."""
        leader = self.leader()
        return {**leader.get("former", {}), **leader["outputs"]}

    def holds(self, lineage: str, epoch: int, output: str, at: str, published: int) -> bool:
        """Does the target of an output have that epoch of that lineage? The target is at epoch
        `published` of lineage `at`."""
        origin = Origin.of(self.log(lineage))
        while origin is not None and not origin.is_fork and epoch <= origin.cut:
            lineage = origin.parent  # up to its cut a lineage has the epochs of its parent
            origin = Origin.of(self.log(lineage))
        while True:
            if lineage == at:
                return epoch <= published
            origin = Origin.of(self.log(at))
            if origin is None:
                return False
            if origin.is_fork:
                return lineage == origin.parent and epoch == origin.cut
            target = origin.outputs.get(output)
            if target is not None and target.choice == "skip" and epoch > origin.cut:
                at, published = target.lineage, min(published, target.epoch)
            else:
                at, published = origin.parent, min(published, origin.cut)

    def known_as(self, lineage: str, epoch: int, output: str) -> str:
        """The lineage by which the target of an output identifies that epoch."""
        while True:
            origin = Origin.of(self.log(lineage))
            if origin is None or origin.is_fork or epoch > origin.last_of(output):
                return lineage
            target = origin.outputs.get(output)
            if target is not None and epoch == origin.cut:
                return target.known
            skipped = target is not None and target.choice == "skip"
            lineage = target.lineage if target and skipped else origin.parent

    def run_in(self, lineage: str, first: int, last: int) -> list[tuple[str, int, int]]:
        """The epochs from `first` to `last` of that lineage and of those that it comes from:
        lineage, first and last epoch that were decided in it. Newest first."""
        found = []
        while last >= first:
            origin = Origin.of(self.log(lineage))
            begins = 0 if origin is None else origin.cut + 1
            if last >= begins:
                found.append((lineage, max(first, begins), last))
            if origin is None or origin.is_fork:
                break
            lineage, last = origin.parent, min(last, origin.cut)
        return found
