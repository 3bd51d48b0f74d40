"""The page for a first job, typed as it stands into an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SECONDS, environment

from pages import DOCS, blocks, missing

ROOT = Path(__file__).parents[2]
PAGE = DOCS / "first-job.md"


def type_in(text: str, folder: Path) -> str:
    """What the commands print, in the order in which they do."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{text}"],
        check=False, cwd=folder, env=environment(PATH=path), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, timeout=2 * SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}"
    return done.stdout


@pytest.mark.kill
def test_every_command_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    said = ""
    for language, text in blocks(PAGE):
        match language:
            case "python":
                name = re.match(r"# (\w+\.py)\n", text)
                assert name is not None, text
                (tmp_path / name[1]).write_text(text)
            case "bash":
                said = type_in(text, tmp_path)
            case "text":
                assert list(missing(text, said)) == [], said
                if text.startswith("09:"):  # all that it prints, and each line once
                    counts = [line for line in said.splitlines() if line.startswith("09:")]
                    assert counts == text.splitlines()
            case _:
                raise AssertionError(f"{PAGE} has a block of {language}")


def test_the_page_the_readme_and_the_example_show_the_same_job() -> None:
    _, _, job = (ROOT / "examples" / "word_count.py").read_text().partition('"""\n\n')
    assert job.startswith("from pyspark.sql import functions as F\n")
    assert ("python", f"# word_count.py\n{job}") in blocks(PAGE)
    assert ("python", job) in blocks(ROOT / "README.md")
