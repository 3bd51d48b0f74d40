"""The numbered commits of an output folder: its ledger, and which files are published.

    <folder>/_commits/<n>.json           fence(term), or epoch(position, files)
    <folder>/_commits/rollup-<n>.json    what the entries up to n came to; names manifests
    <folder>/_commits/manifest-*.json    the files of a range of entries; never changes

A reader takes the newest roll-up, the files of its manifests, and those of the entries above it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onceflow.errors import Damaged
from onceflow.sinks.ledger import Ledger, Position
from onceflow.storage import LocalStore, NumberedLog, seal, unseal

_MANIFEST = "files manifest"


def commit_log(path: Path) -> NumberedLog:
    return NumberedLog(LocalStore(path), "_commits", "files commit", "output folder")


class Folder:
    """What the commits of an output folder come to."""

    def __init__(self, *, keep_files: bool = False) -> None:
        self._keep_files = keep_files
        self.restart(0, None)

    def restart(self, position: int, roll_up: dict[str, Any] | None) -> None:
        body = roll_up or {}
        self.position = self.rolled_up = position
        self.owner: str = body.get("output", "")
        self.term: int = body.get("term", 0)
        self.token: str = body.get("token", "")
        self.at = Position(**body["at"]) if body.get("at") else None
        self.decision: str = body.get("decision", "")
        self.schema: str = body.get("schema", "")
        self.layout: str = body.get("layout", "")
        self.manifests: list[str] = list(body.get("manifests", ()))
        self.files: list[dict[str, Any]] = []

    def apply(self, number: int, entry: dict[str, Any]) -> None:
        self.position = number
        self.owner = entry["output"]
        self.term = max(self.term, entry["term"])
        if entry["type"] == "fence":
            self.token = entry["nonce"]
        else:
            self.at = Position(entry["lineage"], entry["epoch"])
            self.decision = entry["decision"]
            self.schema, self.layout = entry["schema"], entry["layout"]
            if self._keep_files:
                self.files += entry["files"]

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.term, self.at, self.decision)

    def roll_up(self) -> dict[str, Any]:
        at = {"lineage": self.at.lineage, "epoch": self.at.epoch} if self.at else None
        return {
            "output": self.owner, "term": self.term, "token": self.token, "at": at,
            "decision": self.decision, "schema": self.schema, "layout": self.layout,
            "manifests": self.manifests,
        }  # fmt: skip


def roll_up(log: NumberedLog, folder: Folder, *, every: int) -> None:
    """File lists go into manifests that never change, so a roll-up stays small."""
    if folder.position + 1 - folder.rolled_up < every:
        return
    if log.newest_roll_up() > folder.rolled_up:
        folder.restart(0, None)  # a paused driver finished its own in between
    log.catch_up(folder)
    first, number = folder.rolled_up + 1, folder.position
    files: list[dict[str, Any]] = []
    for n in range(first, number + 1):
        entry = log.entry(n)
        if entry is None:
            return  # somebody else rolled up: a successor of ours is at work
        files += entry.get("files", ())
    if log.covered(first):
        return
    name = f"manifest-{first:012d}-{number:012d}.json"
    log.store.put_if_absent(f"_commits/{name}", seal(_MANIFEST, name, {"files": files}))
    folder.manifests.append(name)
    folder.rolled_up = number
    log.roll_up(number, folder.roll_up())


def published_files(path: Path) -> list[dict[str, Any]]:
    """All published files: those of the manifests, then those of the entries."""
    log, folder = commit_log(path), Folder(keep_files=True)
    log.catch_up(folder)
    files: list[dict[str, Any]] = []
    for name in folder.manifests:
        data, where = log.store.read(f"_commits/{name}"), log.store.where(f"_commits/{name}")
        if data is None:
            raise Damaged(f"{where} is missing", hint="put it back from a backup")
        files += unseal(data, _MANIFEST, name, where)["files"]
    return files + folder.files


def refuse_other_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != size:
        says = "is missing" if found is None else f"has {found} bytes, published were {size}"
        raise Damaged(f"{path} {says}", hint="put the file back from a backup")


def data_files(root: Path) -> list[str]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(("_", "."))]
        here = Path(folder).relative_to(root)
        found += [str(here / name) for name in names if not name.startswith(("_", "."))]
    return found
