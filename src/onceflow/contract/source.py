"""The interface of a source: it returns a named streaming DataFrame."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from onceflow.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Keeps facts about a part that joins a source later; returns the facts that were kept first.
Keep = Callable[[str, dict[str, Any]], dict[str, Any]]


class Source(ABC):
    """Returns the same rows again for a range of offsets that was not decided yet."""

    on_bad: Any = "stop"  # or the sink for rows that cannot be parsed

    @abstractmethod
    def stream(self, spark: SparkSession, name: str) -> DataFrame:
        """The rows, as a plain streaming DataFrame whose source is called `name`."""

    def pin(self) -> dict[str, Any] | None:
        """The position at which a first start begins, if it changes with time ("latest")."""
        return None

    def pinned(self, pin: dict[str, Any], keep: Keep) -> Source:
        """This source, beginning at the position `pin`."""
        return self

    def remember(self, offset: Any) -> None:
        """Keep facts about new parts in `offset` that later starts need, before the epoch is
        decided. Called when an epoch up to `offset` is planned, and none of it is read yet."""

    def check(self, offset: Any) -> bool:
        """Raise an error if rows after `offset` (None: the beginning) are gone. Called when a query
        is opened, and when it has failed because rows are missing. Return False if this kind of
        source does not check."""
        return False

    def published(self, query: str, offset: Any) -> None:
        """Called when the query `job/query` has published all rows up to `offset`. Must not
        wait."""

    def settle(self) -> None:
        """Called when the job ends: do what `published` left for later."""

    def origin(self) -> dict[str, Any]:
        """Its kind and the place of its rows, for people and for joining jobs, without secrets."""
        path = getattr(self, "path", None)
        return {"kind": type(self).__name__.lower(), "place": None if path is None else str(path)}

    def rejected(self, spark: SparkSession, name: str) -> DataFrame:
        """The rows that cannot be parsed; only asked for if `on_bad` is a sink."""
        raise JobError(f"{type(self).__name__} has no rows to reject", hint='leave on_bad="stop"')


def start_position(start: Any) -> Any:
    """`start` in the form that goes through JSON: a word, {"offsets": […]} or {"at": …}."""
    if start in ("earliest", "latest"):
        return start
    if isinstance(start, dict):
        return {"offsets": [[partition, offset] for partition, offset in start.items()]}
    return {"at": _microseconds(start)}


def _microseconds(start: Any) -> int:
    if isinstance(start, str):
        try:
            start = datetime.fromisoformat(start)
        except ValueError:
            raise JobError(
                f"start={start!r} is not a place in a log",
                hint='use "earliest", "latest", {0: offset} or a time like "2026-11-15T10:00:00Z"',
            ) from None
    if not isinstance(start, datetime):
        raise JobError(f"start={start!r} is not a place in a log", hint='use "earliest"')
    start = start if start.tzinfo else start.replace(tzinfo=UTC)
    passed: timedelta = start - _EPOCH
    return passed // timedelta(microseconds=1)
