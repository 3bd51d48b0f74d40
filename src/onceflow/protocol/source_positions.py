"""The positions of a query in its sources: checked, recorded and reported to the sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onceflow.contract.source import Source
from onceflow.errors import OnceflowError, OutOfRange, PlanChanged, ServerSilent
from onceflow.log.reader_positions import hold_offsets
from onceflow.protocol.home import Query, now


class SourcePositions:
    """The sources of one query that the job declared.

    `end` is always that of a plan or a decision: source -> offset.
    """

    def __init__(
        self, sources: Mapping[str, Source], query: Query, *, inspect_only: bool = False
    ) -> None:
        self._sources = {} if inspect_only else sources
        self._inspect_only = inspect_only
        self._query = query
        self._name = f"{query.job}/{query.name}"

    def check(self, end: Mapping[str, Any]) -> bool:
        """Raise `OutOfRange` if rows behind these positions are gone. Return whether all sources
        have checked it."""
        checked = [source.check(offset) for source, offset in self._known(end)]
        return bool(end) and len(checked) == len(end) and all(checked)

    def find_gone_rows(self, end: Mapping[str, Any], failure: OutOfRange) -> OnceflowError:
        """Return the error to report when a task misses rows: their source may name the rows, or
        find that none is missing."""
        try:
            is_complete = self.check(end)
        except (OutOfRange, ServerSilent) as exact:
            return exact
        if not is_complete:
            return failure
        return PlanChanged(
            f"Spark says: {failure.message}; but nothing is missing behind the last decision",
            hint="onceflow opens the query again",
        )

    def remember(self, end: Mapping[str, Any]) -> None:
        """Have the sources keep what is new in them: an epoch is planned up to `end`."""
        for source, offset in self._known(end):
            source.remember(offset)

    def hold(self, end: Mapping[str, Any], oldest: Mapping[str, Any]) -> None:
        """Tell the logs that this query reads to which rows it may still go back."""
        if self._inspect_only:
            return
        query = self._query
        hold_offsets(
            end, oldest, query=self._name, lineage=query.lineage, home=str(query.home), at=now()
        )

    def published(self, end: Mapping[str, Any]) -> None:
        for source, offset in self._known(end):
            source.published(self._name, offset)

    def settle(self, end: Mapping[str, Any]) -> None:
        """Have the sources do now what `published` left for later: the job ends."""
        for source, _ in self._known(end):
            source.settle()

    def _known(self, end: Mapping[str, Any]) -> list[tuple[Source, Any]]:
        known = self._sources
        return [(known[name], offset) for name, offset in end.items() if name in known]
