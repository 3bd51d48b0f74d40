"""What a source is: something that gives a named streaming DataFrame."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from onceflow.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Remembers facts of a part that joins a source later; gives what was remembered of it first.
Keep = Callable[[str, dict[str, Any]], dict[str, Any]]


class Source(ABC):
    """Gives the same rows again for a range of offsets that was not decided yet."""

    on_bad: Any = "stop"  # or the sink that rows which cannot be parsed go to

    @abstractmethod
    def stream(self, spark: SparkSession, name: str) -> DataFrame:
        """The rows, as a plain streaming DataFrame whose source is called `name`."""

    def pin(self) -> dict[str, Any] | None:
        """Where a first start begins, if that is not the same a moment later ("latest")."""
        return None

    def pinned(self, pin: dict[str, Any], keep: Keep) -> Source:
        """This source, beginning where `pin` says."""
        return self

    def remember(self, offset: Any) -> None:
        """An epoch is planned up to `offset`, and nothing of it is read yet: what is new in it and
        must be known by later starts is kept before the epoch is decided."""

    def check(self, offset: Any) -> bool:
        """Refuse to go on from `offset` (None: from the beginning) if rows behind it are gone.
        Asked when a query is opened, and when it has failed for want of rows. False: a source of
        this kind does not look."""
        return False

    def published(self, query: str, offset: Any) -> None:
        """All rows up to `offset` are published by the query `job/query`. Must not wait."""

    def settle(self) -> None:
        """The job ends: what `published` left for later is done now, or never."""

    def origin(self) -> dict[str, Any]:
        """Its kind, and where its rows come from, for people and for joining jobs. No secrets."""
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
