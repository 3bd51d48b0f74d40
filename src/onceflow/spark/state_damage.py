"""Find the file of Spark's state that is damaged, after Spark failed to load it.

Spark's error names no file. Spark writes a checksum file beside each changelog and snapshot; the
RocksDB tables that a snapshot names contain their own checksums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onceflow.errors import CheckpointRefused, Damaged
from onceflow.spark.state_files import stores_of, walk_files

_OF_STATE = re.compile(r"STATE_STORE|StateStore|[Rr]ocksDB|CHECKSUM|StackOverflowError")
_RESTORE = (
    "put the file back from a backup of the home, or go back to a savepoint: "
    "onceflow restore JOB SAVEPOINT"
)
_ENDS = (".zip", ".changelog")


def is_about_state(error: BaseException) -> bool:
    """Can the cause of this error be that Spark could not load state?"""
    return _OF_STATE.search(str(error)) is not None


def find_damage(
    spark: Any, checkpoint: Path, epoch: int, state: Mapping[str, list[list[str]]]
) -> Damaged | None:
    """The first damaged file of the state of `epoch`; None if all are whole. `state`: its ids."""
    try:
        for path in _files(checkpoint, epoch, state):
            if not _is_whole(spark._jvm, path):
                return Damaged(
                    f"{path} is damaged: its content is not what Spark wrote, and the state of "
                    f"epoch {epoch} needs it",
                    hint=_RESTORE,
                )
    except CheckpointRefused as unreadable:
        return Damaged(unreadable.message, hint=_RESTORE)
    return None


def _files(checkpoint: Path, epoch: int, state: Mapping[str, list[list[str]]]) -> Iterator[Path]:
    for operator, partitions in state.items():
        for partition, ids in enumerate(partitions):
            for store in stores_of(checkpoint / "state" / operator / str(partition)):
                for state_id in ids:
                    stem = store / f"{epoch + 1}_{state_id}"
                    if any(stem.with_name(stem.name + end).exists() for end in _ENDS):
                        yield from walk_files(store, epoch + 1, state_id)


def _is_whole(jvm: Any, path: Path) -> bool:
    checksum = path.with_name(f"{path.name}.crc")
    if path.suffix == ".crc":
        return _read_checksum(path) is not None
    if path.suffix == ".sst":
        return _is_whole_table(jvm, path)
    if not checksum.exists():
        return True
    return _read_checksum(checksum) == (path.stat().st_size, _crc32c(jvm, path))


def _read_checksum(path: Path) -> tuple[int, int] | None:
    """Size and CRC32C that Spark wrote; None if they are not readable."""
    try:
        body = json.loads(path.read_text())
        return int(body["mainFileSize"]), int(body["value"]) & 0xFFFFFFFF
    except (ValueError, KeyError, TypeError):
        return None


def _crc32c(jvm: Any, path: Path) -> int:
    """Compute the checksum in the JVM: Python's library has no CRC32C, and state may be large."""
    crc = jvm.java.util.zip.CRC32C()
    stream = jvm.java.util.zip.CheckedInputStream(jvm.java.io.FileInputStream(str(path)), crc)
    try:
        stream.transferTo(jvm.java.io.OutputStream.nullOutputStream())
    finally:
        stream.close()
    return int(crc.getValue()) & 0xFFFFFFFF


def _is_whole_table(jvm: Any, path: Path) -> bool:
    from py4j.protocol import Py4JJavaError

    jvm.org.rocksdb.RocksDB.loadLibrary()
    reader = jvm.org.rocksdb.SstFileReader(jvm.org.rocksdb.Options())
    try:
        reader.open(str(path))
        reader.verifyChecksum()
    except Py4JJavaError:  # a RocksDBException: Corruption
        return False
    finally:
        reader.close()
    return True
