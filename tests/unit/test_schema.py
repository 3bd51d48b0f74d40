"""Columns and their types: as people write them, as Spark has them, as Arrow has them."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from onceflow.contract.schema import (
    arrow_schema,
    columns,
    leaf_types,
    nullable,
    parse_schema,
    plain_schema,
    quoted,
    refuse_difference,
    spark_schema,
)
from onceflow.errors import JobError, SchemaMismatch
from onceflow.log.segments import fit


def kinds(text: str) -> dict[str, str]:
    return columns(parse_schema(text))


# ---------------------------------------------------------------- as people write it


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("id long", {"id": "long"}),
        ("id: long", {"id": "long"}),
        ("  id\n  BIGINT ,at\tTimestamp ", {"id": "long", "at": "timestamp"}),
        ("a INT,b Integer,c smallint,d tinyint,e short,f byte",
         {"a": "integer", "b": "integer", "c": "short", "d": "byte", "e": "short", "f": "byte"}),
        ("a real, b float, c double", {"a": "float", "b": "float", "c": "double"}),
        ("a boolean, b binary, c date", {"a": "boolean", "b": "binary", "c": "date"}),
        ("a timestamp_ltz, b timestamp_ntz", {"a": "timestamp", "b": "timestamp_ntz"}),
        ("a decimal, b dec(5), c numeric(38, 38), d DECIMAL(10,2)",
         {"a": "decimal(10,0)", "b": "decimal(5,0)", "c": "decimal(38,38)", "d": "decimal(10,2)"}),
        ("tags array<string>", {"tags": "array<string>"}),
        ("m map<string, array<int>>", {"m": "map<string, array<integer>>"}),
        ("s struct<a: int, b string, c: struct<d: decimal(3,1)>>",
         {"s": "struct<a: integer, b: string, c: struct<d: decimal(3,1)>>"}),
        ("x array<array<map<int,struct<y:date>>>>",
         {"x": "array<array<map<integer, struct<y: date>>>>"}),
        ("`a b` int, `x``y` int, `,` int, `naïve ☃` int",
         {"a b": "integer", "x`y": "integer", ",": "integer", "naïve ☃": "integer"}),
        ("größe int, 列 int, _x1 int, 1st int",
         {"größe": "integer", "列": "integer", "_x1": "integer", "1st": "integer"}),
        ("string string, not int, map int, timestamp timestamp",
         {"string": "string", "not": "integer", "map": "integer", "timestamp": "timestamp"}),
        ("a int NOT NULL, b string not  null, c int", {"a": "integer", "b": "string",
                                                       "c": "integer"}),
    ],
)  # fmt: skip
def test_a_schema_is_read_however_it_is_spelled(text: str, found: dict[str, str]) -> None:
    assert kinds(text) == found
    arrow_schema(parse_schema(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a column's name is missing"),
        ("   ", "a column's name is missing"),
        ("id", "'' is not a type"),
        ("id long,", "a column's name is missing before ''"),
        (", id long", "a column's name is missing before ','"),
        ("id long at timestamp", "'at' instead of 'the end'"),
        ("id lnog", "'lnog' is not a type"),
        ("a-b long", "'-' is not a type"),
        ("id long)", r"'\)' instead of"),
        ("id array<long", "'' instead of '>'"),
        ("id array<>", "'>' is not a type"),
        ("id array long", "'long' instead of '<'"),
        ("id map<string>", "'>' instead of ','"),
        ("id struct<>", "a column's name is missing before '>'"),
        ("id struct<a: int b: int>", "'b' instead of '>'"),
        ("id decimal(39,2)", r"decimal\(39,2\) is out of range"),
        ("id decimal(3,5)", r"decimal\(3,5\) is out of range"),
        ("id decimal(0)", r"decimal\(0,0\) is out of range"),
        ("id decimal(-1)", "'-' is not a number"),
        ("id decimal(a)", "'a' is not a number"),
        ("id decimal(5", "'' instead of"),
        ("id long not", "'' instead of 'null'"),
        ("id long, ID string", "column id is there twice"),
        ("s struct<a: int, A: int>", "column a is there twice"),
        ("s array<struct<a: int, a: int>>", "column a is there twice"),
        ("`unclosed long", "a column's name is missing before '`'"),
        ("` long", "a column's name is missing before '`'"),
        ("`` long", "a column's name is missing before '`'"),
        ("id interval", "'interval' is not a type"),
        ("id void", "'void' is not a type"),
        ("id varchar(10)", "'varchar' is not a type"),
    ],
)
def test_what_is_no_schema_is_refused_and_the_place_named(text: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        parse_schema(text)
    assert caught.value.hint


def test_what_may_be_null_is_said() -> None:
    fields = json.loads(parse_schema("a int not null, b struct<c: int not null>"))["fields"]
    assert [field["nullable"] for field in fields] == [False, True]
    assert fields[1]["type"]["fields"][0]["nullable"] is False


WIDE = (
    "a string, b binary, c boolean, d byte, e short, f int, g long, h float, i double, j date, "
    "k timestamp, l timestamp_ntz, m decimal(38,18), n array<int>, o map<int, string>, "
    "p struct<q: array<struct<r: map<string, decimal(1,1)>>>>"
)


def test_spark_reads_what_was_parsed() -> None:
    from pyspark.sql.types import StructType

    found = StructType.fromJson(json.loads(parse_schema(WIDE)))
    assert found.simpleString() == (
        "struct<a:string,b:binary,c:boolean,d:tinyint,e:smallint,f:int,g:bigint,h:float,i:double,"
        "j:date,k:timestamp,l:timestamp_ntz,m:decimal(38,18),n:array<int>,o:map<int,string>,"
        "p:struct<q:array<struct<r:map<string,decimal(1,1)>>>>>"
    )
    assert json.loads(found.json()) == json.loads(parse_schema(WIDE))


# ---------------------------------------------------------------- as Arrow has it


def test_every_type_goes_to_arrow_and_back() -> None:
    for text in (WIDE, "a int not null, b struct<c: int not null>"):
        parsed = parse_schema(text)
        assert json.loads(spark_schema(arrow_schema(parsed))) == json.loads(parsed)


def test_what_cannot_be_null_goes_to_arrow_and_back() -> None:
    strict: Any = json.loads(parse_schema(WIDE))

    def tighten(kind: Any) -> None:
        if isinstance(kind, dict):
            for name in ("nullable", "containsNull", "valueContainsNull"):
                if name in kind:
                    kind[name] = False
            for inner in kind.values():
                for one in inner if isinstance(inner, list) else [inner]:
                    tighten(one)

    tighten(strict)
    text = json.dumps(strict)
    assert json.loads(spark_schema(arrow_schema(text))) == strict
    assert json.loads(nullable(text)) == json.loads(parse_schema(WIDE))
    assert nullable(nullable(text)) == nullable(text)


def test_arrow_types_are_those_that_spark_wants() -> None:
    found = {field.name: field.type for field in arrow_schema(parse_schema(WIDE))}
    assert found["k"] == pa.timestamp("us", "UTC")
    assert found["l"] == pa.timestamp("us")
    assert found["m"] == pa.decimal128(38, 18)
    assert found["o"] == pa.map_(pa.int32(), pa.string())


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (pa.large_string(), "string"),
        (pa.large_binary(), "binary"),
        (pa.dictionary(pa.int8(), pa.string()), "string"),
        (pa.timestamp("ns", "Europe/Amsterdam"), "timestamp"),
        (pa.timestamp("s"), "timestamp_ntz"),
        (pa.large_list(pa.int8()), "array<byte>"),
        (pa.decimal256(38, 2), "decimal(38,2)"),
        (pa.decimal64(10, 2), "decimal(10,2)"),
        (pa.struct([("x", pa.list_(pa.bool_()))]), "struct<x: array<boolean>>"),
    ],
)
def test_an_arrow_type_gets_the_spark_type_that_holds_it(kind: pa.DataType, found: str) -> None:
    assert columns(spark_schema(pa.schema([("c", kind)]))) == {"c": found}


@pytest.mark.parametrize(
    "kind",
    [
        pa.null(), pa.uint64(), pa.uint8(), pa.float16(), pa.time64("us"), pa.duration("s"),
        pa.decimal256(39, 2), pa.decimal128(10, -2), pa.month_day_nano_interval(),
        pa.list_(pa.uint32()), pa.struct([("x", pa.time32("s"))]), pa.map_(pa.string(), pa.null()),
    ],
    ids=str,
)  # fmt: skip
def test_an_arrow_type_that_spark_has_not_is_refused_and_the_column_named(
    kind: pa.DataType,
) -> None:
    with pytest.raises(JobError, match=r"column (c|x) is of the Arrow type"):
        spark_schema(pa.schema([("c", kind)]))


@pytest.mark.parametrize("kind", ["void", "interval year to month", "variant", "char(3)", "udt"])
def test_a_spark_type_that_a_log_cannot_hold_is_refused(kind: str) -> None:
    schema = {"type": "struct", "fields": [
        {"name": "c", "type": kind if kind != "udt" else {"type": "udt", "class": "x"},
         "nullable": True, "metadata": {}},
    ]}  # fmt: skip
    with pytest.raises(JobError, match="a log cannot hold the type"):
        arrow_schema(json.dumps(schema))


# ---------------------------------------------------------------- rows that fit

US = pa.timestamp("us", "UTC")
DAY = datetime(2026, 11, 15, 10, tzinfo=UTC)


def fitted(given: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return fit(pa.table({"c": given}), pa.schema([("c", kind)]), "log").column("c")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pa.array([1, -128, 127, None]), pa.int8()),
        (pa.array([1, 2**31 - 1, -(2**31)]), pa.int32()),
        (pa.array([1, 2**63 - 1], pa.uint64()), pa.int64()),
        (pa.array([1, None], pa.int8()), pa.int64()),
        (pa.array([2**53, -(2**53)]), pa.float64()),
        (pa.array([0.5, float("inf"), None], pa.float32()), pa.float64()),
        (pa.array([Decimal("1.10"), None]), pa.decimal128(38, 10)),
        (pa.array([Decimal("1.100")]), pa.decimal128(3, 1)),
        (pa.array([7], pa.int8()), pa.decimal128(38, 0)),
        (pa.array(["", "☃", None], pa.large_string()), pa.string()),
        (pa.array(["", "☃", None], pa.string_view()), pa.string()),
        (pa.array(["a", None, "a"]).dictionary_encode(), pa.string()),
        (pa.array([b"", b"\xff"], pa.large_binary()), pa.binary()),
        (pa.array([b"ab", b"cd"], pa.binary(2)), pa.binary()),
        (pa.array([date(1969, 12, 31), date(1, 1, 1)], pa.date64()), pa.date32()),
        (pa.array([1_000, -1_000, None], pa.timestamp("ns", "UTC")), US),
        (pa.array([1, -1], pa.timestamp("s", "Asia/Tokyo")), US),
        (pa.array([1, -1], pa.timestamp("ms")), pa.timestamp("us")),
        (pa.array([None, None]), pa.string()),
        (pa.array([None]), pa.list_(pa.int32())),
        (pa.array([[], []]), pa.list_(pa.int32())),
        (pa.array([[1, None], None, []]), pa.list_(pa.int16())),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.list_(pa.int64())),
        (pa.array([[("k", 1)]], pa.map_(pa.large_string(), pa.int64())),
         pa.map_(pa.string(), pa.int32())),
        (pa.array([{"b": "x", "a": 1}, None]), pa.struct([("a", pa.int32()), ("b", pa.string())])),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_lose_nothing_fit(given: pa.Array, kind: pa.DataType) -> None:
    found = fitted(given, kind)
    assert found.type == kind
    said, wanted = found.to_pylist(), given.to_pylist()
    if pa.types.is_struct(kind):
        wanted = [one and {name: one[name] for name in ("a", "b")} for one in wanted]
    assert said == wanted


def test_a_time_without_a_zone_is_taken_for_utc() -> None:
    found = fitted(pa.array([DAY.replace(tzinfo=None)]), US)
    assert found.to_pylist() == [DAY]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pa.array([128]), pa.int8()),
        (pa.array([2**31]), pa.int32()),
        (pa.array([2**63], pa.uint64()), pa.int64()),
        (pa.array([2.0]), pa.int64()),
        (pa.array([2.5]), pa.int64()),
        (pa.array([float("nan")]), pa.int64()),
        (pa.array([0.1]), pa.float32()),
        (pa.array([1e300]), pa.float32()),
        (pa.array([2**53 + 1]), pa.float64()),
        (pa.array([2**24 + 1]), pa.float32()),
        (pa.array([Decimal("1.239")]), pa.decimal128(10, 2)),
        (pa.array([Decimal("100.0")]), pa.decimal128(3, 1)),
        (pa.array([0.123456]), pa.decimal128(10, 2)),
        (pa.array([Decimal("1.23")]), pa.float64()),
        (pa.array([True]), pa.int64()),
        (pa.array([5]), pa.bool_()),
        (pa.array(["007"]), pa.int64()),
        (pa.array([7]), pa.string()),
        (pa.array(["2026-11-15"]), pa.date32()),
        (pa.array([b"abc"]), pa.string()),
        (pa.array(["abc"]), pa.binary()),
        (pa.array([1], pa.timestamp("ns", "UTC")), US),
        (pa.array([2**62], pa.timestamp("s", "UTC")), US),
        (pa.array([DAY]), pa.timestamp("us")),
        (pa.array([DAY]), pa.date32()),
        (pa.array([date(2026, 11, 15)]), US),
        (pa.array([1], pa.date64()), pa.date32()),
        (pa.array([1]), US),
        (pa.array([DAY]), pa.int64()),
        (pa.array([timedelta(1)]), pa.int64()),
        (pa.array([time(1)]), pa.int64()),
        (pa.array([[2**40]]), pa.list_(pa.int32())),
        (pa.array([[0.1]]), pa.list_(pa.float32())),
        (pa.array([[1]]), pa.int64()),
        (pa.array([1]), pa.list_(pa.int64())),
        (pa.array([{"a": 1, "b": 2}]), pa.struct([("a", pa.int64())])),
        (pa.array([{"a": 1}]), pa.struct([("a", pa.int64()), ("b", pa.int64())])),
        (pa.array([{"a": 1}]), pa.struct([("A", pa.int64())])),
        (pa.array([{"a": 0.5}]), pa.struct([("a", pa.int64())])),
        (pa.array([[("k", 2**40)]], pa.map_(pa.string(), pa.int64())),
         pa.map_(pa.string(), pa.int32())),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
         pa.list_(pa.struct([("key", pa.string()), ("value", pa.int64())]))),
    ],
    ids=lambda v: str(v.type) if isinstance(v, pa.Array) else str(v),
)  # fmt: skip
def test_rows_that_would_lose_something_are_refused(given: pa.Array, kind: pa.DataType) -> None:
    with pytest.raises(JobError, match="the rows do not fit log") as caught:
        fitted(given, kind)
    assert caught.value.hint == "cast the column"


def test_one_bad_value_in_a_later_chunk_is_found() -> None:
    given = pa.chunked_array([[1, 2], [3, 2**31]])
    with pytest.raises(JobError, match="2147483648 not in range"):
        fitted(given, pa.int32())


def test_columns_come_in_the_order_of_the_log() -> None:
    given = pa.table({"b": ["x"], "a": [1]})
    wanted = pa.schema([("a", pa.int32()), ("b", pa.string())])
    assert fit(given, wanted, "log").schema == wanted


def test_columns_that_differ_are_all_named() -> None:
    with pytest.raises(JobError, match="a is missing, c is not a column of the log"):
        fit(pa.table({"b": [1], "c": [1]}), pa.schema([("a", pa.int8()), ("b", pa.int8())]), "log")


# ---------------------------------------------------------------- the rest


def test_every_difference_of_two_schemas_is_named() -> None:
    with pytest.raises(SchemaMismatch) as caught:
        refuse_difference("T", {"a": "long", "b": "string"}, {"a": "string", "c": "date"})
    told = caught.value.message
    assert "c (date) is not in the target" in told
    assert "b (string) is in the target only" in told
    assert "a is string, the target has long" in told
    refuse_difference("T", {"a": "long"}, {"a": "long"})


def test_types_are_found_however_deep_they_lie() -> None:
    found = leaf_types(parse_schema("a array<map<int, struct<date: string>>>, b date"))
    assert found == {"a": {"integer", "string"}, "b": {"date"}}


def test_notes_that_spark_makes_for_itself_are_left_out() -> None:
    field = {"name": "a", "type": "long", "nullable": True, "metadata": {"watermark": 5}}
    found = json.loads(plain_schema({"type": "struct", "fields": [field]}))
    assert found["fields"] == [{**field, "metadata": {}}]


@pytest.mark.parametrize(("name", "found"), [("a", "`a`"), ("a.b", "`a.b`"), ("`", "````")])
def test_names_are_quoted_for_spark(name: str, found: str) -> None:
    assert quoted(name) == found
