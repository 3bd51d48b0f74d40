"""The truth beside the result.

The targets are read by pyarrow and sqlite3, not by onceflow: what counts is what anybody sees.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.demo.stream import Cell, Truth

Found = dict[Cell, list[int]]  # the counts that a target holds for a cell: one, if all is well


@dataclass(frozen=True)
class Difference:
    """Something that a target should hold once and does not."""

    target: str
    what: Cell | str  # a cell, or a rejected line
    truth: int
    found: tuple[int, ...]

    def __str__(self) -> str:
        what = self.what if isinstance(self.what, str) else " ".join(self.what)
        found = " and ".join(f"{count:,}" for count in self.found) or "nothing"
        return f"{self.target}: {what}: {found} instead of {self.truth:,}"


@dataclass(frozen=True)
class Verdict:
    """Lost and duplicated are events and lines; `compared` are the numbers that were looked at."""

    lost: int
    duplicated: int
    compared: int
    differences: tuple[Difference, ...]

    @property
    def exact(self) -> bool:
        return not self.differences


@dataclass(frozen=True)
class Result:
    """What the targets hold."""

    files: Found
    sqlite: Found
    rejected: Counter[str]


def judge(truth: Truth, result: Result) -> Verdict:
    """Each count must be in each target once, and right; each rejected line as often as it came.

    A count that is there in two parts is wrong too, also if the parts add up.
    """
    counts = {cell: (count,) for cell, count in truth.counts.items()}
    lines = {line: (count,) for line, count in truth.rejected.items()}
    differences = (
        *_differences("files", counts, {cell: tuple(n) for cell, n in result.files.items()}),
        *_differences("sqlite", counts, {cell: tuple(n) for cell, n in result.sqlite.items()}),
        *_differences("rejected", lines, {line: (n,) for line, n in result.rejected.items()}),
    )
    missing = [d.truth - sum(d.found) for d in differences]
    return Verdict(
        lost=sum(n for n in missing if n > 0),
        duplicated=-sum(n for n in missing if n < 0),
        compared=2 * len(counts) + len(lines),
        differences=differences,
    )


def _differences(target: str, truth: dict[Any, Any], found: dict[Any, Any]) -> Iterator[Difference]:
    for what in sorted({*truth, *found}, key=str):
        if truth.get(what) != found.get(what):
            yield Difference(target, what, sum(truth.get(what, ())), found.get(what, ()))


@dataclass(frozen=True)
class Line:
    """What the truth and each target say of one kind of event in one minute, over all ads."""

    minute: str
    kind: str
    truth: int
    files: int
    sqlite: int | None  # rejected lines go to files only


def compare(truth: Truth, result: Result) -> list[Line]:
    """For people. Sums may agree where counts differ: `judge` looks at each count."""
    lines = []
    cells = {*truth.counts, *result.files, *result.sqlite}
    for minute, kind in sorted({(minute, kind) for _, kind, minute in cells}):
        here = [cell for cell in cells if cell[1:] == (kind, minute)]
        lines.append(
            Line(
                minute,
                kind,
                truth=sum(truth.counts[cell] for cell in here),
                files=sum(sum(result.files.get(cell, ())) for cell in here),
                sqlite=sum(sum(result.sqlite.get(cell, ())) for cell in here),
            )
        )
    rejected = truth.rejected.total(), result.rejected.total()
    return [*lines, Line("", "rejected", *rejected, sqlite=None)]


# ---------------------------------------------------------------- reading the targets


def read(folder: Path) -> Result:
    """What the demo's job has published under its folder."""
    counts: Found = {}
    for row in _parquet(folder / "out" / "counts"):
        counts.setdefault(_cell(row["ad"], row["kind"], row["minute"]), []).append(row["count"])
    rejected = Counter(row["value"] for row in _parquet(folder / "out" / "rejected"))
    return Result(counts, _table(folder / "out" / "counts.db"), rejected)


def _parquet(folder: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.dataset as ds

    if folder.is_dir():
        yield from ds.dataset(folder, format="parquet").to_table().to_pylist()


def _table(path: Path) -> Found:
    found: Found = {}
    if path.exists():
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            for ad, kind, minute, count in db.execute("SELECT ad, kind, minute, count FROM counts"):
                found.setdefault(_cell(ad, kind, minute), []).append(count)
    return found


def _cell(ad: str, kind: str, minute: object) -> Cell:
    return ad, kind, str(minute)[:16]
