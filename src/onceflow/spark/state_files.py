"""The files that hold the state of an epoch, found without Spark.

A store (of one operator, partition and name) at version v with id x is a snapshot, `v_x.zip`, which
names files that it shares with other snapshots (`SSTs/…`, `logs/…`), or a changelog,
`v_x.changelog`, on top of the version before. The head of a changelog lists versions and ids back
to the snapshot that was due before it. Spark may have failed to write that snapshot, so the walk
continues until it finds one, or to the first version.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from onceflow.errors import CheckpointRefused
from onceflow.spark.file_source_log import names_in

PARTS = ("SSTs", "logs")  # folders with files that the snapshots of a store share
_MAGIC = b"LZ4Block"
_BLOCK = struct.Struct("<Biii")  # token, compressed, original, checksum: Spark's lz4 stream
_RAW, _LZ4 = 0x10, 0x20
_LONGEST_HEAD = 1 << 18  # bytes, compressed; `writeUTF` writes at most 64 KiB
_WITH_LINEAGE = ("v2", "v3")
_RESTORE = "put the checkpoint back from a backup of the home"


def stores_of(partition: Path) -> list[Path]:
    """The folders of a partition's stores: the partition itself, or one for each name (joins have
    four)."""
    folders = [
        partition / name
        for name in names_in(partition)
        if name not in ("_metadata", *PARTS) and (partition / name).is_dir()
    ]
    return folders or [partition]


def files_of(store: Path, version: int, state_id: str) -> list[Path]:
    """All files from which Spark loads version `version` with that id."""
    return list(walk_files(store, version, state_id))


def walk_files(store: Path, version: int, state_id: str) -> Iterator[Path]:
    """The same files, newest first. Yields each file before it reads the file for the older ones
    that it needs."""
    at = (version, state_id)
    while True:
        snapshot, changelog = (store / f"{at[0]}_{at[1]}{end}" for end in (".zip", ".changelog"))
        if snapshot.exists():
            yield from _with_checksum(snapshot)
            yield from _shared(store, snapshot)
            return
        if not changelog.exists():
            raise CheckpointRefused(f"state {changelog} is missing", hint=_RESTORE)
        yield from _with_checksum(changelog)
        if at[0] == 1:
            return
        before = versions_before(changelog)
        if not before or before[-1][0] != at[0] - 1:
            raise _damaged(changelog)
        at = before[-1]


def versions_before(changelog: Path) -> list[tuple[int, str]]:
    """Versions and ids before this changelog, oldest first, from the snapshot that was due."""
    try:
        with changelog.open("rb") as file:
            head = _Head(file.read(_LONGEST_HEAD))
        kind = head.text()
        if kind not in _WITH_LINEAGE:
            raise _damaged(changelog)
        entries = json.loads(head.text())
        return sorted((int(e["version"]), str(e["checkpointUniqueId"])) for e in entries)
    except (ValueError, KeyError, TypeError, struct.error, OSError):
        raise _damaged(changelog) from None


class _Head:
    """The first bytes of a file in Spark's lz4 stream, decompressed as far as they are read."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._read = b""

    def text(self) -> str:
        """A text that Java's `DataOutputStream.writeUTF` wrote; these are plain ASCII."""
        (length,) = struct.unpack(">H", self._take(2))
        return self._take(length).decode("ascii")

    def _take(self, count: int) -> bytes:
        while len(self._read) < count:
            self._read += self._block()
        taken, self._read = self._read[:count], self._read[count:]
        return taken

    def _block(self) -> bytes:
        import pyarrow as pa

        begin = self._at + len(_MAGIC)
        if self._data[self._at : begin] != _MAGIC:
            raise ValueError("not an lz4 block")
        token, size, original, _ = _BLOCK.unpack_from(self._data, begin)
        first = begin + _BLOCK.size
        self._at = first + size
        held = self._data[first : self._at]
        if not original or len(held) != size:
            raise ValueError("the stream ends")
        if token & 0xF0 == _RAW:
            return held
        if token & 0xF0 != _LZ4:
            raise ValueError("unknown compression method")
        return bytes(pa.Codec("lz4_raw").decompress(held, original))


def _shared(store: Path, snapshot: Path) -> list[Path]:
    """The shared files that a snapshot names."""
    try:
        with zipfile.ZipFile(snapshot) as held:
            text = held.read("metadata").decode()
        names = json.loads(text.partition("\n")[2])
        files = [store / "SSTs" / file["dfsSstFileName"] for file in names["sstFiles"]]
        files += [store / "logs" / file["dfsLogFileName"] for file in names.get("logFiles") or ()]
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile, OSError):
        raise _damaged(snapshot) from None
    for file in files:
        if not file.exists():
            raise CheckpointRefused(f"{file}, part of {snapshot.name}, is missing", hint=_RESTORE)
    return files


def _with_checksum(path: Path) -> list[Path]:
    checksum = path.with_name(f"{path.name}.crc")
    return [path, checksum] if checksum.exists() else [path]


def _damaged(path: Path) -> CheckpointRefused:
    return CheckpointRefused(
        f"{path} is damaged, or has a format that this onceflow does not know", hint=_RESTORE
    )
