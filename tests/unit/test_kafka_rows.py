"""Rows as messages: what JSON says of them is what they were."""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.contract.abilities import Staged
from onceflow.contract.ledger import Committable
from onceflow.contract.schema import arrow_schema, parse_schema
from onceflow.contract.staged_files import describe
from onceflow.errors import BadRows, SetupError
from onceflow.kafka.client import Cluster
from onceflow.kafka.ledger import Published, Record, Slots, slot_ledger, transactional_id
from onceflow.kafka.settings import without_secrets
from onceflow.kafka.sink_rows import Layout, _most, bytes_of, json_of
from onceflow.sinks import Kafka

COLUMNS = (
    "s string, n long, f double, ok boolean, d decimal(20,4), day date, at timestamp, raw binary, "
    "tags array<string>, place struct<x: long, y: array<long>>, names map<string, long>"
)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "s": st.none() | st.text(st.characters(exclude_categories=["Cs"])),
            "n": st.none() | st.integers(-(2**63), 2**63 - 1),
            "f": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "ok": st.none() | st.booleans(),
            "d": st.none() | st.decimals(-(10**15), 10**15, places=4),
            "day": st.none() | st.dates(date(1000, 1, 1)),
            "at": st.none() | st.datetimes(datetime(1000, 1, 1), timezones=st.just(UTC)),
            "raw": st.none() | st.binary(),
            "tags": st.none() | st.lists(st.none() | st.text('ab"\\\n,]')),
            "place": st.none()
            | st.fixed_dictionaries(
                {"x": st.none() | st.integers(0, 9), "y": st.none() | st.lists(st.integers(0, 9))}
            ),
            "names": st.none() | st.dictionaries(st.text('ab"'), st.none() | st.integers(0, 9)),
        }
    ),
    max_size=5,
)


@given(rows, st.integers(0, 2))
def test_a_row_comes_back_from_json_as_it_was(found: list[dict[str, Any]], skip: int) -> None:
    plain = [{**r, "names": None if r["names"] is None else [*r["names"].items()]} for r in found]
    batch = pa.RecordBatch.from_pylist(plain, arrow_schema(parse_schema(COLUMNS))).slice(skip)
    keys, values, headers = Layout().messages(batch)
    assert headers is None
    assert set(keys) <= {None}
    assert [_back(json.loads(v or b"", parse_float=str)) for v in values] == found[skip:]


def _back(row: dict[str, Any]) -> dict[str, Any]:
    forms: dict[str, Any] = {
        "f": float, "d": lambda text: Decimal(str(text)), "day": date.fromisoformat,
        "at": datetime.fromisoformat, "raw": base64.b64decode,
    }  # fmt: skip
    return {k: v if v is None else forms.get(k, lambda same: same)(v) for k, v in row.items()}


def test_numbers_that_json_does_not_have_are_strings() -> None:
    column = pa.array([float("nan"), float("inf"), float("-inf"), None, 1.5])
    assert json_of(column).to_pylist() == ['"NaN"', '"Infinity"', '"-Infinity"', "null", "1.5"]


def test_a_single_column_is_what_it_is() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"k": pa.array([7, None]), "v": pa.array([b"\x00", None], pa.binary()), "rest": ["", ""]}
    )
    assert Layout("k", "v").messages(batch) == ([b"7", None], [b"\x00", None], None)


def test_several_columns_are_an_object_and_the_value_is_what_the_key_does_not_take() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1], "b": ["x"], "c": [True]})
    assert Layout(("b", "a")).messages(batch)[:2] == ([b'{"b":"x","a":1}'], [b'{"c":true}'])


def test_a_slice_of_a_column_is_cut_at_its_own_rows() -> None:
    column = pa.array(["zero", None, "two", "three"]).slice(1, 2)
    assert bytes_of(column) == [None, b"two"]


def test_secrets_are_not_written_down_unless_they_are_only_named() -> None:
    settings = {"sasl.username": "u", "sasl.password": "x", "ssl.key.pem": "x", "linger.ms": 1}
    assert without_secrets(settings) == {"sasl.username": "u", "linger.ms": 1}
    assert without_secrets({"sasl.password": "env:PASS"}) == {"sasl.password": "env:PASS"}
    assert "x" not in repr(Cluster("h:1", {"sasl.password": "x"})).replace("max", "")


def test_a_setting_from_an_environment_that_lacks_it_is_refused() -> None:
    with pytest.raises(SetupError, match="NOBODY_SET_THIS"):
        Cluster("h:1", {"sasl.password": "env:NOBODY_SET_THIS"}).client()


@pytest.mark.parametrize(
    ("code", "away"),
    [("_TRANSPORT", True), ("COORDINATOR_NOT_AVAILABLE", True), ("INVALID_RECORD", False)],
)
def test_only_brokers_that_are_away_are_waited_for_without_end(code: str, away: bool) -> None:
    kafka = pytest.importorskip("confluent_kafka").KafkaError
    told = Cluster("h:1").explain(kafka(getattr(kafka, code)), "write to orders")
    assert (told.retryable, told.away) == (True, away)


def test_every_client_gets_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "abracadabra")
    monkeypatch.setattr(Cluster, "_make", lambda self, kind, settings: settings)
    cluster = Cluster("h:1", {"sasl.password": "env:KAFKA_PASSWORD", "linger.ms": 5})
    for client in (cluster.producer(), cluster.consumer(), cluster.admin()):
        assert client["sasl.password"] == "abracadabra"
        assert client["linger.ms"] == 5


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("array<string>", ["s" * 1000] * 2000),
        ("array<long>", [0] * 1_000_000),
        ("array<boolean>", [True] * 400_000),
        (
            "array<struct<a_field_with_a_long_name: int>>",
            [{"a_field_with_a_long_name": 1}] * 40_000,
        ),
    ],
)
def test_a_message_that_is_larger_than_its_row_is_refused(
    tmp_path: Path, kind: str, value: Any
) -> None:
    table = pa.table({"v": [value]}, arrow_schema(parse_schema(f"v {kind}")))
    pq.write_table(table, tmp_path / "part.parquet")
    (file,) = describe(tmp_path, ())
    with pytest.raises(BadRows, match="makes a message of"):
        Layout(None, None, None).refuse_too_large("sink", file, 1_000_000)


@given(rows)
def test_no_row_is_longer_than_it_is_thought_to_be(found: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(found, arrow_schema(parse_schema(COLUMNS)))
    for name in batch.schema.names:
        texts = bytes_of(json_of(batch.column(name)))
        assert max((len(text or b"null") for text in texts), default=0) <= _most(batch.column(name))


def test_messages_of_ordinary_nested_rows_are_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = [{"x": [1, 2, 3], "m": [("a", "b" * 100)]}] * 3
    schema = arrow_schema(parse_schema("v array<struct<x: array<long>, m: map<string, string>>>"))
    pq.write_table(pa.table({"v": [value] * 5000}, schema), tmp_path / "part.parquet")
    (file,) = describe(tmp_path, ())
    monkeypatch.setattr(Layout, "messages", None)
    Layout(None, None, None).refuse_too_large("sink", file, 1_000_000)


# ---------------------------------------------------------------- slots


def test_all_files_of_a_task_go_to_one_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(*names: str) -> tuple[Committable, ...]:
        return tuple(Committable(str(tmp_path / name), 50_000, 1, 0) for name in names)

    names = ("part-00000-a-c000.parquet", "part-00000-a-c001.parquet", "part-00001-b-c000.parquet")
    sink = Kafka("t", servers="h:1", slots=2)
    monkeypatch.setattr(Layout, "refuse_too_large", lambda *_: None)
    staged = Staged(files(*names), tmp_path, tmp_path, "tag", "", lambda: None)
    assert [f.partition for f in sink.stage(staged)] == ["slot=0", "slot=0", "slot=1"]


def record(number: int, slots: int = 1, **more: Any) -> Record:
    last = Published("lineage", number - 1, f"d{number}", slots) if number else None
    before = Published("lineage", number - 2, f"d{number - 1}", 2) if number > 1 else None
    return Record(1, "token", "topic", number, last, before, **more)


def test_the_ledger_of_slots_is_what_all_of_them_have() -> None:
    whole = Slots({0: record(3, 2), 1: record(3, 2), 2: record(1)})
    torn = Slots({0: record(3, 2), 1: record(2, 2), 2: record(1)})
    assert whole.ledger.position is not None
    assert whole.ledger.position.epoch == 2
    assert torn.ledger.position is not None
    assert torn.ledger.position.epoch == 1
    assert torn.ledger.decision == "d2"


def test_a_record_is_read_as_it_was_written() -> None:
    written = record(3, 2, columns={"id": "long"})
    assert Record.load(written.dump(), "") == written


def test_an_id_is_the_same_for_an_output_and_another_for_each_slot() -> None:
    first = transactional_id("ledger", "job/query/output", 0)
    assert first == transactional_id("ledger", "job/query/output", 0)
    others = {transactional_id("ledger", "job/query/output", 1),
              transactional_id("ledger", "job/query/other", 0),
              transactional_id("another", "job/query/output", 0)}  # fmt: skip
    assert len({first, *others}) == 4
    assert all(len(name) < 40 for name in others)


def test_a_slot_that_joins_may_say_anything_older_and_one_that_was_there_may_not() -> None:
    from onceflow.contract.ledger import Position, Publication

    follows = Position("lineage", 4)
    publication = Publication("o", "lineage", 5, 1, follows, (), "{}", "append", "d6")
    before = Published("lineage", 4, "d5", 2)
    assert slot_ledger(record(2), 2, 6, before, publication).position == follows
    assert slot_ledger(record(5), 1, 6, before, publication).position == follows
    assert slot_ledger(record(2), 1, 6, before, publication).position != follows
