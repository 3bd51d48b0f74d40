"""A query that fails for want of rows hears from its sources what is gone, or opens again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onceflow.contract.source import Source
from onceflow.errors import OnceflowError, OutOfRange, PlanChanged, ServerSilent
from onceflow.protocol.home import JobFolder
from onceflow.protocol.source_positions import SourcePositions

FAILURE = OutOfRange("partitions are gone")
EXACT = OutOfRange("offsets 5 to 6 are gone")
SILENT = ServerSilent("no answer")


class Blind(Source):
    def stream(self, spark: Any, name: str) -> Any: ...


class Looks(Blind):
    def __init__(self, finds: OnceflowError | None = None) -> None:
        self.finds = finds

    def check(self, offset: Any) -> bool:
        if self.finds is not None:
            raise self.finds
        return True


@pytest.mark.parametrize(
    ("sources", "end", "reason"),
    [
        ({"a": Looks(EXACT)}, {"a": 1}, EXACT),
        ({"a": Looks(SILENT)}, {"a": 1}, SILENT),  # it could not look: later it may
        ({"a": Blind()}, {"a": 1}, FAILURE),
        ({"a": Looks(), "b": Blind()}, {"a": 1, "b": 1}, FAILURE),  # it may be b that misses rows
        ({"a": Looks()}, {"a": 1, "own": 1}, FAILURE),  # a DataFrame of the author's own
        ({"a": Looks()}, {}, FAILURE),
        ({"a": Looks(), "b": Blind()}, {"a": 1}, None),
        ({"a": Looks()}, {"a": None}, None),
    ],
)
def test_what_is_missing_is_final_and_what_is_not_is_tried_again(
    tmp_path: Path,
    sources: dict[str, Source],
    end: dict[str, Any],
    reason: OnceflowError | None,
) -> None:
    positions = SourcePositions(sources, JobFolder(tmp_path, "shop").query("lineage", "out"))
    found = positions.find_gone_rows(end, FAILURE)
    if reason is not None:
        assert found is reason
    else:
        assert type(found) is PlanChanged
        assert found.retryable
        assert FAILURE.message in found.message
