"""Shared by all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rotation
from onceflow import faults
from onceflow.harness.small_disk import mount

# Processes of tests end before the JVM's better compiler pays, and need what others have compiled.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(rotation)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Makes a file system of its own, of a name and a size. Needs the right to mount."""
    mounted: list[Path] = []

    def make(name: str, size: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if not mount(folder, size):
            pytest.skip("a tmpfs cannot be mounted here")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
