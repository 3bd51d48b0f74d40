"""State that was written with other columns."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from stored import looked_up, scanned, write_run

from onceflow.contract.schema import arrow_schema, parse_schema
from onceflow.state.compact import Merge, compact
from onceflow.state.evolve import adapt, find_key_misfits, find_misfits
from onceflow.state.manifest import Manifest
from onceflow.state.runs import StoreSchema
from onceflow.state.store import Reader


def columns(text: str) -> pa.Schema:
    return arrow_schema(parse_schema(text))


FIT: list[tuple[str, str, list[Any], list[Any]]] = [
    ("a byte", "a short", [1, None], [1, None]),
    ("a byte", "a long", [-1, None], [-1, None]),
    ("a int", "a double", [2**31 - 1], [2.0**31 - 1]),
    ("a float", "a double", [0.5, None], [0.5, None]),
    ("a decimal(5,2)", "a decimal(38,4)", [Decimal("123.45")], [Decimal("123.4500")]),
    (
        "a struct<x: int, y: string>",
        "a struct<z: string, x: long>",
        [{"x": 1, "y": "q"}, None, {"x": None, "y": None}],
        [{"z": None, "x": 1}, None, {"z": None, "x": None}],
    ),
    (
        "a array<struct<x: int>>",
        "a array<struct<x: long, y: array<int>>>",
        [[{"x": 1}, None], None, [], [{"x": 3}]],
        [[{"x": 1, "y": None}, None], None, [], [{"x": 3, "y": None}]],
    ),
    (
        "a map<string, struct<x: int>>",
        "a map<string, struct<y: int, x: long>>",
        [[("k", {"x": 1}), ("l", None)], None, []],
        [[("k", {"y": None, "x": 1}), ("l", None)], None, []],
    ),
]


@pytest.mark.parametrize(("old", "new", "before", "after"), FIT)
def test_what_fits_is_read_as_it_is_declared_now(
    old: str, new: str, before: list[Any], after: list[Any]
) -> None:
    one, two = columns(f"gone int, {old}"), columns(f"{new}, added array<string>")
    assert find_misfits(one, two) == []
    table = pa.table({"gone": [9] * len(before), "a": before}, schema=one)
    read = adapt(table, two)
    read.validate(full=True)
    assert read.schema == two
    assert read["a"].to_pylist() == after
    assert read["added"].null_count == len(after)
    twice = adapt(pa.concat_tables([table.slice(1), table]), two)
    twice.validate(full=True)
    assert twice["a"].to_pylist() == after[1:] + after


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("a long", "a int", "a was int64, now it is int32"),
        ("a long", "a double", "a was int64, now it is double"),
        ("a string", "a long", "a was string, now it is int64"),
        ("a date", "a timestamp_ntz", "a was date32[day], now it is timestamp[us]"),
        ("a decimal(5,2)", "a decimal(6,4)", "a was decimal128(5, 2), now it is"),
        ("a decimal(5,2)", "a decimal(9,1)", "a was decimal128(5, 2), now it is"),
        ("a struct<x: long>", "a struct<x: int>", "a.x was int64, now it is int32"),
        ("a array<struct<x: int>>", "a array<int>", "a.element was struct<x: int32>"),
        ("a map<int, int>", "a map<long, int>", "a was map<int32, int32"),
        ("a map<int, long>", "a map<int, int>", "a.value was int64, now it is int32"),
        ("a int", "a int, b int not null", "b was added and may not be null"),
        ("a int", "a int not null", "a could be null, now it may not"),
        (
            "a struct<x: int>",
            "a struct<x: int, y: int not null>",
            "a.y was added and may not be null",
        ),
    ],
)
def test_what_does_not_fit_is_named(old: str, new: str, reason: str) -> None:
    [said] = find_misfits(columns(old), columns(new))
    assert said.startswith(reason)


def test_keys_keep_their_columns_but_for_wider_whole_numbers() -> None:
    assert find_key_misfits(columns("a int, b string"), columns("a long, b string")) == []
    for other in ("b string, a int", "a int", "a int, b string, c int"):
        [reason] = find_key_misfits(columns("a int, b string"), columns(other))
        assert reason.startswith("the key was a, b, now it is ")
    assert find_key_misfits(columns("a int, b float"), columns("a string, b double")) == [
        "key column a was int32, now it is string",
        "key column b was float, now it is double",
    ]


def test_runs_of_before_and_after_a_change_are_read_and_merged_together(tmp_path: Path) -> None:
    old = StoreSchema(columns("k int, l string"), columns("n int, gone string"))
    new = StoreSchema(columns("k long, l string"), columns("at timestamp, n long"), ("at",))
    rows: dict[Any, Any] = {(k, "x"): (k, "q") for k in range(20)}
    changed: dict[Any, Any] = {(3, "x"): (7, 33), (4, "x"): None}
    one = write_run(tmp_path / "1.arrow", rows, born=1, schema=old)
    two = write_run(tmp_path / "2.arrow", changed, born=2, schema=new)
    manifest = Manifest(0, 8).advance(1, [one]).advance(2, [two])
    expected = {(k, "x"): (None, k) for k in range(20) if k != 4} | {(3, "x"): (7, 33)}
    reader = Reader(tmp_path, manifest, new)
    assert scanned(reader) == expected
    assert looked_up(reader, [(k, "x") for k in range(25)]) == expected
    assert reader.find_next_due("at") == 7
    plan = [
        Merge(range(group, group + 1), tuple(stack), True)
        for group in range(8)
        if len(stack := manifest.stack(group)) > 1
    ]
    merged = manifest.advance(3, [], compact(reader, plan, tmp_path / "m.arrow"))
    assert scanned(Reader(tmp_path, merged, new)) == expected
