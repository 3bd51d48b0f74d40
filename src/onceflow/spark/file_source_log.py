"""The log of Spark's file source: the files that it has seen, under `sources/<name>/`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onceflow.errors import CheckpointRefused, PlanChanged
from onceflow.store.posix import make_dirs, replace_file

COMPACT_INTERVAL = "spark.sql.streaming.fileSource.log.compactInterval"

# file source -> number in its log -> the entries of that number, verbatim
SourceEntries = dict[str, dict[str, list[str]]]


def is_file_offset(offset: Any) -> bool:
    """Is this the offset of a file source, a number in its own log under `sources/`?"""
    return isinstance(offset, dict) and set(offset) == {"logOffset"}


class SourceLog:
    """`sources/<name>/`: entry n lists the files of offset n; every tenth one holds all so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_file_log(self) -> bool:
        return any("batchId" in line for n in names_in(self.folder) for line in self._lines(n))

    def entry(self, number: int) -> list[str]:
        for name in (str(number), f"{number}.compact"):
            if (self.folder / name).exists():
                return [line for line in self._lines(name) if _batch(line) == number]
        raise PlanChanged(
            f"{self.folder / str(number)} is missing",
            hint="start the job again: Spark plans the epoch again",
        )

    def up_to(self, last: int) -> list[str]:
        """All entries 0 to `last`, verbatim; `CheckpointRefused` if one is missing."""
        compacts = [number_of(n) for n in names_in(self.folder) if n.endswith(".compact")]
        later = min((n for n in compacts if n >= last), default=None)
        if later is not None:
            lines = [line for line in self._lines(f"{later}.compact") if _batch(line) <= last]
        else:
            newest = max(compacts, default=-1)
            lines = self._lines(f"{newest}.compact") if newest >= 0 else []
            for number in range(newest + 1, last + 1):
                lines += self.entry(number)
        return lines

    def rewrite(self, lines: list[str], interval: int = 10) -> None:
        """Write a new log with these entries."""
        wanted: dict[int, list[str]] = {}
        for line in lines:
            wanted.setdefault(_batch(line), []).append(line)
        make_dirs(self.folder)
        if wanted:
            self.restore(wanted, max(wanted), interval, lambda: None)

    def holders(self, number: int) -> list[Path]:
        names = (str(number), f"{number}.compact")
        return [self.folder / name for name in names if (self.folder / name).exists()]

    def restore(
        self,
        wanted: dict[int, list[str]],
        last: int,
        interval: int,
        check: Callable[[], object],
    ) -> None:
        """Make entries 0 to `last` complete and equal to `wanted`. Remove the entries above that
        existed when `check` found us leading."""
        above = [self.folder / name for name in names_in(self.folder) if number_of(name) > last]
        seen = [(path, identity_of(path)) for path in above]
        check()
        for path, identity in seen:
            if identity_of(path) == identity:
                remove(path)
        compacts = [n for n in names_in(self.folder) if n.endswith(".compact")]
        compacted = max(map(number_of, compacts), default=-1)
        if compacted >= 0:
            self._correct(f"{compacted}.compact", range(compacted + 1), wanted)
        for number in range(compacted + 1, last + 1):
            if (number + 1) % interval == 0:
                self._write_compact(number, wanted, compacted)
                compacted = number
            else:
                self._correct(str(number), range(number, number + 1), wanted)

    def _correct(self, name: str, numbers: range, wanted: dict[int, list[str]]) -> None:
        found = self._lines(name) if (self.folder / name).exists() else None
        lines, have = found or [], dict[int, list[str]]()
        for line in lines:
            have.setdefault(_batch(line), []).append(line)
        wrong: list[int] = []
        for number in numbers:
            existing = have.get(number, [])
            if number in wanted and sorted(existing) != sorted(wanted[number]):
                wrong.append(number)
            elif number not in wanted and not existing:
                raise self._lost(number, name)
        if wrong:
            gone = set(wrong)
            others = [line for line in lines if _batch(line) not in gone]
            lines = others + [line for number in wrong for line in wanted[number]]
        if found is None or lines != found:
            self._write(name, lines)

    def _lost(self, number: int, name: str) -> CheckpointRefused:
        """Without the entry Spark would take its files for new ones and read them again."""
        return CheckpointRefused(
            f"{self.folder / name} lacks the files of entry {number}",
            hint="put the checkpoint back from a backup of the home",
        )

    def _write_compact(self, number: int, wanted: dict[int, list[str]], compacted: int) -> None:
        lines = self._lines(f"{compacted}.compact") if compacted >= 0 else []
        for n in range(compacted + 1, number + 1):
            if n not in wanted and not self.holders(n):
                raise self._lost(n, str(n))
            lines += wanted[n] if n in wanted else self.entry(n)
        self._write(f"{number}.compact", lines)
        remove(self.folder / str(number))

    def _write(self, name: str, lines: list[str]) -> None:
        crc_of(self.folder / name).unlink(missing_ok=True)
        replace_file(self.folder / name, "\n".join(["v1", *lines]).encode())

    def _lines(self, name: str) -> list[str]:
        try:
            lines = list(filter(None, (self.folder / name).read_text().split("\n")[1:]))
            for line in lines:
                _batch(line)
        except (ValueError, KeyError, TypeError):
            if not name.endswith(".compact"):
                return []  # one entry: the decision has it, or Spark plans it again
            raise CheckpointRefused(
                f"{self.folder / name} is damaged",
                hint="put the checkpoint back from a backup of the home",
            ) from None
        return lines


def _batch(line: str) -> int:
    return int(json.loads(line)["batchId"])


def batches_in(lines: list[str]) -> set[int]:
    """The numbers of the log entries that these lines belong to."""
    return {_batch(line) for line in lines}


def names_in(folder: Path) -> list[str]:
    try:
        return [p.name for p in folder.iterdir() if not p.name.startswith(".")]
    except FileNotFoundError:
        return []


def number_of(name: str) -> int:
    digits = name.removesuffix(".compact")
    return int(digits) if digits.isdecimal() else -1


def numbers_in(folder: Path) -> list[int]:
    return sorted(n for n in map(number_of, names_in(folder)) if n >= 0)


def identity_of(path: Path) -> tuple[int, int] | None:
    """An identity that differs if another file takes the name later."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def crc_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc")


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    crc_of(path).unlink(missing_ok=True)
