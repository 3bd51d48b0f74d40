"""What a driver reports when it ends, and whether starting it again can help."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from onceflow.errors import (
    CheckpointRefused,
    Damaged,
    Fenced,
    JobError,
    OnceflowError,
    PublishFailed,
    ServerSilent,
    StagingDiffers,
)
from onceflow.service.error_report import RETRY, ErrorReport, describe_error


def told(folder: Path, raised: str) -> ErrorReport:
    """About a job file that raises on its second line."""
    job = folder / "job.py"
    job.write_text(f"class SparkError(Exception): ...\nraise {raised}\n")
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the line raises
        runpy.run_path(str(job))
    return describe_error(caught.value, job)


def test_what_the_jobs_own_code_raises_is_not_tried_again(tmp_path: Path) -> None:
    said = told(tmp_path, "ValueError('no such ad')")
    assert (said.kind, said.exit_code, said.retryable) == ("JobError", 2, False)
    assert said.message.endswith("job.py, line 2: ValueError: no such ad")


@pytest.mark.parametrize(("kind", "away"), [(ServerSilent, True), (PublishFailed, False)])
def test_a_server_that_is_away_is_told_from_other_failures(
    tmp_path: Path, kind: type[OnceflowError], away: bool
) -> None:
    said = describe_error(kind("no answer"), tmp_path / "job.py")
    assert (said.retryable, said.away) == (True, away)


def test_a_python_worker_that_died_while_the_job_was_declared_is(tmp_path: Path) -> None:
    said = told(tmp_path, "SparkError('Python worker exited unexpectedly (crashed)')")
    assert (said.kind, said.exit_code, said.retryable) == ("WorkerDied", RETRY, True)
    assert "dmesg" in said.hint


@pytest.mark.parametrize("hiding", [RuntimeError("no"), PublishFailed("no"), ConnectionError("no")])
def test_an_error_that_was_raised_from_a_final_one_is_final(
    tmp_path: Path, hiding: Exception
) -> None:
    hiding.__cause__ = Damaged("bits", hint="put it back")
    said = describe_error(hiding, tmp_path / "job.py")
    assert (said.kind, said.message, said.hint) == ("Damaged", "bits", "put it back")
    assert (said.exit_code, said.retryable) == (7, False)


def test_files_that_a_worker_wrote_elsewhere_are_told_before_what_misses_them(
    tmp_path: Path,
) -> None:
    error = StagingDiffers("not here", hint="share the home")
    error.__cause__ = CheckpointRefused("state 1 is missing", hint="restore a savepoint")
    said = describe_error(error, tmp_path / "job.py")
    assert (said.kind, said.hint) == ("StagingDiffers", "share the home")
    assert (said.exit_code, said.retryable) == (4, False)


def test_so_is_one_that_was_raised_while_a_final_one_was_handled(tmp_path: Path) -> None:
    try:
        try:
            raise Fenced("term 2 leads")
        finally:
            raise ConnectionError("the connection cannot be closed")
    except ConnectionError as error:
        said = describe_error(error, tmp_path / "job.py")
    assert (said.kind, said.retryable) == ("Fenced", False)


def test_what_a_task_raised_of_ours_stays_what_it_is(tmp_path: Path) -> None:
    error = RuntimeError("Job aborted: onceflow.errors.Damaged: a.run is cut\n  fix: put it back")
    said = describe_error(error, tmp_path / "job.py")
    assert (said.kind, said.message, said.retryable) == ("Damaged", "a.run is cut", False)


@pytest.mark.parametrize(
    ("error", "kind"), [(Fenced("term 2 leads"), "Fenced"), (JobError("Py4J: gone"), "JvmDied")]
)
def test_a_jvm_that_died_hides_no_final_error(
    tmp_path: Path, error: OnceflowError, kind: str
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as jvm:
        os.waitid(os.P_PID, jvm.pid, os.WEXITED | os.WNOWAIT)
        said = describe_error(error, tmp_path / "job.py", jvm=jvm.pid)
    assert said.kind == kind
    assert said.retryable is (kind == "JvmDied")
