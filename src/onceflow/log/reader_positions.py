"""The readers of a log, and the offsets that each still needs: retention stops there.

A query that reads a log keeps one small file in it. Its offsets only grow, so a file that is out of
date keeps too many rows, never too few.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.errors import DiskFull, JobError
from onceflow.log.commits import Offsets
from onceflow.store.posix import LocalStore, replace_file, seal, unseal

_FOLDER = "_readers"
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Reader:
    """A query that may still go back to `needs`, as of `at`."""

    name: str  # job/query/source
    lineage: str
    home: str
    needs: Offsets
    at: str

    @property
    def file(self) -> str:
        return f"{self.name.replace('/', ',')}-{self.lineage[:8]}.json"


def hold_offsets(
    end: Mapping[str, Any],
    oldest: Mapping[str, Any],
    *,
    query: str,
    lineage: str,
    home: str,
    at: str,
) -> None:
    """Note what a query still needs in each log that it reads. `end`, `oldest`: source -> the
    offset that it has reached, and the oldest one to which it may go back.

    This has no effect on a log that is read-only here; its owner must know who reads it.
    """
    for source, offset in end.items():
        if isinstance(offset, dict) and {"log", "path", "next"} <= offset.keys():
            needs = oldest[source]["next"] if source in oldest else [0] * len(offset["next"])
            reader = Reader(f"{query}/{source}", lineage, home, needs, at)
            _hold_if_possible(Path(offset["path"]), reader)


def _hold_if_possible(log: Path, reader: Reader) -> None:
    if not (log / "_commits").is_dir():
        return  # it was moved; the source reports that
    try:
        hold(log, reader)
    except (DiskFull, OSError) as error:
        read_only = isinstance(error, OSError) and error.errno in _DENIED
        # A note that is out of date keeps too many rows, never too few.
        if not read_only and not (log / _FOLDER / reader.file).exists():
            raise


def hold(log: str | os.PathLike[str], reader: Reader) -> None:
    body = {**vars(reader)}
    path = Path(log, _FOLDER, reader.file)
    replace_file(path, seal("log reader", reader.name, body))


def readers(log: str | os.PathLike[str]) -> list[Reader]:
    store = LocalStore(log)
    found = []
    for name in sorted(store.list(_FOLDER)):
        data = store.read(f"{_FOLDER}/{name}")
        if data is not None:
            where = store.where(f"{_FOLDER}/{name}")
            found.append(Reader(**unseal(data, "log reader", None, where)))
    return found


def forget(log: str | os.PathLike[str], name: str, *, dry_run: bool = False) -> list[Reader]:
    """Stop keeping rows for the readers of that name (a job, or job/query/source)."""
    gone = [r for r in readers(log) if name in (r.name, r.name.partition("/")[0])]
    if not gone:
        names = ", ".join(r.name for r in readers(log)) or "none"
        raise JobError(f"no reader is called {name}", hint=f"name one of its readers: {names}")
    for reader in [] if dry_run else gone:
        LocalStore(log).delete(f"{_FOLDER}/{reader.file}")
    return gone
