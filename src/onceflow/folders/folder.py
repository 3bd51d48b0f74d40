"""The base of sinks whose target is a folder with numbered commits: `Files` and `Log`.

Publishing renames the staged files to their final names and then puts one commit, which lists
them and carries the ledger entry. Rename moves the only copy, so a second driver finds no staged
file, and checks the final one.

Adding (the weaker guarantees) uses new links to the staged files, with a mark in their names:

1. mark    create `_adding/<mark>`, an empty file that names the driver's term
2. move    move the files to their final names
3. commit  put the commit, unless the ledger has a newer term; then remove the mark

So each start removes the files that an older term marked and did not commit: after the fence of the
newer term it never will.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from onceflow.contract.abilities import (
    CanAdd,
    CanCleanUp,
    CanPartition,
    CanRewind,
    CanStage,
    Staged,
)
from onceflow.contract.ledger import (
    Committable,
    Ledger,
    Outcome,
    Publication,
    refuse_older,
    staged_file_gone,
)
from onceflow.contract.schema import quoted
from onceflow.contract.sink import Sink
from onceflow.contract.staged_files import verify
from onceflow.errors import Fenced, PublishFailed, PublishUnknown
from onceflow.faults.points import reach
from onceflow.folders.commit_log import Commit, CommitLog
from onceflow.store.posix import fsync_dir, fsync_file, make_dirs, translate_disk_full


class FolderSink(Sink, CanStage, CanPartition, CanAdd, CanRewind, CanCleanUp):
    """Publishes each decided epoch exactly once, as files in a folder.

    The rows of an epoch have no order.
    """

    place = "path"
    path: Path
    _commit_log: CommitLog
    _renames: bool | None = None  # can staged files be renamed? None: not tried yet

    @abstractmethod
    def _final(self, publication: Publication, number: int) -> Path:
        """The final path of file `number` of the epoch, the same at every call."""

    @abstractmethod
    def _commit(self, publication: Publication) -> Commit:
        """The content of the commit of this epoch beside the ledger, for the current head."""

    @abstractmethod
    def _listed(self) -> set[str]:
        """All files that are published at this moment."""

    def _own(self, folder: str) -> Path:
        """A folder that readers ignore and no other output uses."""
        return self.path / folder

    @property
    def _copies(self) -> Path:
        """For files that were staged on another file system."""
        return self._own("_staged")

    @property
    def _marks(self) -> Path:
        """For the marks of `add`."""
        return self._own("_adding")

    def _entry(self, publication: Publication, number: int) -> dict[str, Any]:
        file = publication.files[number]
        path = self._final(publication, number).relative_to(self.path)
        return {"path": str(path), "rows": file.rows, "bytes": file.bytes, "crc32": file.crc32}

    # -------------------------------------------------------------- staging

    def by_columns(self) -> list[Any]:
        from pyspark.sql import functions as F

        return [F.col(quoted(name)) for name in self.by]

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        make_dirs(self.path)
        files = staged.files
        if files and not self._can_rename_from(staged.folder):
            files = tuple(self._copy(file, staged.tag) for file in files)
        return files

    def _can_rename_from(self, folder: Path) -> bool:
        """Try it: rename fails between file systems, and between two mounts of one."""
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
        """Copy to the file system of the target, so that publishing can rename the file."""
        folder = self._copies / tag / file.partition  # names repeat in each partition
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
        self._sweep_added(below_term)
        self._commit_log.sweep()

    def _sweep_added(self, below_term: int) -> None:
        """Remove files that older terms moved and did not commit. Their staged files are already
        removed, so they cannot move others."""
        names = os.listdir(self._marks) if self._marks.is_dir() else []
        marks = [name for name in names if 0 < _term(name) < below_term]
        if not marks:
            return
        for path in self._unlisted():
            if any(f"-{mark}-" in os.path.basename(path) for mark in marks):
                (self.path / path).unlink(missing_ok=True)
        for mark in marks:
            (self._marks / mark).unlink(missing_ok=True)

    def _unlisted(self) -> list[str]:
        """Files that a plain reader sees and no commit names."""
        listed = self._listed()
        return [path for path in data_files(self.path) if path not in listed]

    # -------------------------------------------------------------- ledger and publish

    def published(self, output: str) -> Ledger:
        self._commit_log.catch_up()
        return self._commit_log.state.ledger(output)

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        return self._commit_log.fence(output, term=term, token=token, target=str(self))

    def publish(self, publication: Publication) -> Outcome:
        def make() -> Commit:
            self._move(publication)
            reach("folder.moved")
            return self._commit(publication)

        outcome = self._commit_log.publish(publication, str(self), make)
        if outcome is Outcome.PUBLISHED:
            reach("folder.committed")
            self._drop_copies(publication)
        return outcome

    def add(self, publication: Publication) -> None:
        """Every call uses links of its own, so that it does not depend on other calls."""
        mark = self._marks / f"{publication.term}-{uuid.uuid4().hex[:16]}"
        try:
            mine = replace(
                publication, files=tuple(_linked(file, mark.name) for file in publication.files)
            )
        except FileNotFoundError:
            return
        tried: int | None = None

        def make() -> Commit | None:
            nonlocal tried
            if tried is None:
                tried = self._commit_log.state.position
            elif self._was_added(mine, since=tried):
                return None
            self._refuse_if_fenced(mine)
            # 2. move
            self._move(mine)
            reach("folder.moved")
            return {"type": "add", **self._commit(mine)}

        # 1. mark
        with translate_disk_full(mark):
            make_dirs(mark.parent)
            mark.touch()
        # 3. commit
        self._commit_log.append(make)
        reach("folder.committed")
        mark.unlink(missing_ok=True)
        self._drop_copies(publication)

    def _was_added(self, mine: Publication, *, since: int) -> bool:
        """Did a put that seemed lost take effect? There is no ledger, so look for our files."""
        paths = {self._entry(mine, number)["path"] for number in range(len(mine.files))}
        if self._commit_log.commit_with(paths, since=since) is not None:
            return True
        if paths and self._commit_log.state.forgotten > since:
            raise PublishUnknown(
                f"{self}: it cannot be known whether epoch {mine.epoch} was added: this driver "
                "was paused, and the log was trimmed beyond its rows meanwhile",
                hint="onceflow opens the job again, and then follows the guarantee of the output",
            )
        return False

    def _refuse_if_fenced(self, mine: Publication) -> None:
        try:
            seen = self._commit_log.state.ledger(mine.output).term
            refuse_older(seen, mine.term, self)
        except Fenced:
            for number in range(len(mine.files)):
                self._final(mine, number).unlink(missing_ok=True)
            raise

    def _move(self, publication: Publication) -> None:
        """Rename moves the only copy, so a second driver checks the final file."""
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
        """Remove the folders whose copies were moved."""
        for file in publication.files:
            if Path(file.path).is_relative_to(self._copies):
                tag = Path(file.path).relative_to(self._copies).parts[0]
                shutil.rmtree(self._copies / tag, ignore_errors=True)


def _linked(file: Committable, mark: str) -> Committable:
    path = Path(file.path)
    again = path.with_name(f"{mark}-{path.name}")
    os.link(path, again)
    return replace(file, path=str(again))


def _term(mark: str) -> int:
    """The term of the driver that made this mark; 0 if it is not a mark."""
    found = re.fullmatch(r"(\d+)-[0-9a-f]{16}", mark)
    return int(found[1]) if found else 0


def data_files(root: Path) -> Iterator[str]:
    """The files that a plain reader of the folder sees."""
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(("_", "."))]
        here = os.path.relpath(folder, root) + "/" if folder != str(root) else ""
        yield from (here + name for name in names if not name.startswith(("_", ".")))


def _bring(file: Committable, final: Path) -> None:
    """Rename the file. If it is on another mount by now, copy it with the same effect: a second
    driver finds the final name."""
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
