"""The positions of a query in its sources, and who is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onceflow.contract.source import Source
from onceflow.errors import OnceflowError, OutOfRange, PlanChanged, ServerSilent
from onceflow.log.reader_positions import hold_offsets
from onceflow.protocol.home import Query, now


class SourcePositions:
    """The sources of one query, as far as the job knows them.

    `end` is always what a decision says: source -> offset.
    """

    def __init__(
        self, sources: Mapping[str, Source], query: Query, *, looks_only: bool = False
    ) -> None:
        self._sources = {} if looks_only else sources
        self._looks_only = looks_only
        self._query = query
        self._name = f"{query.job}/{query.name}"

    def check(self, end: Mapping[str, Any]) -> bool:
        """Refuse to go on from there if rows behind it are gone. True: all sources have looked."""
        looked = [source.check(offset) for source, offset in self._known(end)]
        return bool(end) and len(looked) == len(end) and all(looked)

    def which_are_gone(self, end: Mapping[str, Any], failure: OutOfRange) -> OnceflowError:
        """A task misses rows; their source can say which, or that it is not so."""
        try:
            looked = self.check(end)
        except (OutOfRange, ServerSilent) as exact:
            return exact
        if not looked:
            return failure
        return PlanChanged(
            f"Spark says: {failure.message}; but nothing is missing behind the last decision",
            hint="the query is opened again",
        )

    def remember(self, end: Mapping[str, Any]) -> None:
        """An epoch is planned up to there: what is new in its sources is kept."""
        for source, offset in self._known(end):
            source.remember(offset)

    def hold(self, end: Mapping[str, Any], oldest: Mapping[str, Any]) -> None:
        """Tell the logs that are read which rows this query may still go back to."""
        if self._looks_only:
            return
        query = self._query
        hold_offsets(
            end, oldest, query=self._name, lineage=query.lineage, home=str(query.home), at=now()
        )

    def published(self, end: Mapping[str, Any]) -> None:
        for source, offset in self._known(end):
            source.published(self._name, offset)

    def settle(self, end: Mapping[str, Any]) -> None:
        """The job ends: what `published` left for later is done now, or never."""
        for source, _ in self._known(end):
            source.settle()

    def _known(self, end: Mapping[str, Any]) -> list[tuple[Source, Any]]:
        known = self._sources
        return [(known[name], offset) for name, offset in end.items() if name in known]
