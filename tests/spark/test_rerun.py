"""An epoch that is run again: the same rows, or which columns are not deterministic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from test_restore import JOB, World

from onceflow import job
from onceflow.cli import cli
from onceflow.errors import JobError
from onceflow.jobs.rerun import rerun

ONLY = ("counts", "files", "windows")


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path, spark)


def again(world: World, query: str, epoch: int) -> dict[str, Any]:
    made = job(JOB)(lambda flow: world.declare(flow, ONLY))
    return rerun(made, world.folder, epoch, query=query, spark=world.spark)


def test_a_deterministic_epoch_has_the_same_rows(world: World) -> None:
    world.add(5)
    world.live(*ONLY)
    before = sorted(path for path in world.root.rglob("*") if "home" not in path.parts)
    for query, epoch in (("counts", 0), ("counts", 3), ("files", 4), ("windows", 4)):
        found = again(world, query, epoch)
        assert found["same"], (query, epoch)
        assert found["compared_by"] == "digest" or not found["rows"]["now"]
    assert sorted(path for path in world.root.rglob("*") if "home" not in path.parts) == before
    assert not list((world.root / "home").glob(".rerun-*"))
    world.add()
    world.live(*ONLY)
    world.check(*ONLY)


def test_columns_that_are_not_deterministic_are_named(world: World) -> None:
    world.plus = (F.rand() * 1e9).cast("long")
    world.add(1)
    world.live(*ONLY)
    found = again(world, "files", 0)
    assert (found["same"], found["columns"]) == (False, ["value"])


def test_code_that_changed_is_told_from_chance(world: World) -> None:
    world.add(1)
    world.live(*ONLY)
    world.plus = F.lit(1)
    found = again(world, "files", 0)
    assert (found["same"], found["columns"]) == (False, [])


def test_an_epoch_that_is_not_there_is_refused(world: World) -> None:
    world.add(1)
    world.live(*ONLY)
    with pytest.raises(JobError, match="epoch 7 of shop/files is not retained"):
        again(world, "files", 7)


def test_input_that_is_gone_is_told_as_such(world: World) -> None:
    world.add(2)
    world.live(*ONLY)
    (world.root / "in" / "0001.parquet").unlink()
    with pytest.raises(JobError, match="its input has changed") as refused:
        again(world, "files", 1)
    assert not refused.value.retryable


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('rows.select("no such column")', "wrong.py, line 9: .*no such column"),
        ('rows.foo.bar("x")()', "wrong.py, line 9: "),
        ("1 / 0", "wrong.py, line 9: ZeroDivisionError"),
    ],
)
def test_code_that_is_wrong_is_told_in_a_line(world: World, line: str, says: str) -> None:
    world.add(1)
    world.live(*ONLY)
    (world.root / "wrong.py").write_text(
        "from onceflow import Flow, job, sources\nfrom onceflow.sinks import Files\n\n\n"
        f'@job("{JOB}")\ndef wrong(flow: Flow) -> None:\n'
        f'    files = sources.Files("{world.root / "in"}", schema="key string")\n'
        '    rows = flow.read("for_files", files)\n'
        f"    rows = {line}\n"
        f'    flow.write("files", rows, to=Files("{world.root / "files"}"))\n'
    )
    asked = ["epoch", "show", JOB, "0", "--query", "files", "--rerun", str(world.root / "wrong.py")]
    ran = CliRunner().invoke(cli, [*asked, "--home", str(world.root / "home")])
    assert isinstance(ran.exception, JobError)
    assert re.search(says, ran.exception.message)
    assert ran.exception.exit_code == 2
    assert ran.exception.hint
