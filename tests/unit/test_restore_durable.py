"""A restore survives a power cut: what its commit point names is on the disk before it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from saved import Saved

from onceflow.protocol.epoch_log import EpochLog
from onceflow.sinks import Files
from onceflow.snapshots.epochs import cuts_at
from onceflow.snapshots.restore import Restore

Known = dict[int, Any]  # inode -> what was on the disk when it was synced last


def seen(place: int | Path) -> object:
    """The bytes of a file, the names in a folder."""
    if isinstance(place, Path) and place.is_file():
        return place.stat().st_size
    if isinstance(place, int) and not os.path.isdir(f"/dev/fd/{place}"):
        return os.fstat(place).st_size
    return {name for name in os.listdir(place) if not name.startswith(".")}


def lost(known: Known, places: Iterable[Path]) -> list[str]:
    """What a power cut would take."""
    return [str(path) for path in places if known.get(path.stat().st_ino) != seen(path)]


@pytest.mark.parametrize("same_disk", [True, False], ids=["linked", "copied"])
def test_all_of_the_new_lineage_is_on_the_disk_before_the_old_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_disk: bool
) -> None:
    saved = Saved(tmp_path / "home")
    target = {"guarantee": "exactly-once", **Files(tmp_path / "out").describe()}
    saved.lead(outputs={"out": target})
    saved.decide(3)
    old, known, ends = saved.folder.lineage(), Known(), list[str]()
    link, fsync, end = os.link, os.fsync, EpochLog.end

    def link_on_one_disk(source: Path, to: Path) -> None:
        if not same_disk and not source.name.startswith("."):  # a put stays in its folder
            raise OSError(errno.EXDEV, "another file system")
        link(source, to)

    def remember(fd: int) -> None:
        known[os.fstat(fd).st_ino] = seen(fd)
        fsync(fd)

    def end_after_a_look(log: EpochLog, facts: dict[str, Any]) -> None:
        root = saved.folder.folder / "lineages"
        (new,) = (folder for folder in root.iterdir() if folder.name != old)
        assert lost(known, [root, new, *new.rglob("*")]) == []
        ends.append(str(facts["to"]))
        end(log, facts)

    monkeypatch.setattr(os, "link", link_on_one_disk)
    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(EpochLog, "end", end_after_a_look)
    Restore(saved.folder, cuts_at(saved.folder, "1"), {"": "replay"}, "restore").run({})
    assert ends == [saved.folder.lineage()]
    made = saved.folder.query(ends[0], "out").folder
    assert len(list(made.rglob("*.sst"))) == 2
