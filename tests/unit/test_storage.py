"""Small files that are put once, sealed documents, and numbered logs with roll-ups."""

from __future__ import annotations

import errno
import json
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from turns import Stepped, Truth, Turns, seeds

from onceflow import faults
from onceflow.errors import Damaged, DiskFull
from onceflow.store.posix import (
    VERSION,
    LocalStore,
    NumberedLog,
    Put,
    make_dirs,
    replace_file,
    seal,
    unseal,
)
from onceflow.testing.processes import child, run_and_kill

# ---------------------------------------------------------------- put-if-absent


def put_many(store: LocalStore, who: str, names: list[str]) -> list[str]:
    return [name for name in names if store.put_if_absent(name, who.encode())]


def put_when_told(pipe: Connection, root: Path, who: str, names: list[str]) -> None:
    pipe.recv()
    pipe.send(put_many(LocalStore(root), who, names))


def everything_was_won_once(
    store: LocalStore, wins: dict[str, list[str]], names: list[str]
) -> None:
    assert sorted(name for won in wins.values() for name in won) == sorted(names)
    for who, won in wins.items():
        assert {store.read(name) for name in won} <= {who.encode()}


def test_of_many_threads_one_wins_each_name(tmp_path: Path) -> None:
    store, names = LocalStore(tmp_path), [f"log/{n}" for n in range(40)]
    wins: dict[str, list[str]] = {}
    begin = threading.Barrier(6)

    def race(who: str) -> None:
        begin.wait()
        wins[who] = put_many(store, who, names)

    threads = [threading.Thread(target=race, args=(f"thread {n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    everything_was_won_once(store, wins, names)
    assert sorted(os.listdir(tmp_path / "log")) == sorted(n.removeprefix("log/") for n in names)


def test_of_many_processes_one_wins_each_name(tmp_path: Path) -> None:
    names = [f"log/{n}" for n in range(100)]
    with (
        child(put_when_told, tmp_path, "a", names) as a,
        child(put_when_told, tmp_path, "b", names) as b,
        child(put_when_told, tmp_path, "c", names) as c,
    ):
        racers = {"a": a, "b": b, "c": c}
        for racer in racers.values():
            racer.pipe.send("go")
        wins = {who: racer.hear() for who, racer in racers.items()}

    everything_was_won_once(LocalStore(tmp_path), wins, names)


def test_a_put_on_a_name_that_is_taken_changes_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert store.put_if_absent("a", b"first")
    assert not store.put_if_absent("a", b"second")
    assert store.read("a") == b"first"


def put_entry(root: Path, data: bytes) -> None:
    LocalStore(root).put_if_absent("log/entry", data)


@pytest.mark.kill
def test_a_put_that_is_killed_before_its_link_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    run_and_kill("put.written", put_entry, tmp_path, b"whole")

    store = LocalStore(tmp_path)
    assert store.read("log/entry") is None
    assert store.list("log") == []
    assert store.put_if_absent("log/entry", b"again")


@pytest.mark.kill
def test_a_put_that_is_killed_after_its_link_is_whole(tmp_path: Path) -> None:
    run_and_kill("put.linked", put_entry, tmp_path, b"whole")

    store = LocalStore(tmp_path)
    assert store.read("log/entry") == b"whole"
    assert store.list("log") == ["entry"]
    assert not store.put_if_absent("log/entry", b"again")


@pytest.mark.kill
@pytest.mark.parametrize("point", faults.PUT)
def test_what_killed_puts_left_is_swept_and_nothing_else(tmp_path: Path, point: str) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("log/other", b"kept")
    run_and_kill(point, put_entry, tmp_path, b"whole")
    assert any(name.startswith(".put-") for name in os.listdir(tmp_path / "log"))

    store.sweep("log")

    linked = ["entry"] if point == "put.linked" else []
    assert sorted(os.listdir(tmp_path / "log")) == [*linked, "other"]
    store.sweep("no such folder")


def put_large_files(pipe: Connection, root: Path) -> None:
    number = 0
    while True:
        LocalStore(root).put_if_absent(str(number), bytes([number % 256]) * 500_000)
        number += 1


@pytest.mark.kill
def test_a_reader_sees_whole_files_or_none_whenever_the_writer_is_killed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with child(put_large_files, tmp_path) as writer:
        for number in range(30):
            while (data := store.read(str(number))) is None:
                pass
            assert data == bytes([number % 256]) * 500_000
        writer.process.kill()
        writer.ended()
    for name in store.list():
        assert store.read(name) == bytes([int(name) % 256]) * 500_000


def test_a_put_whose_temporary_file_is_swept_still_says_who_won(tmp_path: Path) -> None:
    """A successor sweeps while the paused driver stands between its two steps."""
    store = LocalStore(tmp_path)
    faults.arm("put.written", lambda _: store.sweep("log"))
    assert store.put_if_absent("log/entry", b"slow")
    assert store.read("log/entry") == b"slow"


def test_names_that_are_not_there_read_as_none_and_are_deleted_quietly(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "never made")
    assert store.read("a/b") is None
    assert store.list("a") == []
    store.delete("a/b")
    assert not (tmp_path / "never made").exists()


# ---------------------------------------------------------------- a full disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_disk_full_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match=str(tmp_path / "a")):
        LocalStore(tmp_path).put_if_absent("a", b"data")
    with pytest.raises(DiskFull, match=str(tmp_path / "b")):
        replace_file(tmp_path / "b", b"data")
    assert os.listdir(tmp_path) == []


def test_another_error_of_the_disk_is_not_called_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        LocalStore(tmp_path).put_if_absent("a", b"data")


def test_a_disk_that_fills_up_takes_entries_again_when_there_is_space(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    assert store.put_if_absent("first", b"x" * 1000)
    with pytest.raises(DiskFull, match="no space left"):
        store.put_if_absent("large", b"x" * 500_000)
    with pytest.raises(DiskFull, match="no space left"):
        replace_file(small_disk / "first", b"y" * 500_000)
    assert os.listdir(small_disk) == ["first"]
    assert store.read("first") == b"x" * 1000
    assert store.put_if_absent("small", b"fits")


# ---------------------------------------------------------------- files that are replaced


def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "offsets"
    for data in (b"old", b"", b"new"):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert os.listdir(path.parent) == ["offsets"]


def test_folders_are_made_once_whoever_makes_them(tmp_path: Path) -> None:
    for _ in range(2):
        make_dirs(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


# ---------------------------------------------------------------- sealed documents

BODY = {"epoch": 7, "äöü": [1, None, "x\ny"], "deep": {"a": 1.5}}
WHERE = "/home/job/log/7.json"


def test_a_sealed_document_comes_back_as_it_was() -> None:
    data = seal("epoch log", "job/query", BODY)
    assert unseal(data, "epoch log", "job/query", WHERE) == BODY
    assert unseal(data, "epoch log", None, WHERE) == BODY
    assert data.count(b"\n") == 2  # a person can read it with head and tail


def refused(data: bytes, *, kind: str = "epoch log", subject: str = "job/query") -> str:
    with pytest.raises(Damaged) as caught:
        unseal(data, kind, subject, WHERE)
    assert WHERE in caught.value.message
    assert caught.value.hint
    return caught.value.message


def test_a_document_that_is_cut_anywhere_is_damaged() -> None:
    data = seal("epoch log", "job/query", BODY)
    for length in range(len(data)):
        refused(data[:length])


def test_a_document_with_any_bit_flipped_is_damaged() -> None:
    data = seal("epoch log", "job/query", {"epoch": 7})
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        refused(bytes(flipped))


def test_a_document_with_anything_added_is_damaged() -> None:
    data = seal("epoch log", "job/query", BODY)
    for extra in (b"\n", b" ", b"x", data):
        refused(data + extra)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"\n\n", b"null\n\n", b"[]\n{}\n", b'"text"\n{}\n', b"7\n{}\n", b"\xff\xfe\n"],
)
def test_what_is_no_document_at_all_is_damaged(data: bytes) -> None:
    refused(data)


def test_a_document_of_another_kind_says_which() -> None:
    message = refused(seal("files commit", "job/query", BODY))
    assert "files commit" in message
    assert "epoch log" in message


def test_a_document_of_somebody_else_says_whose() -> None:
    message = refused(seal("epoch log", "job/other", BODY))
    assert "job/other" in message
    assert "job/query" in message


def of_version(version: Any) -> bytes:
    head, body, _ = seal("epoch log", "job/query", BODY).split(b"\n")
    header = {**json.loads(head), "version": version}
    return json.dumps(header).encode() + b"\n" + body + b"\n"


def test_a_document_of_a_newer_version_asks_for_the_newer_onceflow() -> None:
    with pytest.raises(Damaged, match="newer onceflow") as caught:
        unseal(of_version(VERSION + 1), "epoch log", "job/query", WHERE)
    assert WHERE in caught.value.message
    assert caught.value.hint == "use the newer onceflow"


@pytest.mark.parametrize("version", [0, -1, None, "1", []])
def test_a_document_of_a_version_that_never_was_is_damaged(version: Any) -> None:
    refused(of_version(version))


# ---------------------------------------------------------------- numbered logs


class Listed:
    """A view that is the list of all entries; a roll-up carries all of them."""

    def __init__(self) -> None:
        self.restarts: list[int] = []
        self.restart(0, None)

    def restart(self, position: int, roll_up: dict[str, Any] | None) -> None:
        self.position = position
        self.entries: list[dict[str, Any]] = list(roll_up["entries"]) if roll_up else []
        self.restarts.append(position)

    def apply(self, number: int, entry: dict[str, Any]) -> None:
        assert number == self.position + 1
        self.position = number
        self.entries.append(entry)

    def roll_up(self) -> dict[str, Any]:
        return {"entries": self.entries}


def numbered(root: Path) -> NumberedLog:
    return NumberedLog(LocalStore(root), "log", "test log", "the test")


def filled(root: Path, count: int) -> tuple[NumberedLog, Listed]:
    log, view = numbered(root), Listed()
    for n in range(1, count + 1):
        assert log.put(n, {"n": n}) is Put.WON
    log.catch_up(view)
    return log, view


def entries(count: int) -> list[dict[str, Any]]:
    return [{"n": n} for n in range(1, count + 1)]


def read(root: Path) -> Listed:
    view = Listed()
    numbered(root).catch_up(view)
    return view


def test_a_reader_follows_the_log(tmp_path: Path) -> None:
    log, view = filled(tmp_path, 3)
    assert view.entries == entries(3)
    log.put(4, {"n": 4})
    log.catch_up(view)
    assert view.entries == entries(4)
    assert view.restarts == [0]


def test_an_empty_log_has_nothing_and_is_not_made_by_reading(tmp_path: Path) -> None:
    assert read(tmp_path / "log of nobody").position == 0
    assert not (tmp_path / "log of nobody").exists()


def test_a_number_is_put_once(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, 2)
    assert log.put(2, {"n": "another"}) is Put.LOST
    assert read(tmp_path).entries == entries(2)


def test_a_hole_is_damage_and_names_the_missing_file(tmp_path: Path) -> None:
    log, view = filled(tmp_path, 5)
    missing = tmp_path / log.entry_name(3)
    missing.unlink()
    with pytest.raises(Damaged, match=missing.name):
        read(tmp_path)
    log.catch_up(view)  # who is past it has read it


def test_a_damaged_entry_is_named_and_not_applied(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, 3)
    path = tmp_path / log.entry_name(2)
    path.write_bytes(path.read_bytes()[:-3])
    view = Listed()
    with pytest.raises(Damaged, match=path.name):
        log.catch_up(view)
    assert view.entries == entries(1)


def test_entries_that_were_swapped_between_logs_are_damage(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, 2)
    other = NumberedLog(LocalStore(tmp_path / "other"), "log", "test log", "another one")
    other.put(1, {"n": 1})
    os.replace(tmp_path / "other" / other.entry_name(1), tmp_path / log.entry_name(1))
    with pytest.raises(Damaged, match="belongs to another one"):
        read(tmp_path)


def test_files_that_are_no_entries_are_not_read(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    for name in ("notes.txt", "x.json", "manifest-1-2.json", "rollup-x.json", "3.json.bak"):
        (tmp_path / "log" / name).write_text("hello")
    assert read(tmp_path).entries == entries(2)


def test_a_reader_begins_with_the_roll_up(tmp_path: Path) -> None:
    log, view = filled(tmp_path, 5)
    log.roll_up(5, view.roll_up())
    log.put(6, {"n": 6})

    fresh = read(tmp_path)

    assert fresh.entries == entries(6)
    assert fresh.restarts == [0, 5]
    assert log.size() == 1  # the names are free
    log.catch_up(view)
    assert view.restarts == [0]  # who stood at the roll-up goes on


def test_a_reader_that_stood_below_a_roll_up_restarts_from_it(tmp_path: Path) -> None:
    log, behind = filled(tmp_path, 2)
    for n in (3, 4, 5):
        log.put(n, {"n": n})
    log.roll_up(4, {"entries": entries(4)})
    log.catch_up(behind)
    assert behind.entries == entries(5)
    assert behind.restarts == [0, 4]


def test_a_put_on_a_freed_name_has_written_nothing(tmp_path: Path) -> None:
    log, view = filled(tmp_path, 5)
    log.roll_up(5, view.roll_up())
    for number in (1, 5):
        assert log.put(number, {"n": "a zombie's"}) is Put.COVERED
    assert read(tmp_path).entries == entries(5)
    assert log.put(6, {"n": 6}) is Put.WON
    assert read(tmp_path).entries == entries(6)


def test_what_a_zombie_put_on_freed_names_is_pruned_by_the_next_roll_up(tmp_path: Path) -> None:
    log, view = filled(tmp_path, 3)
    log.roll_up(3, view.roll_up())
    log.put(2, {"n": "a zombie's"})
    log.put(4, {"n": 4})
    log.catch_up(view)
    log.roll_up(4, view.roll_up())
    assert os.listdir(tmp_path / "log") == ["rollup-000000000004.json"]


def test_a_zombies_entry_on_a_freed_name_is_unread_again(tmp_path: Path) -> None:
    """The reader looked for a roll-up, then one was written, its names were freed and reused."""

    class Racing(LocalStore):
        """Before the first entry is read, everybody else acts."""

        race = True

        def read(self, name: str) -> bytes | None:
            if self.race:
                self.race = False
                others.roll_up(3, view.roll_up())
                others.put(2, {"n": "a zombie's"})
            return super().read(name)

    others, view = filled(tmp_path, 3)
    os.remove(tmp_path / others.entry_name(1))
    log = NumberedLog(Racing(tmp_path), "log", "test log", "the test")
    reader = Listed()
    reader.restart(1, {"entries": entries(1)})

    log.catch_up(reader)

    assert reader.entries == entries(3)


def test_an_older_roll_up_that_comes_late_is_not_looked_at(tmp_path: Path) -> None:
    log, view = filled(tmp_path, 5)
    log.roll_up(5, view.roll_up())
    log.roll_up(3, {"entries": ["a zombie's"]})
    assert read(tmp_path).entries == entries(5)
    assert os.listdir(tmp_path / "log") == ["rollup-000000000005.json"]


def roll_up_five(root: Path) -> None:
    log, view = numbered(root), Listed()
    log.catch_up(view)
    log.roll_up(5, {"entries": view.entries[:5]})


@pytest.mark.kill
@pytest.mark.parametrize(
    ("point", "visit"), [("rollup.written", 1), *(("rollup.pruned-one", n) for n in range(1, 6))]
)
def test_pruning_that_was_killed_changes_nothing_and_is_finished_later(
    tmp_path: Path, point: str, visit: int
) -> None:
    log, _ = filled(tmp_path, 7)
    run_and_kill(point, roll_up_five, tmp_path, visit=visit)
    assert read(tmp_path).entries == entries(7)

    log.prune()

    left = ["000000000006.json", "000000000007.json", "rollup-000000000005.json"]
    assert sorted(os.listdir(tmp_path / "log")) == left
    assert read(tmp_path).entries == entries(7)


def test_pruning_frees_covered_numbers_and_nothing_else(tmp_path: Path) -> None:
    log, view = filled(tmp_path, 3)
    (tmp_path / "log" / "manifest-1-3.json").touch()
    log.prune()  # nothing is rolled up yet
    assert log.size() == 3
    log.roll_up(2, {"entries": view.entries[:2]})
    left = ["000000000003.json", "manifest-1-3.json", "rollup-000000000002.json"]
    assert sorted(os.listdir(tmp_path / "log")) == left


def test_a_log_that_was_set_back_below_its_reader_is_noticed(tmp_path: Path) -> None:
    """An older copy of the folder was restored under a driver that runs."""
    log, view = filled(tmp_path, 5)
    for n in (4, 5):
        os.remove(tmp_path / log.entry_name(n))
    log.catch_up(view)
    assert view.entries == entries(3)


def in_any_order(root: Path, seed: int) -> None:
    turns, truth = Turns(seed), Truth()

    def log() -> NumberedLog:
        store = Stepped(LocalStore(root), turns, truth)
        return NumberedLog(store, "log", "test log", "the test")

    def write(who: str) -> None:
        mine, view = log(), Listed()
        for n in range(5):
            mine.catch_up(view)
            assert view.entries == truth.entries[: view.position]
            entry = {"by": who, "n": n}
            put = mine.put(view.position + 1, entry)
            # COVERED: it was on a freed name, or it was read and rolled up before we looked.
            assert put is Put.COVERED or (put is Put.WON) == (entry in truth.entries)
            if view.position and turns.random.random() < 0.4:
                mine.roll_up(view.position, view.roll_up())

    def watch() -> None:
        mine, kept = log(), Listed()
        for _ in range(4):
            for view in (kept, Listed()):
                at_least = len(truth.entries)
                mine.catch_up(view)
                assert view.position >= at_least
                assert view.entries == truth.entries[: view.position]

    turns.run(lambda: write("a"), lambda: write("b"), lambda: write("c"), watch)
    assert read(root).entries == truth.entries


def test_readers_writers_and_roll_ups_in_any_order_agree_with_a_list(tmp_path: Path) -> None:
    for seed in seeds(20):
        in_any_order(tmp_path / str(seed), seed)
