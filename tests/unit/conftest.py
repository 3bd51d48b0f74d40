"""What all unit tests share: a disk that is easily full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(disk_of: Callable[[str, str], Path]) -> Path:
    """A file system of its own with 256 KiB."""
    return disk_of("small-disk", "256k")
