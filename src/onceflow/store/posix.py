"""Durable small files: put-if-absent, sealed documents, and numbered logs with roll-ups.

onceflow keeps its own records through the four operations of `Store`, which every kind of store
offers (a local disk by `link(2)`, HDFS by create without overwrite, object stores by a conditional
put). Nothing outside `LocalStore` assumes rename, append or locks.

A numbered log decides races: the first process that puts entry `n` has it. A process frees names
only below a roll-up, and from then on a file of such a name does not count:

1. A reader that reads entry n, or finds none, then checks for a roll-up at or above n. If there is
   one, the read does not count, and the reader starts again from the roll-up.
2. A writer that wins the put of entry n makes the same check. If there is such a roll-up, it has
   written nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from onceflow.errors import Damaged, DiskFull
from onceflow.faults.points import reach

VERSION = 1
_TEMPORARY = ".put-"


class Store(Protocol):
    """Four operations on named, immutable byte strings."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Durably create `name`. Return False, and change nothing, if it exists already."""

    def read(self, name: str) -> bytes | None: ...

    def list(self, folder: str = "") -> list[str]:
        """The names directly under `folder`, in any order."""

    def delete(self, name: str) -> None:
        """Remove `name` if it is there."""

    def where(self, name: str) -> str:
        """The full path of `name`, for messages."""


class LocalStore:
    """A folder of a local file system. A file that `put_if_absent` created survives a power cut.

    Not guaranteed on file systems without `link(2)`, nor if the disk lies about fsync.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        path = self.root / name
        with translate_disk_full(path):
            make_dirs(path.parent)
            while (won := self._try_put(path, data)) is None:
                pass
            return won

    @staticmethod
    def _try_put(path: Path, data: bytes) -> bool | None:
        """Try once. None if another process swept our temporary file: then nothing has happened."""
        # O_EXCL on the final name would leave an empty file if we were killed in between.
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            _write_durably(temporary, data)
            reach("put.written")
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except FileNotFoundError:
                return None
            reach("put.linked")
            fsync_dir(path.parent)
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def list(self, folder: str = "") -> list[str]:
        try:
            return [n for n in os.listdir(self.root / folder) if not n.startswith(_TEMPORARY)]
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def where(self, name: str) -> str:
        return str(self.root / name)

    def sweep(self, folder: str = "") -> None:
        """Remove the temporary files of killed puts. A put that still runs tries again, and a
        `replace_file` fails."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.root / folder):
                if name.startswith(_TEMPORARY):
                    (self.root / folder / name).unlink(missing_ok=True)


# ---------------------------------------------------------------- durable files


def fsync_file(path: str | os.PathLike[str]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


fsync_dir = fsync_file  # the same calls sync a folder


def make_dirs(path: Path) -> None:
    """Create folders like mkdir -p, and make their names survive a power cut."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    path.mkdir(exist_ok=True)
    fsync_dir(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Durably write a file that others may read at any time, such as one that Spark owns."""
    with translate_disk_full(path):
        make_dirs(path.parent)
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            _write_durably(temporary, data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_dir(path.parent)


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def translate_disk_full(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"no space left on the file system of {path}",
                hint="make space and start the job again; it continues from its last epoch",
            ) from error
        raise


# ---------------------------------------------------------------- sealed documents


def seal(kind: str, subject: str, body: dict[str, Any]) -> bytes:
    """Two lines: a head with the kind, the version, the subject and a hash; then the body."""
    payload = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return _head(kind, VERSION, subject, payload) + b"\n" + payload + b"\n"


def _head(kind: str, version: int, subject: str, payload: bytes) -> bytes:
    facts = {"onceflow": kind, "version": version, "of": subject}
    digest = hashlib.sha256(json.dumps(facts).encode() + b"\n" + payload).hexdigest()
    return json.dumps({**facts, "sha256": digest}, ensure_ascii=False).encode()


def unseal(data: bytes, kind: str, subject: str | None, where: str) -> dict[str, Any]:
    """The body of a sealed document. Raises `Damaged` with the name of the file."""
    head, _, rest = data.partition(b"\n")
    try:
        header = json.loads(head)
        found, version, of = header["onceflow"], header["version"], header["of"]
    except (ValueError, KeyError, TypeError):
        raise Damaged(
            f"{where} is damaged: its first line is not readable", hint=_RESTORE
        ) from None
    if isinstance(version, int) and version > VERSION:
        raise Damaged(
            f"{where} was written by a newer onceflow (format {version}, this one knows {VERSION})",
            hint="use the newer onceflow",
        )
    whole = rest.endswith(b"\n") and type(version) is int and version >= 1
    if not whole or head != _head(found, version, of, rest[:-1]):
        raise Damaged(f"{where} is damaged: its content does not match its checksum", hint=_RESTORE)
    if found != kind:
        raise Damaged(f"{where} is a {found}, not a {kind}", hint=_RESTORE)
    if subject is not None and of != subject:
        raise Damaged(
            f"{where} belongs to {of}, not to {subject}: it was copied or swapped", hint=_RESTORE
        )
    body: dict[str, Any] = json.loads(rest)
    return body


_RESTORE = "put the file back from a backup; nothing was published because of it"


# ---------------------------------------------------------------- numbered logs


class Put(Enum):
    WON = "won"
    LOST = "lost"  # an entry of another process has this number
    COVERED = "covered"  # a roll-up covers this number: nothing was written


class View(Protocol):
    """The result of reading a numbered log up to `position`; `NumberedLog` applies the entries that
    follow."""

    @property
    def position(self) -> int: ...

    def restart(self, position: int, roll_up: dict[str, Any] | None) -> None: ...

    def apply(self, number: int, entry: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class _Names:
    roll_up: int  # the newest, 0 if there is none
    entries: frozenset[int]


class NumberedLog:
    """Entries 1, 2, 3 … in one folder of a store, each put once."""

    def __init__(self, store: Store, folder: str, kind: str, subject: str) -> None:
        self.store = store
        self.folder = folder
        self.kind = kind
        self.subject = subject

    def catch_up(self, view: View) -> None:
        """Bring `view` to the head of the log (rule 1 of the module)."""
        while True:
            names = self._names()
            newest = names.roll_up
            if view.position > newest and view.position not in names.entries:
                view.restart(0, None)  # an older copy of the log was put back
            if newest > view.position:
                body = self.read_roll_up(newest)
                if body is None:
                    continue  # a newer roll-up has replaced it
                view.restart(newest, body)
            first = view.position + 1
            while (entry := self.entry(view.position + 1)) is not None:
                view.apply(view.position + 1, entry)
            names = self._names()
            if names.roll_up >= first:
                view.restart(0, None)
                continue
            if view.position + 1 in names.entries:
                continue  # it was put after we had looked
            if any(n > view.position for n in names.entries):
                missing = self.store.where(self.entry_name(view.position + 1))
                raise Damaged(f"{missing} is missing, and later entries are there", hint=_RESTORE)
            return

    def entry(self, number: int) -> dict[str, Any] | None:
        return self._read(self.entry_name(number))

    def read_roll_up(self, number: int) -> dict[str, Any] | None:
        """The roll-up of that number; None if a newer one has replaced it."""
        return self._read(self.roll_up_name(number))

    def put(self, number: int, entry: dict[str, Any]) -> Put:
        """Try to put entry `number`, which must be one above the head (rule 2)."""
        name = self.entry_name(number)
        if not self.store.put_if_absent(name, seal(self.kind, self.subject, entry)):
            return Put.LOST
        return Put.COVERED if self.is_covered(number) else Put.WON

    def is_covered(self, number: int) -> bool:
        return self.newest_roll_up() >= number

    def newest_roll_up(self) -> int:
        return self._names().roll_up

    def roll_up(self, number: int, body: dict[str, Any]) -> bool:
        """Replace all entries up to `number` by one document with their result, then free them.

        Return False if another process has put a document of this number; then that one counts.
        """
        name = self.roll_up_name(number)
        won = self.store.put_if_absent(name, seal(self.kind, self.subject, body))
        reach("rollup.written")
        self.prune()
        return won

    def prune(self) -> None:
        """Free the names that the newest roll-up covers."""
        newest = self._names().roll_up
        for name in self.store.list(self.folder):
            number, is_roll_up = _parse(name)
            if 0 < number < newest or (0 < number == newest and not is_roll_up):
                self.store.delete(f"{self.folder}/{name}")
                reach("rollup.pruned-one")

    def size(self) -> int:
        return len(self._names().entries)

    def numbers(self) -> tuple[int, list[int]]:
        """The number of the newest roll-up (0 if there is none) and of the entries above it."""
        names = self._names()
        return names.roll_up, sorted(n for n in names.entries if n > names.roll_up)

    def entry_name(self, number: int) -> str:
        return f"{self.folder}/{number:012d}.json"

    def roll_up_name(self, number: int) -> str:
        return f"{self.folder}/rollup-{number:012d}.json"

    def _read(self, name: str) -> dict[str, Any] | None:
        data = self.store.read(name)
        if data is None:
            return None
        return unseal(data, self.kind, self.subject, self.store.where(name))

    def _names(self) -> _Names:
        numbers = [_parse(name) for name in self.store.list(self.folder)]
        return _Names(
            roll_up=max((n for n, is_roll_up in numbers if is_roll_up), default=0),
            entries=frozenset(n for n, is_roll_up in numbers if n and not is_roll_up),
        )


def _parse(name: str) -> tuple[int, bool]:
    """The number of an entry or roll-up (0 for any other file), and whether it is a roll-up."""
    stem = name.removesuffix(".json")
    is_roll_up = stem.startswith("rollup-")
    digits = stem.removeprefix("rollup-")
    return (int(digits) if digits.isdecimal() and stem != name else 0, is_roll_up)
