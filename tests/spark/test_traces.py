"""The model of the protocol allows what real drivers did, point by point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from story import Story

from onceflow import faults


def test_a_life_without_faults(tmp_path: Path, spark: Any) -> None:
    story = Story(str(tmp_path), "stateful", "files")
    story.write_input()
    story.live()
    story.check()
    story.check_trace()
    points = [json.loads(line)["point"] for line in story.trace.read_text().splitlines()]
    assert points.count("epoch.decided") > 4  # five files, and epochs without data
    assert "rollup.written" in points


def test_lives_that_break_off_around_the_decision_and_in_the_opening(
    tmp_path: Path, spark: Any
) -> None:
    story = Story(str(tmp_path), "stateless", "sqlite")
    story.write_input()
    for point, visit in (("epoch.hardened", 2), ("epoch.decided", 1), ("open.published", 1)):
        faults.arm(point, "raise", visit=visit)
        with pytest.raises(faults.InjectedFault):
            story.live()
        faults.disarm()
    story.live()
    story.check()
    story.check_trace()
