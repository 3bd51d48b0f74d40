"""What a driver records of a sink, and how commands make the sink again from it."""

from __future__ import annotations

import json
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from json_sink import JsonFile

from onceflow.contract import registry
from onceflow.errors import JobError, SetupError
from onceflow.jobs.flow import targets
from onceflow.protocol.query_spec import QuerySpec
from onceflow.sinks import Files, Kafka, Log, Postgres, Sink, Sqlite, open_target


class Table(JsonFile):
    kind = "test-table"

    def __init__(self, path: Any, *, table: str = "rows", **options: Any) -> None:
        super().__init__(path)
        self.table, self.options = table, options


class Placeless(JsonFile):
    place = ""


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were installed that offers the sink."""
    found = {
        "test-table": f"{__name__}:Table",
        "no-client": "a_module_that_is_not_there:Sink",
    }
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group, name: [EntryPoint(name, found[name], group)] if name in found else [],
    )


@pytest.mark.parametrize(
    "sink",
    [
        Files("out", format="json", by=["country"], roll="1 MB"),
        Log("log", key="id", partitions=3, roll="2 MB"),
        Sqlite("out.db", table="rows", key="id", timeout=5.0, keep_before=3),
        Postgres("service=warehouse", table="rows", key="id", create=False, timeout=5.0),
        Kafka("rows", servers="host:9092", key="id", value=["name"], slots=2, timeout=5.0,
              create={"partitions": 3}, settings={"sasl.password": "env:SECRET"}),
    ],
    ids=lambda sink: type(sink).__name__,
)  # fmt: skip
def test_a_sink_is_made_again_with_all_its_settings(sink: Sink) -> None:
    described = json.loads(json.dumps({"guarantee": "exactly-once", **sink.describe()}))
    found = open_target(described)
    assert type(found) is type(sink)
    assert found.describe() == sink.describe()
    given = set(sink._named())  # each argument that it was made with is recorded
    assert given <= set(described)


def test_an_entry_of_an_older_driver_says_less_and_is_still_read(tmp_path: Path) -> None:
    sink = open_target({"kind": "sqlite", "path": str(tmp_path / "out.db"), "table": "rows"})
    assert str(sink) == str(Sqlite(tmp_path / "out.db", table="rows"))


@pytest.mark.usefixtures("offered")
def test_a_sink_of_another_package_is_described_by_the_arguments_that_it_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = Table("out.json", table="counts", threads=2)
    described = json.loads(json.dumps(sink.describe()))
    assert described == {
        "kind": "test-table", "path": str(tmp_path / "out.json"), "table": "counts", "threads": 2,
    }  # fmt: skip
    monkeypatch.chdir("/")
    found = open_target(described)
    assert isinstance(found, Table)
    assert (found.store.path, found.table, found.options) == (
        tmp_path / "out.json", "counts", {"threads": 2}
    )  # fmt: skip


def test_a_sink_is_moved_with_all_its_settings(tmp_path: Path) -> None:
    moved = Table(tmp_path / "a", table="counts", threads=2).moved(str(tmp_path / "b"))
    assert (moved.store.path, moved.table) == (tmp_path / "b", "counts")
    with pytest.raises(JobError, match="does not say which argument names its target"):
        Placeless(tmp_path / "a").moved("b")


def test_a_secret_is_not_written_down(tmp_path: Path) -> None:
    assert Table(tmp_path, password="env:SECRET").describe()["password"] == "env:SECRET"
    with pytest.raises(JobError, match="would store argument password") as refused:
        Table(tmp_path, password="open-sesame").describe()
    assert 'password="env:NAME"' in refused.value.hint
    assert "open-sesame" not in str(refused.value)


def test_arguments_that_json_does_not_have_are_refused(tmp_path: Path) -> None:
    assert Table(Path("a")).describe()["path"] == os.path.abspath("a")
    with pytest.raises(JobError, match="cannot be described by its arguments"):
        Table(tmp_path, client=object()).describe()
    with pytest.raises(JobError, match="is called guarantee"):
        Table(tmp_path, guarantee="none").describe()


@pytest.mark.usefixtures("offered")
def test_a_sink_that_cannot_be_made_again_says_what_is_missing() -> None:
    with pytest.raises(JobError, match=r"no package .* offers a sink of kind 'elsewhere'"):
        open_target({"kind": "elsewhere"})
    with pytest.raises(JobError, match=r"does not take the settings .* missing 1 required"):
        open_target({"kind": "test-table", "table": "rows"})
    with pytest.raises(SetupError, match="cannot be imported: No module named"):
        open_target({"kind": "no-client"})


class Keyspace(JsonFile):
    """Its place is neither a path nor a table."""

    place = "prefix"

    def __init__(self, url: str, *, prefix: str) -> None:
        super().__init__("nowhere")
        self.url, self.prefix = url, prefix


class Nameless(Keyspace):
    """It does not say which argument names its target."""

    place = ""


@pytest.mark.parametrize("kind", [Keyspace, Nameless])
def test_two_places_of_a_sink_from_another_package_are_two_targets(kind: type[Keyspace]) -> None:
    kind.shared = False
    sinks = {name: kind("redis://host", prefix=name) for name in "ab"}
    first, second = targets(QuerySpec(df=None, outputs=sinks))
    assert first != second
    sinks["b"] = kind("redis://host", prefix="a")
    first, second = targets(QuerySpec(df=None, outputs=sinks))
    assert first == second
