"""The state of a log that its commits add up to: schema, offsets in use, and removed rows.

| commit | meaning |
|---|---|
| create | id, schema, partitions, key, retention |
| fence, epoch | the ledger of a job's output; an epoch adds segments |
| append | segments that a producer added without a job |
| trim | readers can no longer read below these offsets |
| clean | the files below these offsets are removed |
| drop | an output took rows back: these segments are gone; their offsets are never used again |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onceflow.errors import Damaged
from onceflow.folders.commit_log import Commit, FolderState, Reference

Offsets = list[int]  # partition -> offset


@dataclass(frozen=True)
class Segment:
    """A Parquet file with consecutive rows of one partition."""

    path: str  # relative to the log
    partition: int
    first: int  # offset of its first row
    rows: int
    bytes: int
    crc32: int
    commit: int
    at: int  # microseconds since 1970: `_appended_at` of its rows

    @property
    def end(self) -> int:
        return self.first + self.rows


@dataclass(frozen=True)
class Facts:
    """The settings with which a log is created."""

    id: str
    schema: str  # Spark's JSON
    partitions: int
    key: tuple[str, ...]
    retain_ms: int | None = None
    retain_bytes: int | None = None


@dataclass(frozen=True)
class Dropped:
    """Rows that an output took back, by commit `commit`."""

    commit: int
    partition: int
    first: int
    end: int


class LogState(FolderState):
    """The commits of a log as far as they were read."""

    facts: Facts | None
    next: Offsets
    low: Offsets  # the earliest offsets that can be read
    cleaned: Offsets  # files below are removed
    at: int  # of the newest commit; never goes back, even if a clock does
    created_at: int
    appended_at: int  # of the newest commit that added rows; 0 if none did
    bytes: int  # of all segments ever added
    removed: int  # bytes of the segments whose files are removed
    trimmed_at: int  # of the newest commit from which a trim removed rows
    forgotten: int  # manifests may no longer list commits up to here: their rows were trimmed
    dropped: list[Dropped]

    def restarted(self, body: dict[str, Any]) -> None:
        said = body.get("facts")
        self.facts = Facts(**{**said, "key": tuple(said["key"])}) if said else None
        partitions = self.facts.partitions if self.facts else 0
        self.next = list(body.get("next", [0] * partitions))
        self.low = list(body.get("low", [0] * partitions))
        self.cleaned = list(body.get("cleaned", [0] * partitions))
        self.at, self.trimmed_at = body.get("at", 0), body.get("trimmed_at", 0)
        self.created_at, self.appended_at = body.get("created_at", 0), body.get("appended_at", 0)
        self.bytes, self.removed = body.get("bytes", 0), body.get("removed", 0)
        self.forgotten = body.get("forgotten", 0)
        self.dropped = [Dropped(*drop) for drop in body.get("dropped", ())]

    def applied(self, number: int, entry: Commit) -> None:
        if entry["type"] == "create" and number == 1:
            at = entry["at"]
            self.restarted({"facts": entry["facts"], "at": at, "created_at": at})
            return
        if self.facts is None or entry["of"] != self.facts.id:
            raise Damaged("it belongs to another log", hint="put back the commits of this log")
        following = self._following(entry)
        self.at = max(self.at, entry.get("at", 0))
        self.removed += entry.get("removed", 0)
        match entry["type"]:
            case "trim":
                self.low = later(self.low, entry["below"])
                self.trimmed_at = max(self.trimmed_at, entry["last"])
            case "clean":
                self.cleaned = later(self.cleaned, entry["below"])
                self.dropped = [d for d in self.dropped if d.end > self.cleaned[d.partition]]
            case "drop":
                self.dropped += [Dropped(number, *drop) for drop in entry["drop"]]
        if entry.get("files"):
            self.appended_at = self.at
        self.next = following
        self.bytes += sum(file["bytes"] for file in entry.get("files", ()))

    def _following(self, entry: Commit) -> Offsets:
        """The next offsets after a commit, which must begin where the log ends."""
        following = list(self.next)
        for file in entry.get("files", ()):
            partition = file["partition"]
            if file["first"] != following[partition]:
                raise Damaged(
                    f"it begins at offset {file['first']} of partition {partition}, but "
                    f"{following[partition]} follows: commits are missing or swapped",
                    hint="put the commits of the log back from a backup",
                )
            following[partition] += file["rows"]
        return following

    def rolled(self) -> dict[str, Any]:
        assert self.facts is not None
        # Nobody can read below `cleaned`, so manifests of older rows are dropped.
        named = [ref for ref in self.manifests if not covers(self.cleaned, ref["next"])]
        gone = [ref["last"] for ref in self.manifests if ref not in named]
        self.manifests, self.forgotten = named, max([self.forgotten, *gone])
        return {
            "facts": {**vars(self.facts), "key": list(self.facts.key)},
            "next": self.next, "low": self.low, "cleaned": self.cleaned, "at": self.at,
            "created_at": self.created_at, "appended_at": self.appended_at,
            "bytes": self.bytes, "removed": self.removed, "trimmed_at": self.trimmed_at,
            "forgotten": self.forgotten,
            "dropped": [[d.commit, d.partition, d.first, d.end] for d in self.dropped],
        }  # fmt: skip

    def stamp(self) -> str:
        return self.facts.id if self.facts else ""

    def kept(self, number: int, entry: Commit) -> Commit:
        owner: Commit = {k: entry[k] for k in ("output", "lineage", "epoch") if k in entry}
        return {"commit": number, "at": entry["at"], "files": entry["files"], **owner}

    def summary(self) -> dict[str, Any]:
        return {"next": list(self.next), "at": self.at, "bytes": self.bytes}

    def rows(self, partition: int) -> int:
        """How many rows of a partition can be read."""
        low = self.low[partition]
        dropped = [d for d in self.dropped if d.partition == partition and d.end > low]
        return self.next[partition] - low - sum(d.end - max(d.first, low) for d in dropped)

    def has_dropped(self, segment: Segment) -> bool:
        return any(
            drop.partition == segment.partition and drop.first <= segment.first < drop.end
            for drop in self.dropped
        )


def covers(offsets: Offsets, others: Offsets) -> bool:
    """Is `offsets` at or behind `others` in every partition?"""
    return all(mine >= other for mine, other in zip(offsets, others, strict=True))


def later(offsets: Offsets, others: Offsets) -> Offsets:
    """The later offset of each partition."""
    return [max(pair) for pair in zip(offsets, others, strict=True)]


def segments_of(commit: Commit) -> list[Segment]:
    return [
        Segment(
            path=file["path"],
            partition=file["partition"],
            first=file["first"],
            rows=file["rows"],
            bytes=file["bytes"],
            crc32=file["crc32"],
            commit=commit["commit"],
            at=commit["at"],
        )
        for file in commit["files"]
    ]


def above(start: Offsets) -> Any:
    """For `CommitLog.published`: selects the manifests that have rows at or above `start`."""

    def wanted(reference: Reference) -> bool:
        return not covers(start, reference["next"])

    return wanted
