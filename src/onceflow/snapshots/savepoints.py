"""The savepoints of a job: cuts that a person asked for, self-contained, named and movable.

<home>/<job>/savepoints/<name>/manifest.json     what it is, and every file with size and hash
<home>/<job>/savepoints/<name>/<id>/<query>/…    the files of state, as they are in a checkpoint
<home>/<job>/savepoints/<name>/<id>/hold.json    the epochs after which decisions are kept for it
<home>/<job>/savepoints/.lock                    held by every command that creates one

A savepoint exists as soon as its manifest does, which is put last. A command that was killed leaves
a folder that no manifest names. The next one removes it, unless another command holds the lock,
because that one may be writing there. The job keeps running: a savepoint takes only files that
never change, by hard links, so it still has them when Spark's maintenance removes the originals. If
a file was removed before it was linked, the epoch was too old, and a newer one is taken.

Making one:

1. hold     record which decisions it will need: the driver keeps them when its log frees them
2. link     link the files of each query's last published epoch, sync them, check that none is
            missing
3. list     put the manifest with their hashes: the commit point
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onceflow.errors import CheckpointRefused, JobError, OnceflowError
from onceflow.faults.points import reach
from onceflow.protocol.holds import MANIFEST, Holds
from onceflow.protocol.home import JobFolder, Query, now
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.cut import Hashes, file_identity, last_cut, published_decisions, take_cut
from onceflow.snapshots.published_history import History
from onceflow.snapshots.savepoint import FORMAT, Savepoint
from onceflow.store.names import check_name
from onceflow.store.posix import LocalStore, seal, translate_disk_full
from onceflow.store.version import __version__

_TRIES = 5
_SHOWN = 10  # names, in an error
# The log frees no decision before four later ones are there: see `EpochLog.roll_up`.
_NEVER_FREED = 4


class Savepoints:
    """The savepoints of one job."""

    def __init__(self, folder: JobFolder) -> None:
        self._job = folder
        self._root = folder.folder / "savepoints"
        self._store = LocalStore(self._root)
        self._holds = Holds(folder)

    # -------------------------------------------------------------- reading

    def names(self) -> list[str]:
        return [name for name in sorted(self._store.list()) if self._exists(name)]

    def manifest(self, name: str) -> Path:
        """The file that makes a savepoint of its folder."""
        return self._root / name / MANIFEST

    def _exists(self, name: str) -> bool:
        return self.manifest(name).is_file()

    def read(self, name: str) -> Savepoint:
        if not self._exists(name):
            raise JobError(
                f"job {self._job.name} has no savepoint {name!r}", hint=self._nearest(name)
            )
        return Savepoint.at(self._root / name)

    def _nearest(self, name: str) -> str:
        known = self.names()
        if not known:
            return f"it has none yet: onceflow savepoint create {self._job.name}"
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            return f"did you mean {' or '.join(near)}?"
        more = f" and {len(known) - _SHOWN} more" * (len(known) > _SHOWN)
        return f"there are: {', '.join(known[:_SHOWN])}{more}"

    def find(self, name: str) -> Savepoint:
        """The savepoint of that name, or in the folder of that path if it was moved."""
        if not self._exists(name) and (os.sep in name or Path(name).is_dir()):
            return Savepoint.at(Path(name))
        return self.read(name)

    def all(self) -> list[tuple[str, Savepoint | OnceflowError]]:
        """Each with its name, in the order of creation; those that cannot be read come first."""
        found: list[tuple[str, Savepoint | OnceflowError]] = []
        for name in self.names():
            try:
                found.append((name, self.read(name)))
            except OnceflowError as error:
                found.append((name, error))
        return sorted(found, key=lambda one: _creation(one[1]))

    def readable(self) -> list[Savepoint]:
        """All that can be read, in the order of their creation."""
        return [found for _, found in self.all() if isinstance(found, Savepoint)]

    # -------------------------------------------------------------- creating

    def create(self, name: str | None, facts: dict[str, Any]) -> Savepoint:
        """Create a savepoint of the last published epoch of each query."""
        name = check_name("savepoint", name or now().replace(":", "").replace(".", "-"))
        self.refuse_taken(name)
        folder = self._root / name / uuid.uuid4().hex
        with self._holds.creating(), translate_disk_full(folder):
            try:
                # 1. hold
                queries = self._hold(name, folder)
                reach("savepoint.held")

                # 2. link
                others = self.readable()
                known = _hashes(others)
                copied = {q.name: self._copy(q, folder / q.name, known) for q in queries}
                reach("savepoint.copied")

                # 3. list
                lineage = queries[0].lineage
                histories = {query: History(self._job, query, lineage) for query in copied}
                for query, part in copied.items():
                    part["known"] = _known(histories[query], lineage, part["epoch"])
                number = 1 + max((other.number for other in others), default=0)
                body = {
                    "format": FORMAT, "job": self._job.name, "name": name, "at": now(),
                    "number": number,
                    "onceflow": __version__, **_made_by(histories), "lineage": lineage,
                    "folder": folder.name, "queries": copied, "starts": self._job.starts(), **facts,
                }  # fmt: skip
                manifest = f"{name}/{MANIFEST}"
                if not self._store.put_if_absent(manifest, seal("savepoint", name, body)):
                    self.refuse_taken(name)
                reach("savepoint.listed")
            except BaseException:
                if self._holds.folder_of(name) != folder.name:
                    _remove(folder)
                raise
        return self.read(name)

    def refuse_taken(self, name: str) -> None:
        if self._exists(name):
            raise JobError(f"savepoint {name!r} exists already", hint="choose another name")

    def _hold(self, name: str, folder: Path) -> list[Query]:
        """Record what this savepoint will need, so that no driver frees it meanwhile.

        A driver looks for holds after it has decided the epoch whose sweep frees something. So if
        that epoch was not decided yet when the hold was written, the driver keeps the decisions.
        Otherwise this holds a newer epoch.
        """
        while True:
            lineage = self._job.lineage()
            queries = [] if lineage is None else self._job.queries_of(lineage)
            before = {
                q.name: max((d.epoch for d in published_decisions(q)), default=-1) for q in queries
            }
            decided = [q for q in queries if before[q.name] >= 0]
            if not decided:
                raise JobError(
                    f"job {self._job.name} has not published an epoch yet", hint="let it run first"
                )
            self._holds.put(name, folder, {q.name: (q.lineage, before[q.name]) for q in queries})
            if all(_last_epoch(q) - before[q.name] < _NEVER_FREED for q in queries):
                return decided

    def _copy(self, query: Query, folder: Path, known: Hashes) -> dict[str, Any]:
        """Link a cut; take a newer one if files are removed before they are linked."""
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError, CheckpointRefused):
                cut = last_cut(query)
                assert cut is not None
                return take_cut(cut, folder, known)
        cut = last_cut(query)  # names the missing file, if it is still missing
        raise CheckpointRefused(
            f"files of {query.job}/{query.name} are removed again and again before they are "
            f"linked, last those of epoch {cut.decision.epoch if cut else '?'}",
            hint="try again while fewer epochs run; spark.sql.streaming.minBatchesToRetain says "
            "how many epochs Spark keeps",
        )

    # -------------------------------------------------------------- deleting

    def delete(self, name: str) -> None:
        """Remove a savepoint. Refused while a lineage depends on it."""
        self._refuse_needed(name)
        folder = self._holds.folder_of(name)
        self._store.delete(f"{name}/{MANIFEST}")  # from here on it is not there
        reach("savepoint.unlisted")
        if folder is not None:  # else it is damaged; a later `create` removes it
            _remove(self._root / name / folder)

    def _refuse_needed(self, name: str) -> None:
        if not self._exists(name):
            self.read(name)
        identity = self._holds.folder_of(name)
        for lineage in self._dependents():
            of = self._job.about(lineage).get("savepoint") or {}
            if of.get("id") == identity or (identity is None and of.get("name") == name):
                raise JobError(
                    f"lineage {lineage[:8]} of job {self._job.name} was restored from savepoint "
                    f"{name!r} and has published nothing yet",
                    hint=f"start the job once, or finish the restore; then delete {name!r}",
                )

    def _dependents(self) -> Iterator[str]:
        """Lineages that need the savepoint that they were restored from.

        A lineage needs it until it has published an epoch of its own: a restore that was killed
        runs again from it, the first start may find that the code does not fit, and epochs that run
        again without being published (`replay/`) may turn out to differ. Later the lineage has all
        files itself, and the job can go back to its own retained epochs or a newer savepoint.
        """
        known = self._job.lineages()
        for lineage in sorted(self._job.store.list("lineages")):
            if self._job.store.read(f"lineages/{lineage}/lineage.json") is None:
                continue  # its restore was killed before the lineage was recorded
            if lineage not in known:
                if not self._is_given_up(lineage):
                    yield lineage
            elif lineage == known[-1] and any(
                map(_has_published_nothing, self._job.queries_of(lineage))
            ):
                yield lineage

    def _is_given_up(self, lineage: str) -> bool:
        """Was its restore killed before the commit point, and has the job decided epochs since?"""
        for query in self._job.queries_of(lineage):
            origin = Origin.of(query.epoch_log().read())
            if origin is not None:
                last = self._job.query(origin.ended, query.name).epoch_log().read().last
                reached = max((target.epoch for target in origin.outputs.values()), default=-1)
                if last is not None and last.epoch > reached:
                    return True
        return False


def _creation(savepoint: Savepoint | OnceflowError) -> tuple[int, str]:
    """The order of creation: by number, because clocks can be set back. Savepoints from before
    there were numbers come first, by their times."""
    if not isinstance(savepoint, Savepoint):
        return -1, ""
    return savepoint.number, str(savepoint.body["at"])


def _hashes(savepoints: Iterable[Savepoint]) -> Hashes:
    """The hashes of files that savepoints share with the job: they need not be read again."""
    found = {}
    for savepoint in savepoints:
        for path, entry in savepoint.paths():
            with contextlib.suppress(FileNotFoundError):
                found[file_identity(path)] = str(entry["sha256"])
    return found


def _made_by(histories: Mapping[str, History]) -> dict[str, Any]:
    """What the driver that led last recorded: its Spark, its code's fingerprint, its outputs."""
    leaders = {query: history.leader() for query, history in histories.items()}
    led = max(leaders.values(), key=lambda leader: int(leader["term"]))
    outputs = {query: leader["outputs"] for query, leader in leaders.items()}
    return {"spark": led.get("spark"), "code": led.get("code"), "outputs": outputs}


def _known(history: History, lineage: str, epoch: int) -> dict[str, str]:
    """Output -> the lineage by which its target identifies the cut."""
    return {output: history.known_as(lineage, epoch, output) for output in history.targets()}


def _last_epoch(query: Query) -> int:
    last = query.epoch_log().read().last
    return -1 if last is None else last.epoch


def _has_published_nothing(query: Query) -> bool:
    """Has this query of a restored lineage published nothing of its own yet?"""
    log = query.epoch_log().read()
    origin, last = Origin.of(log), log.last
    if origin is None or last is None:
        return False
    return last.epoch <= origin.cut or query.to_replay(last.epoch + 1) is not None


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
