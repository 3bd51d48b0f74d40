"""Holds: which decisions savepoints still need, so that the epoch log does not drop them.

<home>/<job>/savepoints/<name>/manifest.json     names the folder of the savepoint
<home>/<job>/savepoints/<name>/<id>/hold.json    the epochs whose later decisions it needs
<home>/<job>/savepoints/.lock                    held by every process that creates a savepoint

A process that was killed while it created or deleted a savepoint leaves a folder that no manifest
names. The next process that reads holds or creates a savepoint removes it, if the lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from onceflow.errors import Damaged, OnceflowError
from onceflow.protocol.home import JobFolder, Query
from onceflow.store.posix import LocalStore, make_dirs, replace_file, seal, unseal

MANIFEST = "manifest.json"
_HOLD = "hold.json"
_LOCK = ".lock"


class Holds:
    """The holds of the savepoints of one job."""

    def __init__(self, folder: JobFolder) -> None:
        self._root = folder.folder / "savepoints"
        self._store = LocalStore(self._root)

    def put(self, name: str, folder: Path, epochs: Mapping[str, tuple[str, int]]) -> None:
        """Hold the decisions of each query that follow its (lineage, epoch)."""
        held = {query: list(position) for query, position in epochs.items()}
        replace_file(folder / _HOLD, seal("savepoint hold", name, {"queries": held}))

    def needed_after(self, query: Query) -> int | None:
        """The epoch of the query after which savepoints need its decisions; None if none does.

        In doubt it holds too much: a savepoint of an earlier lineage needs all decisions of ours.
        """
        self._sweep_if_idle()
        found = []
        for path in self._root.glob(f"*/*/{_HOLD}"):
            try:
                held = unseal(path.read_bytes(), "savepoint hold", None, str(path))
            except FileNotFoundError:
                continue
            except Damaged:
                return -1
            for lineage, epoch in filter(None, [held["queries"].get(query.name)]):
                found.append(epoch if lineage == query.lineage else -1)
        return min(found, default=None)

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Keep every process from sweeping while the block runs. Sweep first if no other process
        creates a savepoint."""
        make_dirs(self._root)
        self._sweep_if_idle()
        with self._lock(fcntl.LOCK_SH):
            yield

    def folder_of(self, name: str) -> str | None:
        """The folder that the manifest names; None if no manifest can be read."""
        path = self._root / name / MANIFEST
        with contextlib.suppress(OnceflowError, OSError, KeyError):
            return str(unseal(path.read_bytes(), "savepoint", None, str(path))["folder"])
        return None

    @contextlib.contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        """Hold the lock. `BlockingIOError` if another process holds it."""
        with open(self._root / _LOCK, "ab") as file:
            fcntl.flock(file, kind)
            yield

    def _sweep_if_idle(self) -> None:
        busy_or_none = contextlib.suppress(BlockingIOError, FileNotFoundError)
        with busy_or_none, self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            self._sweep()

    def _sweep(self) -> None:
        """Remove the folders that a killed process has left."""
        for name in self._store.list():
            if not (self._root / name).is_dir():
                continue
            exists, keep = (self._root / name / MANIFEST).is_file(), self.folder_of(name)
            if exists and keep is None:
                continue  # a damaged manifest does not say which folder is in use
            for path in (self._root / name).iterdir():
                if path.is_dir() and path.name != keep:
                    shutil.rmtree(path, ignore_errors=True)
            self._store.sweep(name)
            if not exists:
                with contextlib.suppress(OSError):
                    (self._root / name).rmdir()
