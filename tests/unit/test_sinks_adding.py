"""Folders as targets of the weaker guarantees: what a call of `add` leaves when it does not end."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from overtaken import WHEN, Overtaken
from targets import OUTPUT, FilesTarget, LogTarget, ids_in, publication, rows_of, stage, table

from onceflow import faults
from onceflow.contract.staged_files import BY, describe
from onceflow.errors import DiskFull, Fenced, PublishUnknown, TargetForeign
from onceflow.log import EmbeddedLog
from onceflow.log.retention import trim
from onceflow.sinks import Files, Log, Publication
from onceflow.testing.processes import run_and_kill

KINDS = (FilesTarget, LogTarget)
CRASHES = [
    *((point, 1) for point in (*faults.FOLDER, *faults.PUT)),
    ("folder.moved-one", 2),
]


def opened(target: FilesTarget, term: int) -> Any:
    sink = target.sink()
    sink.fence(OUTPUT, term=term, token=f"token {term}")
    return sink


def in_the_folder(target: FilesTarget) -> list[int]:
    """What a plain reader sees: whatever is there."""
    return sorted(id for path in target.path.rglob("*.parquet") for id in ids_in(path))


def marks(target: FilesTarget) -> list[Path]:
    return [path for path in (target.path / "_adding").rglob("*") if path.is_file()]


def add_in_a_child(target: FilesTarget, decided: Publication) -> None:
    target.sink().add(decided)


@pytest.mark.kill
@pytest.mark.parametrize("again", [False, True], ids=["at-most-once", "at-least-once"])
@pytest.mark.parametrize(("point", "visit"), CRASHES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_driver_added_in_part_is_removed_and_its_successor_goes_on(
    tmp_path: Path, kind: type[FilesTarget], point: str, visit: int, again: bool
) -> None:
    target = kind(tmp_path)
    opened(target, 1).add(publication(tmp_path, 0))
    decided = publication(tmp_path, 1)

    run_and_kill(point, add_in_a_child, target, decided, visit=visit)

    there = target.rows()
    assert there in (rows_of(0), [*rows_of(0), *rows_of(1)])
    successor = opened(target, 2)
    if again:
        successor.add(replace(decided, term=2))
    successor.sweep(below_term=2)
    successor.settled(OUTPUT)
    assert target.rows() == sorted([*there, *(rows_of(1) if again else [])])
    assert in_the_folder(target) == target.rows()
    assert marks(target) == []
    successor.add(publication(tmp_path, 2, term=2))
    assert Counter(target.rows()) - Counter(there) - Counter(rows_of(1)) == Counter(rows_of(2))


def test_left_overs_are_found_in_sub_folders_too(tmp_path: Path) -> None:
    target, staged = FilesTarget(tmp_path), tmp_path / "staged" / "0f8fad5b-0-1-aaaa"
    for country, ids in (("NL", [1, 2]), ("DE", [3])):
        stage(staged / f"{BY}0={country}", table(ids))
    sink = Files(target.path, by=["country"])
    sink.fence(OUTPUT, term=1, token="token 1")
    faults.arm("folder.moved", "raise")
    with pytest.raises(faults.InjectedFault):
        sink.add(publication(tmp_path, 0, files=describe(staged, sink.by)))
    assert in_the_folder(target) == [1, 2, 3]
    successor = opened(target, 2)
    successor.sweep(below_term=2)
    assert in_the_folder(target) == []
    successor.settled(OUTPUT)


def test_files_that_bear_no_mark_are_not_removed(tmp_path: Path) -> None:
    """Somebody has set back the commits alone: these files had been published."""
    target = FilesTarget(tmp_path)
    sink = opened(target, 1)
    for epoch in (0, 1):
        sink.add(publication(tmp_path, epoch))
    (target.path / "_commits" / "000000000003.json").unlink()
    successor = opened(target, 2)
    successor.sweep(below_term=2)
    with pytest.raises(TargetForeign, match="something else wrote into"):
        successor.settled(OUTPUT)
    assert in_the_folder(target) == [*rows_of(0), *rows_of(1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_while_rows_are_added_keeps_nobody_from_going_on(
    small_disk: Path, kind: type[FilesTarget]
) -> None:
    target = kind(small_disk)
    sink, decided = opened(target, 1), publication(small_disk, 0)

    def fill(_: str) -> None:
        with (
            pytest.raises(OSError, match="No space left"),
            (small_disk / "ballast").open("wb", buffering=0) as file,
        ):
            file.writelines(itertools.repeat(b"\0" * 4096))

    faults.arm("folder.moved", fill)
    with pytest.raises(DiskFull):
        sink.add(decided)
    faults.disarm()
    (small_disk / "ballast").unlink()
    successor = opened(target, 2)
    successor.add(replace(decided, term=2))
    successor.sweep(below_term=2)
    successor.settled(OUTPUT)
    assert target.rows() == in_the_folder(target) == rows_of(0)


# ---------------------------------------------------------------- zombies


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", ["folder.moved-one", "folder.moved", "put.written"])
def test_a_driver_that_wakes_up_while_it_adds_is_fenced_and_leaves_nothing(
    tmp_path: Path, kind: type[FilesTarget], point: str
) -> None:
    target = kind(tmp_path)
    older, decided = opened(target, 1), publication(tmp_path, 0)

    def take_over(_: str) -> None:
        faults.disarm()
        newer = opened(target, 2)
        newer.add(replace(decided, term=2))
        newer.sweep(below_term=2)
        newer.settled(OUTPUT)

    faults.arm(point, take_over)
    with pytest.raises(Fenced):
        older.add(decided)
    assert target.rows() == in_the_folder(target) == rows_of(0)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("more", [1, 3, 14])
def test_rows_are_added_once_though_others_roll_them_up_before_the_driver_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, more: int
) -> None:
    """It stands still inside the one link; the other producers of the log go on."""
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 4)
    target = LogTarget(tmp_path)
    sink: Log = opened(target, 1)
    others = lambda: append_many(target.path, range(900, 900 + more))  # noqa: E731
    sink._commit_log.numbered.store = Overtaken(target.path, others, when)
    sink.add(publication(tmp_path, 0))
    assert target.rows() == [*rows_of(0), *range(900, 900 + more)]
    assert marks(target) == []


def test_the_same_for_a_driver_that_was_replaced_after_its_rows_were_there(tmp_path: Path) -> None:
    target = FilesTarget(tmp_path)
    older = opened(target, 1)

    def take_over() -> None:
        newer = opened(target, 2)
        newer.roll_up_every = 3
        newer.sweep(below_term=2)
        for epoch in range(1, 5):
            newer.add(publication(tmp_path, epoch, term=2))
            newer.tidy()

    older._commit_log.numbered.store = Overtaken(target.path, take_over, "after")
    older.add(publication(tmp_path, 0))
    assert target.rows() == in_the_folder(target) == [n for e in range(5) for n in rows_of(e)]


def test_rows_that_were_trimmed_before_the_driver_looked_are_not_guessed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 4)
    target = LogTarget(tmp_path)
    sink: Log = opened(target, 1)

    def others() -> None:
        append_many(target.path, range(900, 910))
        trim(EmbeddedLog(target.path), [14])
        append_many(target.path, range(910, 920))

    sink._commit_log.numbered.store = Overtaken(target.path, others, "after")
    with pytest.raises(PublishUnknown, match="cannot be known whether epoch 0 was added"):
        sink.add(publication(tmp_path, 0))
    assert EmbeddedLog(target.path).view.next == [25]


def append_many(path: Path, ids: range) -> None:
    log = EmbeddedLog(path)
    for id in ids:
        log.append(table([id]))


def test_a_folder_of_marks_is_nobodys_business(tmp_path: Path) -> None:
    target = FilesTarget(tmp_path)
    sink = opened(target, 1)
    sink.add(publication(tmp_path, 0))
    (target.path / "_adding" / "notes").touch()
    sink.sweep(below_term=5)
    assert os.listdir(target.path / "_adding") == ["notes"]
    assert target.rows() == rows_of(0)
