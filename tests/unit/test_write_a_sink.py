"""The page about sinks: its commands do what it says, and its code is that of the examples."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onceflow
from pages import DOCS, blocks, missing

PAGE = DOCS / "write-a-sink.md"
EXAMPLE = DOCS.parent / "examples" / "json_sink"
PACKAGE = DOCS.parent / "tests" / "third_party" / "onceflow_duckdb"
_CI = ("CI", "BUILD_NUMBER")


def type_in(text: str, folder: Path) -> str:
    """What the commands print; those of the page may fail, and it shows how."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    modules = f"{folder / 'without'}:{Path(onceflow.__file__).parents[1]}"
    # pytest cuts its lines to the terminal, as on the page, but not where it believes to be in CI.
    kept = {name: value for name, value in os.environ.items() if name not in _CI}
    done = subprocess.run(
        ["bash", "-c", text], check=False, cwd=folder, capture_output=True, text=True, timeout=240,
        env={**kept, "PATH": path, "PYTHONPATH": modules, "PYTEST_ADDOPTS": "", "COLUMNS": "80"},
    )  # fmt: skip
    return done.stdout + done.stderr


def hide_pandas(folder: Path) -> None:
    """Arrow imports it if it is there, and that takes longer than all the rest."""
    (folder / "without").mkdir()
    (folder / "without" / "pandas.py").write_text("raise ImportError\n")


@pytest.mark.kill
def test_every_command_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    folder = tmp_path / "json_sink"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    hide_pandas(folder)
    said = ""
    for language, text in blocks(PAGE):
        if language == "bash":
            said = type_in(text, folder)
        elif language == "text":
            assert list(missing(text, said)) == [], said


def test_the_code_of_the_page_is_that_of_the_examples() -> None:
    files = [path.read_text() for path in EXAMPLE.glob("*.py")]
    files += [(PACKAGE / "pyproject.toml").read_text()]
    for language, text in blocks(PAGE):
        assert language in ("python", "toml", "bash", "text")
        if language in ("python", "toml"):
            assert any(text in file for file in files), text


def test_the_page_names_the_seed_and_all_settings_of_the_suite() -> None:
    from onceflow.testing.under_test import SinkUnderTest

    page = PAGE.read_text()
    given = {"make_sink", "read_rows"}
    tools = {"begin", "driver", "modes_of", "rows", "run", "ledger", "moments", "check"}
    settings = {name for name in vars(SinkUnderTest) if not name.startswith("_")} - tools
    assert given < settings
    for name in settings:
        assert f"`{name}" in page or name in given, f"{name} is not on {PAGE}"


def test_the_page_names_every_ability() -> None:
    from onceflow import sinks
    from onceflow.contract.abilities import ABILITIES

    abilities = {ability.__name__ for ability in ABILITIES}
    assert {name for name in sinks.__all__ if name.startswith(("Can", "Has"))} == abilities
    for name in abilities:
        assert f"| `{name}` |" in PAGE.read_text()
