"""A small file system for a case, so that its disk can be full."""

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
    """Mount a tmpfs of that size at `folder`. False without the right to mount."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:  # this system has no such command
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
    """A small file system at `folder`, for a case with so many faults. Its files stay in `folder`
    after the block."""
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
    """Spark removes old state in the background, even for a query that has ended."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(file, to)


def _put_in_place(kept: Path, folder: Path) -> None:
    """While its JVM runs, Spark may still write a snapshot of state there."""
    for last in (False,) * 50 + (True,):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            kept.rename(folder)
            return
        except OSError:
            if last:
                raise
            time.sleep(0.1)
