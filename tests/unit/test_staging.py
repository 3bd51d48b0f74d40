"""What can be staged is told before a query starts, from its columns alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from targets import schema

from onceflow.errors import JobError
from onceflow.protocol.columns import refuse_columns
from onceflow.sinks import Files, Sink


def outputs(root: Path, *names: str) -> dict[str, Sink]:
    return {name: Files(root / name) for name in names}


def field(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


def refused(kinds: str, sinks: dict[str, Sink], by: str | None = None) -> str:
    with pytest.raises(JobError) as caught:
        refuse_columns(kinds, sinks, by)
    return caught.value.message


def test_ordinary_columns_are_taken(tmp_path: Path) -> None:
    refuse_columns(schema(id="long", at="timestamp", text="string"), outputs(tmp_path, "a"), None)


def test_columns_that_differ_in_case_only_are_refused(tmp_path: Path) -> None:
    message = refused(schema(id="long", ID="long", x="long"), outputs(tmp_path, "a"))
    assert message == "column ID, id is there twice"


@pytest.mark.parametrize("name", ["_onceflow_route", "_OnceFlow_by0"])
def test_names_that_staging_uses_are_refused(tmp_path: Path, name: str) -> None:
    message = refused(schema(**{"id": "long", name: "long"}), outputs(tmp_path, "a"))
    assert name in message


@pytest.mark.parametrize(
    "kind",
    [
        "void",
        "interval",
        "interval day to second",
        {"type": "array", "elementType": "void", "containsNull": True},
        {"type": "struct", "fields": [field("a", "interval year to month")]},
        {"type": "map", "keyType": "string", "valueType": "void", "valueContainsNull": True},
    ],
    ids=str,
)
def test_types_that_no_file_can_hold_are_refused(tmp_path: Path, kind: Any) -> None:
    assert "column x" in refused(schema(id="long", x=kind), outputs(tmp_path, "a"))


@pytest.mark.parametrize("name", ["interval", "interval_ms", "void", "avoided"])
def test_a_field_may_be_called_like_a_type(tmp_path: Path, name: str) -> None:
    kind = {"type": "struct", "fields": [field(name, "long")]}
    refuse_columns(schema(**{"id": "long", "x": kind, name: "long"}), outputs(tmp_path, "a"), None)


def test_rows_without_columns_are_refused(tmp_path: Path) -> None:
    assert "cannot be written" in refused(schema(), outputs(tmp_path, "a"))


def test_several_outputs_need_a_column_that_names_the_one_of_each_row(tmp_path: Path) -> None:
    both = outputs(tmp_path, "valid", "rejected")
    kinds = schema(id="long", outcome="string")
    refuse_columns(kinds, both, "outcome")
    assert "several outputs need by=" in refused(kinds, both)
    for by in ("id", "none"):
        assert f"by={by!r} must be a string column" in refused(kinds, both, by)
