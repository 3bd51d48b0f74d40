"""The example with orders: servers, generator and job, as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_order_is_in_its_targets_once() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ORDERS_")}
    done = subprocess.run(
        [sys.executable, "-m", "examples.orders"],
        check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, too many 0" in done.stdout
    assert done.stdout.endswith("all are exact\n")
