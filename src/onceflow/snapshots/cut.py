"""The cut at the end of an epoch: find its files, take them, and check that none is missing."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.contract.staged_files import harden
from onceflow.errors import CheckpointRefused, DiskFull, JobError, OnceflowError
from onceflow.faults.points import reach
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import Query
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.checkpoint_view import ReadCheckpoint
from onceflow.spark.checkpoint import parse_offsets
from onceflow.spark.file_source_log import batches_in, is_file_offset
from onceflow.store.posix import make_dirs

Hashes = dict[tuple[int, int, int], str]  # of files, by `file_identity`
_OTHER = "take another savepoint"


@dataclass(frozen=True)
class Cut:
    """The end of one decided epoch of one query: all that a query needs to continue from there."""

    decisions: list[Decision]  # that of the cut, and the one before it
    sources: dict[str, list[str]]  # file source -> the entries of its log
    files: dict[str, Path]  # name in the checkpoint -> where it is

    @property
    def decision(self) -> Decision:
        return self.decisions[-1]


def last_cut(query: Query) -> Cut | None:
    """The cut at the end of the last published epoch. None if no epoch is published."""
    decisions = published_decisions(query)
    return _cut(query, decisions) if decisions else None


def cut_at(query: Query, epoch: int) -> Cut:
    """The cut at the end of an epoch. `JobError` if the query has not decided it."""
    decisions = [d for d in query.epoch_log().read().decisions if d.epoch <= epoch]
    if not decisions or decisions[-1].epoch != epoch:
        raise JobError(f"epoch {epoch} of {query.job}/{query.name} is not decided")
    return _cut(query, decisions)


def _cut(query: Query, decisions: list[Decision]) -> Cut:
    last, checkpoint = decisions[-1], ReadCheckpoint(query.folder)
    state = checkpoint.state_files(last.epoch, last.state) if last.state else []
    state = [*state, *_keyed_files(query.folder, last)]
    files = {str(path.relative_to(query.folder)): path for path in state}
    return Cut(decisions[-2:], checkpoint.source_lines(last), files)


def _keyed_files(folder: Path, decision: Decision) -> list[Path]:
    if not decision.keyed:
        return []
    from onceflow.protocol.keyed_runner import files_of  # loads Arrow

    return files_of(folder, decision)


def published_decisions(query: Query) -> list[Decision]:
    """The retained decisions that are certainly published, oldest first. Spark commits an epoch
    after it is published, and no epoch is decided before the one below it is published."""
    log = query.epoch_log().read()
    decisions, origin = log.decisions, Origin.of(log)
    if decisions:
        last = decisions[-1].epoch
        from_before = origin is not None and last <= origin.certain
        if not from_before and last not in ReadCheckpoint(query.folder).committed():
            return decisions[:-1]
    return decisions


def take_cut(cut: Cut, folder: Path, known: Hashes) -> dict[str, Any]:
    """Link the files of a cut into a savepoint. `FileNotFoundError` or `CheckpointRefused` if some
    have been removed."""
    place_files(cut, folder)
    part = {
        "epoch": cut.decision.epoch,
        "files": _listed(cut, folder, known),
        "sources": cut.sources,
        "decisions": [decision.to_json() for decision in cut.decisions],
    }
    refuse_incomplete(folder, part)
    return part


def place_files(cut: Cut, folder: Path) -> None:
    """Link the files of a cut into a folder, or copy them if links are not possible. When this
    returns, the files and the names of their folders are on the disk."""
    make_dirs(folder)
    left = [name for name, path in cut.files.items() if not _linked(path, folder / name)]
    if left:
        refuse_full_disk(sum(cut.files[name].stat().st_size for name in left), folder)
    for name in left:
        shutil.copyfile(cut.files[name], folder / name)
    reach("savepoint.linked")
    harden((folder / name for name in cut.files), folder, set())


def _listed(cut: Cut, folder: Path, known: Hashes) -> list[dict[str, Any]]:
    found = []
    for name in cut.files:
        path = folder / name
        digest = known.get(file_identity(path)) or sha256(path)
        found.append({"path": name, "bytes": path.stat().st_size, "sha256": digest})
    return found


def _linked(path: Path, target: Path) -> bool:
    """Link a file. False if it must be copied: the target is on another file system, or on one
    without links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def refuse_full_disk(needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFull(
            f"{needed:,} bytes must be copied to {folder}, whose file system has {free:,} left",
            hint="free some space there, or put savepoints/ on the file system of the home, where "
            "nothing is copied",
        )


def refuse_incomplete(root: Path, part: dict[str, Any]) -> None:
    """Refuse a query's part of a savepoint, in `root`, if its epoch needs more than it has."""
    try:
        decisions = [Decision.from_json(decision) for decision in part["decisions"]]
        last = decisions[-1]
        for decision in decisions:
            parse_offsets(decision.offsets, f"epoch {decision.epoch} of {root}")
        if last.epoch != part["epoch"]:
            raise ValueError(last.epoch)
        lines = {name: batches_in(entries) for name, entries in part["sources"].items()}
    except (KeyError, TypeError, ValueError, IndexError, OnceflowError) as error:
        raise CheckpointRefused(
            f"the decisions of {root} cannot be read: {type(error).__name__}: {error}", hint=_OTHER
        ) from None
    for name, offset in last.end.items():
        if is_file_offset(offset) and not set(range(offset["logOffset"] + 1)) <= lines.get(
            name, set()
        ):
            raise CheckpointRefused(
                f"the log of source {name} in {root} is not whole up to {offset['logOffset']}",
                hint=_OTHER,
            )
    taken = ReadCheckpoint(root).state_files(last.epoch, last.state) if last.state else []
    taken = [*taken, *_keyed_files(root, last)]
    gone = [path for path in taken if not path.is_file()]
    if gone:
        raise CheckpointRefused(
            f"{gone[0]} belongs to the state of epoch {last.epoch} and is missing", hint=_OTHER
        )
    named = {entry["path"] for entry in part["files"]}
    extra = sorted({str(path.relative_to(root)) for path in taken} - named)
    if extra:
        raise CheckpointRefused(
            f"{root / extra[0]} belongs to the state of epoch {last.epoch} and is not named in "
            "the manifest",
            hint=_OTHER,
        )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns
