"""Import the state of a keyed step from files: the job continues with it in a new lineage.

It is a restore to the last decided epoch with another state of one step. Nothing that was published
changes, and the lineage that ends keeps its state, so a rollback returns to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onceflow.errors import JobError, LeaseHeld
from onceflow.protocol.home import JobFolder
from onceflow.protocol.keyed_runner import FOLDER
from onceflow.protocol.lease import Lease
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.cut import Cut, cut_at
from onceflow.snapshots.keyed_state_view import KeyedState
from onceflow.snapshots.published_history import History
from onceflow.snapshots.published_rows import OutputPlan
from onceflow.snapshots.restore import Restore
from onceflow.state.files import Tell
from onceflow.state.load import LoadResult, load
from onceflow.store.posix import make_dirs

_MAKING = "importing"  # in the folder of the job


class StateImport(Restore):
    """An import of the state of one step, planned and then run like any restore."""

    def plan(self) -> list[OutputPlan]:
        found = super().plan()
        for ending in self._queries:
            last = ending.log.last
            if last is None or last.nonce != ending.cut.decision.nonce:
                raise JobError(
                    f"{ending.query.job}/{ending.query.name} has decided epochs since the state "
                    "was read",
                    hint="stop the job, and import again",
                )
        again = [a for a in found if a.choice == "skip" and a.published > a.cut]
        if again:
            raise JobError(
                f"epochs {again[0].cut + 1} to {again[0].published} of {again[0].query} must "
                "still run again after a restore, and with another state their rows would differ",
                hint="start the job first, so that it runs them; or roll back to the same epoch "
                "with --published rewind, then import",
            )
        return found


@dataclass(frozen=True)
class PreparedImport:
    """An import that is ready: its state is written, and no lineage uses it yet."""

    restore: StateImport
    loaded: LoadResult
    state: KeyedState  # the one that it replaces


@contextlib.contextmanager
def prepared_import(
    folder: JobFolder, state: KeyedState, source: Path, tell: Tell = lambda _: None
) -> Iterator[PreparedImport]:
    """Prepare the import of the files at `source` for the step of `state`, which is that of the
    last decided epoch. Refuses rows and columns that do not fit. Changes nothing."""
    _refuse_running(folder)
    query, last, step = state.query, state.decision, state.step
    tag = f"{query.lineage[:8]}-{last.epoch}-{last.term}-{uuid.uuid4().hex[:8]}-imported"
    with _folder_for_one(folder.folder / _MAKING) as place:
        loaded = load(
            source,
            place,
            state.schema,
            state.record["groups"],
            prefix=tag,
            epoch=last.epoch,
            now=max(last.now, state.record["watermark"] or 0),
            scratch=place / "scratch",
            tell=tell,
        )
        crc = loaded.manifest.write(place, f"{tag}.json")
        named = {"manifest": f"{tag}.json", "crc": crc}
        cut = _with_state(cut_at(query, last.epoch), step, place, named, loaded)
        restore = StateImport(
            folder,
            {query.name: (query.lineage, cut)},
            {"": "skip", **_pending_choices(folder)},
            f"import of the state of {step} from {source}",
        )
        yield PreparedImport(restore, loaded, state)


def _with_state(
    cut: Cut, step: str, place: Path, named: Mapping[str, object], loaded: LoadResult
) -> Cut:
    """The same cut, with another state of the step."""
    record = {**cut.decision.keyed[step], **named, "next": loaded.earliest}
    decision = replace(cut.decision, keyed={**cut.decision.keyed, step: record})
    names = [str(named["manifest"]), *sorted(loaded.manifest.run_names())]
    inside = f"{FOLDER}/{step}/"
    files = {name: path for name, path in cut.files.items() if not name.startswith(inside)}
    files |= {inside + name: place / name for name in names}
    return Cut([*cut.decisions[:-1], decision], cut.sources, files)


def _pending_choices(folder: JobFolder) -> dict[str, str]:
    """The choices of a restore whose lineage has not been opened yet: they still hold."""
    found: dict[str, str] = {}
    for query in folder.queries():
        origin = Origin.of(query.epoch_log().read())
        if origin is not None:
            known = History(folder, query.name, query.lineage).targets()
            found |= {
                f"{query.name}/{output}": was.choice
                for output, was in origin.outputs.items()
                if output in known
            }
    return found


def _refuse_running(folder: JobFolder) -> None:
    """Refuse a running job before the work begins. The restore would refuse it only at the end."""
    lease = Lease(folder.folder / "lease", folder.name)
    holder = lease.holder()
    if holder is not None and lease.alive(holder):
        raise LeaseHeld(
            f"job {folder.name} is led by {holder}", hint=f"onceflow stop {folder.name}"
        )


@contextlib.contextmanager
def _folder_for_one(folder: Path) -> Iterator[Path]:
    """A folder for one import at a time. Removes what a killed import left.

    It need not survive a power cut: the restore links its files into the new lineage, and syncs
    them and their new names there, before it ends the old lineage."""
    make_dirs(folder)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(
                f"another import of job {folder.parent.name} is running",
                hint="wait until it has ended",
            ) from None
        for left in folder.iterdir():
            shutil.rmtree(left)
        place = folder / uuid.uuid4().hex
        place.mkdir()
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(lock)
