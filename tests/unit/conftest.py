"""What unit tests share: a disk that is easily full, and one that is never waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(disk_of: Callable[[str, str], Path]) -> Path:
    """A file system of its own with 256 KiB."""
    return disk_of("small-disk", "256k")


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that write much and cut no power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
