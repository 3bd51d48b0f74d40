"""Shared by all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onceflow import faults
from onceflow.harness.disk import mount


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run with --all of `scripts/test` only."""
    if os.environ.get("ONCEFLOW_TEST_ALL") != "1":
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)


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
