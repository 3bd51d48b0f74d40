"""Producers at work on a log, so that what a dead one left can be removed.

A producer holds a lock on a file of its own in which the names of its segments stand, and removes
the file when it is done. A file without a lock is a dead producer's: the segments in it that no
commit names are removed. A paused producer still holds its lock.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from onceflow.storage import make_dirs

if TYPE_CHECKING:
    from onceflow.log.embedded import EmbeddedLog

_FOLDER = "_appending"


class Appending:
    """Hands out names for segments; removes what was written unless it was committed."""

    def __init__(self, log: Path, position: int) -> None:
        self._log = log
        self._position = position
        self._id = uuid.uuid4().hex
        self._names: list[str] = []
        self._kept = False

    def __enter__(self) -> Appending:
        folder = self._log / _FOLDER
        make_dirs(folder)
        self._path = folder / self._id
        while True:
            self._file = open(self._path, "w", encoding="utf-8")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if self._path.exists():  # else somebody took it for a dead producer's
                break
            self._file.close()
        print(self._position, file=self._file, flush=True)
        return self

    def name(self, partition: int) -> str:
        name = f"partition={partition}/{self._id}-{len(self._names):05d}.parquet"
        self._names.append(name)
        print(name, file=self._file, flush=True)
        return name

    def keep(self) -> None:
        """The segments are committed."""
        self._kept = True

    def __exit__(self, *_: object) -> None:
        if self._kept:  # else `sweep` looks: the commit may be there although putting it failed
            self._path.unlink(missing_ok=True)
        self._file.close()


def sweep(path: Path, log: EmbeddedLog) -> None:
    """Remove what dead producers left behind."""
    try:
        left = os.listdir(path / _FOLDER)
    except FileNotFoundError:
        return
    for name in left:
        journal = path / _FOLDER / name
        try:
            with open(journal, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _sweep_one(path, log, file.read().splitlines())
                journal.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError):
            continue  # alive, or done in between


def _sweep_one(path: Path, log: EmbeddedLog, lines: list[str]) -> None:
    if not lines:
        return
    position, names = int(lines[0]), set(lines[1:])
    log.refresh()
    for commit in log.commits.published(lambda reference: reference["last"] > position):
        names -= {file["path"] for file in commit["files"]}
    for name in names:
        (path / name).unlink(missing_ok=True)
