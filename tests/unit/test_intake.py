"""Lines as rows: what is taken comes back as it was; what does not fit is told, never guessed."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import string
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onceflow.contract.schema import arrow_schema, parse_schema
from onceflow.errors import BadInput, JobError
from onceflow.log import EmbeddedLog
from onceflow.log import row_input as intake
from onceflow.log.row_input import Input, RejectFile, RowInput
from onceflow.log.row_output import as_word, plain_rows
from onceflow.log.segments import fit
from onceflow.log.strict_values import Malformed, from_json, from_text, load_json
from onceflow.log.text_records import cells_of

NOW = 1_763_200_000_000_000
PLAIN = "value string, event_time timestamp"
SEEDS = range(5)


def kind_of(text: str) -> Any:
    return json.loads(parse_schema(f"c {text}"))["fields"][0]["type"]


def write(path: Path, data: str | bytes) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def taken(
    path: str, schema: str, *, format: str | None = None, reject: Path | None = None
) -> tuple[list[dict[str, Any]], RowInput]:
    """All rows of a file, as Python has them."""
    rejects = RejectFile(reject) if reject else None
    source = RowInput([Input.of(path, format)], parse_schema(schema), now=NOW, rejects=rejects)
    return [row for table in source.tables() for row in table.to_pylist()], source


def refusal(path: str, schema: str, **more: Any) -> str:
    with pytest.raises(BadInput) as caught:
        taken(path, schema, **more)
    assert caught.value.exit_code == 9
    return caught.value.message


# ---------------------------------------------------------------- one value

GOOD = [
    ("string", '"ä\\n"', "ä\n"),
    ("string", '""', ""),
    ("string", '"\\ud83d\\ude00"', "😀"),
    ("byte", "-128", -128),
    ("short", "32767", 32767),
    ("integer", "-2147483648", -(2**31)),
    ("long", "9223372036854775807", 2**63 - 1),
    ("double", "1", 1.0),
    ("double", "0.1", 0.1),
    ("double", "-0.0", -0.0),
    ("double", "1.7976931348623157e308", 1.7976931348623157e308),
    ("double", '"Infinity"', math.inf),
    ("float", "3.4028235e38", 3.4028235e38),
    ("decimal(38,18)", "12345678901234567890.123456789012345678",
     Decimal("12345678901234567890.123456789012345678")),
    ("decimal(5,2)", '"1.5"', Decimal("1.50")),
    ("decimal(5,2)", "1.5000", Decimal("1.50")),
    ("decimal(5,2)", "1e2", Decimal("100.00")),
    ("decimal(5,2)", "-999.99", Decimal("-999.99")),
    ("boolean", "true", True),
    ("date", '"2024-02-29"', date(2024, 2, 29)),
    ("binary", '"AAH/"', b"\x00\x01\xff"),
    ("binary", '""', b""),
    ("array<integer>", "[1, null, 3]", [1, None, 3]),
    ("map<string, double>", '{"a": 1.5, "b": null}', [("a", 1.5), ("b", None)]),
    ("map<integer, string>", '{"7": "x"}', [(7, "x")]),
    ("map<date, long>", '{"2026-01-02": 1}', [(date(2026, 1, 2), 1)]),
    ("struct<a: integer, b: array<struct<c: boolean>>>", '{"b": [{"c": true}, null, {}]}',
     (None, [(True,), None, (None,)])),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "expected"), GOOD)
def test_a_value_that_fits_is_taken_exactly(kind: str, text: str, expected: Any) -> None:
    found = from_json(kind_of(kind))(load_json(text))
    assert found == expected
    assert type(found) is type(expected)
    assert str(found) == str(expected)  # -0.0 is not 0.0, 1.50 is not 1.5


BAD = [
    ("string", "3", "is not of type string"),
    ("string", "true", "is not of type string"),
    ("string", '"\\ud800"', "half of a surrogate pair"),
    ("byte", "128", "out of range for byte"),
    ("long", "9223372036854775808", "out of range for long"),
    ("long", "1.0", "is not of type long"),
    ("long", "1e3", "is not of type long"),
    ("long", '"1"', "is not of type long"),
    ("long", "true", "is not of type long"),
    ("long", "1" * 5000, "out of all range"),
    ("double", '"1"', "is not of type double"),
    ("double", "false", "is not of type double"),
    ("double", "1e400", "out of range for double"),
    ("double", "-" + "9" * 400, "out of range for double"),
    ("double", "1e99999999999999999999", "out of all range"),
    ("double", "NaN", "is not JSON: NaN"),
    ("float", "3.5e38", "out of range for float"),
    ("decimal(5,2)", "1.005", "too many digits behind the point"),
    ("decimal(5,2)", "1000", "out of range for decimal"),
    ("decimal(5,2)", "1e999999999", "out of range for decimal"),
    ("decimal(5,2)", "1e-999999999", "too many digits behind the point"),
    ("decimal(5,2)", '"NaN"', "is not of type decimal"),
    ("decimal(5,2)", '"1_0"', "is not of type decimal"),
    ("boolean", "1", "is not of type boolean"),
    ("boolean", '"true"', "is not of type boolean"),
    ("date", '"20260101"', "is no date"),
    ("date", '"2026-02-29"', "is no date"),
    ("date", '"2026-W01-1"', "is no date"),
    ("date", "19000", "is not of type date"),
    ("binary", '"?"', "is not base64"),
    ("array<integer>", "3", "is not a list"),
    ("array<integer>", '[1, "x"]', r'^\[1\]: "x" is not of type integer'),
    ("map<string, integer>", '{"a": "b"}', r'^\["a"\]: "b" is not of type integer'),
    ("map<integer, integer>", '{"a": 1}', "is not of type integer"),
    ("struct<a: struct<b: byte>>", '{"a": {"b": 300}}', r"^a.b: 300 is out of range"),
    ("struct<a: array<byte>>", '{"a": [300]}', r"^a\[0\]: 300 is out of range"),
    ("struct<a: byte>", '{"A": 1}', 'no column "A"'),
    ("struct<a: byte>", '{"a": 1, "a": 1}', '"a" is there twice'),
    ("struct<a: byte>", "[1]", "is not an object"),
    ("struct<a: byte>", '{"a": 1', "is not JSON"),
    ("struct<a: byte>", '{"a": 1} {"a": 2}', "is not JSON: Extra data"),
    ("struct<a: byte>", "[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("kind", "text", "reason"), BAD, ids=range(len(BAD)))
def test_a_value_that_does_not_fit_is_refused(kind: str, text: str, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        from_json(kind_of(kind))(load_json(text))


TIMES = [
    ("2026-11-15T10:00:00Z", datetime(2026, 11, 15, 10)),
    ("2026-11-15 10:00:00", datetime(2026, 11, 15, 10)),
    ("2026-11-15T10:00", datetime(2026, 11, 15, 10)),
    ("2026-11-15", datetime(2026, 11, 15)),
    ("2026-11-15T10:00:00.5", datetime(2026, 11, 15, 10, 0, 0, 500_000)),
    ("2026-11-15T10:00:00,123456Z", datetime(2026, 11, 15, 10, 0, 0, 123_456)),
    ("2026-11-15T10:00:00.123456000Z", datetime(2026, 11, 15, 10, 0, 0, 123_456)),
    ("2026-11-15T10:00:00+05:30", datetime(2026, 11, 15, 4, 30)),
    ("2026-11-15T10:00:00-0800", datetime(2026, 11, 15, 18)),
    ("2026-11-15T10:00:00+02", datetime(2026, 11, 15, 8)),
    ("0001-01-01T00:00:00Z", datetime(1, 1, 1)),
    ("9999-12-31T23:59:59.999999Z", datetime.max),
    ("1969-12-31T23:59:59.999999Z", datetime(1969, 12, 31, 23, 59, 59, 999_999)),
]


@pytest.mark.parametrize(("text", "expected"), TIMES)
def test_times_are_iso_8601_and_utc_unless_they_say_else(text: str, expected: datetime) -> None:
    us = (expected - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    assert from_json("timestamp")(text) == us
    assert from_text("timestamp")(text) == us


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (1_700_000_000, "the number 1700000000 is no time"),
        (Decimal("1700000000.5"), "is no time"),
        ("1700000000", "is no time"),
        ("", "is no time"),
        ("2026-13-01T00:00:00Z", "month must be in 1..12"),
        ("2026-11-15T25:00:00Z", "is no time"),
        ("2026-11-15T10:00:60Z", "is no time"),
        ("2026-11-15T10:00.5Z", "is no time"),
        ("2026-11-15Z", "is no time"),
        ("2026-11-15T10:00:00 Z", "is no time"),
        ("2026-11-15T10:00:00+99:00", "is no zone"),
        ("2026-11-15T10:00:00.1234567Z", "finer than microseconds"),
        ("0001-01-01T00:00:00+01:00", "out of range"),
        ("9999-12-31T23:59:59-01:00", "out of range"),
        ("15.11.2026 10:00", "is no time"),
        ("\u0662\u0660\u0662\u0666-11-15", "is no time"),
    ],
)
def test_what_is_no_time_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        from_json("timestamp")(value)


def test_a_time_without_a_zone_stays_without_one() -> None:
    assert from_json("timestamp_ntz")("1970-01-01T00:00:01") == 1_000_000
    with pytest.raises(Malformed, match="names a zone"):
        from_json("timestamp_ntz")("1970-01-01T00:00:01Z")


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("string", "a b ", "a b "),
        ("long", "-5", -5),
        ("long", "+5", 5),
        ("double", "1e3", 1000.0),
        ("double", ".5", 0.5),
        ("double", "NaN", math.nan),
        ("decimal(5,2)", "1.5", Decimal("1.50")),
        ("boolean", "TRUE", True),
        ("array<long>", "[1, 2]", [1, 2]),
        ("struct<a: long>", '{"a": 1}', (1,)),
    ],
)
def test_a_cell_of_csv_is_taken_exactly(kind: str, text: str, expected: Any) -> None:
    assert repr(from_text(kind_of(kind))(text)) == repr(expected)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("long", ""), ("long", " 5"), ("long", "1_000"), ("long", "5.0"), ("long", "\u0665"),
        ("long", "1" * 5000), ("double", "inf"), ("double", "0x10"), ("boolean", "1"),
        ("boolean", "yes"), ("date", "1/2/2026"), ("decimal(3,0)", "1000"), ("array<long>", "1"),
    ],
)  # fmt: skip
def test_a_cell_of_csv_that_does_not_fit_is_refused(kind: str, text: str) -> None:
    with pytest.raises(Malformed):
        from_text(kind_of(kind))(text)


# ---------------------------------------------------------------- CSV


@pytest.mark.parametrize(
    ("record", "cells"),
    [
        ("a,b", ["a", "b"]),
        (",", [None, None]),
        ('"",', ["", None]),
        ('"a,b","c""d"', ["a,b", 'c"d']),
        ('"a\r\nb",c', ["a\r\nb", "c"]),
        ('a,""', ["a", ""]),
        ('""""', ['"']),
        (" a , b", [" a ", " b"]),
    ],
)
def test_quotes_are_those_of_rfc_4180(record: str, cells: list[str | None]) -> None:
    assert cells_of(record) == cells


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('a"b,c', "inside of a field"),
        ('"a"b,c', "text behind it"),
        ('"a" ,c', "text behind it"),
        ('c,"a', "not closed"),
    ],
)
def test_other_quotes_are_refused(record: str, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        cells_of(record)


def test_columns_of_csv_may_come_in_any_order_and_be_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'c,a\n"x\ny",1\n,2\n')
    rows, _ = taken(path, "a long, b string, c string")
    assert rows == [{"a": 1, "b": None, "c": "x\ny"}, {"a": 2, "b": None, "c": None}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1: there is no header line"),
        ("a,x\n1,2\n", 'line 1: there is no column "x"'),
        ("a,a\n1,2\n", "line 1: column a is there twice"),
        ('\n"a\n', "line 2: a quote is opened and not closed"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """Also if lines may be rejected: without a header no line has a meaning."""
    path = write(tmp_path / "a.csv", text)
    assert reason in refusal(path, "a long", reject=tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_torn_record_does_not_swallow_the_next(tmp_path: Path) -> None:
    """A quote inside of an unquoted field opens nothing; the lines behind are read as they are."""
    path = write(tmp_path / "a.csv", 'a,b\n1,5" pipe\n2,x\n3,"y"z\n4,"q\nr"\n5\n')
    rows, source = taken(path, "a long, b string", reject=tmp_path / "bad")
    assert rows == [{"a": 2, "b": "x"}, {"a": 4, "b": "q\nr"}]
    assert (tmp_path / "bad").read_text() == '1,5" pipe\n3,"y"z\n5\n'
    assert source.bad == 3
    said = refusal(path, "a long, b string")
    assert "line 2: a quote" in said
    assert "line 4: a closing quote" in said
    assert "line 7: there are 1 fields, the header has 2" in said


def test_a_quote_that_is_never_closed_is_told_where_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.csv", 'a\nx\n"y\n' + "z\n" * 100)
    assert "line 3: a quote is opened and not closed" in refusal(path, "a string")
    rows, _ = taken(path, "a string", reject=tmp_path / "bad")
    assert rows == [{"a": "x"}]
    assert (tmp_path / "bad").read_text() == '"y\n' + "z\n" * 100
    monkeypatch.setattr("onceflow.log.text_records._LONGEST", 50)
    assert "not closed within 50 bytes" in refusal(path, "a string", reject=tmp_path / "more")


# ---------------------------------------------------------------- lines


def test_marks_line_ends_and_empty_lines_are_tolerated(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    rows = [{"value": "a", "event_time": None}, {"value": "b", "event_time": None}]
    found, _ = taken(
        write(tmp_path / "a.json", bom + b'{"value":"a"}\r\n\r\n  \n{"value":"b"}'), PLAIN
    )
    assert found == rows
    found, _ = taken(write(tmp_path / "a.csv", bom + b"value\r\n\r\na\r\nb"), PLAIN)
    assert found == rows
    found, _ = taken(write(tmp_path / "a.txt", bom + b"a\r\n\r\nb"), PLAIN)
    assert [row["value"] for row in found] == ["a", "b"]


def test_lines_of_text_get_the_time_of_the_append(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", '  x "y"\n')
    rows, _ = taken(path, "n long, event_time timestamp, value string")
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=NOW)
    assert rows == [{"n": None, "event_time": at, "value": '  x "y"'}]
    rows, _ = taken(path, "value string, event_time string")
    assert rows == [{"value": '  x "y"', "event_time": None}]
    with pytest.raises(JobError, match="column value of type string"):
        taken(path, "value long")


def test_invalid_utf_8_is_told_with_its_line(tmp_path: Path) -> None:
    bad = b'{"value":"\xff"}\n'
    for name, data in (
        ("a.json", b'{"value":"a"}\n' + bad),
        ("a.csv", b"value\n\xff\n"),
        ("a.txt", b"a\n\xe4\n"),
    ):
        assert "line 2: is not UTF-8" in refusal(write(tmp_path / name, data), PLAIN)


def test_the_first_twenty_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    lines = [f'{{"value": {n}}}' for n in range(1, 31)]
    path = write(tmp_path / "a.json", "\n".join([*lines, '{"value": "good"}']))
    said = refusal(path, PLAIN)
    assert said.startswith("30 lines do not fit, so nothing was appended:")
    assert f"{path}, line 1: value: 1 is not of type string" in said
    assert f"{path}, line 20: " in said
    assert "line 21" not in said
    assert said.endswith("and 10 more")


def test_rejected_lines_are_kept_byte_for_byte(tmp_path: Path) -> None:
    bad = [b'{"value": 1}\r\n', b"\xff\xfe\n", b"{\n", b"[] "]
    path = write(tmp_path / "a.json", b'{"value":"x"}\n'.join(bad))
    rows, source = taken(path, PLAIN, reject=tmp_path / "bad")
    assert (len(rows), source.bad) == (3, 4)
    assert (tmp_path / "bad").read_bytes() == b"".join(bad) + b"\n"


def test_no_file_is_made_for_no_rejects_and_none_is_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"value":"x"}')
    taken(path, PLAIN, reject=tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    write(tmp_path / "bad", "precious")
    with pytest.raises(JobError, match="exists already"):
        RejectFile(tmp_path / "bad")
    with pytest.raises(JobError, match="does not exist"):
        RejectFile(tmp_path / "no" / "bad")


def test_chunks_are_bounded_in_lines_and_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.txt", "".join(f"{n:09d}\n" for n in range(25)))

    def sizes() -> list[int]:
        source = RowInput([Input.of(path)], parse_schema(PLAIN), now=NOW)
        return [table.num_rows for table in source.tables()]

    monkeypatch.setattr(intake, "_CHUNK_LINES", 10)
    assert sizes() == [10, 10, 5]
    monkeypatch.setattr(intake, "_CHUNK_BYTES", 40)
    assert sizes() == [4, 4, 4, 4, 4, 4, 1]


def test_a_bad_line_in_the_last_chunk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_CHUNK_LINES", 10)
    path = write(tmp_path / "a.json", '{"value":"x"}\n' * 25 + "{")
    log = EmbeddedLog.create(tmp_path / "log")
    source = RowInput([Input.of(path)], log.facts.schema, now=NOW)
    with pytest.raises(BadInput, match="line 26"):
        log.append(source.tables())
    assert log.refresh().view.next == [0]
    assert not list((tmp_path / "log").glob("partition=*/*"))
    assert not list((tmp_path / "log" / "_appending").iterdir())


def test_the_digest_is_that_of_the_input(tmp_path: Path) -> None:
    def digest(data: str, name: str = "a.json") -> str:
        path = write(tmp_path / name, data)
        return taken(path, PLAIN)[1].digest()

    assert digest('{"value":"a"}\n') == digest('{"value":"a"}\n')
    assert digest('{"value":"a"}\n') != digest('{"value":"b"}\n')
    assert digest("value\na\n", "a.csv") != digest("value\na\n", "a.txt")


def test_the_format_is_told_by_the_ending(tmp_path: Path) -> None:
    for name, format in (
        ("a.json", "json"), ("a.JSONL", "json"), ("a.ndjson", "json"), ("a.csv", "csv"),
        ("a.parquet", "parquet"), ("a.txt", "text"),
    ):  # fmt: skip
        assert Input.of(write(tmp_path / name, ""), None).format == format
    assert Input.of("-").format == "json"
    for path, match in (
        (write(tmp_path / "a.gz", ""), "cannot be told"),
        (str(tmp_path / "none.json"), "does not exist"),
    ):
        with pytest.raises(JobError, match=match):
            Input.of(path)
    with pytest.raises(JobError, match="is a folder"):
        Input.of(str(tmp_path), "json")
    with pytest.raises(JobError, match="standard input"):
        Input.of("-", "parquet")


# ---------------------------------------------------------------- Parquet


def test_parquet_is_read_in_pieces_and_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_CHUNK_LINES", 10)
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": pa.array(range(25), pa.int32())}), path)
    rows, source = taken(path, "n long")
    assert [row["n"] for row in rows] == list(range(25))
    assert source.rows == 25
    with pytest.raises(JobError, match="no lines to reject"):
        taken(path, "n long", reject=tmp_path / "bad")


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", "no")
    assert f"{path} cannot be read as Parquet" in refusal(path, "n long")
    pq.write_table(pa.table({"n": pa.array(range(100_000))}), path)
    data = bytearray(Path(path).read_bytes())
    data[100:200_000] = bytes(len(data[100:200_000]))
    assert "cannot be read as Parquet" in refusal(write(Path(path), bytes(data)), "n long")


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (pa.array([5]), "boolean"),
        (pa.array([1e300]), "float"),
        (pa.array([5]), "timestamp"),
        (pa.array([5]), "string"),
        (pa.array(["5"]), "long"),
        (pa.array(["2026-01-01"]), "date"),
        (pa.array([1.55]), "decimal(5,1)"),
        (pa.array([1.0]), "long"),
        (pa.array([{"x": 1, "y": 2}]), "struct<x: long>"),
        (pa.array([{"x": 1}]), "struct<x: long, y: long>"),
        (pa.array([[5]]), "array<boolean>"),
        (pa.array([datetime(2026, 1, 1, tzinfo=UTC)]), "timestamp_ntz"),
        (pa.array([2**40]), "integer"),
        (pa.array([Decimal("1.55")]), "decimal(5,1)"),
        (pa.array([1001], pa.timestamp("ns", "UTC")), "timestamp"),
        (pa.array([b"\xff"]), "string"),
    ],
)
def test_a_column_is_widened_or_refused_but_never_changed(have: pa.Array, want: str) -> None:
    with pytest.raises(JobError, match="do not fit the log"):
        fit(pa.table({"c": have}), arrow_schema(parse_schema(f"c {want}")), "the log")


@pytest.mark.parametrize(
    ("have", "want", "expected"),
    [
        (pa.array([5], pa.int8()), "long", 5),
        (pa.array([5]), "byte", 5),
        (pa.array([5]), "double", 5.0),
        (pa.array([5]), "decimal(21,2)", Decimal("5.00")),
        (pa.array([0.5], pa.float32()), "double", 0.5),
        (pa.array(["a"], pa.large_string()), "string", "a"),
        (pa.array(["a"]).dictionary_encode(), "string", "a"),
        (pa.array([None], pa.null()), "array<long>", None),
        (pa.array([{"y": 1, "x": 2}]), "struct<x: long, y: integer>", {"x": 2, "y": 1}),
        (pa.array([[1]], pa.large_list(pa.int8())), "array<long>", [1]),
        (pa.array([1000], pa.timestamp("ns", "UTC")), "timestamp",
         datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
        (pa.array([datetime(2026, 1, 1)]), "timestamp", datetime(2026, 1, 1, tzinfo=UTC)),
    ],
)  # fmt: skip
def test_a_column_that_loses_nothing_is_widened(have: pa.Array, want: str, expected: Any) -> None:
    schema = arrow_schema(parse_schema(f"c {want}"))
    found = fit(pa.table({"c": have}), schema, "the log")
    assert found.schema == schema
    assert found.to_pylist() == [{"c": expected}]


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    log = EmbeddedLog.create(tmp_path / "log", "a long")
    with pytest.raises(JobError, match="a is there twice"):
        log.append(pa.table([[1], [2]], ["a", "a"]))
    with pytest.raises(JobError, match="a is there twice"):
        EmbeddedLog.create(tmp_path / "other", pa.schema([("a", pa.int64()), ("A", pa.int64())]))


# ---------------------------------------------------------------- there and back

EVERY = (
    "id long, s string, b binary, yes boolean, i8 byte, i16 short, i32 integer, f float, d double, "
    "dec decimal(20,4), big decimal(38,0), day date, at timestamp, local timestamp_ntz, "
    "tags array<string>, m map<string, decimal(10,2)>, by_day map<date, array<timestamp>>, "
    "n struct<x: integer, deep: array<struct<k: string, v: double>>>"
)
_LETTERS = string.ascii_letters + ' ,"\\\n\r\t\x00\x1b{}[]äß漢😀\u2028\ufeff'


def random_value(rng: random.Random, kind: Any) -> Any:
    """As Arrow gives it back."""
    if isinstance(kind, dict):
        match kind["type"]:
            case "struct":
                return {f["name"]: maybe(rng, f["type"]) for f in kind["fields"]}
            case "array":
                return [maybe(rng, kind["elementType"]) for _ in range(rng.randrange(4))]
            case _:
                keys = {random_value(rng, kind["keyType"]) for _ in range(rng.randrange(4))}
                return [(key, maybe(rng, kind["valueType"])) for key in sorted(keys)]
    if kind.startswith("decimal"):
        precision, scale = map(int, kind[8:-1].split(","))
        unscaled = rng.randrange(-(10**precision) + 1, 10**precision)
        return Decimal((unscaled < 0, tuple(map(int, str(abs(unscaled)))), -scale))
    bits = {"byte": 8, "short": 16, "integer": 32, "long": 64}
    if kind in bits:
        end = 2 ** (bits[kind] - 1)
        return rng.choice([-end, end - 1, 0, rng.randrange(-end, end)])
    us = timedelta(microseconds=rng.randrange(10**18 // 4))
    match kind:
        case "string":
            return "".join(rng.choices(_LETTERS, k=rng.randrange(12)))
        case "binary":
            return rng.randbytes(rng.randrange(12))
        case "boolean":
            return rng.random() < 0.5
        case "float":
            some = [rng.random(), 3.4028234663852886e38, 1e-45, -0.0, math.inf]
            return pa.array([rng.choice(some)], pa.float32())[0].as_py()
        case "double":
            return rng.choice([rng.gauss(0, 1e10), 5e-324, 1.7976931348623157e308, -math.inf, 0.1])
        case "date":
            return date(1, 1, 1) + timedelta(days=rng.randrange(3_652_059))
        case "timestamp":
            return datetime(1, 1, 1, tzinfo=UTC) + us
        case _:
            return datetime(1, 1, 1) + us


def maybe(rng: random.Random, kind: Any) -> Any:
    return None if rng.random() < 0.15 else random_value(rng, kind)


def random_rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    fields = json.loads(parse_schema(EVERY))["fields"]
    return [{**{f["name"]: maybe(rng, f["type"]) for f in fields}, "id": n} for n in range(count)]


def written(value: Any, kind: Any, rng: random.Random) -> Any:
    """As a careful exporter writes JSON; numbers by their own digits."""
    if value is None:
        return None
    match kind:
        case {"type": "struct"}:
            kinds = {field["name"]: field["type"] for field in kind["fields"]}
            some = [name for name in value if value[name] is not None or rng.random() < 0.5]
            return {name: written(value[name], kinds[name], rng) for name in some}
        case {"type": "map"}:
            key, item = kind["keyType"], kind["valueType"]
            return {str(written(k, key, rng)): written(v, item, rng) for k, v in value}
        case {"type": "array"}:
            return [written(v, kind["elementType"], rng) for v in value]
        case "binary":
            return base64.b64encode(value).decode()
        case "timestamp" | "timestamp_ntz":
            zone = "" if kind == "timestamp_ntz" else rng.choice(["", "Z", "+00:00"])
            return value.replace(tzinfo=None).isoformat(rng.choice("T ")) + zone
        case "date":
            return value.isoformat()
        case "float" | "double" if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case str() if kind.startswith("decimal"):
            return str(value) if rng.random() < 0.5 else _Digits(value)
    return value


class _Digits(float):
    """A number that json writes with all its digits."""

    def __new__(cls, value: Decimal) -> _Digits:
        made = super().__new__(cls, 0)
        made.text = format(value, "f")  # type: ignore[attr-defined]
        return made

    def __repr__(self) -> str:
        return str(self.text)  # type: ignore[attr-defined]


def dumps(value: Any) -> str:
    """`json.dumps` writes floats by `float.__repr__`, whatever their class."""
    match value:
        case dict():
            return "{" + ",".join(f"{json.dumps(k)}:{dumps(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(dumps, value)) + "]"
        case _Digits():
            return repr(value)
    return json.dumps(value)


def cell(value: Any, kind: Any, rng: random.Random) -> str:
    if value is None:
        return ""
    plain = written(value, kind, rng)
    text = plain if isinstance(plain, str) else dumps(plain)
    quoted = '"' + text.replace('"', '""') + '"'
    needs = not text or any(c in text for c in ',"\n\r')
    return quoted if needs or rng.random() < 0.3 else text


def as_csv(rows: list[dict[str, Any]], rng: random.Random) -> str:
    fields = json.loads(parse_schema(EVERY))["fields"]
    rng.shuffle(fields)
    lines = [",".join(field["name"] for field in fields)]
    lines += [",".join(cell(row[f["name"]], f["type"], rng) for f in fields) for row in rows]
    return "".join(line + rng.choice(["\n", "\r\n"]) for line in lines)


def as_json(rows: list[dict[str, Any]], rng: random.Random) -> str:
    kind = json.loads(parse_schema(EVERY))
    return "".join(dumps(written(row, kind, rng)) + "\n" for row in rows)


def comparable(rows: list[dict[str, Any]]) -> str:
    """By digits: 0.0 and -0.0, 1.5 and 1.50 differ."""
    utc = "zoneinfo.ZoneInfo(key='UTC')", repr(UTC)
    return "\n".join(repr(row).replace(*utc) for row in rows)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("ending", "write_rows"), [("json", as_json), ("csv", as_csv)])
def test_random_rows_come_back_exactly(
    tmp_path: Path, seed: int, ending: str, write_rows: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rng = random.Random(f"{ending} {seed}")
    monkeypatch.setattr(intake, "_CHUNK_LINES", rng.choice([7, 64, 1000]))
    rows = random_rows(rng, 150)
    path = write(tmp_path / f"rows.{ending}", write_rows(rows, rng))
    log = EmbeddedLog.create(tmp_path / "log", EVERY, partitions=3, key=["s"])
    source = RowInput([Input.of(path)], log.facts.schema, now=NOW)
    assert log.append(source.tables()).rows == len(rows)
    found = [row for batch in log.read(columns=list(rows[0])) for row in batch.to_pylist()]
    found.sort(key=lambda row: row["id"])
    assert comparable(found) == comparable(rows), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_tail_writes_can_be_appended_again(tmp_path: Path, seed: int) -> None:
    rows = random_rows(random.Random(seed), 100)
    log = EmbeddedLog.create(tmp_path / "log", EVERY)
    log.append(pa.Table.from_pylist(rows, schema=log.schema))
    kinds = {f["name"]: f["type"] for f in json.loads(log.facts.schema)["fields"]}
    lines = io.StringIO()
    for batch in log.read(columns=list(kinds)):
        for row in plain_rows(batch, kinds):
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            assert all(as_word(value).isprintable() for value in row.values())
    found, _ = taken(write(tmp_path / "a.json", lines.getvalue()), EVERY)
    assert comparable(found) == comparable(rows), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_line_is_appended_or_rejected(tmp_path: Path, seed: int) -> None:
    """Lines, some broken at random: what is taken is what another parser takes for whole."""
    rng = random.Random(seed)
    lines, good = [], []
    for n in range(300):
        row = {"value": f"row {n} ä", "event_time": "2026-11-15T10:00:00Z"}
        line = json.dumps(row, ensure_ascii=rng.random() < 0.5).encode()
        if rng.random() < 0.4:
            at = rng.randrange(len(line))
            line = rng.choice([line[:at], line[:at] + rng.randbytes(1) + line[at:], b"[]", b"{}x"])
            line = line.replace(b"\n", b" ")
        lines.append(line + b"\n")
        try:
            again = json.loads(line.decode())
            if again == {**row, "value": str(again["value"])}:
                good.append(again["value"])
        except (ValueError, KeyError, TypeError):
            pass
    path = write(tmp_path / "a.json", b"".join(lines))
    rows, source = taken(path, PLAIN, reject=tmp_path / "bad")
    assert [row["value"] for row in rows] == good, f"seed {seed}"
    rejected = (tmp_path / "bad").read_bytes()
    blank = sum(1 for line in lines if not line.strip())
    assert len(rows) + source.bad + blank == len(lines)
    assert rejected.count(b"\n") == source.bad
    assert all(line in lines for line in io.BytesIO(rejected))


def test_times_beyond_those_of_python_are_shown() -> None:
    far = 2**62
    batch = pa.record_batch({
        "at": pa.array([far], pa.timestamp("us", "UTC")),
        "day": pa.array([2**30], pa.date32()),
        "list": pa.array([[far]], pa.list_(pa.timestamp("us"))),
    })  # fmt: skip
    kinds = {"at": "timestamp", "day": "date", "list": kind_of("array<timestamp_ntz>")}
    (row,) = plain_rows(batch, kinds)
    assert row == {
        "at": f"{far} microseconds since 1970",
        "day": f"{2**30} days since 1970",
        "list": [f"{far} microseconds since 1970"],
    }


def test_words_cannot_be_misread_and_no_terminal_obeys_them() -> None:
    assert as_word("plain") == "plain"
    assert as_word("a b") == '"a b"'
    assert as_word("null") == '"null"'
    assert as_word(None) == "null"
    assert as_word("") == '""'
    assert as_word("\x1b[2J") == '"\\u001b[2J"'
    assert as_word("\x9b2J") == '"\\u009b2J"'
    assert as_word({"ä": ["\x9b"]}) == '{"\\u00e4": ["\\u009b"]}'
