"""Decisions that the epoch log has freed but a savepoint still needs.

A restore with `skip` runs the epochs after the savepoint once more with the same boundaries.

<query>/onceflow/past/<first>-<last>.json    decisions of these epochs, oldest first
"""

from __future__ import annotations

import re

from onceflow.faults.points import reach
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.holds import Holds
from onceflow.protocol.home import JobFolder, Query
from onceflow.store.posix import seal, unseal

_FOLDER = "past"


class RetainedDecisions:
    """The decisions of one query that the log has freed and a savepoint still needs."""

    def __init__(self, query: Query) -> None:
        self._query = query

    def keep(self, freed: list[Decision]) -> None:
        """Keep those of the decisions that follow a savepoint, before the log frees them."""
        needed = self._needed()
        kept = [d for d in freed if needed is not None and d.epoch > needed]
        if kept:
            name = f"{_FOLDER}/{kept[0].epoch}-{kept[-1].epoch}.json"
            body = {"decisions": [decision.to_json() for decision in kept]}
            self._query.store.put_if_absent(name, seal("past", self._query.subject, body))
            reach("past.kept")

    def sweep(self) -> None:
        """Remove decisions that no savepoint needs any longer."""
        names = self._names()
        needed = self._needed() if names else None
        for _, last, name in names:
            if needed is None or last <= needed:
                self._query.store.delete(f"{_FOLDER}/{name}")

    def after(self, epoch: int) -> list[Decision]:
        """The kept decisions of epochs after `epoch`."""
        found = [d for _, last, name in self._names() if last > epoch for d in self._read(name)]
        return [decision for decision in found if decision.epoch > epoch]

    def oldest(self) -> Decision | None:
        names = self._names()
        return self._read(names[0][2])[0] if names else None

    def _needed(self) -> int | None:
        return Holds(JobFolder(self._query.home, self._query.job)).needed_after(self._query)

    def _names(self) -> list[tuple[int, int, str]]:
        """First epoch, last epoch and name of each file, oldest first. After a crash two files may
        hold the same decision."""
        names = self._query.store.list(_FOLDER)
        parsed = [(re.fullmatch(r"(\d+)-(\d+)\.json", name), name) for name in names]
        return sorted((int(found[1]), int(found[2]), name) for found, name in parsed if found)

    def _read(self, name: str) -> list[Decision]:
        name = f"{_FOLDER}/{name}"
        data = self._query.store.read(name)
        if data is None:
            return []
        body = unseal(data, "past", self._query.subject, self._query.store.where(name))
        return [Decision.from_json(decision) for decision in body["decisions"]]


def sweep_all(folder: JobFolder) -> None:
    """Sweep the retained decisions of all lineages, after a savepoint was deleted."""
    for lineage in folder.lineages():
        for query in folder.queries_of(lineage):
            RetainedDecisions(query).sweep()
