"""Files that other processes write, read again only when they have changed.

A file that changed less than 0.1 seconds ago is read once more the next time: two changes within
one tick of the file system's clock have the same time.

A number that is not finite, or too large for a float, is read as null: it is not JSON, and no chart
can draw it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_SETTLED = 100_000_000  # nanoseconds
_LONGEST = 8 * 2**20  # bytes of a file of lines that are read at once, from its end
_ANY = (-1, -1, -1)


class Changes:
    """Tells whether a file or a folder has changed since the last call of `any`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = _ANY

    def any(self) -> bool:
        found, settled = signature(self._path)
        changed = found != self._seen
        self._seen = found if settled else _ANY
        return changed

    def forget(self) -> None:
        self._seen = _ANY


def signature(path: Path) -> tuple[tuple[int, int, int] | None, bool]:
    """Inode, size and time of the file; and whether a further change would change them."""
    try:
        found = os.stat(path)
    except OSError:
        return None, True
    settled = time.time_ns() - found.st_mtime_ns > _SETTLED
    return (found.st_ino, found.st_size, found.st_mtime_ns), settled


class JsonFile:
    """A JSON file that its writer replaces as a whole. `body` is empty while it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path, self._changes = path, Changes(path)
        self.body: Row = {}

    def read(self) -> None:
        if self._changes.any():
            self.body = read_json(self._path) or {}


class JsonLinesFile:
    """A file of JSON lines that grows at its end. Its writer may replace it by a shorter one, and
    its last line may be incomplete. `take` gets each line once; `restart` is called before the
    lines of another file."""

    def __init__(
        self, path: Path, take: Callable[[Row], None], restart: Callable[[], None]
    ) -> None:
        self._path, self._take, self._restart = path, take, restart
        self._changes = Changes(path)
        self._inode = self._offset = -1

    def read(self) -> None:
        if not self._changes.any():
            return
        try:
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._restart()
                    self._inode = found.st_ino
                    self._offset = max(0, found.st_size - _LONGEST)
                file.seek(self._offset)
                data = file.read(_LONGEST)
        except OSError:
            self._restart()
            self._inode = self._offset = -1
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for row in parse_lines(data[:whole].splitlines()):
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
                self._take(row)  # unless it has another shape


def parse_lines(lines: Iterable[bytes]) -> Iterable[Row]:
    """The lines that are objects; a line that a crash cut off is none."""
    for line in lines:
        try:
            row = _DECODER.decode(str(line, "utf-8"))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def read_json(path: Path) -> Row | None:
    """None if the file is missing or unreadable, or is being written."""
    try:
        body = _DECODER.decode(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _whole(text: str) -> int | None:
    """Up to 18 digits, the usual case, need no check."""
    return int(text) if len(text) < 19 or _finite(text) is not None else None


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, parse_int=_whole)


def last_rows(path: Path, most: int) -> tuple[list[Row], int]:
    """The objects in the last `most` bytes of a file of lines, and the size of the file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read(most)
    except OSError:
        return [], 0
    lines = data.split(b"\n")
    return list(parse_lines(lines if size <= most else lines[1:])), size


def first_row(path: Path) -> Row:
    """The object in the first line of a file."""
    try:
        with open(path, "rb") as file:
            return next(iter(parse_lines([file.readline(2**16)])), {})
    except OSError:
        return {}


def names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
