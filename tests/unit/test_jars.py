"""Jars that Maven gets: once, whole or not at all, with a fix for what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from onceflow.errors import SetupError
from onceflow.spark import jars
from onceflow.spark.jars.__main__ import command


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH beside the system's, with an empty cache."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(jars, "cache", lambda: tmp_path / "cache")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def maven(folder: Path, *lines: str) -> None:
    """One that puts a jar where it is told to, after these lines."""
    script = folder / "mvn"
    body = ['for a in "$@"; do case "$a" in -DoutputDirectory=*) to="${a#*=}";; esac; done',
            *lines, '/bin/mkdir -p "$to" && echo x >"$to/x.jar"']  # fmt: skip
    script.write_text("\n".join(["#!/bin/sh", *body]) + "\n")
    script.chmod(0o755)


def test_jars_are_got_once_and_then_need_no_maven(bin_folder: Path) -> None:
    maven(bin_folder)
    folder = jars.fetch("connector")
    assert [path.name for path in folder.iterdir()] == ["x.jar"]
    (bin_folder / "mvn").unlink()
    assert jars.fetch("connector") == folder
    assert list(folder.parent.iterdir()) == [folder]


def test_without_maven_the_fix_is_named(bin_folder: Path) -> None:
    with pytest.raises(SetupError, match=r"Maven \(mvn\) is missing") as refused:
        jars.fetch("broker")
    assert "apt-get install maven" in refused.value.hint
    assert f"-DoutputDirectory={jars.folder_of('broker')}" in refused.value.hint


def test_a_maven_that_fails_leaves_nothing_and_says_why(bin_folder: Path) -> None:
    maven(bin_folder, '/bin/mkdir -p "$to"; echo half >"$to/half.jar"',
          "echo '[ERROR] Could not transfer artifact a:b:1: Unknown host'; exit 1")  # fmt: skip
    with pytest.raises(SetupError, match="Could not transfer artifact a:b:1") as refused:
        jars.fetch("connector")
    assert "it needs the network once" in refused.value.hint
    assert list(jars.cache().iterdir()) == []


def test_whoever_is_faster_wins(bin_folder: Path) -> None:
    folder = jars.folder_of("connector")
    maven(bin_folder, f"/bin/mkdir -p {folder} && echo y >{folder}/y.jar")
    assert jars.fetch("connector") == folder
    assert [path.name for path in folder.iterdir()] == ["y.jar"]


def test_an_installed_package_keeps_them_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jars.cache() == Path(jars.__file__).parents[4] / ".cache" / "jars"  # of this clone
    monkeypatch.setattr(jars, "_HERE", tmp_path / "site-packages" / "onceflow" / "spark" / "jars")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jars.cache() == tmp_path / "onceflow" / "jars"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert jars.cache() == tmp_path / "home" / ".cache" / "onceflow" / "jars"


def test_the_command_prints_the_folders_or_the_fix(bin_folder: Path) -> None:
    failed = CliRunner().invoke(command, ["connector", "broker"])
    assert failed.exit_code == SetupError.exit_code
    assert "fix: install it" in failed.stderr
    maven(bin_folder)
    done = CliRunner().invoke(command, ["connector", "broker"])
    assert done.stdout.split() == [str(jars.folder_of(name)) for name in jars.NAMES]
