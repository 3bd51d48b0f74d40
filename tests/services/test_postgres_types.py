"""Values on their way into PostgreSQL: as they were, or refused before anything is decided."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import Place

import any_values
from onceflow.contract.abilities import Staged
from onceflow.contract.ledger import Outcome
from onceflow.contract.schema import arrow_schema, parse_schema
from onceflow.contract.staged_files import describe
from onceflow.errors import BadRows, JobError
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
EXAMPLES = 40
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


@pytest.mark.parametrize(
    ("day", "said", "time"),
    [
        (-719_163, "0001-12-31 BC", "0001-12-31T12:00:00.000001 BC"),
        (-735_160, "0044-03-15 BC", "0044-03-15T12:00:00.000001 BC"),
        (2_932_897, "10000-01-01", "10000-01-01T12:00:00.000001"),
        (11_016, "2000-02-29", "2000-02-29T12:00:00.000001"),
    ],
)  # fmt: skip
def test_times_in_json_are_iso_8601_as_postgresql_writes_it(
    place: Place, day: int, said: str, time: str
) -> None:
    kinds = [{"type": "map", "keyType": kind, "valueType": kind, "valueContainsNull": True}
             for kind in any_values.TIMES]  # fmt: skip
    fields = [{"name": f"m{n}", "type": kind} for n, kind in enumerate(kinds)]
    tick = day * any_values.US_A_DAY + 43_200_000_001
    value = {"m0": [(day, day)], "m1": [(tick, tick)], "m2": [(tick, tick)]}
    kind = {"type": "struct", "fields": [{**f, "nullable": True, "metadata": {}} for f in fields]}
    found = _through(place, "rows", kind, [value])[0]
    zoned = f"{time.removesuffix(' BC')}Z{' BC' if 'BC' in time else ''}"
    assert found == {"m0": {said: said}, "m1": {zoned: zoned}, "m2": {time: time}}


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


def test_a_key_that_an_index_does_not_take_is_refused(place: Place) -> None:
    """One byte more, and PostgreSQL says: index row size 2712 exceeds btree version 4 maximum."""
    rng = random.Random(7)
    longest, longer = (_printable(rng, length) for length in (2692, 2693))
    driver = place.driver(place.sink(key="name")).open()
    driver.run(0, [{"id": 1, "name": longest}])
    assert place.ids() == [1]
    with pytest.raises(BadRows) as refused:
        driver.stage(1, [{"id": 2, "name": "short"}, {"id": 3, "name": longer}])
    assert "more than 2,704 bytes of an index" in refused.value.message
    assert f"in column name (1 values), the first where name = {longer[:60]!r}" in (
        refused.value.message
    )
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        place.run(f"INSERT INTO {place.table} VALUES (3, $x${longer}$x$)")
    place.driver(place.sink(table="others"), output="job/query/others").open().run(
        0, [{"id": 3, "name": longer}]
    )


@pytest.mark.parametrize(
    "columns",
    [
        "a long, b string, c short, d binary", "a array<string>, b boolean", "a array<binary>",
        "a array<long>", "a array<boolean>", "a array<decimal(38,10)>", "a array<timestamp>",
        "a struct<b: string, c: long, d: boolean, e: binary>", "a array<array<long>>",
        "a array<array<double>>", "a array<struct<b: timestamp, c: date, d: decimal(38,38)>>",
        "a map<decimal(38,38), decimal(38,38)>", "a array<map<string, boolean>>",
    ],
)  # fmt: skip
def test_no_key_that_is_decided_is_too_long(place: Place, columns: str) -> None:
    """Of random keys, which cannot be compressed, about as long as an index takes."""
    rng, kinds = random.Random(columns), json.loads(parse_schema(columns))["fields"]
    driver = place.driver(place.sink(key=[f["name"] for f in kinds]), columns=columns).open()
    fit = []
    for _ in range(40):
        size = rng.randrange(9_000) // len(kinds)
        row = {f["name"]: _of_size(rng, f["type"], size) for f in kinds}
        with contextlib.suppress(BadRows):
            driver.stage(0, [row])
            fit.append(row)
    assert 0 < len(fit) < 40
    driver.run(0, fit)
    assert place.read(f"SELECT count(*) AS n FROM {place.table}") == [{"n": len(fit)}]


def _of_size(rng: random.Random, kind: Any, size: int) -> Any:
    match kind:
        case {"type": "array", "elementType": of}:
            parts = rng.randint(1, max(1, size // 8))
            return [_of_size(rng, of, size // parts) for _ in range(parts)]
        case {"type": "map", "keyType": key, "valueType": of}:
            parts = rng.randint(1, max(1, size // 16))
            half = size // parts // 2
            found = {_of_size(rng, key, half): _of_size(rng, of, half) for _ in range(parts)}
            return list(found.items())
        case {"type": "struct", "fields": fields}:
            return {f["name"]: _of_size(rng, f["type"], size // len(fields)) for f in fields}
        case "string":
            return _printable(rng, size)
        case "binary":
            return rng.randbytes(size)
        case "boolean":
            return rng.random() < 0.5
        case "double":
            return rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300)
        case "date" | "timestamp":
            at = datetime(1, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(2**57))
            return at.date() if kind == "date" else at
        case "short":
            return rng.randrange(2**15)
        case "long":
            return rng.randrange(-(2**63), 2**63)
    scale = int(kind.removesuffix(")").partition(",")[2])
    return Context(prec=76).scaleb(Decimal(rng.randrange(10**38)), -scale)


def _printable(rng: random.Random, length: int) -> str:
    return "".join(chr(rng.randrange(33, 127)) for _ in range(length))


def test_types_and_names_that_postgresql_does_not_have_are_refused_at_the_start(
    place: Place,
) -> None:
    sink = place.sink()
    interval = parse_schema("id long, x string").replace('"string"', '"interval day to second"')
    with pytest.raises(JobError, match="no type for column x"):
        sink.prepare("job/query/output", interval, "append")
    with pytest.raises(JobError, match="63 bytes"):
        sink.prepare("job/query/output", parse_schema(f"id long, {'x' * 64} string"), "append")


# ---------------------------------------------------------------- any value


def _through(place: Place, table: str, kind: Any, values: list[Any], key: Any = ()) -> list[Any]:
    """What the server holds after these were staged and published; its own text for times."""
    sink = place.sink(table=table, key=key)
    driver = place.driver(sink, output=f"job/query/{table}")
    driver.schema = any_values.schema_of(kind)
    rows = any_values.staged(place.home / table, kind, values)
    assert driver.open().publish(driver._decision(0, sink.stage(rows))) is Outcome.PUBLISHED
    as_text = {"date": "::text", "timestamp": "::text", "timestamp_ntz": "::text"}
    shape = as_text.get(kind, "") if isinstance(kind, str) else "::text"
    if not isinstance(kind, str) and isinstance(of := kind.get("elementType"), str):
        shape = f"{as_text[of]}[]" if of in as_text else ""
    found = place.read(f"SELECT v{shape} AS v FROM {place.schema}.{table} ORDER BY id")
    if shape == "::text" and not isinstance(kind, str):
        return [row["v"] and json.loads(row["v"], parse_float=Decimal) for row in found]
    return [row["v"] for row in found]


def _fits(kind: str, value: Any) -> bool:
    if kind == "string":
        return any_values.is_utf8(value) and b"\0" not in value
    return kind not in any_values.TIMES or (
        -2_440_588 <= any_values.day_of(kind, value) <= 2_145_042_905
    )


def _equal_if_same(kind: str, value: Any) -> Any:
    """NaN as a word, since none is equal to another."""
    return "NaN" if kind in ("float", "double") and math.isnan(value) else value


class _Back:
    """Values from what was read: columns, JSON, and keys of JSON objects, which are all text."""

    def __init__(self, db: Any) -> None:
        self.db = db

    def __call__(self, kind: str, value: Any) -> Any:
        match kind:
            case "string":
                return value.encode()
            case "binary":
                return bytes.fromhex(value[2:]) if isinstance(value, str) else value
            case "boolean":
                return {"true": True, "false": False}.get(value, value)
            case "float":
                return _equal_if_same(kind, struct.unpack("f", struct.pack("f", float(value)))[0])
            case "double":
                return _equal_if_same(kind, float(value))
            case "date" | "timestamp" | "timestamp_ntz":
                return self._time(kind, value)
        return Decimal(value) if kind.startswith("decimal") else int(value)

    def _time(self, kind: str, text: str) -> int:
        """What PostgreSQL reads in it, and Python, if that has the year."""
        query = {
            "date": "SELECT %s::date - '1970-01-01'::date",
            "timestamp": "SELECT (extract(epoch FROM %s::timestamptz) * 1000000)::bigint",
            "timestamp_ntz": "SELECT (extract(epoch FROM %s::timestamp) * 1000000)::bigint",
        }[kind]
        (found,) = self.db.execute(query, (text,)).fetchone()
        if -719_162 <= any_values.day_of(kind, found) <= 2_932_896:
            assert any_values.time_from(kind, text) == found
        return int(found)


def test_any_value_is_refused_before_it_is_decided_or_it_comes_back(place: Place) -> None:
    tables = itertools.count()

    @given(st.data(), any_values.KINDS, st.booleans())
    @settings(deadline=None, max_examples=EXAMPLES)
    def holds(data: st.DataObject, kind: Any, keyed: bool) -> None:
        drawn = data.draw(st.lists(st.none() | any_values.values(kind), min_size=1, max_size=4))
        fits = all(_fits(*part) for v in drawn for part in any_values.plain_values(kind, v))
        table, key = f"rows{next(tables)}", "id" if keyed else ()
        if not fits:
            with pytest.raises(BadRows, match="column v"):
                _through(place, table, kind, drawn, key)
            return
        found = _through(place, table, kind, drawn, key)
        wanted = [any_values.walk(kind, value, _equal_if_same) for value in drawn]
        assert [any_values.walk(kind, value, back) for value in found] == wanted

    with psycopg.connect(place.server.dsn, options="-c timezone=UTC", autocommit=True) as db:
        back = _Back(db)
        holds()
