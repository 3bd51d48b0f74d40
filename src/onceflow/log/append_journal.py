"""The segments that producers are writing, so that those of dead producers can be removed.

A producer locks a file of its own that lists the names of its segments, and removes the file when
it is done. A file without a lock belongs to a dead producer: of the segments in it, those that no
commit names are removed. A paused producer still holds its lock.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from onceflow.store.posix import make_dirs, translate_disk_full

if TYPE_CHECKING:
    from onceflow.log.log_reader import LogReader

_FOLDER = "_appending"


class AppendJournal:
    """Gives names to segments, and notes them until the segments are committed."""

    def __init__(self, log: Path, position: int) -> None:
        self._log = log
        self._position = position
        self._id = uuid.uuid4().hex
        self._names: list[str] = []
        self._kept = False

    def __enter__(self) -> AppendJournal:
        folder = self._log / _FOLDER
        self._path = folder / self._id
        with translate_disk_full(self._path):
            make_dirs(folder)
            while True:
                self._file = open(self._path, "wb", buffering=0)
                fcntl.flock(self._file, fcntl.LOCK_EX)
                if self._path.exists():  # else a sweep took it for a dead producer's
                    break
                self._file.close()
        try:
            self._note(str(self._position))
        except BaseException:
            self._file.close()
            raise
        return self

    def _note(self, line: str) -> None:
        data = f"{line}\n".encode()
        with translate_disk_full(self._path):
            while data:
                data = data[self._file.write(data) :]

    def name(self, partition: int) -> str:
        name = f"partition={partition}/{self._id}-{len(self._names):05d}.parquet"
        self._names.append(name)
        self._note(name)
        return name

    def keep(self) -> None:
        """The segments are committed."""
        self._kept = True

    def __exit__(self, *_: object) -> None:
        if self._kept:  # else `sweep` checks: the commit may exist although the put failed
            self._path.unlink(missing_ok=True)
        self._file.close()


def sweep(path: Path, log: LogReader) -> None:
    """Remove the segments of dead producers."""
    try:
        left = os.listdir(path / _FOLDER)
    except FileNotFoundError:
        return
    for name in left:
        journal = path / _FOLDER / name
        try:
            with open(journal, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file.fileno()), journal.stat()):
                    continue  # another producer has created a new one under this name
                _sweep_one(path, log, file.read().splitlines())
                journal.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError):
            continue  # its producer is alive, or was done meanwhile
        except ValueError:
            continue  # not the file of a producer


def _sweep_one(path: Path, log: LogReader, lines: list[str]) -> None:
    if not lines:
        return
    # Ignore a line that a full disk cut off: its segment was not begun.
    position, names = int(lines[0]), {name for name in lines[1:] if name.endswith(".parquet")}
    log.refresh()
    for commit in log.commit_log.remembered(lambda reference: reference["last"] > position):
        names -= {file["path"] for file in commit["files"]}
    for name in names:
        (path / name).unlink(missing_ok=True)
