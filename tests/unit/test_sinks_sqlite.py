"""The Sqlite sink: append, upsert and replace, types, and tables that are not ours."""

from __future__ import annotations

import base64
import json
import math
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import LINEAGE, OUTPUT, SCHEMA, SqliteTarget, publication, schema, stage, table

import any_values
from onceflow.errors import (
    BadRows,
    JobError,
    PublishFailed,
    SchemaMismatch,
    TargetBehind,
    TargetError,
)
from onceflow.sinks import Ledger, Outcome, Position, Sqlite, Staged


@pytest.fixture
def target(tmp_path: Path) -> SqliteTarget:
    return SqliteTarget(tmp_path)


def sqlite(target: SqliteTarget, **settings: Any) -> Sqlite:
    return Sqlite(target.path, **{"table": "counts", "timeout": 5.0, **settings})


def fenced(target: SqliteTarget, **settings: Any) -> Sqlite:
    sink = sqlite(target, **settings)
    sink.fence(OUTPUT, term=1, token="token 1")
    return sink


def user_makes(target: SqliteTarget, sql: str) -> None:
    with closing(sqlite3.connect(target.path)) as db:
        db.executescript(sql)


def pairs(target: SqliteTarget) -> list[tuple[Any, ...]]:
    return target.query("SELECT id, name FROM counts ORDER BY id")


def counted(*rows: tuple[int, str]) -> pa.Table:
    return pa.table(
        {"id": pa.array([r[0] for r in rows], pa.int64()), "name": [r[1] for r in rows]}
    )


# ---------------------------------------------------------------- append


def test_appended_rows_carry_lineage_and_epoch(target: SqliteTarget) -> None:
    sink = fenced(target)
    for epoch in (0, 1):
        sink.publish(publication(target.root, epoch, table([epoch])))
    found = target.query("SELECT id, _lineage, _epoch FROM counts ORDER BY id")
    assert found == [(0, LINEAGE, 0), (1, LINEAGE, 1)]


def test_equal_rows_of_several_epochs_all_stay(target: SqliteTarget) -> None:
    sink = fenced(target)
    for epoch in (0, 1):
        sink.publish(publication(target.root, epoch, counted((7, "x"), (7, "x"))))
    assert pairs(target) == [(7, "x")] * 4


@pytest.mark.parametrize("name", ["_epoch", "_Lineage"])
def test_a_column_that_has_the_name_of_a_tag_is_refused(target: SqliteTarget, name: str) -> None:
    kinds = schema(**{"id": "long", name: "long"})
    with pytest.raises(JobError, match=f"writes {name} itself"):
        sqlite(target).prepare(OUTPUT, kinds, "append")
    sqlite(target, key="id").prepare(OUTPUT, kinds, "append")


# ---------------------------------------------------------------- upsert


@pytest.mark.parametrize("mode", ["append", "update"])
def test_rows_with_a_key_replace_the_older_ones(target: SqliteTarget, mode: str) -> None:
    sink = fenced(target, key="id")
    sink.prepare(OUTPUT, SCHEMA, mode)
    sink.publish(publication(target.root, 0, counted((1, "a"), (2, "b")), mode=mode))
    sink.publish(publication(target.root, 1, counted((2, "B"), (3, "c")), mode=mode))
    assert pairs(target) == [(1, "a"), (2, "B"), (3, "c")]
    assert [row[1] for row in target.query("PRAGMA table_info(counts)")] == ["id", "name"]


def test_of_several_rows_of_one_key_in_an_epoch_the_last_stays(target: SqliteTarget) -> None:
    sink = fenced(target, key="id")
    first, second = counted((1, "a"), (1, "b")), counted((1, "c"))
    assert sink.publish(publication(target.root, 0, first, second)) is Outcome.PUBLISHED
    assert pairs(target) == [(1, "c")]


def test_a_key_may_have_several_columns_and_be_all_there_is(target: SqliteTarget) -> None:
    sink = fenced(target, key=["id", "name"])
    for epoch in (0, 1):
        sink.publish(publication(target.root, epoch, counted((1, "a"), (1, "b"))))
    assert pairs(target) == [(1, "a"), (1, "b")]


def test_update_needs_a_key(target: SqliteTarget) -> None:
    with pytest.raises(JobError, match="has no key") as caught:
        sqlite(target).prepare(OUTPUT, SCHEMA, "update")
    assert "key=" in caught.value.hint


def test_a_key_must_be_a_column(target: SqliteTarget) -> None:
    with pytest.raises(JobError, match="there is no column word"):
        sqlite(target, key=["id", "word"]).prepare(OUTPUT, SCHEMA, "append")


def staged(root: Path, rows: pa.Table) -> Staged:
    return Staged(stage(root / "staged", rows), root, root, "tag", SCHEMA, lambda: None)


def test_a_null_in_a_key_stops_the_epoch_before_it_is_decided(target: SqliteTarget) -> None:
    rows = pa.table({"id": pa.array([1, None, None], pa.int64()), "name": ["a", None, "c"]})
    with pytest.raises(BadRows, match=r"key column id \(2 values\).*key column name \(1 values\)"):
        sqlite(target, key=["id", "name"]).stage(staged(target.root, rows))
    assert sqlite(target).stage(staged(target.root, rows))[0].rows == 3


def test_a_nan_in_a_key_stops_the_epoch_too(target: SqliteTarget) -> None:
    """SQLite stores it as NULL, and no two NULLs are the same key."""
    rows = pa.table({"id": [1.0, float("nan")], "name": ["a", "b"]})
    with pytest.raises(BadRows, match="key column id"):
        sqlite(target, key="id").stage(staged(target.root, rows))


# ---------------------------------------------------------------- complete


@pytest.mark.parametrize("key", [(), "id"], ids=["no key", "key"])
def test_complete_replaces_the_table(target: SqliteTarget, key: Any) -> None:
    sink = fenced(target, key=key)
    sink.prepare(OUTPUT, SCHEMA, "complete")
    sink.publish(publication(target.root, 0, counted((1, "a"), (2, "b")), mode="complete"))
    sink.publish(publication(target.root, 1, counted((2, "B")), mode="complete"))
    assert pairs(target) == [(2, "B")]
    sink.publish(publication(target.root, 2, files=(), mode="complete"))
    assert pairs(target) == []
    assert sink.published(OUTPUT).position == Position(LINEAGE, 2)


# ---------------------------------------------------------------- types


def stored(target: SqliteTarget, kind: Any, values: pa.Array) -> list[Any]:
    """What SQLite holds after a column of this type was prepared and published."""
    kinds = schema(id="long", value=kind)
    rows = pa.table({"id": pa.array(range(len(values)), pa.int64()), "value": values})
    sink = fenced(target)
    sink.prepare(OUTPUT, kinds, "append")
    assert sink.publish(publication(target.root, 0, rows, schema=kinds)) is Outcome.PUBLISHED
    sqlite(target).prepare(OUTPUT, kinds, "append")  # and the table fits its own rows
    found = target.query("SELECT value, typeof(value) FROM counts ORDER BY id")
    assert {kind for value, kind in found if value is None} <= {"null"}
    return [value for value, _ in found]


NOON = datetime(2026, 11, 15, 12, 0, 0, 123456, tzinfo=UTC)
INF = float("inf")


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("long", pa.array([2**63 - 1, -(2**63), None]), [2**63 - 1, -(2**63), None]),
        ("integer", pa.array([1, None], pa.int32()), [1, None]),
        ("byte", pa.array([-128], pa.int8()), [-128]),
        ("boolean", pa.array([True, False, None]), [1, 0, None]),
        ("double", pa.array([0.1, float("nan"), INF, None]), [0.1, None, INF, None]),
        ("float", pa.array([0.5], pa.float32()), [0.5]),
        ("string", pa.array(["", "ä\x00b", None]), ["", "ä\x00b", None]),
        ("binary", pa.array([b"", b"\x00\xff", None]), [b"", b"\x00\xff", None]),
        ("date", pa.array([date(2026, 11, 15), None]), ["2026-11-15", None]),
        (
            "timestamp",
            pa.array([NOON, None], pa.timestamp("us", "UTC")),
            ["2026-11-15 12:00:00.123456", None],
        ),
        (
            "timestamp",
            pa.array([NOON], pa.timestamp("us", "Europe/Amsterdam")),
            ["2026-11-15 12:00:00.123456"],
        ),
        (
            "timestamp_ntz",
            pa.array([NOON.replace(tzinfo=None)], pa.timestamp("us")),
            ["2026-11-15 12:00:00.123456"],
        ),
        (
            "decimal(38,10)",
            pa.array([Decimal("12345678901234567890.0000000001"), None], pa.decimal128(38, 10)),
            ["12345678901234567890.0000000001", None],
        ),
        ("decimal(5,2)", pa.array([Decimal("1.50")], pa.decimal128(5, 2)), ["1.50"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_values_are_stored_as_documented(
    target: SqliteTarget, kind: str, values: pa.Array, expected: list[Any]
) -> None:
    assert stored(target, kind, values) == expected


@pytest.mark.parametrize("text", ["0.0000000001", "-0.0000000001", "0.0000000000"])
def test_small_decimals_are_written_out(target: SqliteTarget, text: str) -> None:
    values = pa.array([Decimal(text)], pa.decimal128(38, 10))
    assert stored(target, "decimal(38,10)", values) == [text]


ARRAY = {"type": "array", "elementType": "long", "containsNull": True}
MAP = {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": True}
STRUCT = {
    "type": "struct",
    "fields": [
        {"name": "a", "type": "long", "nullable": True, "metadata": {}},
        {"name": "b", "type": "binary", "nullable": True, "metadata": {}},
        {"name": "t", "type": "timestamp", "nullable": True, "metadata": {}},
        {"name": "d", "type": "decimal(5,2)", "nullable": True, "metadata": {}},
    ],
}


def test_nested_values_are_json_that_sqlite_can_read(target: SqliteTarget) -> None:
    kind = pa.struct(
        {
            "a": pa.int64(),
            "b": pa.binary(),
            "t": pa.timestamp("us", "UTC"),
            "d": pa.decimal128(5, 2),
        }
    )
    value = {"a": 1, "b": b"\x00", "t": NOON, "d": Decimal("1.50")}
    found = stored(target, STRUCT, pa.array([value, None], kind))
    assert json.loads(found[0]) == {
        "a": 1,
        "b": "AA==",
        "t": "2026-11-15 12:00:00.123456+00:00",
        "d": "1.50",
    }
    assert found[1] is None
    extracted = target.query("SELECT json_extract(value, '$.a') FROM counts ORDER BY id")
    assert extracted == [(1,), (None,)]


def test_arrays_and_maps_are_json(target: SqliteTarget) -> None:
    assert stored(target, ARRAY, pa.array([[1, None], [], None])) == ["[1, null]", "[]", None]


def test_a_map_is_a_list_of_pairs(target: SqliteTarget) -> None:
    values = pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int64()))
    assert [json.loads(v) for v in stored(target, MAP, values)] == [[["a", 1], ["b", None]]]


def test_a_nested_decimal_is_written_out_too(target: SqliteTarget) -> None:
    kind = {"type": "array", "elementType": "decimal(38,10)", "containsNull": True}
    values = pa.array([[Decimal("0.0000000001")]], pa.list_(pa.decimal128(38, 10)))
    assert stored(target, kind, values) == ['["0.0000000001"]']


def test_a_nan_inside_a_nested_value_is_still_json(target: SqliteTarget) -> None:
    kind = {"type": "array", "elementType": "double", "containsNull": True}
    stored(target, kind, pa.array([[1.0, float("nan"), INF]]))
    assert target.query("SELECT json_valid(value) FROM counts") == [(1,)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("time(6)", pa.array([1], pa.time64("us"))),
        (
            "variant",
            pa.array(
                [{"value": b"\x0c\x07", "metadata": b"\x01\x00\x00"}],
                pa.struct({"value": pa.binary(), "metadata": pa.binary()}),
            ),
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_type_is_refused_before_anything_is_decided_or_it_is_stored(
    target: SqliteTarget, kind: str, values: pa.Array
) -> None:
    """An epoch that is decided and can never be published would stop the job for good."""
    try:
        sqlite(target).prepare(OUTPUT, schema(id="long", value=kind), "append")
    except JobError:
        return
    assert all(isinstance(value, str | bytes | int) for value in stored(target, kind, values))


@pytest.mark.parametrize("name", ["interval", "variant", "void", "geometry", "time"])
def test_a_field_may_be_called_like_a_type(target: SqliteTarget, name: str) -> None:
    inner = {"name": name, "type": "long", "nullable": True, "metadata": {}}
    kind = {"type": "struct", "fields": [inner]}
    assert stored(target, kind, pa.array([{name: 1}])) == [f'{{"{name}": 1}}']


def test_any_name_of_a_column_is_quoted(target: SqliteTarget) -> None:
    name = 'a "b"; DROP TABLE counts; --'
    kinds = schema(**{name: "long", "select": "string"})
    sink = fenced(target, key=name)
    sink.prepare(OUTPUT, kinds, "update")
    rows = pa.table({name: pa.array([1], pa.int64()), "select": ["x"]})
    for epoch in (0, 1):
        sink.publish(publication(target.root, epoch, rows, schema=kinds, mode="update"))
    sink.prepare(OUTPUT, kinds, "update")
    assert target.query("SELECT * FROM counts") == [(1, "x")]


@pytest.mark.parametrize(
    ("settings", "names", "said"),
    [
        ({"table": "sqlite_counts"}, ["id"], "reserved for internal use"),
        ({}, ["id", "a\0b"], "null character"),
        ({}, [f"c{n}" for n in range(2_000)], "too many columns"),
    ],
    ids=["table", "column", "columns"],
)
def test_a_table_that_can_never_be_created_is_refused_at_the_start(
    target: SqliteTarget, settings: dict[str, Any], names: list[str], said: str
) -> None:
    """It would be created with the first epoch, which is decided by then."""
    with pytest.raises(JobError, match=said):
        sqlite(target, **settings).prepare(OUTPUT, schema(**dict.fromkeys(names, "long")), "append")
    assert not target.path.exists()


def test_columns_are_matched_by_name_not_by_place(target: SqliteTarget) -> None:
    user_makes(target, "CREATE TABLE counts (name TEXT, id INTEGER PRIMARY KEY)")
    sink = fenced(target, key="id")
    sink.prepare(OUTPUT, SCHEMA, "append")
    sink.publish(publication(target.root, 0, counted((1, "a"))))
    assert pairs(target) == [(1, "a")]


# ---------------------------------------------------------------- tables that users made


def test_a_table_that_the_user_made_is_used_with_its_index(target: SqliteTarget) -> None:
    user_makes(
        target,
        "CREATE TABLE counts (id BIGINT NOT NULL, name VARCHAR(20));"
        "CREATE UNIQUE INDEX by_id ON counts (id);",
    )
    sink = fenced(target, key="id")
    sink.prepare(OUTPUT, SCHEMA, "append")
    for epoch in (0, 1):
        sink.publish(publication(target.root, epoch, counted((1, f"epoch {epoch}"))))
    assert pairs(target) == [(1, "epoch 1")]


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ("id TEXT, name TEXT", "id is INTEGER, the target has TEXT"),
        ("id INTEGER, name BLOB", "name is TEXT, the target has BLOB"),
        ("id INTEGER, name NUMERIC", "name is TEXT, the target has NUMERIC"),
        ("id DECIMAL(5), name TEXT", "id is INTEGER, the target has NUMERIC"),
        ("id, name TEXT", "id is INTEGER, the target has BLOB"),
        ("id INTEGER", "name (TEXT) is not in the target"),
        ("id INTEGER, name TEXT, extra TEXT", "extra (TEXT) is in the target only"),
    ],
)
def test_a_table_whose_columns_do_not_fit_is_refused(
    target: SqliteTarget, declared: str, told: str
) -> None:
    user_makes(target, f"CREATE TABLE counts ({declared}); CREATE UNIQUE INDEX i ON counts (id);")
    with pytest.raises(SchemaMismatch) as caught:
        sqlite(target, key="id").prepare(OUTPUT, SCHEMA, "append")
    assert told in caught.value.message


@pytest.mark.parametrize(
    "index",
    [
        "",
        "CREATE INDEX i ON counts (id)",
        "CREATE UNIQUE INDEX i ON counts (id, name)",
        "CREATE UNIQUE INDEX i ON counts (name)",
        "CREATE UNIQUE INDEX i ON counts (id) WHERE name IS NOT NULL",
        "CREATE UNIQUE INDEX i ON counts (id + 1)",
    ],
)
def test_a_table_without_a_unique_index_on_the_key_is_refused(
    target: SqliteTarget, index: str
) -> None:
    user_makes(target, f"CREATE TABLE counts (id INTEGER, name TEXT); {index};")
    with pytest.raises(SchemaMismatch, match=r"no unique index on \(id\)") as caught:
        sqlite(target, key="id").prepare(OUTPUT, SCHEMA, "append")
    user_makes(target, "DROP INDEX IF EXISTS i")
    user_makes(target, caught.value.hint)  # the hint is the cure
    sqlite(target, key="id").prepare(OUTPUT, SCHEMA, "append")


def test_other_tables_in_the_database_are_left_alone(target: SqliteTarget) -> None:
    user_makes(target, "CREATE TABLE mine (x); INSERT INTO mine VALUES (1);")
    fenced(target).publish(publication(target.root, 0, table([1])))
    assert target.query("SELECT x FROM mine") == [(1,)]


def test_two_outputs_have_two_tables_in_one_database(target: SqliteTarget) -> None:
    a, b = fenced(target), sqlite(target, table="others")
    b.fence("job/query/others", term=4, token="token 4")
    a.publish(publication(target.root, 0, table([1])))
    b.publish(
        publication(target.root, 7, table([2]), output="job/query/others", term=4, previous=None)
    )
    assert a.published(OUTPUT) == Ledger(1, Position(LINEAGE, 0), "decision 0")
    assert b.published("job/query/others") == Ledger(4, Position(LINEAGE, 7), "decision 7")
    assert target.query("SELECT id FROM others") == [(2,)]


def test_a_table_that_refuses_decided_rows_says_what_to_do(target: SqliteTarget) -> None:
    user_makes(
        target,
        "CREATE TABLE counts (id INTEGER PRIMARY KEY, name TEXT CHECK (name <> 'bad'));",
    )
    sink = fenced(target, key="id")
    decided = publication(target.root, 0, counted((1, "good"), (2, "bad")))
    with pytest.raises(PublishFailed, match="CHECK constraint failed") as caught:
        sink.publish(decided)
    assert "drop the constraint" in caught.value.hint
    assert pairs(target) == []
    assert sink.published(OUTPUT).position is None


# ---------------------------------------------------------------- bad days


def test_staged_files_with_other_rows_than_decided_are_not_published(target: SqliteTarget) -> None:
    sink, decided = fenced(target), publication(target.root, 0, table([1, 2, 3]))
    stage(Path(decided.files[0].path).parent, table([1, 2]))
    with pytest.raises(PublishFailed, match="have 2 rows, but 3 were decided"):
        sink.publish(decided)
    assert target.rows() == []


@contextmanager
def locked(target: SqliteTarget) -> Iterator[None]:
    with closing(sqlite3.connect(target.path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def test_a_lock_that_nobody_gives_up_is_an_error_within_the_timeout(target: SqliteTarget) -> None:
    fenced(target)
    sink, decided = sqlite(target, timeout=0.2), publication(target.root, 0, table([1]))
    with locked(target):
        began = time.monotonic()
        with pytest.raises(PublishFailed, match="locked"):
            sink.publish(decided)
        assert 0.1 < time.monotonic() - began < 5
        assert sink.published(OUTPUT).term == 1  # reading goes on
    assert sink.publish(decided) is Outcome.PUBLISHED


def test_a_reader_in_the_middle_of_a_transaction_keeps_nobody_out(target: SqliteTarget) -> None:
    sink = fenced(target)
    sink.publish(publication(target.root, 0, table([1])))
    with closing(sqlite3.connect(target.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM counts").fetchone() == (1,)
        sink.publish(publication(target.root, 1, table([2])))
        assert reader.execute("SELECT count(*) FROM counts").fetchone() == (1,)
        reader.execute("COMMIT")
        assert reader.execute("SELECT count(*) FROM counts").fetchone() == (2,)


def test_a_database_that_can_have_no_write_ahead_log_is_refused(
    target: SqliteTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without shared memory: SQLite goes on in another mode, silently."""
    connect = sqlite3.connect

    def without_shared_memory(path: Any, **settings: Any) -> Any:
        return connect(f"file:{path}?vfs=unix-dotfile", uri=True, **settings)

    monkeypatch.setattr(sqlite3, "connect", without_shared_memory)
    with pytest.raises(TargetError, match=r"write-ahead log.* stays delete") as refused:
        fenced(target)
    assert "move the database to a local file system" in str(refused.value)


def test_a_file_that_is_no_database_is_named(target: SqliteTarget) -> None:
    target.path.write_bytes(b"something else entirely " * 100)
    for act in (
        lambda: sqlite(target).prepare(OUTPUT, SCHEMA, "append"),
        lambda: sqlite(target).published(OUTPUT),
        lambda: fenced(target),
        lambda: sqlite(target).publish(publication(target.root, 0, table([1]))),
    ):
        with pytest.raises(TargetError, match=r"target.db is not a database") as caught:
            act()
        assert caught.value.hint
    assert target.path.read_bytes().startswith(b"something else")


def test_a_path_that_is_a_folder_is_named(target: SqliteTarget) -> None:
    target.path.mkdir()
    with pytest.raises(TargetError, match=r"cannot open .*target.db"):
        sqlite(target).prepare(OUTPUT, SCHEMA, "append")


def test_a_database_that_was_replaced_by_an_empty_one_is_behind(target: SqliteTarget) -> None:
    sink = fenced(target)
    sink.publish(publication(target.root, 0, table([1])))
    target.remove()
    target.path.touch()
    with pytest.raises(TargetBehind):
        sink.publish(publication(target.root, 1, table([2])))


def test_a_table_that_was_dropped_between_two_epochs_is_noticed(
    target: SqliteTarget,
) -> None:
    """The ledger says that epoch 0 is published; its rows are gone with the table."""
    sink = fenced(target)
    sink.publish(publication(target.root, 0, table([1])))
    user_makes(target, "DROP TABLE counts")
    with pytest.raises(TargetBehind):
        sink.publish(publication(target.root, 1, table([2])))


# ---------------------------------------------------------------- what it can never take


def _fits(kind: str, value: Any) -> bool:
    if kind == "string":
        return any_values.is_utf8(value)
    return kind not in any_values.TIMES or -719_162 <= any_values.day_of(kind, value) <= 2_932_896


def _from_column(kind: str, value: Any) -> Any:
    forms: dict[str, Callable[[Any], Any]] = {
        "string": str.encode, "boolean": bool, "float": float, "double": float,
        **{time: partial(any_values.time_from, time) for time in any_values.TIMES},
    }  # fmt: skip
    return Decimal(value) if kind.startswith("decimal") else forms.get(kind, lambda v: v)(value)


def _from_json(kind: str, value: Any) -> Any:
    return base64.b64decode(value) if kind == "binary" else _from_column(kind, value)


def _without_nan(_: str, value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


@given(st.data(), any_values.KINDS, st.booleans())
@settings(deadline=None, max_examples=50)
def test_a_value_is_refused_before_it_is_decided_or_it_comes_back(
    data: st.DataObject, kind: Any, keyed: bool
) -> None:
    drawn = data.draw(st.lists(st.none() | any_values.values(kind), min_size=1, max_size=4))
    fits = all(_fits(*part) for value in drawn for part in any_values.plain_values(kind, value))
    with tempfile.TemporaryDirectory() as root:
        target = SqliteTarget(Path(root))
        sink, kinds = sqlite(target, key="id" if keyed else ()), any_values.schema_of(kind)
        sink.prepare(OUTPUT, kinds, "append")
        sink.fence(OUTPUT, term=1, token="token 1")
        rows = any_values.staged(target.root / "rows", kind, drawn)
        if not fits:
            with pytest.raises(BadRows, match="column v"):
                sink.stage(rows)
            return
        decided = publication(target.root, 0, files=sink.stage(rows), schema=kinds)
        assert sink.publish(decided) is Outcome.PUBLISHED
        found = [value for (value,) in target.query("SELECT v FROM counts ORDER BY id")]
    if not isinstance(kind, str):
        found = [value if value is None else json.loads(value) for value in found]
    back = _from_column if isinstance(kind, str) else _from_json
    expected = [any_values.walk(kind, value, _without_nan) for value in drawn]
    assert [any_values.walk(kind, value, back) for value in found] == expected


@pytest.mark.parametrize(
    ("kind", "bad", "said"),
    [
        ("string", b"\xff", "text that is not UTF-8 in column v"),
        ("string", b"\xed\xa0\x80", "text that is not UTF-8 in column v"),
        ("date", -719_163, "a date before the year 1 or after 9999 in column v"),
        ("timestamp", 2_932_897 * 86_400_000_000,
         "a timestamp before the year 1 or after 9999 in column v"),
        ("timestamp_ntz", 2**62, "a timestamp_ntz before the year 1 or after 9999 in column v"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("deep", [False, True])
def test_what_sqlite_cannot_store_is_named_with_the_first_row_that_has_it(
    target: SqliteTarget, kind: Any, bad: Any, said: str, deep: bool
) -> None:
    drawn = [None, bad, None, bad]
    if deep:
        kind = {"type": "array", "elementType": kind, "containsNull": True}
        drawn = [value and [None, value] for value in drawn]
    rows = any_values.staged(target.root / "rows", kind, drawn)
    with pytest.raises(BadRows) as refused:
        sqlite(target, key="id").stage(rows)
    assert f"{said} (2 values), the first where id = 1" in refused.value.message
    assert "filter these rows out" in refused.value.hint
    with pytest.raises(BadRows, match=r"\(2 values\)\n"):
        sqlite(target).stage(rows)
    if not deep:  # the key itself may be what is wrong
        with pytest.raises(BadRows, match="the first where v = "):
            sqlite(target, key="v").stage(rows)
