"""State to Parquet and back: the same state, or a reason by name and nothing written."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored import SCHEMA, looked_up, plain, scanned, state_of, write_run

from onceflow.errors import BadInput, BadRows, JobError
from onceflow.state import files, runs
from onceflow.state import load as loading
from onceflow.state.files import check_files, dump
from onceflow.state.load import LoadResult, load
from onceflow.state.manifest import Manifest
from onceflow.state.runs import StoreSchema

pytestmark = pytest.mark.usefixtures("no_fsync")
UTC_TIME = pa.timestamp("us", "UTC")
CLICK = pa.struct([("ad", pa.string()), ("at", UTC_TIME)])


def loaded(source: Path, into: Path, schema: StoreSchema = SCHEMA, **more: Any) -> LoadResult:
    settings = {"prefix": "new", "epoch": 7, "now": 1000, "scratch": into / "scratch", **more}
    found = load(source, into, schema, 8, **settings)
    assert not (into / "scratch").exists()
    return found


def written(folder: Path, **columns: Any) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "some.parquet")
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many scratch files, many runs, many Parquet files."""
    monkeypatch.setattr(runs, "BLOCK_ROWS", 9)
    monkeypatch.setattr(loading, "_SCRATCH_ROWS", 10)
    monkeypatch.setattr(loading, "_READ_ROWS", 7)
    monkeypatch.setattr(loading, "_RUN_BYTES", 500)
    monkeypatch.setattr(files, "_WRITE_ROWS", 9)
    monkeypatch.setattr(files, "_FILE_BYTES", 500)


@pytest.mark.usefixtures("small")
def test_state_that_is_dumped_and_loaded_is_the_same(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    out.mkdir()
    manifest = Manifest(0, 8)
    for epoch in range(1, 4):
        rows = {(n,): None if n % 7 == epoch else (n * epoch, n or None) for n in range(0, 200)}
        run = write_run(state / f"{epoch}.arrow", rows, born=epoch)
        manifest = manifest.advance(epoch, [run])
    before = scanned(state_of(state, manifest))
    told: list[int] = []
    assert dump(state_of(state, manifest), out, told.append) == len(before)
    assert told == sorted(told)
    assert told[-1] == 8
    assert len(list(out.iterdir())) > 3
    found = loaded(out, tmp_path / "new")
    assert scanned(state_of(tmp_path / "new", found.manifest)) == before
    assert found.rows == len(before)
    assert found.earliest == {"wake": min(wake for _, wake in before.values() if wake is not None)}
    made = [entry.run for entry in found.manifest.entries]
    assert len(made) > 3
    assert all(len(found.manifest.stack(group)) == 1 for group in range(8))
    assert {run.born for run in made} == {7}
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(r.name for r in made)


def test_no_state_is_dumped_as_a_file_without_rows_and_loaded_as_none(tmp_path: Path) -> None:
    assert dump(state_of(tmp_path, Manifest(0, 8)), tmp_path) == 0
    (path,) = tmp_path.iterdir()
    assert pq.read_schema(path).names == ["user", "total", "wake"]
    found = loaded(tmp_path, tmp_path / "new")
    assert (found.rows, found.manifest.entries, found.earliest) == (0, (), {"wake": None})


def test_every_type_comes_back(tmp_path: Path) -> None:
    schema = StoreSchema(
        pa.schema([("a", pa.string()), ("b", pa.decimal128(20, 2)), ("c", pa.date32())]),
        pa.schema([
            ("clicks", pa.list_(pa.field("element", CLICK))),
            ("seen", pa.map_(pa.int64(), pa.list_(pa.field("element", pa.float64())))),
            ("raw", pa.binary()), ("local", pa.timestamp("us")), ("_written.raw", pa.int64()),
        ]),
    )  # fmt: skip
    at = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    rows: dict[Any, Any] = {
        ("x", Decimal("1.50"), date(2026, 1, 1)): (
            [{"ad": "a", "at": at}, {"ad": None, "at": None}], [(1, [1.5, None])], b"\0", None, 9
        ),
        (None, None, None): (None, None, None, datetime(2026, 1, 1), None),
        ("", Decimal("-0.01"), None): ([{"ad": "b", "at": at}], None, b"", None, None),
    }  # fmt: skip
    manifest = Manifest(0, 8).advance(
        1, [write_run(tmp_path / "1.arrow", rows, schema=schema, groups=8)]
    )
    (tmp_path / "out").mkdir()
    dump(state_of(tmp_path, manifest, schema), tmp_path / "out")
    found = loaded(tmp_path / "out", tmp_path / "new", schema)
    before, after = (
        {
            key: value
            for _, keys, values in state_of(folder, what, schema).scan()
            for key, value in zip(plain(keys), values.to_pylist(), strict=True)
        }
        for folder, what in ((tmp_path, manifest), (tmp_path / "new", found.manifest))
    )
    assert before == after
    assert len(after) == 3


def test_files_of_others_fit_if_their_values_do(tmp_path: Path) -> None:
    # as pandas and Spark write them: large strings, nanoseconds, INT96 without a zone, dictionaries
    schema = StoreSchema(
        pa.schema([("user", pa.int64())]),
        pa.schema([("name", pa.string()), ("at", UTC_TIME), ("total", pa.float64()),
                   ("tags", pa.list_(pa.field("element", pa.string())))]),
    )  # fmt: skip
    at = datetime(2026, 1, 1, tzinfo=UTC)
    folder = written(
        tmp_path / "in",
        tags=pa.array([["x"], []], pa.large_list(pa.large_string())),
        total=pa.array([1.5, 2.5], pa.float32()),
        at=pa.array([at, None], pa.timestamp("ns", "Europe/Berlin")),
        name=pa.array(["a", "b"], pa.large_string()).dictionary_encode(),
        user=pa.array([1, 2], pa.int32()),
    )
    other = pa.table({"user": [3], "name": pa.nulls(1), "at": pa.array([at], pa.timestamp("us"))})
    pq.write_table(other, folder / "b.parquet", use_deprecated_int96_timestamps=True)
    (folder / "_SUCCESS").touch()
    (folder / "_some.parquet").write_text("not read")
    found = loaded(folder, tmp_path / "new", schema)
    assert found.absent == ("total", "tags")  # in one of the files
    micros = int(at.timestamp() * 1e6)
    assert scanned(state_of(tmp_path / "new", found.manifest, schema)) == {
        (1,): ("a", micros, 1.5, ["x"]),
        (2,): ("b", None, 2.5, None),
        (3,): (None, micros, None, None),
    }


def test_a_value_without_a_time_of_writing_counts_as_written_now(tmp_path: Path) -> None:
    schema = StoreSchema(
        pa.schema([("user", pa.int64())]),
        pa.schema([("total", pa.int64()), ("last", pa.string()), ("_written.last", pa.int64())]),
    )
    bare = written(tmp_path / "bare", user=[1, 2, 3], total=[5, 6, None], last=["x", None, None])
    found = loaded(bare, tmp_path / "new", schema)
    assert scanned(state_of(tmp_path / "new", found.manifest, schema)) == {
        (1,): (5, "x", 1000),
        (2,): (6, None, None),
    }  # the third has no state at all
    exact = written(
        tmp_path / "exact", user=[1, 2], last=["x", "y"], **{"_written.last": [7, None]}
    )
    found = loaded(exact, tmp_path / "other", schema)
    assert found.absent == ("total",)
    assert looked_up(state_of(tmp_path / "other", found.manifest, schema), [(1,), (2,)]) == {
        (1,): (None, "x", 7),
        (2,): (None, "y", None),
    }


@pytest.mark.usefixtures("small")
def test_keys_that_are_there_twice_are_named(tmp_path: Path) -> None:
    users = [*range(100), 17, None, None]
    folder = written(tmp_path / "in", user=pa.array(users, pa.int64()), total=[1] * len(users))
    with pytest.raises(BadRows, match=r"has keys more than once, at least 1: user=(17|None)"):
        loaded(folder, tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"total": [1]}, "there is no column user, which is part of the key"),
        ({"user": [1], "totl": [1], "total": [1]}, "the state has no column totl"),
        ({"user": [1]}, "there is no state in it, only keys"),
        ({"user": ["1"], "total": [1]}, "key column user was string, now it is int64"),
        ({"user": [1], "total": [1.5]}, "total was double, now it is int64"),
        ({"user": [1], "wake": ["now"]}, r"wake was string, now it is timestamp\[us, tz=UTC\]"),
    ],
)
def test_columns_that_do_not_fit_are_named_before_anything_is_written(
    tmp_path: Path, columns: dict[str, Any], says: str
) -> None:
    folder = written(tmp_path / "in", **columns)
    with pytest.raises(JobError, match=says):
        check_files(folder, SCHEMA)
    with pytest.raises(JobError, match=says) as error:
        load(folder, tmp_path / "new", SCHEMA, 8, prefix="new", epoch=7, now=0, scratch=tmp_path)
    assert "the key user int64, and total int64, wake timestamp[us, tz=UTC]" in error.value.hint
    assert not (tmp_path / "new").exists()


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no "):
        check_files(tmp_path / "nowhere", SCHEMA)
    (tmp_path / "in").mkdir()
    with pytest.raises(JobError, match="has no Parquet files"):
        check_files(tmp_path / "in", SCHEMA)
    (tmp_path / "in" / "a.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(BadInput, match=r"a\.parquet is no Parquet file, or is damaged"):
        check_files(tmp_path / "in", SCHEMA)
    odd = written(tmp_path / "odd", user=[1], total=pa.array([1], pa.uint64()))
    with pytest.raises(
        JobError, match=r"column total of .* is uint64, for which Spark has no type"
    ):
        check_files(odd, SCHEMA)
    fine = {"user": [1], "wake": pa.array([1], pa.timestamp("ns", "UTC"))}
    with pytest.raises(BadInput, match="would lose data"):
        loaded(written(tmp_path / "fine", **fine), tmp_path / "new")
