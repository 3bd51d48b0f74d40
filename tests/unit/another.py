"""Code that runs as another user, who may only read: for tests of what needs no more."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """One that other users can look into, as they cannot into those of pytest."""
    with tempfile.TemporaryDirectory() as found:
        os.chmod(found, 0o755)
        yield Path(found)


def as_another(imports: str, code: str) -> str:
    """What `code` prints. `imports` run before it, as whoever runs the tests: Python itself may
    lie where nobody else can read. Who is not root already has no right to what is forbidden."""
    drop = f"import os; os.setegid({_NOBODY}); os.seteuid({_NOBODY})" if os.geteuid() == 0 else ""
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join([imports, drop, code])],
        check=False, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
