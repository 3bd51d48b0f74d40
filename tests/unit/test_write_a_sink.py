"""The page that builds a sink, typed as it stands into an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onceflow
from pages import DOCS, blocks, missing

PAGE = DOCS / "write-a-sink.md"
HERE = Path(__file__).parent
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


def save(text: str, folder: Path) -> None:
    """`# name.py` begins a file, `# name.py, at the end` goes on with one."""
    found = re.match(r"# (\w+\.py)(, at the end)?\n", text)
    assert found is not None, text
    path = folder / found[1]
    path.write_text(f"{path.read_text()}\n{text[found.end() :]}" if found[2] else text)


@pytest.mark.kill
def test_every_step_of_the_page_fails_or_passes_as_the_page_says(tmp_path: Path) -> None:
    hide_pandas(tmp_path)
    said = ""
    for language, text in blocks(PAGE):
        match language:
            case "python":
                save(text, tmp_path)
            case "bash":
                said = type_in(text, tmp_path)
            case "text":
                assert list(missing(text, said)) == [], said
            case "py":
                assert text.startswith("flow.write(")  # a line of a job, which needs Spark
            case _:
                raise AssertionError(f"{PAGE} has a block of {language}")


def test_the_sink_of_the_page_is_the_one_that_the_wrong_sinks_are_made_of(tmp_path: Path) -> None:
    for language, text in blocks(PAGE):
        if language == "python":
            save(text, tmp_path)
        elif text.startswith("sed "):
            type_in(text, tmp_path)
    for name in ("json_store.py", "json_sink.py"):
        assert (tmp_path / name).read_text() == (HERE / name).read_text()
