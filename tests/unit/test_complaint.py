"""What a driver says when it ends, and whether starting again can help."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from onceflow.errors import OnceflowError, PublishFailed, ServerSilent
from onceflow.service.error_report import RETRY, Complaint, complaint


def told(folder: Path, raised: str) -> Complaint:
    """About a job file that raises on its second line."""
    job = folder / "job.py"
    job.write_text(f"class SparkError(Exception): ...\nraise {raised}\n")
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the line raises
        runpy.run_path(str(job))
    return complaint(caught.value, job)


def test_what_the_jobs_own_code_raises_is_not_tried_again(tmp_path: Path) -> None:
    said = told(tmp_path, "ValueError('no such ad')")
    assert (said.kind, said.exit_code, said.retryable) == ("JobError", 2, False)
    assert said.message.endswith("job.py, line 2: ValueError: no such ad")


@pytest.mark.parametrize(("kind", "away"), [(ServerSilent, True), (PublishFailed, False)])
def test_a_server_that_is_away_is_told_from_other_failures(
    tmp_path: Path, kind: type[OnceflowError], away: bool
) -> None:
    said = complaint(kind("no answer"), tmp_path / "job.py")
    assert (said.retryable, said.away) == (True, away)


def test_a_python_worker_that_died_while_the_job_was_declared_is(tmp_path: Path) -> None:
    said = told(tmp_path, "SparkError('Python worker exited unexpectedly (crashed)')")
    assert (said.kind, said.exit_code, said.retryable) == ("WorkerDied", RETRY, True)
    assert "dmesg" in said.hint
