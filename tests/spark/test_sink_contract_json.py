"""`Files` as JSON, held to the contract: its `stage` reads the staged rows with Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onceflow.files.sink import published_files
from onceflow.sinks import Files, Sink
from onceflow.testing import SinkContract


class TestFilesAsJson(SinkContract):
    columns = "id long, name string, ratio double, ok boolean, tags array<string>"
    tries = 2

    @pytest.fixture
    def session(self, spark: Any) -> Any:
        return spark

    def make_sink(self, folder: Path) -> Sink:
        return Files(folder / "out", format="json")

    def read_rows(self, folder: Path) -> list[dict[str, Any]]:
        return _rows((folder / "out").rglob("[!_.]*.json"))

    def read_epochs(self, folder: Path) -> list[dict[str, Any]]:
        return _rows(folder / "out" / file["path"] for file in published_files(folder / "out"))


def _rows(paths: Any) -> list[dict[str, Any]]:
    """Spark leaves nulls out."""
    names = ("id", "name", "ratio", "ok", "tags")
    lines = [line for path in paths if "_commits" not in path.parts
             for line in path.read_text().splitlines()]  # fmt: skip
    return [{**dict.fromkeys(names), **json.loads(line)} for line in lines]
