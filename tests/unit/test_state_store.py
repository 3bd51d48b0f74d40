"""Reading state: the newest version of a key counts, wherever it lies."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from stored import SCHEMA, in_order, keys_table, looked_up, plain, scanned, state_of, write_run

from onceflow.errors import Damaged
from onceflow.state import runs
from onceflow.state.keys import END, task_ranges
from onceflow.state.manifest import Manifest
from onceflow.state.runs import StoreSchema
from onceflow.state.store import Reader

pytestmark = pytest.mark.usefixtures("no_fsync")
EMPTY = Manifest(0, 8)


def state(folder: Path, *epochs: dict[Any, Any], modulo: int = 0) -> Manifest:
    """The state after epochs that wrote these rows."""
    manifest = EMPTY
    for epoch, rows in enumerate(epochs, 1):
        run = write_run(folder / f"{epoch}.arrow", rows, born=epoch, modulo=modulo)
        manifest = manifest.advance(epoch, [run])
    return manifest


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "BLOCK_ROWS", 4)


def test_the_newest_version_counts_and_a_tombstone_is_one(tmp_path: Path) -> None:
    manifest = state(
        tmp_path,
        {(n,): (n, None) for n in range(10)},
        {(1,): (100, 5), (2,): None, (20,): (20, None)},
        {(2,): (200, None), (3,): None},
    )
    expected = {(n,): (n, None) for n in range(10)}
    expected |= {(1,): (100, 5), (2,): (200, None), (20,): (20, None)}
    del expected[3,]
    reader = state_of(tmp_path, manifest)
    assert looked_up(reader, [(n,) for n in range(30)]) == expected
    assert scanned(reader) == expected


def test_a_state_of_nothing_has_nothing(tmp_path: Path) -> None:
    reader = state_of(tmp_path, EMPTY)
    assert looked_up(reader, [(1,)]) == {}
    assert scanned(reader) == {}
    assert reader.find_due("wake", 100, -END, END, 10)[0].size == 0
    assert reader.find_next_due("wake") is None
    values, found = reader.look_up(np.zeros(0, np.int64), keys_table([]))
    assert (values.num_rows, values.schema, found.size) == (0, SCHEMA.values, 0)


@pytest.mark.usefixtures("small_blocks")
def test_keys_that_share_a_place_are_told_apart_across_blocks(tmp_path: Path) -> None:
    keys = [(n,) for n in [*range(40), None]]
    rows = {key: (i, None) for i, key in enumerate(keys)}
    changed = {key: None if i % 3 else (-i, None) for i, key in enumerate(keys[::2])}
    manifest = state(tmp_path, rows, changed, modulo=2)
    expected = {k: v for k, v in {**rows, **changed}.items() if v is not None}
    reader = state_of(tmp_path, manifest)
    assert looked_up(reader, [*keys, (77,), (78,)], modulo=2) == expected
    assert scanned(reader) == expected


def test_an_older_manifest_sees_nothing_of_what_came_later(tmp_path: Path) -> None:
    before = state(tmp_path, {(1,): (1, None)})
    run = write_run(tmp_path / "later.arrow", {(1,): (2, None), (2,): (2, None)}, born=2)
    after = before.advance(2, [run])
    assert scanned(state_of(tmp_path, before)) == {(1,): (1, None)}
    assert scanned(state_of(tmp_path, after)) == {(1,): (2, None), (2,): (2, None)}


def test_keys_of_several_columns_and_types(tmp_path: Path) -> None:
    schema = StoreSchema(
        pa.schema([("name", pa.string()), ("n", pa.decimal128(20, 2))]),
        pa.schema([("tags", pa.list_(pa.struct([("a", pa.string())])))]),
    )
    rows: dict[Any, Any] = {
        ("x", None): ([{"a": "1"}],), (None, None): ([],), (None, 7): (None,), ("", 7): ([None],),
    }  # fmt: skip
    run = write_run(tmp_path / "a.arrow", rows, schema=schema)
    reader = Reader(tmp_path, EMPTY.advance(1, [run]), schema)
    assert looked_up(reader, [*rows, ("x", 7)]) == rows


def test_a_reader_of_some_groups_refuses_keys_of_others(tmp_path: Path) -> None:
    manifest = state(tmp_path, {(n,): (n, None) for n in range(50)})
    places, keys = in_order([(n,) for n in range(50)])
    reader = Reader(tmp_path, manifest, SCHEMA, range(2, 4))
    with pytest.raises(ValueError, match="groups 0 to 7"):
        reader.look_up(places, keys_table(keys))
    with pytest.raises(ValueError, match="not in order"):
        reader.look_up(places[::-1], keys_table(keys))
    parts = [Reader(tmp_path, manifest, SCHEMA, part) for part in task_ranges(8, 3)]
    assert {k: v for part in parts for k, v in scanned(part).items()} == {
        (n,): (n, None) for n in range(50)
    }


def test_a_damaged_run_stops_those_who_need_it(tmp_path: Path) -> None:
    manifest = state(tmp_path, {(1,): (1, None)}, {(2,): (2, None)})
    (tmp_path / "1.arrow").write_bytes(b"x")
    reader = state_of(tmp_path, manifest)
    assert looked_up(reader, [(2,)]) == {(2,): (2, None)}
    with pytest.raises(Damaged, match=r"1\.arrow is damaged"):
        looked_up(reader, [(1,), (2,)])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_file_that_was_removed_is_not_kept_open(tmp_path: Path) -> None:
    manifest = state(tmp_path, {(1,): (1, None)}, {(2,): (2, None)})
    scanned(state_of(tmp_path, manifest))
    assert {"1.arrow", "2.arrow"} <= open_files(tmp_path)
    (tmp_path / "1.arrow").unlink()
    state_of(tmp_path, EMPTY)
    gc.collect()
    assert open_files(tmp_path) == {"2.arrow"}


def open_files(folder: Path) -> set[str]:
    """Of this process, those in the folder, removed ones too."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [Path(line.split(maxsplit=5)[-1]) for line in lines if str(folder) in line]
    return {path.name.removesuffix(" (deleted)") for path in mapped}


# ---------------------------------------------------------------- timers


def all_due(reader: Reader, until: int, most: int, **more: Any) -> list[int]:
    """The users that are due, asked for bit by bit."""
    found, low = [], -END
    while low < END:
        places, keys, reached = reader.find_due("wake", until, low, END, most, **more)
        assert ((places >= low) & (places < reached)).all()
        assert reached > low
        found += [user for (user,) in plain(keys)]
        low = reached
    assert len(set(found)) == len(found)
    return sorted(found)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("modulo", [0, 2])
@pytest.mark.parametrize("most", [1, 3, 1000])
def test_what_is_due_is_found_bit_by_bit_and_once(tmp_path: Path, most: int, modulo: int) -> None:
    manifest = state(
        tmp_path,
        {(n,): (n, n) for n in range(30)},
        {(1,): (1, 500), (2,): None, (3,): (3, None), (4,): (4, 4), (25,): (25, 2)},
        modulo=modulo,
    )
    reader = state_of(tmp_path, manifest)
    assert all_due(reader, 10, most) == [0, 4, 5, 6, 7, 8, 9, 10, 25]
    assert all_due(reader, -1, most) == []


def test_what_an_earlier_epoch_has_fired_need_not_be_looked_up(tmp_path: Path) -> None:
    manifest = state(
        tmp_path,
        {(n,): (n, n) for n in range(10)},
        {(n,): (n, 3 if n == 0 else None) for n in range(6)},  # fired all until 5; 0 is due again
        {(20,): (20, 1)},
    )
    reader = state_of(tmp_path, manifest)
    assert all_due(reader, 7, 100, handled=(2, 5)) == all_due(reader, 7, 100) == [0, 6, 7, 20]


def test_the_next_time_that_something_can_be_due(tmp_path: Path) -> None:
    manifest = state(tmp_path, {(1,): (1, 10), (2,): (2, 30)}, {(3,): (3, 20), (4,): (4, None)})
    reader = state_of(tmp_path, manifest)
    assert [reader.find_next_due("wake", t) for t in (None, 9, 10, 20, 30)] == [
        10,
        10,
        20,
        30,
        None,
    ]


def test_a_column_that_became_a_timer_later_is_looked_through(tmp_path: Path) -> None:
    before = StoreSchema(SCHEMA.keys, pa.schema([("total", pa.int64()), ("other", pa.int64())]))
    run = write_run(tmp_path / "a.arrow", {(1,): (5, 1), (2,): (50, 1)}, schema=before)
    after = StoreSchema(SCHEMA.keys, pa.schema([*before.values, SCHEMA.values.field("wake")]),
                        ("total", "wake"))  # fmt: skip
    reader = Reader(tmp_path, EMPTY.advance(1, [run]), after)
    assert plain(reader.find_due("total", 10, -END, END, 9)[1]) == [(1,)]
    assert plain(reader.find_due("wake", 10, -END, END, 9)[1]) == []
    assert reader.find_next_due("total", 5) == 50
    assert reader.find_next_due("total") == 5
    assert reader.find_next_due("wake") is None
