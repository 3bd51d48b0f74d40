"""The Files sink: commit entries, roll-ups, partitions, and hands that are not ours."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from targets import (
    LINEAGE,
    OUTPUT,
    SCHEMA,
    FilesTarget,
    publication,
    rows_of,
    stage,
    stage_lines,
    table,
)
from turns import Killed, Stepped, Truth, Turns, seeds

from onceflow import faults
from onceflow.contract.staged_files import BY, describe, verify
from onceflow.errors import BadRows, Damaged, Fenced, JobError, PublishFailed, TargetForeign
from onceflow.files.sink import _OutputFolder, published_files
from onceflow.sinks import Files, Outcome, Position, Publication, Staged
from onceflow.store.posix import LocalStore
from onceflow.testing.processes import run_and_kill


def files(target: FilesTarget, *, roll_up_every: int = 100, **settings: Any) -> Files:
    sink = Files(target.path, **settings)
    sink.roll_up_every = roll_up_every
    return sink


def fenced(target: FilesTarget, term: int = 1, **settings: Any) -> Files:
    sink = files(target, **settings)
    sink.fence(OUTPUT, term=term, token=f"token {term}")
    return sink


def publish(target: FilesTarget, sink: Files, *epochs: int, term: int = 1) -> None:
    for epoch in epochs:
        found = sink.publish(publication(target.root, epoch, term=term))
        assert found is Outcome.PUBLISHED
        sink.tidy()


def all_rows(count: int) -> list[int]:
    return [id for epoch in range(count) for id in rows_of(epoch)]


@pytest.fixture
def target(tmp_path: Path) -> FilesTarget:
    return FilesTarget(tmp_path)


def commits(target: FilesTarget) -> list[str]:
    return sorted(os.listdir(target.path / "_commits"))


def manifests(target: FilesTarget) -> list[str]:
    return sorted(os.listdir(target.path / "_manifests"))


# ---------------------------------------------------------------- the folder


def test_files_are_named_by_epoch_and_nothing_else_is_in_the_folder(target: FilesTarget) -> None:
    publish(target, fenced(target), 0, 1)
    assert sorted(os.listdir(target.path)) == [
        "0000000000-part-00000.parquet",
        "0000000000-part-00001.parquet",
        "0000000001-part-00000.parquet",
        "0000000001-part-00001.parquet",
        "_commits",
    ]
    assert not any(path.is_file() for path in (target.root / "staged").rglob("*"))


def test_a_commit_entry_says_what_its_files_hold(target: FilesTarget) -> None:
    decided = publication(target.root, 0)
    fenced(target).publish(decided)
    listed = published_files(target.path)
    assert [(f["rows"], f["bytes"], f["crc32"]) for f in listed] == [
        (file.rows, file.bytes, file.crc32) for file in decided.files
    ]
    for file, entry in zip(decided.files, listed, strict=True):
        verify(file, target.path / entry["path"])


def test_partitions_become_folders(target: FilesTarget) -> None:
    staged = target.root / "staged" / "0f8fad5b-0-1-aaaa"
    for country, ids in (("NL", [1, 2]), ("DE", [3]), ("a%2Fb", [4])):
        stage(staged / f"{BY}0={country}", table(ids))
    sink = fenced(target, by=["country"])
    decided = publication(target.root, 0, files=describe(staged, sink.by))
    assert sink.publish(decided) is Outcome.PUBLISHED
    assert target.rows() == [1, 2, 3, 4]
    name = "0000000000-part-00000.parquet"
    assert sorted(file["path"] for file in published_files(target.path)) == [
        f"country=DE/{name}",
        f"country=NL/{name}",
        f"country=a%2Fb/{name}",
    ]
    sink.settled(OUTPUT)


def test_staged_files_without_rows_are_left_out(tmp_path: Path) -> None:
    found = stage(tmp_path / "staged", table([]), table([1]))
    assert [os.path.basename(file.path) for file in found] == ["part-00001.parquet"]


def test_lines_of_json_are_counted(tmp_path: Path) -> None:
    (tmp_path / "part-0.json").write_text('{"id":1}\n{"id":2}\n')
    assert [file.rows for file in describe(tmp_path, ())] == [2]


def test_a_staged_file_that_changed_is_damaged(tmp_path: Path) -> None:
    (file,) = stage(tmp_path / "staged", table([1, 2, 3]))
    verify(file, file.path)
    data = bytearray(Path(file.path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(file.path).write_bytes(data)
    with pytest.raises(Damaged, match=os.path.basename(file.path)):
        verify(file, file.path)


def test_a_moved_file_that_was_damaged_is_not_published(target: FilesTarget) -> None:
    """The driver was killed after it moved the files; somebody cut one of them."""
    decided = publication(target.root, 0)
    fenced(target)
    faults.arm("folder.moved", "raise")
    with pytest.raises(faults.InjectedFault):
        files(target).publish(decided)
    moved = target.path / "0000000000-part-00001.parquet"
    moved.write_bytes(moved.read_bytes()[:-1])
    with pytest.raises(Damaged, match=moved.name):
        files(target).publish(decided)
    assert target.rows() == []


def test_a_folder_that_cannot_be_written_says_so(
    target: FilesTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = fenced(target)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)  # root may write anywhere
    with pytest.raises(PublishFailed, match="cannot write into"):
        sink.publish(publication(target.root, 0))


# ---------------------------------------------------------------- staging


def staged_as(root: Path, tag: str) -> Staged:
    folder = root / "staged" / tag
    found = stage(folder / "rows", table([1, 2]))
    return Staged(found, folder, folder / "0", tag, SCHEMA, lambda: None)


def test_what_is_staged_on_the_same_file_system_stays_where_it_is(target: FilesTarget) -> None:
    staged = staged_as(target.root, "0f8fad5b-0-1-aaaa")
    assert files(target).stage(staged) == staged.files


def test_what_is_staged_elsewhere_is_copied_beside_the_target(
    tmp_path: Path, small_disk: Path
) -> None:
    target, staged = FilesTarget(small_disk), staged_as(tmp_path, "0f8fad5b-0-1-aaaa")
    sink = fenced(target)
    copied = sink.stage(staged)
    assert all(Path(file.path).is_relative_to(target.path / "_staged") for file in copied)
    sink.settled(OUTPUT)  # hidden from readers
    assert sink.publish(publication(tmp_path, 0, files=copied)) is Outcome.PUBLISHED
    assert target.rows() == [1, 2]
    assert sorted(n for n in os.listdir(target.path) if n[0] != "_") == [
        "0000000000-part-00000.parquet"
    ]


def test_files_of_one_name_in_several_partitions_are_copied_apart(
    tmp_path: Path, small_disk: Path
) -> None:
    """A task that writes several partitions gives all of its files one name."""
    target, folder = FilesTarget(small_disk), tmp_path / "staged" / "0f8fad5b-0-1-aaaa"
    for country, ids in (("NL", [1, 2]), ("DE", [3])):
        stage(folder / "rows" / f"{BY}0={country}", table(ids))
    sink = fenced(target, by=["country"])
    found = describe(folder / "rows", sink.by)
    copied = sink.stage(Staged(found, folder, folder / "0", folder.name, SCHEMA, lambda: None))
    assert sink.publish(publication(tmp_path, 0, files=copied)) is Outcome.PUBLISHED
    assert target.rows() == [1, 2, 3]


@pytest.mark.parametrize(("value", "size"), [("x" * 248, 256), ("%3A" * 83, 257), ("字" * 83, 257)])
def test_a_value_that_no_folder_can_be_called_by_is_refused_before_the_decision(
    target: FilesTarget, value: str, size: int
) -> None:
    folder = target.root / "staged" / "0f8fad5b-0-1-aaaa"
    rows = stage(folder / "rows", table([1]))
    sink = fenced(target, by=["country"])

    def staged(value: str) -> Staged:
        files = tuple(replace(file, partition=f"country={value}") for file in rows)
        return Staged(files, folder, folder / "0", folder.name, SCHEMA, lambda: None)

    with pytest.raises(BadRows, match=f"column country would make .* {size} bytes") as caught:
        sink.stage(staged(value))
    assert "shorten country" in caught.value.hint
    fits = sink.stage(staged(value[: len(value) - 3]))
    assert sink.publish(publication(target.root, 0, files=fits)) is Outcome.PUBLISHED
    assert target.rows() == [1]


def test_what_older_terms_staged_beside_the_target_is_swept(target: FilesTarget) -> None:
    sink = fenced(target, term=3)
    for term in (1, 2, 3):
        (target.path / "_staged" / f"0f8fad5b-7-{term}-aaaa").mkdir(parents=True)
    sink.sweep(below_term=3)
    assert os.listdir(target.path / "_staged") == ["0f8fad5b-7-3-aaaa"]


# ---------------------------------------------------------------- hands that are not ours


def test_a_folder_with_foreign_files_is_refused(target: FilesTarget) -> None:
    target.path.mkdir()
    for n in range(7):
        (target.path / f"part-{n}.parquet").touch()
    with pytest.raises(TargetForeign, match=r"part-0.parquet.* and 2 more"):
        files(target).prepare(OUTPUT, SCHEMA, "append")


def test_an_empty_folder_is_taken(target: FilesTarget) -> None:
    target.path.mkdir()
    files(target).prepare(OUTPUT, SCHEMA, "append")


def test_a_path_that_is_a_file_is_refused(target: FilesTarget) -> None:
    target.path.write_text("not a folder")
    with pytest.raises(TargetForeign, match="is not a folder"):
        files(target).prepare(OUTPUT, SCHEMA, "append")


@pytest.mark.parametrize("name", ["stranger.parquet", "country=NL/stranger.parquet"])
def test_a_foreign_file_between_ours_is_noticed(target: FilesTarget, name: str) -> None:
    sink = fenced(target)
    publish(target, sink, 0)
    sink.settled(OUTPUT)
    (target.path / name).parent.mkdir(exist_ok=True)
    (target.path / name).touch()
    with pytest.raises(TargetForeign, match=f"something else wrote into .*{name}"):
        sink.settled(OUTPUT)


def test_hidden_files_are_nobodys_business(target: FilesTarget) -> None:
    sink = fenced(target)
    publish(target, sink, 0)
    for name in ("_SUCCESS", ".part-0.crc", "_notes"):
        (target.path / name).touch()
    sink.settled(OUTPUT)


@pytest.mark.parametrize("settings", [{"format": "json"}, {"by": ["name"]}])
def test_another_format_or_partitioning_of_a_written_folder_is_refused(
    target: FilesTarget, settings: dict[str, Any]
) -> None:
    publish(target, fenced(target), 0)
    with pytest.raises(TargetForeign, match="was written with parquet, now it is"):
        files(target, **settings).prepare(OUTPUT, SCHEMA, "append")


def test_a_column_to_partition_by_must_be_there(target: FilesTarget) -> None:
    with pytest.raises(JobError, match="there is no column country"):
        files(target, by=["country"]).prepare(OUTPUT, SCHEMA, "append")


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_files_are_only_appended_to(target: FilesTarget, mode: str) -> None:
    with pytest.raises(JobError, match=f"does not take output mode '{mode}'") as caught:
        files(target).prepare(OUTPUT, SCHEMA, mode)
    assert "Sqlite" in caught.value.hint


def test_a_missing_commit_entry_is_damage(target: FilesTarget) -> None:
    publish(target, fenced(target), 0, 1, 2)
    (target.path / "_commits" / "000000000002.json").unlink()
    with pytest.raises(Damaged, match=r"000000000002.json is missing"):
        files(target).published(OUTPUT)


def test_a_commit_entry_with_a_flipped_bit_is_damage(target: FilesTarget) -> None:
    publish(target, fenced(target), 0)
    path = target.path / "_commits" / "000000000002.json"
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    path.write_bytes(data)
    with pytest.raises(Damaged, match=path.name):
        target.rows()


# ---------------------------------------------------------------- mounts


@pytest.fixture
def two_mounts(target: FilesTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mounts of one file system: the same device, and yet no rename between them."""
    rename = os.rename

    def refuse(source: Any, to: Any) -> None:
        if Path(to).is_relative_to(target.path) and not Path(source).is_relative_to(target.path):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
        rename(source, to)

    monkeypatch.setattr(os, "rename", refuse)


def test_between_two_mounts_rows_are_copied_when_they_are_staged(
    target: FilesTarget, two_mounts: None
) -> None:
    sink, decided = fenced(target), publication(target.root, 0)
    folder = Path(decided.files[0].path).parent
    staged = Staged(decided.files, folder, folder, "l-0-1-a", SCHEMA, lambda: None)
    copied = sink.stage(staged)
    assert all(Path(file.path).is_relative_to(target.path) for file in copied)
    assert sink.publish(replace(decided, files=copied)) is Outcome.PUBLISHED
    assert target.rows() == rows_of(0)
    sink.settled(OUTPUT)


def test_what_was_decided_before_the_mounts_changed_is_published(
    target: FilesTarget, two_mounts: None
) -> None:
    sink, decided = fenced(target), publication(target.root, 0)
    assert sink.publish(decided) is Outcome.PUBLISHED
    assert sink.publish(decided) is Outcome.ALREADY_PUBLISHED
    assert target.rows() == rows_of(0)
    assert not any(Path(file.path).exists() for file in decided.files)
    sink.settled(OUTPUT)


# ---------------------------------------------------------------- roll-ups


def test_commits_that_were_set_back_alone_are_not_rolled_up_with_old_manifests(
    target: FilesTarget, tmp_path: Path
) -> None:
    sink = fenced(target, roll_up_every=4)
    publish(target, sink, 0)
    shutil.copytree(target.path / "_commits", tmp_path / "older")
    publish(target, sink, 1, 2)
    assert manifests(target)
    shutil.rmtree(target.path / "_commits")
    shutil.copytree(tmp_path / "older", target.path / "_commits")
    other = files(target, roll_up_every=4)
    for epoch in (1, 2):
        rows = stage(tmp_path / f"other {epoch}", table([900 + epoch]))
        other.publish(publication(tmp_path, epoch, files=rows, decision=f"other {epoch}"))
    with pytest.raises(Damaged, match="were set back"):
        other.tidy()
    assert target.rows() == [*rows_of(0), 901, 902]


def test_all_files_stay_listed_through_many_roll_ups(target: FilesTarget) -> None:
    sink = fenced(target, roll_up_every=3)
    for epoch in range(20):
        publish(target, sink, epoch)
        assert target.rows() == all_rows(epoch + 1)
        assert len(commits(target)) < 12
    assert files(target).published(OUTPUT).position == Position(LINEAGE, 19)
    assert manifests(target)
    sink.settled(OUTPUT)


def test_manifests_form_a_tree_so_that_a_roll_up_stays_small(
    target: FilesTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceflow.folders.commit_log._FAN_OUT", 3)
    sink = fenced(target, roll_up_every=2)
    for epoch in range(60):
        publish(target, sink, epoch)
        assert len(sink._folder.manifests) < 12
    assert {name[0] for name in manifests(target)} == {"0", "1", "2", "3"}
    assert target.rows() == all_rows(60)
    before = manifests(target)
    files(target).sweep(below_term=2)
    assert manifests(target) == before, "none of the tree is left over"
    publish(target, fenced(target, term=2, roll_up_every=2), 60, 61, term=2)
    assert target.rows() == all_rows(62)


# ---------------------------------------------------------------- what opening costs


def open_again(target: FilesTarget, term: int) -> None:
    sink = files(target, roll_up_every=4)
    sink.prepare(OUTPUT, SCHEMA, "append")
    sink.fence(OUTPUT, term=term, token=f"token {term}")
    sink.sweep(below_term=term)
    sink.settled(OUTPUT)


def reads_and_listings(target: FilesTarget, term: int, patch: pytest.MonkeyPatch) -> Counter[str]:
    """What one opening of the folder reads and lists."""
    found: Counter[str] = Counter()

    def counted(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            found[kind] += 1
            return call(*args)

        return count

    with patch.context() as patched:
        patched.setattr(LocalStore, "read", counted("read", LocalStore.read))
        patched.setattr(os, "listdir", counted("listed", os.listdir))
        patched.setattr(os, "scandir", counted("listed", os.scandir))
        open_again(target, term)
    return found


def taken_back(target: FilesTarget, epoch: int, term: int) -> None:
    """All epochs above `epoch` are taken back."""
    at = Position(LINEAGE, epoch)
    files(target).rewind(OUTPUT, cut=at, to=replace(at, lineage="b"), term=term, decision="cut")


@pytest.mark.parametrize("rewound", [False, True])
def test_opening_reads_and_lists_as_much_after_200_epochs_as_after_ten(
    target: FilesTarget, monkeypatch: pytest.MonkeyPatch, rewound: bool
) -> None:
    monkeypatch.setattr("onceflow.folders.commit_log._FAN_OUT", 3)
    costs = []
    for term, epochs in enumerate((range(10), range(10, 200)), 1):
        sink = fenced(target, term, roll_up_every=4)
        for epoch in epochs:
            lines = stage_lines(target.root / f"staged {epoch}", [epoch])
            sink.publish(publication(target.root, epoch, files=lines, term=term))
            sink.tidy()
        if rewound and len(epochs) > 10:
            taken_back(target, 150, term=2)
            assert target.rows() == list(range(151))
        costs.append(reads_and_listings(target, term + 1, monkeypatch))
    few, many = costs
    levels = 4  # 50 manifests in a tree with a fan-out of 3
    assert many["read"] <= few["read"] + 8 + 2 * levels, (
        "commits above the roll-up, and its manifests"
    )
    assert many["listed"] <= few["listed"] + 2, "a roll-up may be due, or not"


def test_a_foreign_file_is_noticed_in_place_of_one_that_is_gone(target: FilesTarget) -> None:
    sink = fenced(target, roll_up_every=2)
    publish(target, sink, *range(6))
    gone = target.path / "0000000002-part-00000.parquet"
    gone.rename(target.path / "0000000002-part-00009.parquet")
    with pytest.raises(TargetForeign, match=r"0000000002-part-00009\.parquet"):
        sink.settled(OUTPUT)


def test_a_folder_that_an_older_onceflow_rolled_up_gets_an_inventory(
    target: FilesTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled = _OutputFolder.rolled
    with monkeypatch.context() as older:
        older.setattr(_OutputFolder, "rolled", lambda self: {**rolled(self), "inventory": None})
        publish(target, fenced(target, roll_up_every=4), *range(30))
    first, second = (reads_and_listings(target, term, monkeypatch) for term in (2, 3))
    assert second["read"] < first["read"]
    assert files(target).published(OUTPUT).position == Position(LINEAGE, 29)
    assert target.rows() == all_rows(30)
    (target.path / "other.parquet").touch()
    with pytest.raises(TargetForeign, match=r"other\.parquet"):
        open_again(target, 4)


def test_rows_whose_removal_was_killed_are_removed_by_the_next_start(target: FilesTarget) -> None:
    publish(target, fenced(target, roll_up_every=2), *range(6))
    faults.arm("drop.committed", "raise")
    with pytest.raises(faults.InjectedFault):
        taken_back(target, 2, term=2)
    assert len(list(target.path.glob("*.parquet"))) == 12
    open_again(target, 3)
    assert len(list(target.path.glob("*.parquet"))) == 6
    assert target.rows() == all_rows(3)
    open_again(target, 4)


def test_the_first_roll_up_comes_after_a_hundred_commits(target: FilesTarget) -> None:
    sink = fenced(target)
    for epoch in range(98):
        sink.publish(publication(target.root, epoch, files=()))
    assert len(commits(target)) == 99
    publish(target, sink, 98)
    assert commits(target) == ["rollup-000000000100.json"]
    assert manifests(target) == ["0-000000000001-000000000100.json"]
    publish(target, sink, 99)
    assert target.rows() == [*rows_of(98), *rows_of(99)]


def test_a_new_driver_goes_on_behind_a_roll_up(target: FilesTarget) -> None:
    publish(target, fenced(target, roll_up_every=3), *range(5))
    for term, epochs in ((2, (5, 6)), (3, (7, 8, 9, 10))):
        sink = fenced(target, term=term, roll_up_every=3)
        sink.sweep(below_term=term)
        publish(target, sink, *epochs, term=term)
    assert target.rows() == all_rows(11)


def test_a_driver_that_stood_below_a_roll_up_knows_that_it_is_fenced(target: FilesTarget) -> None:
    older = fenced(target)
    publish(target, older, 0)
    newer = fenced(target, term=2, roll_up_every=3)
    publish(target, newer, 1, 2, 3, 4, 5, term=2)
    for epoch in (6, 3):
        with pytest.raises(Fenced):
            older.publish(publication(target.root, epoch))
    assert older.publish(publication(target.root, 5)) is Outcome.ALREADY_PUBLISHED
    assert target.rows() == all_rows(6)


def test_a_driver_that_stood_below_a_roll_up_writes_nothing_on_a_freed_name(
    target: FilesTarget,
) -> None:
    """It aims at an entry; the entry's name is taken, rolled up and freed before its put."""

    class Late(LocalStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            newer = fenced(target, term=2, roll_up_every=3)
            newer.publish(replace(decided, term=2))
            publish(target, newer, 2, 3, 4, 5, term=2)
            assert not (target.path / name).exists()
            return super().put_if_absent(name, data)

    older = fenced(target)
    publish(target, older, 0)
    decided = publication(target.root, 1)
    older._commit_log.numbered.store = Late(target.path)
    with pytest.raises(Fenced):
        older.publish(decided)
    assert target.rows() == all_rows(6)


def test_a_manifest_that_is_gone_is_damage(target: FilesTarget) -> None:
    publish(target, fenced(target, roll_up_every=3), *range(5))
    manifest = manifests(target)[0]
    (target.path / "_manifests" / manifest).unlink()
    with pytest.raises(Damaged, match=manifest):
        target.rows()


def test_a_manifest_that_was_swapped_for_another_is_damage(target: FilesTarget) -> None:
    publish(target, fenced(target, roll_up_every=3), *range(8))
    first, second, *_ = manifests(target)
    shutil.copy(target.path / "_manifests" / first, target.path / "_manifests" / second)
    with pytest.raises(Damaged, match=second):
        target.rows()


def publish_and_roll_up(target: FilesTarget, decided: Publication) -> None:
    sink = files(target, roll_up_every=4)
    sink.publish(decided)
    sink.tidy()


@pytest.mark.kill
@pytest.mark.parametrize(
    ("point", "visit"),
    [("put.linked", 2), ("rollup.written", 1), ("rollup.pruned-one", 1), ("rollup.pruned-one", 3)],
    ids=str,
)
def test_a_roll_up_that_was_killed_loses_and_doubles_nothing(
    target: FilesTarget, point: str, visit: int
) -> None:
    publish(target, fenced(target), 0, 1)
    run_and_kill(point, publish_and_roll_up, target, publication(target.root, 2), visit=visit)
    assert target.rows() == all_rows(3)

    sink = fenced(target, term=2, roll_up_every=4)
    sink.sweep(below_term=2)
    assert target.rows() == all_rows(3)
    publish(target, sink, *range(3, 12), term=2)
    assert target.rows() == all_rows(12)
    sink.settled(OUTPUT)


def test_a_paused_driver_that_rolls_up_after_a_sweep_leaves_the_folder_readable(
    target: FilesTarget,
) -> None:
    """It has put its manifest. Its successor sweeps; then it goes on and puts its roll-up."""
    older = fenced(target, roll_up_every=4)
    publish(target, older, 0, 1)

    def take_over(_: str) -> None:
        fenced(target, term=2).sweep(below_term=2)

    faults.arm("put.linked", take_over, visit=2)  # the entry, then the manifest
    publish(target, older, 2)
    assert target.rows() == all_rows(3)


@pytest.mark.parametrize("stopped_at", ["rollup.written", "rollup.pruned-one"])
def test_a_paused_driver_that_rolls_up_what_is_rolled_up_doubles_nothing(
    target: FilesTarget, stopped_at: str
) -> None:
    """Its successor was killed in its own roll-up; the third driver has just fenced."""
    older = fenced(target, roll_up_every=4)
    publish(target, older, 0, 1)

    def take_over(_: str) -> None:
        faults.disarm()
        second = fenced(target, term=2, roll_up_every=4)
        faults.arm(stopped_at, "raise")
        with pytest.raises(faults.InjectedFault):
            publish(target, second, 3, term=2)
        faults.disarm()
        fenced(target, term=3)

    faults.arm("folder.committed", take_over)
    publish(target, older, 2)
    assert target.rows() == all_rows(4)


def test_two_sinks_on_one_folder_know_the_same(target: FilesTarget) -> None:
    a, b = fenced(target, roll_up_every=3), files(target, roll_up_every=3)
    for epoch in range(0, 20, 2):
        publish(target, a, epoch)
        publish(target, b, epoch + 1)
        assert a.published(OUTPUT) == b.published(OUTPUT)
    assert target.rows() == all_rows(20)


# ---------------------------------------------------------------- drivers in any order


class Story:
    """Drivers that lead one after the other, wake up late and die, on one folder.

    What is modelled of the epoch log: only the newest leader decides, and a decision is there
    for everybody.
    """

    def __init__(self, root: Path, seed: int, *, kill: float, lose: float) -> None:
        self.target = FilesTarget(root)
        self.turns, self.truth = Turns(seed, kill=kill), Truth()
        self.lose = lose
        self.leader = 0
        self.decided: list[Publication] = []
        self.published: set[int] = set()

    @property
    def goes_on(self) -> bool:
        return len(self.decided) < 12 and self.leader < 20

    def lead(self) -> None:
        self.leader += 1
        term = self.leader
        sink = files(self.target, roll_up_every=3)
        local = LocalStore(self.target.path)
        sink._commit_log.numbered.store = Stepped(local, self.turns, self.truth, lose=self.lose)
        sink.fence(OUTPUT, term=term, token=f"token {term}")
        if self.decided:
            self.publish(sink, term)
        sink.sweep(below_term=term)
        if self.leader == term:
            sink.settled(OUTPUT)
        while self.leader == term and self.goes_on:
            self.decide(term)
            self.publish(sink, term)

    def decide(self, term: int) -> None:
        epoch = len(self.decided)
        staged = stage_lines(self.target.root / "staged" / str(epoch), rows_of(epoch))
        self.decided.append(publication(self.target.root, epoch, term=term, files=staged))

    def publish(self, sink: Files, term: int) -> None:
        decided = self.decided[-1]
        sink.publish(replace(decided, term=term))
        sink.tidy()
        self.published.add(decided.epoch)

    def drive(self) -> None:
        while self.goes_on:
            with contextlib.suppress(Fenced, Killed):
                self.lead()

    def watch(self) -> None:
        while self.goes_on:
            self.turns.wait()
            rows = self.target.rows()
            assert rows == all_rows(len(rows) // 5), "a reader sees whole epochs, each once"

    def play(self) -> None:
        self.turns.run(self.drive, self.drive, self.drive, self.watch)
        rows = self.target.rows()
        assert rows == all_rows(len(rows) // 5)
        assert set(range(len(rows) // 5)) >= self.published, "what was published is there"
        last = files(self.target)
        last.fence(OUTPUT, term=1000, token="the last")
        for decided in self.decided[-1:]:
            last.publish(replace(decided, term=1000))
        last.sweep(below_term=1000)
        last.settled(OUTPUT)
        assert self.target.rows() == all_rows(len(self.decided))


@pytest.mark.parametrize(("kill", "lose"), [(0.0, 0.0), (0.01, 0.0), (0.01, 0.2)], ids=str)
def test_drivers_in_any_order_publish_every_decided_epoch_once(
    tmp_path: Path, kill: float, lose: float
) -> None:
    for seed in seeds(8):
        Story(tmp_path / str(seed), seed, kill=kill, lose=lose).play()


def test_a_staged_folder_that_cannot_be_listed_is_an_error_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> object:
        raise OSError(errno.EMFILE, "too many open files")

    assert describe(tmp_path / "nothing", ()) == ()
    monkeypatch.setattr(os, "scandir", full)
    with pytest.raises(OSError, match="too many open files"):
        describe(tmp_path, ())
