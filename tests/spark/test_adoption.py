"""A decided epoch is adopted, never evaluated again: rows and state are of one attempt."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from story import FILES, ROWS, Story

from onceflow.testing import faults


def state(spark: Any, story: Story) -> dict[int, int]:
    """What Spark's own reader finds in the state store."""
    rows = spark.read.format("statestore").load(str(story.checkpoint)).collect()
    return {row.key[0]: row.value["count"] for row in rows}


def published(story: Story) -> dict[int, int]:
    return dict(story.published().keys())


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_state_is_what_was_published_though_the_query_rolls_dice(
    tmp_path: Path, spark: Any, how: str
) -> None:
    story = Story(str(tmp_path), "random", "sqlite")
    story.write_input(range(2))
    if how == "kill":
        assert story.live_apart("epoch.decided:kill:2") == -9
    else:
        faults.arm("epoch.decided", "raise", visit=2)
        with pytest.raises(faults.InjectedFault):
            story.live()
        faults.disarm()
    assert not (story.checkpoint / "commits" / "1").exists()
    decided = story.log_entries()[-1]

    story.live()  # nothing new has come: it only recovers
    assert state(spark, story) == published(story)
    assert sum(published(story).values()) == 2 * ROWS
    assert story.log_entries()[-2]["nonce"] == decided["nonce"]  # then came a fence, no epoch

    story.write_input(range(2, FILES))
    story.live()
    assert state(spark, story) == published(story)
    assert sum(published(story).values()) == FILES * ROWS


def test_a_lost_commit_file_is_written_from_the_decision(tmp_path: Path, spark: Any) -> None:
    story = Story(str(tmp_path), "random", "sqlite")
    story.write_input(range(2))
    story.live()
    before, committed = published(story), story.newest("commits").read_text()
    story.newest("commits").unlink()
    story.live()
    assert published(story) == before == state(spark, story)
    assert Counter(story.newest("commits").read_text()) == Counter(committed)
