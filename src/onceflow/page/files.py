"""Files that somebody else writes, read again only when they have changed.

A file that changed less than a moment before we looked at it is read once more: two changes within
one tick of the file system's clock have the same time.

A number that is not finite, or that no float can hold, is read as null: nobody can draw it, and it
is not JSON.
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
_LONGEST = 8 * 2**20  # bytes of a file of lines that are read at once: the last ones
_ANY = (-1, -1, -1)


class Changes:
    """Has a file or a folder changed since it was asked last?"""

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
    """Which file is it, how large, of when; and whether a further change would show."""
    try:
        found = os.stat(path)
    except OSError:
        return None, True
    settled = time.time_ns() - found.st_mtime_ns > _SETTLED
    return (found.st_ino, found.st_size, found.st_mtime_ns), settled


class Document:
    """A JSON file that is replaced as a whole. `body` is None while it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path, self._changes = path, Changes(path)
        self.body: Row | None = None

    def read(self) -> Row | None:
        if self._changes.any():
            self.body = read_json(self._path)
        return self.body


class Lines:
    """A file of JSON lines that grows at its end, is trimmed by being replaced, and may end in
    half a line. `take` is told each line once; `restart`, that all begins anew."""

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
                self._take(row)  # unless it is of another shape


def parse_lines(lines: Iterable[bytes]) -> Iterable[Row]:
    """Those that are objects; a line that a crash cut through is not."""
    for line in lines:
        try:
            row = _DECODER.decode(str(line, "utf-8"))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def read_json(path: Path) -> Row | None:
    """None: it is not there, or not readable, or being written."""
    try:
        body = _DECODER.decode(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _whole(text: str) -> int | None:
    """One of up to 18 digits is the most usual, and needs no second look."""
    return int(text) if len(text) < 19 or _finite(text) is not None else None


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, parse_int=_whole)
