"""Rows that are put into folders by the driver, as Spark's writer would."""

from __future__ import annotations

import pyarrow as pa
import pytest

from onceflow.contract.staged_files import folder_name, split


def test_rows_are_split_by_value_and_keep_their_order() -> None:
    table = pa.table({"id": [1, 2, 3, 4, 5], "land": ["b", None, "a", "b", None]})
    found = {value: part.column("id").to_pylist() for value, part in split(table, "land")}
    assert found == {"b": [1, 4], "a": [3], None: [2, 5]}
    assert all(part.column_names == ["id"] for _, part in split(table, "land"))


def test_no_rows_make_no_folders() -> None:
    empty = pa.table({"id": pa.array([], pa.int64()), "land": pa.array([], pa.string())})
    assert list(split(empty, "land")) == []
    several = pa.chunked_array([["a"], [], ["a", "b"]], pa.string())
    parts = dict(split(pa.table({"id": [1, 2, 3], "land": several}), "land"))
    assert {value: part.num_rows for value, part in parts.items()} == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (7, "x=7"),
        (None, "x=__HIVE_DEFAULT_PARTITION__"),
        ("a/b=c", "x=a%2Fb%3Dc"),
        ("100%", "x=100%25"),
        ("line\nbreak\x7f", "x=line%0Abreak%7F"),
        ("größe 日本", "x=größe 日本"),
    ],
)
def test_a_folder_is_called_as_spark_calls_it(value: object, name: str) -> None:
    assert folder_name("x", value) == name
