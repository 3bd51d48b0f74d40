"""The archive of Spark's classes: used where it is there and can be named."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from onceflow.cli.class_archive import command
from onceflow.spark import class_archive as warm


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "classes.jsa"
    path.touch()
    monkeypatch.setenv(warm.ARCHIVE, str(path))
    return path


def test_sessions_start_from_the_archive_that_is_named(archive: Path) -> None:
    assert f"-XX:SharedArchiveFile={archive} " in warm.java_options()


def test_an_archive_that_is_not_there_is_left_out(archive: Path) -> None:
    archive.unlink()
    assert warm.java_options() == ""


def test_a_path_with_a_blank_is_left_out(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blank = archive.rename(archive.parent / "my classes.jsa")
    monkeypatch.setenv(warm.ARCHIVE, str(blank))
    assert warm.java_options() == ""
    done = CliRunner().invoke(command, [str(blank.with_name("other classes.jsa"))])
    assert done.exit_code == 1
    assert "contains a space" in done.output


def test_an_archive_that_is_there_is_kept(archive: Path) -> None:
    done = CliRunner().invoke(command, [str(archive)])
    assert done.exit_code == 0
    assert done.output == f"{archive} exists already\n"
