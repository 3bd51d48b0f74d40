"""The home: lineages on disk, and checkpoints and targets that do not belong together."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from onceflow import faults
from onceflow.contract.ledger import Ledger, Position
from onceflow.errors import CheckpointRefused, Damaged, JobError
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query, jobs
from onceflow.protocol.identity import refuse_foreign_ledger, refuse_other_checkpoint
from onceflow.spark.checkpoint import Checkpoint
from onceflow.spark.session import REQUIRED
from onceflow.store.posix import LocalStore, seal
from onceflow.testing.processes import run_and_kill


def opened(home: Path, job: str = "word-count") -> str:
    return JobFolder(home, job).open_lineage("4.2.1")


def query(home: Path) -> Query:
    return JobFolder(home, "word-count").query(opened(home), "counts")


# ---------------------------------------------------------------- lineages


def test_a_job_that_never_ran_here_has_no_lineage(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "word-count")
    assert folder.lineage() is None
    assert folder.queries() == []
    assert os.listdir(tmp_path) == []


def test_the_first_lineage_is_made_once(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert opened(tmp_path) == first
    assert JobFolder(tmp_path, "word-count").lineage() == first
    assert opened(tmp_path, "another") != first


def open_in_a_child(home: Path) -> None:
    opened(home)


@pytest.mark.kill
@pytest.mark.parametrize("point", faults.PUT)
@pytest.mark.parametrize("visit", [1, 2], ids=["job.json", "lineage.json"])
def test_making_the_first_lineage_can_be_killed_anywhere(
    tmp_path: Path, point: str, visit: int
) -> None:
    run_and_kill(point, open_in_a_child, tmp_path, visit=visit)
    before = JobFolder(tmp_path, "word-count").lineage()
    after = opened(tmp_path)
    assert before in (None, after)
    assert os.listdir(tmp_path / "word-count" / "lineages") == [after]


def test_a_home_without_its_job_file_is_damaged(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "word-count" / "job.json").unlink()
    with pytest.raises(Damaged, match=r"job.json is missing"):
        opened(tmp_path)


def test_a_lineage_without_its_file_is_damaged(tmp_path: Path) -> None:
    lineage = opened(tmp_path)
    folder = tmp_path / "word-count" / "lineages" / lineage
    (folder / "counts").mkdir()
    (folder / "lineage.json").unlink()
    with pytest.raises(Damaged, match=r"lineage.json is missing"):
        opened(tmp_path)


def test_a_job_file_of_another_job_is_damaged(tmp_path: Path) -> None:
    opened(tmp_path)
    shutil.copytree(tmp_path / "word-count", tmp_path / "copy")
    with pytest.raises(Damaged, match="belongs to word-count, not to copy"):
        opened(tmp_path, "copy")


def test_a_checkpoint_that_was_made_with_weaker_settings_is_refused(tmp_path: Path) -> None:
    lineage = opened(tmp_path)
    name, (value, why) = next(iter(REQUIRED.items()))
    settings = {n: v for n, (v, _) in REQUIRED.items() if n != name}
    store = LocalStore(tmp_path / "word-count")
    store.delete(f"lineages/{lineage}/lineage.json")
    body = {"parent": None, "settings": settings}
    store.put_if_absent(f"lineages/{lineage}/lineage.json", seal("lineage", lineage, body))
    with pytest.raises(CheckpointRefused) as caught:
        opened(tmp_path)
    assert f"{name} was None, must be {value!r}: {why}" in caught.value.message


@pytest.mark.parametrize("home", ["hdfs://cluster/home", "s3a://bucket/home"])
def test_a_home_that_is_not_local_is_refused(home: str) -> None:
    with pytest.raises(JobError, match="is not a local path"):
        JobFolder(home, "word-count")


def test_a_home_may_be_a_file_url(tmp_path: Path) -> None:
    for prefix in ("", "file:", "file://"):
        assert JobFolder(f"{prefix}{tmp_path}", "a").folder == tmp_path / "a"


def test_jobs_and_queries_that_ran_are_listed(tmp_path: Path) -> None:
    assert list(jobs(tmp_path / "none")) == []
    for name in ("b", "a"):
        opened(tmp_path, name)
    (tmp_path / "not a job").mkdir()
    assert [folder.name for folder in jobs(tmp_path)] == ["a", "b"]
    ran = query(tmp_path)
    assert JobFolder(tmp_path, "word-count").queries() == []
    ran.epoch_log().fence(1, {})
    assert JobFolder(tmp_path, "word-count").queries() == [ran]


def test_a_query_has_one_id_for_life_and_no_other_query_has_it(tmp_path: Path) -> None:
    folder, lineage = JobFolder(tmp_path, "word-count"), opened(tmp_path)
    ids = [folder.query(lineage, name).spark_id for name in ("a", "b", "a")]
    assert ids[0] == ids[2] != ids[1]
    with pytest.raises(JobError, match="is not a name for a query"):
        folder.query(lineage, "../a")


# ---------------------------------------------------------------- what belongs together


def decision(epoch: int, nonce: str = "ours") -> Decision:
    return Decision(epoch, 1, "today", {}, {}, "", {}, {}, 0, {}, nonce)


@pytest.fixture
def known(tmp_path: Path) -> tuple[Query, Checkpoint]:
    made = query(tmp_path)
    return made, Checkpoint(made.folder)


def test_a_new_checkpoint_gets_the_id_of_its_query(known: tuple[Query, Checkpoint]) -> None:
    made, checkpoint = known
    refuse_other_checkpoint(made, None, checkpoint)
    assert checkpoint.query_id() == made.spark_id
    refuse_other_checkpoint(made, None, checkpoint)
    refuse_other_checkpoint(made, decision(0), checkpoint)


def test_the_checkpoint_of_another_query_is_refused(known: tuple[Query, Checkpoint]) -> None:
    made, checkpoint = known
    checkpoint.set_query_id("another")
    with pytest.raises(CheckpointRefused, match="is of another query"):
        refuse_other_checkpoint(made, None, checkpoint)


def test_a_checkpoint_that_was_deleted_is_refused(known: tuple[Query, Checkpoint]) -> None:
    made, checkpoint = known
    with pytest.raises(CheckpointRefused, match="was deleted"):
        refuse_other_checkpoint(made, decision(3), checkpoint)
    assert checkpoint.query_id() is None


def test_a_checkpoint_that_is_ahead_of_the_log_is_refused(known: tuple[Query, Checkpoint]) -> None:
    made, checkpoint = known
    checkpoint.set_query_id(made.spark_id)
    checkpoint.set_commit(3, 0, {})
    refuse_other_checkpoint(made, decision(3), checkpoint)
    for last, told in ((decision(2), "epoch 2"), (None, "nothing")):
        with pytest.raises(CheckpointRefused, match=f"committed epoch 3 .* is {told}"):
            refuse_other_checkpoint(made, last, checkpoint)


def ledger(made: Query, epoch: int, nonce: str = "ours", **changes: Any) -> Ledger:
    return Ledger(1, Position(changes.get("lineage", made.lineage), epoch), nonce)


def test_a_ledger_that_fits_the_home_is_taken(known: tuple[Query, Checkpoint]) -> None:
    made, _ = known
    refuse_foreign_ledger(made, None, Ledger(), "out")
    refuse_foreign_ledger(made, decision(4), Ledger(7), "out")
    refuse_foreign_ledger(made, decision(4), ledger(made, 4), "out")
    refuse_foreign_ledger(made, decision(4), ledger(made, 3, "of an older one"), "out")


def test_a_ledger_of_another_home_is_refused(known: tuple[Query, Checkpoint]) -> None:
    made, _ = known
    foreign = ledger(made, 4, lineage="another lineage")
    with pytest.raises(CheckpointRefused, match=r"out: .* epoch 4 of lineage another lineage"):
        refuse_foreign_ledger(made, decision(4), foreign, "out")


@pytest.mark.parametrize(("last", "nonce"), [(None, "ours"), (3, "ours"), (4, "of a copy")])
def test_a_home_that_was_set_back_or_copied_is_refused(
    known: tuple[Query, Checkpoint], last: int | None, nonce: str
) -> None:
    made, _ = known
    decided = None if last is None else decision(last)
    with pytest.raises(CheckpointRefused, match="has epoch 4, which this home did not decide"):
        refuse_foreign_ledger(made, decided, ledger(made, 4, nonce), "out")
