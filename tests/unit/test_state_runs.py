"""Runs: what is written is what is read, or the file is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from stored import SCHEMA, keys_table, placed, plain, write_run

from onceflow.errors import Damaged, DiskFull, JobError
from onceflow.state import runs
from onceflow.state.keys import group_of
from onceflow.state.manifest import Run
from onceflow.state.runs import OpenRun, RunWriter, StoreSchema

ONE = np.ones(1, np.bool_)


def values(*totals: int) -> pa.Table:
    rows = {"total": list(totals), "wake": [None] * len(totals)}
    return pa.table(rows, schema=SCHEMA.values)


def test_a_run_tells_what_is_in_it(tmp_path: Path) -> None:
    rows = {(n,): (n, 1000 - n) for n in range(100)}
    run = write_run(tmp_path / "a.arrow", {**rows, (7,): None}, born=5)
    assert run is not None
    assert (run.name, run.rows, run.born) == ("a.arrow", 100, 5)
    assert run.bytes == (tmp_path / "a.arrow").stat().st_size
    assert run.timers == {"wake": 901}
    of_groups = [group_of(place, 8) for place in placed(list(rows))]
    assert [run.count(group) for group in range(8)] == [of_groups.count(g) for g in range(8)]
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_a_run_without_rows_is_no_file(tmp_path: Path) -> None:
    assert write_run(tmp_path / "a.arrow", {}) is None
    assert os.listdir(tmp_path) == []


def test_tombstones_keep_no_values(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a.arrow", SCHEMA, 8)
    both = pa.table({"total": [1, 2], "wake": [5, 6]}).cast(SCHEMA.values)
    writer.add(np.array([1, 2]), keys_table([(1,), (2,)]), both, np.array([True, False]))
    run = writer.close(1)
    assert run is not None
    opened = OpenRun(tmp_path, run, SCHEMA)
    rows = pa.Table.from_batches([opened.block(0)])
    assert plain(opened.values(rows)) == [(1, 5), (None, None)]
    assert run.timers == {"wake": 5}


def test_rows_out_of_order_are_refused(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a.arrow", SCHEMA, 8)
    with pytest.raises(ValueError, match="order"):
        writer.add(np.array([2, 1]), keys_table([(1,), (2,)]), values(1, 2), np.ones(2, np.bool_))
    writer.add(np.array([5]), keys_table([(1,)]), values(1), ONE)
    with pytest.raises(ValueError, match="order"):
        writer.add(np.array([4]), keys_table([(2,)]), values(1), ONE)


def test_a_key_twice_is_refused_and_two_keys_of_one_place_are_not(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a.arrow", SCHEMA, 8)
    live, places = np.ones(3, np.bool_), np.array([9, 9, 9])
    with pytest.raises(ValueError, match="twice"):
        writer.add(places, keys_table([(1,), (2,), (1,)]), values(1, 2, 3), live)
    writer.add(places, keys_table([(1,), (None,), (3,)]), values(1, 2, 3), live)
    run = writer.close(1)
    assert run is not None
    opened = OpenRun(tmp_path, run, SCHEMA)
    found = opened.find(np.array([9, 9]), keys_table([(3,), (4,)]))
    assert [(w.tolist(), plain(opened.keys(rows))) for w, rows in found if len(w)] == [
        ([0], [(3,)])
    ]


def test_blocks_are_cut_by_rows_and_by_bytes_however_rows_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = StoreSchema(pa.schema([("n", pa.int64())]), pa.schema([("text", pa.string())]))
    monkeypatch.setattr(runs, "BLOCK_ROWS", 100)
    monkeypatch.setattr(runs, "BLOCK_BYTES", 10_000)
    writer, at = RunWriter(tmp_path / "a.arrow", schema, 8), 0
    for size, width in [(1, 1), (50, 1), (350, 1), (30, 1000), (3, 1)]:
        keys = pa.table({"n": np.arange(at, at + size)})
        text = pa.table({"text": ["x" * width] * size})
        writer.add(np.arange(at, at + size), keys, text, np.ones(size, np.bool_))
        at += size
    run = writer.close(1)
    assert run is not None
    opened = OpenRun(tmp_path, run, schema)
    blocks = [opened.block(i) for i in range(len(opened))]
    assert all(block.num_rows <= 100 and block.nbytes <= 12_000 for block in blocks)
    assert [n for block in blocks for n in block.column(1).to_pylist()] == list(range(at))
    assert len(blocks) < 20


def test_a_file_that_was_changed_is_named_with_the_way_back(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a.arrow", {(n,): (n, None) for n in range(50)}, born=9)
    assert run is not None
    data = bytearray((tmp_path / "a.arrow").read_bytes())
    for changed in (data[:-1], data[:200] + bytes([data[200] ^ 1]) + data[201:]):
        (tmp_path / "a.arrow").write_bytes(changed)
        with pytest.raises(Damaged, match=r"a\.arrow is damaged") as damaged:
            OpenRun(tmp_path, run, SCHEMA)
        assert "restore a savepoint, or roll back to an epoch before 9" in damaged.value.hint
    (tmp_path / "a.arrow").unlink()
    with pytest.raises(Damaged, match=r"a\.arrow is missing"):
        OpenRun(tmp_path, run, SCHEMA)


def test_a_file_is_read_once_to_check_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a.arrow", {(1,): (1, None)})
    assert run is not None
    runs._verified.clear()
    OpenRun(tmp_path, run, SCHEMA)
    monkeypatch.setattr(runs, "_CHUNK", -1)  # reading would fail
    OpenRun(tmp_path, run, SCHEMA)


def test_what_is_remembered_of_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_fsync: None
) -> None:
    monkeypatch.setattr(runs, "_REMEMBERED", 3)
    runs._verified.clear()
    written = [write_run(tmp_path / f"{i}.arrow", {(i,): (i, None)}) for i in range(5)]
    for run in written:
        assert run is not None
        OpenRun(tmp_path, run, SCHEMA)
    assert len(runs._verified) == 3


def test_a_full_disk_is_said_and_leaves_no_file(small_disk: Path) -> None:
    with pytest.raises(DiskFull, match="no space left"):
        write_run(small_disk / "a.arrow", {(n,): (n, n) for n in range(30_000)})
    assert not (small_disk / "a.arrow").exists()


def test_a_name_is_never_used_again(tmp_path: Path) -> None:
    write_run(tmp_path / "a.arrow", {(1,): (1, None)})
    with pytest.raises(FileExistsError):
        write_run(tmp_path / "a.arrow", {(2,): (1, None)})
    with pytest.raises(ValueError, match=r"ends with \.arrow"):
        RunWriter(tmp_path / "a.parquet", SCHEMA, 8)


def test_a_writer_that_is_given_up_leaves_nothing(tmp_path: Path, no_fsync: None) -> None:
    writer = RunWriter(tmp_path / "a.arrow", SCHEMA, 8)
    many = 70_000
    keys, live = pa.table({"user": np.arange(many)}), np.ones(many, np.bool_)
    writer.add(np.arange(many), keys, values(*range(many)), live)
    assert (tmp_path / "a.arrow").exists()
    writer.discard()
    assert os.listdir(tmp_path) == []


def test_a_timer_must_be_a_time() -> None:
    with pytest.raises(JobError, match="timer total is string"):
        StoreSchema(SCHEMA.keys, pa.schema([("total", pa.string())]), ("total",))
    with pytest.raises(JobError, match="no key column or no value column"):
        StoreSchema(SCHEMA.keys, pa.schema([]))
