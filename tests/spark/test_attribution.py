"""The example with attribution: generator, job and a kill in the middle, as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_order_is_attributed_once_and_rightly() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.attribution"],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost or wrong 0, too many 0" in done.stdout
    assert done.stdout.endswith("all are exact\n")
