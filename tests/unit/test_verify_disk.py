"""The small disk of a case: what was on it is kept, whoever still writes there."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceflow.harness.small_disk import can_mount, disk_of


@pytest.fixture
def case(tmp_path: Path) -> Path:
    if not can_mount(tmp_path):
        pytest.skip("a tmpfs cannot be mounted here")
    return tmp_path / "case"


def test_what_was_on_a_disk_is_kept_when_it_goes(case: Path) -> None:
    with disk_of(case):
        (case / "folder").mkdir()
        (case / "folder" / "file").write_text("kept")
    assert (case / "folder" / "file").read_text() == "kept"


def test_what_somebody_wrote_where_the_disk_was_is_put_up_with(case: Path) -> None:
    """Spark writes state behind the epochs. Here it is there from before, under the disk."""
    (case / "state").mkdir(parents=True)
    (case / "state" / "snapshot.zip").write_text("late")
    with disk_of(case):
        (case / "file").write_text("kept")
    assert (case / "file").read_text() == "kept"
