"""The embedded log: creating it, rows and their offsets, times, keys, producers, damage."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from logs import (
    TIME,
    Clock,
    commit_names,
    damaged,
    forget_checksums,
    ids,
    make,
    manifest_names,
    placed,
    rows,
    segment_files,
    table,
    unused_files,
)
from targets import OUTPUT, LogTarget, publication
from targets import SCHEMA as SINK_SCHEMA

from onceflow.errors import (
    Damaged,
    DiskFull,
    Fenced,
    JobError,
    OnceflowError,
    OutOfRange,
    SchemaMismatch,
)
from onceflow.log import EmbeddedLog, segments
from onceflow.log import append as append_module
from onceflow.log.reader_positions import Reader, hold
from onceflow.log.segments import split_by_key
from onceflow.protocol.staging import Stager
from onceflow.sinks import Files, Log, Outcome
from onceflow.store.posix import LocalStore
from onceflow.testing.processes import run_and_kill

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def log(tmp_path: Path) -> EmbeddedLog:
    return make(tmp_path / "log")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def small_roll_ups(monkeypatch: pytest.MonkeyPatch, every: int = 2, fan_out: int = 2) -> None:
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", every)
    monkeypatch.setattr("onceflow.folders.commit_log._FAN_OUT", fan_out)


# ---------------------------------------------------------------- creating


def test_a_log_holds_text_and_a_time_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    log = EmbeddedLog.create(tmp_path / "log")
    at = datetime(2026, 11, 15, 10, 0, 0, 123456, UTC)
    log.append(pa.table({"value": ["a", None, ""], "event_time": [at, None, at]}))
    assert [row | {"_appended_at": 0} for row in table(log).to_pylist()] == [
        {"value": value, "event_time": time, "_partition": 0, "_offset": n, "_appended_at": 0}
        for n, (value, time) in enumerate([("a", at), (None, None), ("", at)])
    ]


def test_a_log_is_created_once(tmp_path: Path) -> None:
    first = make(tmp_path / "log")
    with pytest.raises(JobError, match="is a log already"):
        make(tmp_path / "log")
    assert make(tmp_path / "log", exist_ok=True).facts == first.facts
    with pytest.raises(SchemaMismatch, match="more"):
        make(tmp_path / "log", schema="id long, name string, more long", exist_ok=True)


def test_of_two_who_create_a_log_at_once_one_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalStore.put_if_absent

    def late(store: LocalStore, name: str, data: bytes) -> bool:
        monkeypatch.setattr(LocalStore, "put_if_absent", put)
        make(tmp_path / "log", partitions=3)
        return put(store, name, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", late)
    with pytest.raises(JobError, match="is a log already"):
        make(tmp_path / "log")
    assert EmbeddedLog(tmp_path / "log").facts.partitions == 3


def test_who_created_a_log_is_not_told_that_it_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others use it, and roll it up, before the answer to its creation is looked at."""
    put = LocalStore.put_if_absent

    def slow(store: LocalStore, name: str, data: bytes) -> bool:
        monkeypatch.setattr(LocalStore, "put_if_absent", put)
        won = put(store, name, data)
        other = EmbeddedLog(tmp_path / "log")
        for n in range(20):
            other.append(rows([n]))
        return won

    monkeypatch.setattr(LocalStore, "put_if_absent", slow)
    assert ids(make(tmp_path / "log")) == list(range(20))


@pytest.mark.kill
@pytest.mark.parametrize("point", ["put.written", "put.linked"])
def test_a_creation_that_was_killed_can_be_done_again(tmp_path: Path, point: str) -> None:
    path = tmp_path / "log"
    run_and_kill(point, make, path)
    if point == "put.written":
        with pytest.raises(JobError, match="its creation was interrupted"):
            EmbeddedLog(path)
    log = make(path, exist_ok=True)
    log.append(rows([1]))
    assert ids(log) == [1]


def create_by_a_sink(path: Path) -> None:
    sink = Log(path)
    sink.prepare(OUTPUT, SINK_SCHEMA, "append")
    sink.fence(OUTPUT, term=1, token="a")


@pytest.mark.kill
def test_a_job_goes_on_with_a_log_whose_creation_was_killed(tmp_path: Path) -> None:
    target = LogTarget(tmp_path)
    run_and_kill("put.written", create_by_a_sink, target.path)
    sink = target.sink()
    assert sink.published(OUTPUT).position is None
    sink.fence(OUTPUT, term=2, token="b")
    assert sink.publish(publication(tmp_path, 0, term=2)) is Outcome.PUBLISHED


def test_a_folder_that_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="does not exist"):
        EmbeddedLog(tmp_path / "nothing")
    with pytest.raises(JobError, match="is not a log"):
        EmbeddedLog(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(JobError, match=r"holds other files: notes\.txt"):
        make(tmp_path)
    with pytest.raises(JobError, match="is not a folder"):
        make(tmp_path / "notes.txt")
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_an_output_folder_is_not_taken_for_a_log(tmp_path: Path) -> None:
    Files(tmp_path / "out").fence(OUTPUT, term=1, token="a")
    uses: list[Callable[[], Any]] = [
        lambda: EmbeddedLog(tmp_path / "out"),
        lambda: make(tmp_path / "out"),
        lambda: Log(tmp_path / "out").published(OUTPUT),
    ]
    for use in uses:
        with pytest.raises(JobError, match="is not a log: it has output folder commits"):
            use()


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"schema": "_offset long"}, "_offset has a name that the log uses itself"),
        ({"schema": "_Appended_At long"}, "has a name that the log uses itself"),
        ({"schema": "a long, A string"}, "twice"),
        ({"schema": pa.schema([("a", pa.int64()), ("a", pa.int64())])}, "twice"),
        ({"schema": pa.schema([])}, "at least one column"),
        ({"schema": pa.schema([("a", pa.duration("s"))])}, "a is of the Arrow type duration"),
        ({"schema": "a interval"}, "'interval' is not a type"),
        ({"schema": "{}"}, "is not a schema"),
        ({"schema": '{"type": "struct", "fields": [{"name": "a"}]}'}, "is not a schema"),
        ({"partitions": 0}, "1 to 1024 partitions"),
        ({"partitions": 1025}, "1 to 1024 partitions"),
        ({"key": ["nobody"]}, "no column nobody"),
        ({"schema": "a double", "key": ["a"]}, r"a \(double\) cannot be a key"),
        ({"retain_ms": 0}, "age to retain"),
        ({"retain_bytes": -1}, "size to retain"),
    ],
)
def test_a_log_that_cannot_be_is_refused(tmp_path: Path, facts: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        make(tmp_path / "log", **facts)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- rows and offsets


def test_rows_are_there_once_in_their_order_at_offsets_that_stay(log: EmbeddedLog) -> None:
    log.append(rows([5, 3]))
    before = placed(log)
    assert log.append(rows([9])).commit == 3
    assert placed(log) == {**before, (0, 2): 9} == {(0, 0): 5, (0, 1): 3, (0, 2): 9}
    assert placed(EmbeddedLog(log.path)) == placed(log)


def test_many_tables_are_one_commit(log: EmbeddedLog) -> None:
    done = log.append(rows(range(n, n + 3)) for n in (0, 3, 6))
    assert (done.rows, done.commit) == (9, 2)
    assert ids(log) == list(range(9))


def test_an_append_without_rows_is_no_commit(log: EmbeddedLog) -> None:
    for nothing in (rows([]), [], [rows([]), rows([])]):
        done = log.append(nothing)
        assert (done.commit, done.rows, done.already) == (None, 0, False)
    assert commit_names(log.path) == ["000000000001.json"]
    assert unused_files(log) == set()


def test_rows_that_fail_half_way_leave_nothing(log: EmbeddedLog) -> None:
    log.append(rows([1]))

    def fails() -> Iterator[pa.Table]:
        yield rows([2])
        raise RuntimeError("the input ended badly")

    with pytest.raises(RuntimeError, match="ended badly"):
        log.append(fails())
    with pytest.raises(JobError, match="name is missing"):
        log.append([rows([3]), pa.table({"id": [4]})])
    assert ids(log) == [1]
    assert unused_files(log) == set()


def test_a_log_that_is_open_sees_what_others_append_when_it_looks(log: EmbeddedLog) -> None:
    other = EmbeddedLog(log.path)
    other.append(rows([1, 2]))
    assert ids(log) == []
    assert ids(log.refresh()) == [1, 2]
    log.append(rows([3]))
    assert ids(other.refresh()) == [1, 2, 3]


def test_any_range_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that begin and end in the middle of batches, row groups, segments and commits."""
    monkeypatch.setattr(segments, "ROW_GROUP", 10)
    monkeypatch.setattr(segments, "_BATCH", 7)
    monkeypatch.setattr(append_module, "SEGMENT_ROWS", 25)
    log = make(tmp_path / "log")
    for n in range(0, 120, 40):
        log.append(rows(range(n, n + 40)))
    assert len(segment_files(log.path)) == 6
    for first in range(0, 120, 3):
        for last in (first, first + 1, first + 9, first + 10, 120):
            wanted = {(0, n): n for n in range(first, min(last, 120))}
            assert placed(log, [first], [min(last, 120)]) == wanted


def test_a_range_that_is_not_there_is_refused(log: EmbeddedLog) -> None:
    log.append(rows(range(5)))
    with pytest.raises(OutOfRange, match=r"offset 6 of partition 0 is not there.* ends at 5"):
        ids(log, [0], [6])
    assert ids(log, [5], [5]) == []


def test_only_the_columns_that_are_asked_for_are_read(log: EmbeddedLog) -> None:
    log.append(rows(range(3)))
    assert table(log, columns=["name", "_offset"]).to_pylist() == [
        {"name": f"name {n}", "_offset": n} for n in range(3)
    ]
    assert table(log, columns=["_partition"]).to_pylist() == [{"_partition": 0}] * 3
    for wrong, says in ((["id", "nobody"], "no column nobody"), ([], "none was named")):
        with pytest.raises(JobError, match=says):
            list(log.read(columns=wrong))


def test_columns_may_have_any_name(tmp_path: Path) -> None:
    names = ["a.b", "a", "b c", "naïve ☃", "`", "x=1", "list.element", "Ü"]
    schema = ", ".join("`" + name.replace("`", "``") + "` long" for name in names)
    log = EmbeddedLog.create(tmp_path / "log", schema)
    values = {name: [n] for n, name in enumerate(names)}
    log.append(pa.table(values))
    for name in names:
        assert table(log, columns=[name]).to_pydict() == {name: values[name]}
    assert table(log, columns=names).to_pydict() == values


def test_every_type_comes_back_as_it_was_written(tmp_path: Path) -> None:
    schema = (
        "a string, b binary, c boolean, d byte, e short, f int, g long, h float, i double, j date, "
        "k timestamp, l timestamp_ntz, m decimal(38,10), n array<struct<x: int, y: array<string>>>,"
        "o map<string, array<long>>, p struct<q: struct<r: decimal(5,2)>>"
    )
    log = EmbeddedLog.create(tmp_path / "log", schema)
    wide = log.schema
    ends = {
        "a": ["", "\0", "☃" * 1000], "b": [b"", b"\xff\0", b"x"], "c": [True, False, None],
        "d": [-128, 127, 0], "e": [-(2**15), 2**15 - 1, 0], "f": [-(2**31), 2**31 - 1, 0],
        "g": [-(2**63), 2**63 - 1, 0], "h": [0.5, -0.0, float("inf")],
        "i": [5e-324, 1.7976931348623157e308, float("-inf")],
        "j": [date(1, 1, 1), date(9999, 12, 31), date(1969, 12, 31)],
        "k": [-(2**62), 2**62, -1], "l": [-(2**62), 2**62, -1],
        "m": ["9999999999999999999999999999.9999999999", "-0.0000000001", "0"],
        "n": [[], [{"x": None, "y": None}, None], [{"x": 1, "y": ["", None]}]],
        "o": [[], [("k", None), ("", [1, None])], [("☃", [])]],
        "p": [{"q": None}, {"q": {"r": None}}, None],
    }  # fmt: skip
    arrays = []
    for field in wide:
        values = ends[field.name]
        kind = pa.string() if field.name == "m" else field.type
        if field.name in "kl":
            kind = pa.int64()
        arrays.append(pa.array([*values, None], kind).cast(field.type))
    written = pa.table(arrays, schema=wide)
    log.append(written)
    assert table(log, columns=wide.names).equals(written)
    assert table(log, columns=wide.names).schema == wide


def test_rows_that_do_not_fit_are_refused_and_leave_nothing(log: EmbeddedLog) -> None:
    wrong = {
        "id is missing": {"name": ["a"]},
        "more is not a column": {"id": [1], "name": ["a"], "more": [1]},
        "id is int64 there, not string": {"id": ["1"], "name": ["a"]},
        "name is string there, not int64": {"id": [1], "name": [1]},
        "not in range": {"id": pa.array([2**63], pa.uint64()), "name": ["a"]},
    }
    for says, columns in wrong.items():
        with pytest.raises(JobError, match=says):
            log.append(pa.table(columns))
    twice = pa.table([pa.array([1]), pa.array([2]), pa.array(["a"])], names=["id", "id", "name"])
    with pytest.raises(JobError, match="id is there twice"):
        log.append(twice)
    assert ids(log) == []
    assert unused_files(log) == set()


# ---------------------------------------------------------------- times


def test_every_row_says_when_it_was_appended(log: EmbeddedLog, clock: Clock) -> None:
    for n in range(3):
        clock.tick()
        log.append(rows([n, n]))
    told = [at.timestamp() for at in table(log).column("_appended_at").to_pylist()]
    assert told == [(TIME + n * 1_000_000) / 1e6 for n in (1, 1, 2, 2, 3, 3)]


def test_a_reader_may_begin_at_a_time(log: EmbeddedLog, clock: Clock) -> None:
    for n in range(40):  # through roll-ups
        clock.tick()
        log.append(rows([n]))
    for n in range(40):
        at = TIME + (n + 1) * 1_000_000
        assert log.offsets_at(at - 1) == log.offsets_at(at) == [n]
        if n < 39:
            assert log.offsets_at(at + 1) == [n + 1]
    clock.tick()
    assert log.offsets_at(clock.now) == [40]
    assert log.offsets_at(0) == [0]
    with pytest.raises(OutOfRange, match="is in the future"):
        log.offsets_at(clock.now + 1)


def test_partitions_without_newer_rows_begin_at_their_end(tmp_path: Path, clock: Clock) -> None:
    log = make(tmp_path / "log", partitions=3)
    times = []
    for n in range(4):  # partitions 0, 1, 2, 0
        times.append(clock.tick())
        log.append(rows([n, n]))
    assert [log.offsets_at(at) for at in times] == [[0, 0, 0], [2, 0, 0], [2, 2, 0], [2, 2, 2]]


def test_times_never_go_back_whatever_the_clock_does(log: EmbeddedLog, clock: Clock) -> None:
    random.seed(7)
    before = []
    for n in range(40):
        clock.now = TIME + random.randrange(-(10**9), 10**9)
        log.append(rows([n]))
        before.append(clock.now)
    highest = list(itertools.accumulate(before, max))
    told = table(log).column("_appended_at").cast(pa.int64()).to_pylist()
    assert told == highest
    clock.now = TIME - 10**9  # earlier than all of it
    for at in sorted({*highest, TIME - 10**9}):
        wanted = sum(time < at for time in highest)
        assert log.offsets_at(at) == [wanted]
    for other in (EmbeddedLog(log.path), log.refresh()):
        assert other.view.at == max(highest)


def test_commits_of_one_moment_are_all_read_from_it(log: EmbeddedLog, clock: Clock) -> None:
    log.append(rows([0]))
    at = clock.tick()
    for n in (1, 2, 3):
        log.append(rows([n]))
    assert log.offsets_at(at) == [1]


# ---------------------------------------------------------------- partitions and keys

# Column -> values, each with the text whose checksum is the value's code. Spark has the same.
KEYS: dict[str, list[tuple[Any, bytes]]] = {
    "string": [("", b""), ("a", b"a"), ("ünï ☃ 𝄞", "ünï ☃ 𝄞".encode()), ("\0", b"\0")],
    "binary": [(b"", b""), (b"\xff\0", b"\xff\0")],
    "boolean": [(True, b"true"), (False, b"false")],
    "byte": [(-128, b"-128"), (0, b"0"), (127, b"127")],
    "short": [(-32768, b"-32768"), (7, b"7")],
    "int": [(-(2**31), b"-2147483648"), (2**31 - 1, b"2147483647")],
    "long": [(-(2**63), b"-9223372036854775808"), (2**63 - 1, b"9223372036854775807")],
    "date": [(date(1969, 12, 31), b"1969-12-31"), (date(1, 2, 3), b"0001-02-03"),
             (date(2026, 11, 15), b"2026-11-15")],
}  # fmt: skip


@pytest.mark.parametrize("kind", KEYS)
def test_the_key_says_in_which_partition_a_row_is(tmp_path: Path, kind: str) -> None:
    log = EmbeddedLog.create(tmp_path / "log", f"k {kind}, n long", partitions=7, key=["k"])
    values = [(None, b""), *KEYS[kind]] * 3
    given = pa.table({"k": pa.array([v for v, _ in values], log.schema.field("k").type),
                      "n": range(len(values))})  # fmt: skip
    log.append(given)
    found = table(log).to_pylist()
    assert len(found) == len(values)
    for row in found:
        value, text = values[row["n"]]
        assert row["k"] == value
        assert row["_partition"] == (zlib.crc32(text) & 0x7FFFFFFF) % 7
    by_key: dict[Any, list[int]] = {}
    for row in found:
        by_key.setdefault(row["k"], []).append(row["n"])
    assert all(numbers == sorted(numbers) for numbers in by_key.values()), "in their order"


@pytest.mark.parametrize("days", [3_000_000, -1_000_000])
def test_a_date_that_has_no_name_in_python_cannot_be_a_key(tmp_path: Path, days: int) -> None:
    log = EmbeddedLog.create(tmp_path / "log", "k date", partitions=2, key=["k"])
    with pytest.raises(JobError, match="a value cannot be a key"):
        log.append(pa.table({"k": pa.array([days], pa.int32()).cast(pa.date32())}))
    assert unused_files(log) == set()


def test_a_key_of_several_columns(tmp_path: Path) -> None:
    given = pa.table({"a": ["x", "x", None, "y"], "b": pa.array([1, 2, 1, None], pa.int32())})
    parts = split_by_key(given, ["a", "b"], 5)
    for partition, part in parts.items():
        for row in part.to_pylist():
            code = 0
            for text in (row["a"], row["b"]):
                more = 0 if text is None else zlib.crc32(str(text).encode())
                code = (code * 31 + more) & 0x7FFFFFFF
            assert code % 5 == partition
    assert sum(part.num_rows for part in parts.values()) == 4


def test_chunks_and_slices_of_a_table_do_not_matter_to_its_keys() -> None:
    given = pa.concat_tables([rows(range(n, n + 10)) for n in range(0, 50, 10)]).slice(5, 40)
    parts = split_by_key(given, ["name"], 4)
    whole = split_by_key(given.combine_chunks(), ["name"], 4)
    assert {p: t.to_pydict() for p, t in parts.items()} == {
        p: t.to_pydict() for p, t in whole.items()
    }
    assert split_by_key(given.slice(0, 0), ["name"], 4) == {}


def test_without_a_key_commits_go_where_the_fewest_rows_are(tmp_path: Path) -> None:
    log = make(tmp_path / "log", partitions=3)
    for count in (5, 1, 2, 3, 1):
        log.append(rows(range(count)))
    assert log.view.next == [5, 4, 3]


def test_a_sink_learns_the_key_of_its_log_when_it_is_fenced(tmp_path: Path) -> None:
    """The stager is made before the log is: it must not believe what the sink said then."""
    sink = Log(tmp_path / "log", key="name", partitions=4)
    stager = Stager({"a": sink}, None, SINK_SCHEMA)
    sink.prepare(OUTPUT, SINK_SCHEMA, "append")
    sink.fence(OUTPUT, term=1, token="a")
    assert sink.by == ("partition",)
    assert stager._by_columns == 1


def test_a_sink_that_was_beaten_to_creating_its_log_looks_at_it(tmp_path: Path) -> None:
    sink = Log(tmp_path / "log", key="name", partitions=4)
    sink.prepare(OUTPUT, SINK_SCHEMA, "append")
    EmbeddedLog.create(tmp_path / "log", SINK_SCHEMA)
    with pytest.raises(JobError, match="has no key, the sink says key name"):
        sink.fence(OUTPUT, term=1, token="a")


# ---------------------------------------------------------------- producers


def test_an_append_that_is_tried_again_is_done_once(log: EmbeddedLog) -> None:
    outcomes = [log.append(rows([1, 2]), producer="a", sequence=7) for _ in range(3)]
    assert [(o.commit, o.rows, o.already) for o in outcomes] == [
        (2, 2, False), (None, 2, True), (None, 2, True)
    ]  # fmt: skip
    assert EmbeddedLog(log.path).append(rows([1, 2]), producer="a", sequence=7).already
    assert ids(log.refresh()) == [1, 2]
    assert unused_files(log) == set()


def test_the_last_sequence_is_known_however_much_came_since(log: EmbeddedLog) -> None:
    log.append(rows([1, 2]), producer="a", sequence=7)
    for n in range(40):
        log.append(rows([n]), producer="b", sequence=n)
    assert log.append(rows([1, 2]), producer="a", sequence=7).already
    assert not log.append(rows([1, 2]), producer="a", sequence=8).already


def test_other_rows_under_a_sequence_that_was_used_are_refused(log: EmbeddedLog) -> None:
    log.append(rows([1, 2]), producer="a", sequence=7)
    for other, sequence in ((rows([1, 3]), 7), (rows([1]), 7), (rows([]), 7), (rows([1, 2]), 6)):
        with pytest.raises(Fenced, match=f"'a' has appended sequence {sequence} .* before"):
            log.append(other, producer="a", sequence=sequence)
    assert ids(log) == [1, 2]
    assert unused_files(log) == set()


def test_two_producers_with_one_name_are_told_so(log: EmbeddedLog) -> None:
    other = EmbeddedLog(log.path)
    log.append(rows([1]), producer="a", sequence=1)
    with pytest.raises(Fenced, match="two producers use one name"):
        other.append(rows([2]), producer="a", sequence=1)
    other.append(rows([2]), producer="a", sequence=2)
    with pytest.raises(Fenced, match="two producers use one name"):
        log.append(rows([3]), producer="a", sequence=2)
    assert ids(log.refresh()) == [1, 2]


def test_a_producer_may_say_that_there_is_nothing(log: EmbeddedLog) -> None:
    first = log.append(rows([]), producer="a", sequence=1)
    assert (first.commit, first.rows, first.already) == (2, 0, False)
    assert log.append(rows([]), producer="a", sequence=1).already
    with pytest.raises(Fenced):
        log.append(rows([1]), producer="a", sequence=1)
    log.append(rows([1]), producer="a", sequence=2)
    assert ids(log) == [1]


def test_the_same_rows_in_other_chunks_are_the_same_append(tmp_path: Path) -> None:
    """A retry reads its input again, and Arrow's readers do not always cut it alike."""
    log = make(tmp_path / "log", key=["name"], partitions=3)
    whole = rows(range(1000))
    log.append(whole, producer="a", sequence=1)
    chunked = pa.concat_tables([whole.slice(at, 77) for at in range(0, 1000, 77)])
    assert log.append(chunked, producer="a", sequence=1).already
    coded = whole.set_column(1, "name", whole.column("name").dictionary_encode())
    assert log.append(coded, producer="a", sequence=1).already
    noted = whole.replace_schema_metadata({"pandas": "1"})
    assert log.append(noted, producer="a", sequence=1).already
    assert sorted(ids(log)) == list(range(1000))


@pytest.mark.parametrize(
    ("producer", "sequence"), [("a", None), ("", 1), ("", 0), ("job/query/out", 1)]
)
def test_a_producer_needs_a_name_of_its_own_and_a_sequence(
    log: EmbeddedLog, producer: str, sequence: int | None
) -> None:
    with pytest.raises(JobError, match="both or neither"):
        log.append(rows([1]), producer=producer, sequence=sequence)
    assert ids(log) == []


# ---------------------------------------------------------------- roll-ups


def test_opening_a_log_reads_a_few_files_however_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make(tmp_path / "log")
    for n in range(100):
        log.append(rows([n]))
        assert len(commit_names(log.path)) <= 17
    read: list[str] = []
    reads = LocalStore.read

    def counted(store: LocalStore, name: str) -> bytes | None:
        read.append(name)
        return reads(store, name)

    monkeypatch.setattr(LocalStore, "read", counted)
    again = EmbeddedLog(log.path)
    assert len(read) <= 18
    assert ids(again) == list(range(100))


def test_a_log_is_the_same_at_every_moment_of_its_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_roll_ups(monkeypatch, every=3, fan_out=2)
    log = make(tmp_path / "log", partitions=2)
    follower = EmbeddedLog(log.path)
    for n in range(40):
        log.append(rows([n]))
        assert sorted(ids(log)) == sorted(ids(EmbeddedLog(log.path))) == list(range(n + 1))
        if n % 7 == 0:
            assert sorted(ids(follower.refresh())) == list(range(n + 1))
    names = manifest_names(log.path)
    log.commit_log.sweep()
    assert manifest_names(log.path) == names, "none of the tree is left over"


def test_the_log_that_rolled_up_goes_on_without_a_look(log: EmbeddedLog) -> None:
    for n in range(17):
        log.append(rows([n]))
        assert ids(log) == list(range(n + 1))
        assert log.schema.names == ["id", "name"]


def test_who_did_not_come_to_roll_up_is_stood_in_for(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's commit was the 16th, or who put it was killed: later ones make up for it."""
    keep_house = EmbeddedLog.keep_house
    monkeypatch.setattr(
        EmbeddedLog,
        "keep_house",
        lambda self, commit: keep_house(self, commit if commit % 16 else 1),
    )
    for n in range(120):
        log.append(rows([n]))
        assert len(commit_names(log.path)) <= 50
    assert ids(EmbeddedLog(log.path)) == list(range(120))


def test_what_is_not_ours_between_the_files_of_a_log_does_no_harm(log: EmbeddedLog) -> None:
    for folder in ("_commits", "_manifests", "_appending", "partition=0"):
        (log.path / folder).mkdir(exist_ok=True)
        for name in (".DS_Store", "notes.txt", "x-y.json", "rollup-x.json"):
            (log.path / folder / name).write_bytes(b"\xff\xfe not ours")
    for n in range(20):
        log.append(rows([n]))
    log.commit_log.sweep()
    assert ids(EmbeddedLog(log.path)) == list(range(20))


# ---------------------------------------------------------------- a full disk


def fill(disk: Path, *, left: int) -> Path:
    """Take all the space there is, and give some of it back."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    os.truncate(filler, max(filler.stat().st_size - left, 0))
    return filler


def test_an_append_that_found_no_space_has_done_nothing_or_all(
    disk_of: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    small_roll_ups(monkeypatch, every=3)
    disk = disk_of("disk", "2m")
    log = make(disk / "log", partitions=2, key=["id"])
    known: list[int] = []
    outcomes = set()
    for left in range(0, 12 * 4096, 4096):
        while log.view.position % 3 != 2:  # the next commit is rolled up
            known.append(len(known))
            log.append(rows(known[-1:]))
        filler = fill(disk, left=left)
        caplog.clear()
        more = list(range(len(known), len(known) + 50))
        try:
            log.append(rows(more))
        except DiskFull:
            outcomes.add("nothing")
        else:
            known += more
            outcomes.add("all, but" if "housekeeping failed" in caplog.text else "all")
        filler.unlink()
        assert sorted(ids(EmbeddedLog(log.path))) == known
        assert unused_files(log.refresh()) == set()
    assert outcomes == {"nothing", "all", "all, but"}
    log.append(rows([1000]))
    assert sorted(ids(log)) == [*known, 1000]


def test_housekeeping_that_fails_does_not_say_that_the_rows_are_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who is told so appends them again."""
    log = make(tmp_path / "log", retain_bytes=1)
    hold(log.path, Reader("job/query/lines", "a-b", "home", [0], "now"))
    (reader,) = (log.path / "_readers").iterdir()
    reader.write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        done = [log.append(rows([n])).commit for n in range(20)]
    assert done == list(range(2, 22))
    assert reader.name in caplog.text
    assert ids(log) == list(range(20))


# ---------------------------------------------------------------- damage


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedLog:
    """A log with commits, a roll-up, and manifests of two levels."""
    small_roll_ups(monkeypatch, every=3, fan_out=2)
    log = make(tmp_path / "log", partitions=2)
    for n in range(7):
        log.append(rows(range(n * 10, n * 10 + 3)))
    assert {name[0] for name in commit_names(log.path)} == {"0", "r"}
    assert {name[0] for name in manifest_names(log.path)} == {"0", "1"}
    return log


def look(path: Path) -> dict[tuple[int, int], int] | str:
    """What a reader gets, or what it is told."""
    try:
        return placed(EmbeddedLog(path))
    except (Damaged, JobError) as error:
        return error.message


def test_a_damaged_file_is_named_or_makes_no_difference(whole: EmbeddedLog) -> None:
    wanted = placed(whole)
    *_, newest = sorted((whole.path / "_commits").glob("0*"))
    files = [p for p in whole.path.rglob("*") if p.is_file()]
    assert len(files) > 12
    for file in files:
        for how in damaged(file, bits=1, step=7 if file.suffix == ".json" else 31):
            found = look(whole.path)
            if file == newest and how == "missing":
                continue  # so it is a log that was set back: see below
            if how == "missing" and "rollup" in file.name:
                assert "is missing" in found
                continue  # of its commits the oldest is named
            named = isinstance(found, str) and file.name in found
            assert named or found == wanted, f"{file}, {how}: {found}"
    assert placed(EmbeddedLog(whole.path)) == wanted


@pytest.mark.parametrize("writer", ["ours", "of a sink"])
def test_no_bit_of_a_segment_can_become_other_rows(tmp_path: Path, writer: str) -> None:
    """Whatever it stands for: pages, dictionaries, their headers, statistics, the footer."""
    if writer == "ours":
        log = make(tmp_path / "target")
        log.append(rows([n % 7 for n in range(100)]))
    else:  # Spark writes these, and not with checksums for pages
        target = LogTarget(tmp_path)
        sink = target.sink()
        sink.fence(OUTPUT, term=1, token="a")
        sink.publish(publication(tmp_path, 0, rows([n % 7 for n in range(100)])))
        log = EmbeddedLog(target.path)
    (file,) = log.path.glob("partition=0/*")
    for how in damaged(file, bits=1, step=2):
        with pytest.raises(Damaged) as caught:
            list(log.read(columns=["id"]))
        assert file.name in caught.value.message, how


def test_a_part_of_a_damaged_segment_is_not_read_either(log: EmbeddedLog) -> None:
    log.append(rows(range(1000)))
    (file,) = log.path.glob("partition=0/*")
    for _ in damaged(file, bits=1, step=997):
        with pytest.raises(Damaged, match=file.name):
            ids(log, [10], [11])


def test_segments_that_were_swapped_are_damage(log: EmbeddedLog) -> None:
    log.append(rows([11, 12]))
    log.append(rows([21, 22]))
    a, b = sorted(log.path.glob("partition=0/*"))
    assert a.stat().st_size == b.stat().st_size
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    forget_checksums()
    with pytest.raises(Damaged, match="does not match its checksum"):
        ids(log)


def documents(log: EmbeddedLog) -> list[Path]:
    return sorted([*(log.path / "_commits").iterdir(), *(log.path / "_manifests").iterdir()])


def test_a_commit_or_manifest_in_another_ones_place_is_noticed(whole: EmbeddedLog) -> None:
    whole.append(rows([]), producer="a", sequence=1)  # commits without rows are told apart, too
    whole.append(rows([]), producer="b", sequence=1)
    wanted = placed(whole)
    for taken, place in itertools.permutations(documents(whole), 2):
        before = place.read_bytes()
        shutil.copyfile(taken, place)
        found = look(whole.path)
        assert found == wanted or place.name in found, f"{taken.name} as {place.name}: {found}"
        if place.parent.name == "_commits" or taken.parent.name == "_commits":
            assert place.name in found
        place.write_bytes(before)


def test_a_commit_or_manifest_of_another_log_is_noticed(whole: EmbeddedLog, tmp_path: Path) -> None:
    """The other log has the same commits, with other rows."""
    other = make(tmp_path / "other", partitions=2)
    for n in range(7):
        other.append(rows(range(n * 10 + 5, n * 10 + 8)))
    for log in (whole, other):
        log.commit_log.fence("job/query/out", term=7 if log is whole else 1, token="a", target="")
    assert [f.name for f in documents(other)] == [f.name for f in documents(whole)]
    for theirs, ours in zip(documents(other), documents(whole), strict=True):
        before = ours.read_bytes()
        shutil.copyfile(theirs, ours)
        found = look(whole.path)
        assert isinstance(found, str), f"{ours.name}: the rows of nobody"
        ours.write_bytes(before)


def test_a_log_that_was_set_back_is_noticed_by_who_had_read_on(log: EmbeddedLog) -> None:
    log.append(rows([1]))
    log.append(rows([2]))
    reader = EmbeddedLog(log.path)
    stood = list(reader.view.next)
    (log.path / "_commits" / commit_names(log.path)[-1]).unlink()
    assert ids(reader.refresh()) == [1]
    with pytest.raises(OutOfRange, match="it was set back or replaced"):
        reader.refuse_range(stood, stood)


def test_a_file_of_a_reader_that_is_damaged_is_named(log: EmbeddedLog) -> None:
    from onceflow.log.retention import trim

    log.append(rows(range(5)))
    hold(log.path, Reader("job/query/lines", "a-b", "home", [3], "now"))
    (file,) = (log.path / "_readers").iterdir()
    for how in damaged(file, bits=1, step=3):
        if how == "missing":
            break  # then nobody needs anything
        with pytest.raises(Damaged, match=file.name):
            trim(log, [2])


def test_segments_are_parquet_that_any_tool_can_open(log: EmbeddedLog) -> None:
    log.append(rows([1, 2]))
    (file,) = log.path.glob("partition=0/*.parquet")
    assert pq.ParquetFile(file).read().to_pydict() == rows([1, 2]).to_pydict()
    assert json.loads(log.facts.schema)["fields"][0]["nullable"] is True


def test_errors_say_what_to_do(log: EmbeddedLog, tmp_path: Path) -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: EmbeddedLog(tmp_path / "nothing"),
        lambda: make(log.path),
        lambda: log.append(pa.table({"a": [1]})),
        lambda: list(log.read([0], [9])),
        lambda: log.columns(["nobody"]),
        lambda: log.append(rows([1]), producer="a"),
    ]
    for call in wrong:
        with pytest.raises(OnceflowError) as caught:
            call()
        assert caught.value.hint
