"""Manifests: which rows of which runs are the state at the end of an epoch.

Manifests and runs never change, so an epoch that runs again from an older manifest reads the same
state as the first time, whatever was written since.

Within a key group the runs have an order of age, and the newest row of a key counts. A run serves
a group until it is merged into another run, which serves the group from then on. The rows of the
first run stay in its file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.errors import Damaged
from onceflow.store.posix import replace_file, seal, unseal

_KIND, _SUBJECT = "state-manifest", "keyed state"
_HINT = "restore a savepoint, or roll back to another epoch; nothing was computed from the file"


SUFFIX = ".arrow"


@dataclass(frozen=True)
class Run:
    """What a manifest says about one file of the folder."""

    name: str
    rows: int
    bytes: int
    crc32: int
    born: int  # the epoch of its newest row
    first: int  # the first group of its rows
    counts: tuple[int, ...]  # rows of that group and of the following ones
    timers: Mapping[str, int | None]  # the earliest time in each timer column

    def count(self, group: int) -> int:
        at = group - self.first
        return self.counts[at] if 0 <= at < len(self.counts) else 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "counts": list(self.counts)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Run:
        return cls(**{**body, "counts": tuple(body["counts"])})


def find_earliest(times: Iterable[int | None]) -> int | None:
    return min((time for time in times if time is not None), default=None)


@dataclass(frozen=True)
class Entry:
    """A run and the groups that it serves."""

    run: Run
    serves: tuple[range, ...]

    def __contains__(self, group: int) -> bool:
        return any(group in part for part in self.serves)


@dataclass(frozen=True)
class MergeResult:
    """A run that replaces others in some groups. None: none of their rows were left."""

    run: Run | None
    groups: range
    inputs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "run": None if self.run is None else self.run.to_json(),
            "groups": [self.groups.start, self.groups.stop], "inputs": list(self.inputs),
        }  # fmt: skip

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> MergeResult:
        run = None if body["run"] is None else Run.from_json(body["run"])
        return cls(run, range(*body["groups"]), tuple(body["inputs"]))


@dataclass(frozen=True)
class Manifest:
    """The state at the end of `epoch`. The entries are newest first, in every group."""

    epoch: int
    groups: int
    entries: tuple[Entry, ...] = ()

    def stack(self, group: int) -> list[Run]:
        """The runs that serve a group, newest first."""
        return self.stacks(range(group, group + 1))[0]

    def stacks(self, groups: range) -> list[list[Run]]:
        """The runs that serve each of these groups, newest first."""
        found: list[list[Run]] = [[] for _ in groups]
        for entry in self.entries:
            for part in entry.serves:
                for group in range(max(part.start, groups.start), min(part.stop, groups.stop)):
                    found[group - groups.start].append(entry.run)
        return found

    def run_names(self) -> set[str]:
        return {entry.run.name for entry in self.entries}

    def counts(self) -> list[int]:
        """The rows of each group in its runs, with older versions and tombstones."""
        found = [0] * self.groups
        for entry in self.entries:
            for group in _iterate(entry.serves):
                found[group] += entry.run.count(group)
        return found

    def bytes(self) -> int:
        """The size of all files of the state."""
        return sum(entry.run.bytes for entry in self.entries)

    def advance(
        self, epoch: int, added: Iterable[Run | None], compacted: Iterable[MergeResult] = ()
    ) -> Manifest:
        """The state after an epoch whose tasks added and merged these runs.

        No two tasks share a group. `ValueError` for a merge that would change which row counts: its
        inputs must follow each other in age in each of its groups.
        """
        entries = [
            Entry(run, _to_ranges(run.first + i for i, rows in enumerate(run.counts) if rows))
            for run in added
            if run is not None
        ]
        entries += self.entries
        together: dict[str | None, list[MergeResult]] = {}
        for merged in compacted:
            name = None if merged.run is None else merged.run.name
            together.setdefault(name, []).append(merged)
        for parts in together.values():
            entries = _replace(entries, parts)
        return Manifest(epoch, self.groups, tuple(entries))

    # ------------------------------------------------------------ as a file

    def to_json(self) -> dict[str, Any]:
        entries = [
            {"run": e.run.to_json(), "serves": [[part.start, part.stop] for part in e.serves]}
            for e in self.entries
        ]
        return {"epoch": self.epoch, "groups": self.groups, "entries": entries}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Manifest:
        entries = (
            Entry(Run.from_json(e["run"]), tuple(range(*part) for part in e["serves"]))
            for e in body["entries"]
        )
        return cls(body["epoch"], body["groups"], tuple(entries))

    def write(self, folder: Path, name: str) -> int:
        """Write it durably and return the checksum of the file, for `read`."""
        data = seal(_KIND, _SUBJECT, self.to_json())
        replace_file(folder / name, data)
        return zlib.crc32(data)

    @classmethod
    def read(cls, path: Path, crc32: int | None = None) -> Manifest:
        """`Damaged` if the file is missing or is not the one that was written."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise Damaged(f"{path} is missing", hint=_HINT) from None
        if crc32 is not None and zlib.crc32(data) != crc32:
            raise Damaged(f"{path} is damaged or is of another epoch", hint=_HINT)
        try:
            body = unseal(data, _KIND, _SUBJECT, str(path))
        except Damaged as error:
            raise Damaged(error.message, hint=_HINT) from None
        return cls.from_json(body)


def _replace(entries: list[Entry], parts: Sequence[MergeResult]) -> list[Entry]:
    """Put a merged run where its age is right in each of its groups."""
    newest, oldest = 0, len(entries)
    replaced: dict[str, set[int]] = {}
    for part in parts:
        for group in part.groups:
            serving = [i for i, entry in enumerate(entries) if group in entry]
            at = [n for n, i in enumerate(serving) if entries[i].run.name in part.inputs]
            if len(at) != len(part.inputs) or at[-1] - at[0] + 1 != len(at):
                raise ValueError(
                    f"group {group}: {', '.join(part.inputs)} do not follow each other in age"
                )
            newest = max(newest, serving[at[0] - 1] + 1 if at[0] else 0)
            oldest = min(oldest, (*serving, len(entries))[at[-1] + 1])
            for name in part.inputs:
                replaced.setdefault(name, set()).add(group)
    left = [_stop_serving(entry, replaced.get(entry.run.name, set())) for entry in entries]
    run = parts[0].run
    if run is not None:
        if newest > oldest:
            raise ValueError(f"no age of {run.name} is right in all of its groups")
        groups = {group for part in parts for group in part.groups if run.count(group)}
        left.insert(newest, Entry(run, _to_ranges(groups)))
    return [entry for entry in left if entry.serves]


def _stop_serving(entry: Entry, groups: set[int]) -> Entry:
    if not groups:
        return entry
    return Entry(
        entry.run, _to_ranges(group for group in _iterate(entry.serves) if group not in groups)
    )


def _iterate(parts: Iterable[range]) -> Iterator[int]:
    for part in parts:
        yield from part


def _to_ranges(groups: Iterable[int]) -> tuple[range, ...]:
    found: list[range] = []
    for group in sorted(groups):
        if found and found[-1].stop == group:
            found[-1] = range(found[-1].start, group + 1)
        else:
            found.append(range(group, group + 1))
    return tuple(found)
