"""What sinks share whose target is a folder with numbered commits: `Files` and `Log`.

Publishing renames the staged files to their final names and then puts one commit, which lists
them and carries the ledger entry. Rename moves the only copy, so a zombie's rename finds nothing;
whoever finds nothing looks at the final name.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from onceflow.commits import Commit, CommitLog
from onceflow.committables import verify
from onceflow.errors import PublishFailed
from onceflow.ledger import (
    Committable,
    Guarantee,
    Ledger,
    Outcome,
    Publication,
    staged_file_gone,
)
from onceflow.sinks.base import Sink, Staged
from onceflow.storage import fsync_dir, fsync_file, make_dirs, translate_disk_full
from onceflow.testing.faults import reach


class FolderSink(Sink):
    """Publishes each decided epoch exactly once, as files in a folder.

    It does not promise an order among the rows of an epoch.
    """

    guarantees = tuple(Guarantee)
    path: Path
    _commits: CommitLog
    _renames: bool | None = None  # from where rows are staged; None: not tried yet

    @abstractmethod
    def _final(self, publication: Publication, number: int) -> Path:
        """Where file `number` of the epoch goes, the same at every call."""

    @abstractmethod
    def _commit(self, publication: Publication) -> Commit:
        """What the commit of this epoch says beside the ledger, for the head as it stands."""

    @property
    def _copies(self) -> Path:
        """For what was staged on another file system. No other output has anything there."""
        return self.path / "_staged"

    def _entry(self, publication: Publication, number: int) -> dict[str, Any]:
        file = publication.files[number]
        path = self._final(publication, number).relative_to(self.path)
        return {"path": str(path), "rows": file.rows, "bytes": file.bytes, "crc32": file.crc32}

    # -------------------------------------------------------------- staging

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        make_dirs(self.path)
        files = staged.files
        if files and not self._can_rename_from(staged.folder):
            files = tuple(self._copy(file, staged.tag) for file in files)
        return files

    def _can_rename_from(self, folder: Path) -> bool:
        """Not between file systems, nor between two mounts of one: so it is tried."""
        if self._renames is None:
            name = f"_try-{uuid.uuid4().hex}"
            (folder / name).touch()
            try:
                os.rename(folder / name, self.path / name)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                self._renames = False
            else:
                self._renames = True
            for place in (folder, self.path):
                (place / name).unlink(missing_ok=True)
        return self._renames

    def _copy(self, file: Committable, tag: str) -> Committable:
        """Onto the target's own file system, so that publishing can rename it."""
        folder = self._copies / tag / file.partition  # Spark's names repeat in each
        make_dirs(folder)
        copy = folder / (os.path.basename(file.path) + ".staged")
        with translate_disk_full(copy):
            shutil.copyfile(file.path, copy)
            fsync_file(copy)
            fsync_dir(folder)
        return Committable(str(copy), file.rows, file.bytes, file.crc32, file.partition)

    def sweep(self, *, below_term: int) -> None:
        for folder in self._copies.glob("*-*-*-*"):
            if int(folder.name.rsplit("-", 2)[1]) < below_term:
                shutil.rmtree(folder, ignore_errors=True)
        self._commits.sweep()

    # -------------------------------------------------------------- ledger and publish

    def published(self, output: str) -> Ledger:
        self._commits.catch_up()
        return self._commits.commits.ledger(output)

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        return self._commits.fence(output, term=term, token=token, target=str(self))

    def publish(self, publication: Publication) -> Outcome:
        def make() -> Commit:
            self._move(publication)
            reach("folder.moved")
            return self._commit(publication)

        outcome = self._commits.publish(publication, str(self), make)
        if outcome is Outcome.PUBLISHED:
            reach("folder.committed")
            self._drop_copies(publication)
        return outcome

    def add(self, publication: Publication) -> None:
        """Every call brings files of its own, so that nothing hangs on those of another."""
        try:
            mine = replace(publication, files=tuple(map(_linked, publication.files)))
        except FileNotFoundError:
            return

        def make() -> Commit:
            self._move(mine)
            return {"type": "add", **self._commit(mine)}

        self._commits.append(make)
        self._drop_copies(publication)

    def _move(self, publication: Publication) -> None:
        """Rename moves the only copy, so who comes second finds nothing, and looks."""
        touched = set()
        for number, file in enumerate(publication.files):
            final = self._final(publication, number)
            with translate_disk_full(final):
                make_dirs(final.parent)
                touched.add(final.parent)
                try:
                    _bring(file, final)
                except FileNotFoundError:
                    if not final.exists():
                        raise staged_file_gone(str(self), file.path, publication.epoch) from None
                    verify(file, final)
                except PermissionError as error:
                    raise PublishFailed(
                        f"cannot write into {final.parent}: {error.strerror}",
                        hint="give the driver write access and start it again",
                    ) from error
            reach("folder.moved-one")
        for parent in touched:
            fsync_dir(parent)

    def _drop_copies(self, publication: Publication) -> None:
        """The folders of copies that were renamed away."""
        for file in publication.files:
            if Path(file.path).is_relative_to(self._copies):
                tag = Path(file.path).relative_to(self._copies).parts[0]
                shutil.rmtree(self._copies / tag, ignore_errors=True)


def _linked(file: Committable) -> Committable:
    path = Path(file.path)
    again = path.with_name(f"{uuid.uuid4().hex[:8]}-{path.name}")
    os.link(path, again)
    return replace(file, path=str(again))


def _bring(file: Committable, final: Path) -> None:
    """Rename; where it was another mount when the epoch was decided, what a rename does. Who comes
    second finds the final name."""
    try:
        os.rename(file.path, final)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    part = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
    try:
        shutil.copyfile(file.path, part)
        verify(file, part)
        fsync_file(part)
        os.replace(part, final)
    finally:
        part.unlink(missing_ok=True)
    Path(file.path).unlink(missing_ok=True)
