"""What the status of a home says of each query."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saved import Saved

from onceflow.service.status import status


def test_a_folder_with_commits_is_measured_whatever_sink_writes_it(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    (tmp_path / "out" / "_commits").mkdir(parents=True)
    (tmp_path / "out" / "_commits" / "1").write_text("12345")
    outputs = {
        "out": {"kind": "of-another-package", "path": str(tmp_path / "out")},
        "table": {"kind": "of-another-package", "path": str(tmp_path / "table.db")},
    }
    saved.lead(outputs=outputs)
    (query,) = status(saved.folder)["queries"]
    assert query["outputs"]["table"] == outputs["table"]
    sizes = {"commits": 1, "manifests": 0, "ledger_bytes": 5}
    assert query["outputs"]["out"] == {**outputs["out"], **sizes}


@pytest.mark.parametrize(
    ("spark", "steps", "said"),
    [
        (0, {}, None),
        (0, {"spend": None}, None),
        (0, {"spend": 7_000_000}, 7_000),
        (5_000, {}, 5_000),
        (5_000, {"spend": 7_000_000, "totals": 4_000_999}, 4_000),
    ],
)
def test_the_watermark_is_the_lowest_of_the_query_and_its_keyed_steps(
    tmp_path: Path, spark: int, steps: dict[str, Any], said: int | None
) -> None:
    saved = Saved(tmp_path)
    saved.lead()
    keyed = {name: {"watermark": at} for name, at in steps.items()}
    saved.log.decide(replace(saved.decision(0), watermark=spark, keyed=keyed))
    (query,) = status(saved.folder)["queries"]
    assert query["watermark_ms"] == said
