"""A small file system of its own for a case, so that its disk can be full."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from onceflow.errors import SetupError

_LEAST, _EACH = 64, 8  # MiB: for a case, and for what it writes around each of its faults


def mount(folder: Path, size: str) -> bool:
    """A tmpfs of that size at `folder`, if we may."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:  # there is no such command here
        return False


def can_mount(folder: Path) -> bool:
    place = folder / "can-mount"
    place.mkdir()
    try:
        with disk_of(place):
            return True
    except SetupError:
        return False
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def disk_of(folder: Path, faults: int = 0) -> Iterator[None]:
    """A small file system at `folder`, for a case with so many faults. What is on it is kept when
    it goes."""
    folder.mkdir(exist_ok=True)
    if not mount(folder, f"{_LEAST + faults * _EACH}m"):
        raise SetupError(f"a tmpfs cannot be mounted at {folder}", hint="run it as root")
    try:
        yield
    finally:
        kept = folder.with_name(f"{folder.name}.kept")
        try:
            shutil.copytree(folder, kept, symlinks=True, copy_function=_copy_if_there)
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        _put_in_place(kept, folder)


def _copy_if_there(file: str, to: str) -> None:
    """Spark removes old state behind the epochs, also of a query that has ended."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(file, to)


def _put_in_place(kept: Path, folder: Path) -> None:
    """Spark may still write a snapshot of state there, while its JVM lives on."""
    for last in (False,) * 50 + (True,):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            kept.rename(folder)
            return
        except OSError:
            if last:
                raise
            time.sleep(0.1)
