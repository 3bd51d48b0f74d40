"""`onceflow verify` as a command, for its tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ONCEFLOW = [sys.executable, "-c", "from onceflow.cli import main; main()", "verify"]


def verify(
    *options: str, cwd: Path, **environment: str
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Exit code, the verdict, all events."""
    done = subprocess.run(
        [*ONCEFLOW, *options, "--json"], cwd=cwd, env={**os.environ, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines()]
    verdict = next((event for event in events if event["event"] == "verdict"), {})
    for problem in (*verdict.get("violations", ()), *verdict.get("unknown", ()), done.stderr):
        print(problem)
    return done.returncode, verdict, [*events, *map(json.loads, done.stderr.splitlines()[-1:])]
