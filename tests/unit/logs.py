"""Logs that tests make, rows for them, what readers get, and files that are damaged."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow.log import EmbeddedLog
from onceflow.log.segments import _crc32

SCHEMA = "id long, name string"
TIME = 1_800_000_000_000_000  # microseconds since 1970: when tests that set the clock begin


def make(path: Path, **facts: Any) -> EmbeddedLog:
    return EmbeddedLog.create(path, facts.pop("schema", SCHEMA), **facts)


def rows(ids: Iterable[int]) -> pa.Table:
    known = list(ids)
    return pa.table({"id": pa.array(known, pa.int64()), "name": [f"name {n}" for n in known]})


def table(log: EmbeddedLog, *args: Any, **settings: Any) -> pa.Table:
    """What a reader gets, with offsets."""
    batches = list(log.read(*args, **settings))
    return pa.Table.from_batches(batches) if batches else pa.table({})


def ids(log: EmbeddedLog, *args: Any) -> list[int]:
    """The ids that a reader gets, in the order of commits. Each row must be the one it was."""
    found = table(log, *args)
    if not found.num_rows:
        return []
    known = found.column("id").to_pylist()
    assert found.column("name").to_pylist() == [f"name {n}" for n in known]
    return list(known)


def placed(log: EmbeddedLog, *args: Any) -> dict[tuple[int, int], int]:
    """(partition, offset) -> id."""
    found = table(log, *args)
    if not found.num_rows:
        return {}
    places = zip(
        found.column("_partition").to_pylist(), found.column("_offset").to_pylist(), strict=True
    )
    known = dict(zip(places, found.column("id").to_pylist(), strict=True))
    assert len(known) == found.num_rows, "an offset is there twice"
    return known


def segment_files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.glob("partition=*/*")}


def committed_files(log: EmbeddedLog) -> set[str]:
    return {file["path"] for commit in log.commit_log.published() for file in commit["files"]}


def commit_names(path: Path) -> list[str]:
    return sorted(name.name for name in (path / "_commits").iterdir())


def manifest_names(path: Path) -> list[str]:
    return sorted(name.name for name in (path / "_manifests").glob("*"))


def named_manifests(log: EmbeddedLog) -> set[str]:
    """The manifests that a reader of the whole log reads."""
    found: set[str] = set()
    left = list(log.view.manifests)
    while left:
        name = left.pop()["name"]
        found.add(name)
        left += log.commit_log.read_manifest(name).get("manifests", ())
    return found


def unused_files(log: EmbeddedLog) -> set[str]:
    """What is in the folder and nobody will ever ask for."""
    root = log.path
    strange = segment_files(root) - committed_files(log)
    strange |= {str(f.relative_to(root)) for f in (root / "_appending").glob("*")}
    return strange | {str(f.relative_to(root)) for f in root.rglob(".put-*")}


class Clock:
    """Stands still until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = TIME
        monkeypatch.setattr("time.time_ns", lambda: self.now * 1000)

    def tick(self, microseconds: int = 1_000_000) -> int:
        self.now += microseconds
        return self.now


# ---------------------------------------------------------------- damage


def damaged(path: Path, *, bits: int, step: int = 1) -> Iterator[str]:
    """Every way in which a file can be damaged; whole again afterwards. Says which it is."""
    data = path.read_bytes()
    ways = itertools.chain(
        ((f"cut to {size}", data[:size]) for size in {0, 1, len(data) // 2, len(data) - 1}),
        ((f"{more!r} more", data + more) for more in (b"\n", b"\0", b"x" * 100)),
        (
            (f"bit {bit} of byte {at}", _flipped(data, at, bit))
            for at in range(0, len(data), step)
            for bit in range(0, 8, 8 // bits)
        ),
    )
    try:
        for how, changed in ways:
            path.write_bytes(changed)
            forget_checksums()
            yield how
        path.unlink()
        yield "missing"
    finally:
        path.write_bytes(data)
        forget_checksums()


def _flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def forget_checksums() -> None:
    """A file that is written twice in a moment looks the same to who has read it."""
    _crc32.cache_clear()
