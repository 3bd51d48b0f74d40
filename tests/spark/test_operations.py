"""The drills of `docs/operations.md`, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOC = Path(__file__).parents[2] / "docs" / "operations.md"
BLOCK = re.compile(r"^```(\w+) (file=\S+|drill)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(900)
def test_the_drills_do_what_the_page_says(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "SPARK_MASTER": "local[2]"}
    environment.pop("ONCEFLOW_HOME", None)
    drills = 0
    for _, kind, text in BLOCK.findall(DOC.read_text()):
        if kind != "drill":
            (tmp_path / kind.removeprefix("file=")).write_text(text)
            continue
        drills += 1
        # `! command` alone would not end the script.
        script = re.sub(r"^! (.*)$", r"if \1; then exit 1; fi", text, flags=re.MULTILINE)
        ran = subprocess.run(
            ["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{script}\n{ran.stdout}\n{ran.stderr}"
        assert "lost 0, doubled 0, totals right" in ran.stdout
    assert drills == 5
