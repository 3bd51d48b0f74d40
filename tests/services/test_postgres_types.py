"""Values on their way into PostgreSQL: as they were, or refused before anything is decided."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tables import Place

from onceflow.committables import describe
from onceflow.errors import BadRows, JobError
from onceflow.ledger import Outcome
from onceflow.schema import arrow_schema, parse_schema
from onceflow.sinks.base import Staged
from onceflow.testing.rows import awkward_rows
from onceflow.testing.servers import Postgres as Server
from onceflow.testing.under_test import same

PLAIN = (
    "id long, s string, b binary, ok boolean, b1 byte, b2 short, b4 integer, f float, d double, "
    "n decimal(28,10), day date, at timestamp, local timestamp_ntz"
)
ARRAYS = (
    "id long, s array<string>, b array<binary>, i array<integer>, n array<decimal(20,4)>, "
    "at array<timestamp>, ok array<boolean>, day array<date>"
)
NESTED = (
    'id long, place struct<x: long, `y "z"`: string>, points array<struct<x: double>>, '
    "grid array<array<long>>, tags map<string, long>, deep struct<m: map<long, array<string>>>"
)
ODD = 'tab\t line\n "quoted" \\ {a,b} \x01 \x1f naïve ☃ 😀'


@pytest.fixture
def place(postgres: Server, tmp_path: Path) -> Place:
    return Place(postgres, tmp_path)


@pytest.mark.parametrize("columns", [PLAIN, ARRAYS], ids=["plain", "arrays"])
@pytest.mark.parametrize("key", ["", "id"])
def test_values_and_arrays_come_back_as_they_were(place: Place, columns: str, key: str) -> None:
    rows = awkward_rows(parse_schema(columns), 0)
    place.driver(place.sink(key=key or ()), columns=columns).open().run(0, rows)
    same(place.read(), rows)


def test_nested_values_are_json(place: Place) -> None:
    rows = [
        {"id": 0, "place": {"x": 2**63 - 1, 'y "z"': ODD}, "points": [{"x": 0.1}, None],
         "grid": [[1, 2], [], None], "tags": [("a\\b", 1), ("ü", None)],
         "deep": {"m": [(7, [ODD, None, ""])]}},
        {"id": 1, "place": None, "points": [], "grid": None, "tags": [], "deep": {"m": None}},
    ]  # fmt: skip
    place.driver(place.sink(), columns=NESTED).open().run(0, rows)
    first, second = place.read()
    assert first == {
        "id": 0, "place": {"x": 2**63 - 1, 'y "z"': ODD}, "points": [{"x": 0.1}, None],
        "grid": [[1, 2], [], None], "tags": {"a\\b": 1, "ü": None},
        "deep": {"m": {"7": [ODD, None, ""]}},
    }  # fmt: skip
    assert second == {**rows[1], "tags": {}}


def test_what_json_has_no_form_for_is_text_in_it(place: Place) -> None:
    columns = "id long, v struct<f: double, b: binary, at: timestamp, day: date, n: decimal(20,4)>"
    at = datetime(2026, 3, 29, 1, 30, 0, 1, UTC)
    values = {"b": b"\x00\xff", "at": at, "day": date(1600, 2, 29), "n": Decimal("1.5000")}
    floats = (math.nan, math.inf, -math.inf, 0.5)
    rows = [{"id": n, "v": {"f": f, **values}} for n, f in enumerate(floats)]
    place.driver(place.sink(), columns=columns).open().run(0, rows)
    found = [row["v"] for row in place.read()]
    assert [v["f"] for v in found] == ["NaN", "Infinity", "-Infinity", 0.5]
    assert found[0] == {
        "f": "NaN", "b": "\\x00ff", "at": "2026-03-29T01:30:00.000001Z", "day": "1600-02-29",
        "n": 1.5,
    }  # fmt: skip


def test_numbers_that_are_not_finite_stay_what_they_are(place: Place) -> None:
    rows = [{"id": n, "d": f, "f": f} for n, f in enumerate((math.nan, math.inf, -math.inf, -0.0))]
    place.driver(place.sink(), columns="id long, d double, f float").open().run(0, rows)
    found = place.read()
    for name in ("d", "f"):
        assert [str(row[name]) for row in found] == ["nan", "inf", "-inf", "-0.0"]


@pytest.mark.parametrize(
    ("day", "said"),
    [
        (-719_163, "0001-12-31 BC"),
        (-719_162, "0001-01-01"),
        (-2_440_588, "4714-11-24 BC"),
        (2_932_897, "10000-01-01"),
        (106_751_990, "294247-01-09"),
        (-141_427, "1582-10-15"),
        (11_016, "2000-02-29"),
    ],
)
def test_days_and_times_of_any_year_are_exact(place: Place, day: int, said: str) -> None:
    columns = "id long, day date, at timestamp, local timestamp_ntz"
    tick = day * 86_400_000_000 + 43_200_000_001
    written = _staged(place, columns, {"id": [0], "day": [day], "at": [tick], "local": [tick]})
    _publish(place, columns, written)
    (found,) = place.read(f"SELECT day::text, at::text, local::text FROM {place.table}")
    era = " BC" if said.endswith(" BC") else ""
    time = f"{said.removesuffix(' BC')} 12:00:00.000001"
    assert found == {"day": said, "at": f"{time}+00{era}", "local": f"{time}{era}"}


def test_fields_that_cannot_be_null_fit_into_files_where_they_may(place: Place) -> None:
    """Spark's writer makes every field nullable, however the rows were declared."""
    root = place.home / "loose"
    root.mkdir()
    table = pa.table({"id": [1], "w": [{"a": 1, "b": ["x"]}]})
    pq.write_table(table, root / "part-0.parquet")
    columns = "id long not null, w struct<a: long not null, b: array<string> not null>"
    staged = Staged(describe(root, ()), root, root, "tag", parse_schema(columns), lambda: None)
    _publish(place, columns, staged)
    assert place.read() == [{"id": 1, "w": {"a": 1, "b": ["x"]}}]


def test_a_row_that_is_large_goes_in_beside_others(place: Place) -> None:
    rows = [{"id": n, "name": "x" * 3_000_000} for n in range(12)]
    place.driver(place.sink()).open().run(0, rows)
    assert place.read(f"SELECT id, length(name) AS n FROM {place.table} ORDER BY id") == [
        {"id": n, "n": 3_000_000} for n in range(12)
    ]


# ---------------------------------------------------------------- refused


def _staged(place: Place, columns: str, values: dict[str, list[Any]]) -> Staged:
    """Values as integers or bytes where Python has none for them."""
    schema, root = parse_schema(columns), place.home / "odd"
    root.mkdir()
    arrays = []
    for field in arrow_schema(schema):
        if pa.types.is_string(field.type):
            arrays.append(pa.array(values[field.name], pa.binary()).cast(pa.string(), safe=False))
        elif pa.types.is_date(field.type):
            arrays.append(pa.array(values[field.name], pa.int32()).cast(field.type))
        else:
            arrays.append(pa.array(values[field.name]).cast(field.type))
    table = pa.Table.from_arrays(arrays, schema=arrow_schema(schema))
    pq.write_table(table, root / "part-0.parquet")
    return Staged(describe(root, ()), root, root, "tag", schema, lambda: None)


def _publish(place: Place, columns: str, staged: Staged) -> None:
    driver = place.driver(place.sink(), columns=columns).open()
    decided = driver._decision(0, driver.sink.stage(staged))
    assert driver.publish(decided) is Outcome.PUBLISHED


@pytest.mark.parametrize(
    ("columns", "values", "said"),
    [
        ("id long, name string", {"id": [1, 2, 3], "name": [b"a\0b", b"\0", b"c"]},
         "text with a NUL character in column name (2 values)"),
        ("id long, name string", {"id": [1, 2], "name": [b"\xff\xfe", b"ok"]},
         "text that is not UTF-8 in column name (1 values)"),
        ("id long, day date", {"id": [1], "day": [-2_440_589]},
         "a date that is out of PostgreSQL's range in column day (1 values)"),
        ("id long, at timestamp", {"id": [1, 2], "at": [-(2**62), 0]},
         "a timestamp that is out of PostgreSQL's range in column at (1 values)"),
    ],
    ids=["nul", "utf8", "date", "timestamp"],
)  # fmt: skip
def test_rows_that_cannot_be_stored_are_refused_before_they_are_decided(
    place: Place, columns: str, values: dict[str, list[Any]], said: str
) -> None:
    staged = _staged(place, columns, values)
    with pytest.raises(BadRows) as refused:
        place.sink().stage(staged)
    assert said in refused.value.message


def test_nul_is_found_however_deep_it_lies(place: Place) -> None:
    columns = "id long, deep array<struct<m: map<string, string>>>"
    rows = [{"id": 1, "deep": [{"m": [("key", "a\0b")]}]}]
    driver = place.driver(place.sink(), columns=columns).open()
    with pytest.raises(BadRows, match="NUL character in column deep"):
        driver.stage(0, rows)


def test_a_key_that_is_null_is_refused(place: Place) -> None:
    driver = place.driver(place.sink(key=["id", "name"])).open()
    with pytest.raises(BadRows, match=r"null in key column name \(2 values\)"):
        driver.stage(0, [{"id": n, "name": None} for n in range(2)])


def test_types_and_names_that_postgresql_does_not_have_are_refused_at_the_start(
    place: Place,
) -> None:
    sink = place.sink()
    interval = parse_schema("id long, x string").replace('"string"', '"interval day to second"')
    with pytest.raises(JobError, match="no type for column x"):
        sink.prepare("job/query/output", interval, "append")
    with pytest.raises(JobError, match="63 bytes"):
        sink.prepare("job/query/output", parse_schema(f"id long, {'x' * 64} string"), "append")
