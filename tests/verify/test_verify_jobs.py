"""`onceflow verify` of jobs of a user's own, and a clean end."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from verifying import ONCEFLOW, verify

from onceflow.errors import JobError
from onceflow.harness.drivers import Drivers
from onceflow.harness.user_job import user_case

JOB = """
from datetime import UTC, datetime, timedelta

from pyspark.sql import functions as F

from onceflow import Flow, job
from onceflow.sinks import Files, Kafka, Sqlite
from onceflow.sources import Log


def line(number, random):
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)
    return {"value": " ".join(random.choices("to be or not".split(), k=3)), "event_time": at}


@job("words", every="0ms", keep_epochs=3, workload=line)
def words(flow: Flow) -> None:
    lines = flow.read("lines", Log("data/lines"))
    words = lines.select("event_time", F.explode(F.split("value", " ")).alias("word"))
    windows = (
        words.withWatermark("event_time", "5 seconds")
        .groupBy(F.window("event_time", "20 seconds"), "word").count()
        .select(F.col("window.start").alias("begin"), "word", "count")
    )
    flow.write("windows", windows, to=Files("out/windows"))
    sums = words.groupBy("word").count()
    flow.write("sums", sums, to=Sqlite("out/sums.db", table="sums", key="word"), mode="update")
"""


@pytest.mark.kill
@pytest.mark.timeout(900)
def test_a_job_of_ones_own_against_its_undisturbed_run(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    kinds = ("--fault", "kill-driver", "--fault", "raise-point")
    code, verdict, _ = verify("job.py", "--faults", "2", *kinds, cwd=tmp_path)
    assert code == 0
    assert verdict["struck"] == 2
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"job.py", ".onceflow"}, "it ran elsewhere"
    assert [path.name for path in (tmp_path / ".onceflow").iterdir()] == ["_verify"]
    (recorded,) = (tmp_path / ".onceflow" / "_verify").iterdir()
    assert {path.name for path in recorded.iterdir()} == {
        "events.jsonl", "result.json", "report.html",
    }  # fmt: skip


FOREIGN = """
from onceflow_duckdb import DuckDB

from onceflow import Flow, job
from onceflow.sources import Log


def order(number, random):
    return {"id": number, "cents": random.randrange(100)}


@job("orders", every="0ms", workload=order)
def orders(flow: Flow) -> None:
    orders = flow.read("orders", Log("data/orders")).select("id", "cents")
    flow.write("rows", orders, to=DuckDB("out/orders.duckdb", table="rows"))
"""


@pytest.mark.kill
@pytest.mark.timeout(600)
def test_a_job_with_a_sink_of_another_package(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(FOREIGN)
    kinds = ("--fault", "raise-point", "--fault", "rollback")
    code, verdict, events = verify("job.py", "--faults", "2", *kinds, cwd=tmp_path)
    assert code == 0, events[-1]
    assert verdict["struck"] == 2


REFUSED = {
    "a sink that verify cannot read": (
        'Sqlite("out/sums.db", table="sums", key="word")',
        'Kafka("sums", servers="127.0.0.1:1", key="word")',
        "Kafka has no ability CanReadBack",
    ),
    "no workload": ("workload=line", "workload=None", "names no workload"),
    "a place of its own": ('Log("data/lines")', 'Log("/nowhere/lines")', "a folder of its own"),
    "no log": (
        'flow.read("lines", Log("data/lines"))',
        'flow.read("lines", flow.spark.readStream.name("lines").format("rate").load())'
        '.selectExpr("timestamp event_time", "string(value) value")',
        "cannot be fed and replayed here",
    ),
}


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    """A job that is only declared leaves the driver as it was, so that one serves them all."""
    with closing(Drivers(tmp_path_factory.mktemp("drivers"), "local[2,4]", {})) as found:
        yield found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("why", REFUSED)
def test_a_job_that_cannot_be_verified_is_refused_with_the_reason(
    tmp_path: Path, drivers: Drivers, why: str
) -> None:
    before, after, says = REFUSED[why]
    assert before in JOB
    (tmp_path / "job.py").write_text(JOB.replace(before, after))
    with pytest.raises(JobError, match=says) as refused:
        user_case(
            str(tmp_path / "job.py"), tmp_path / "run" / "job", seed=1, recorded=None,
            drivers=drivers,
        )  # fmt: skip
    assert refused.value.hint


@pytest.mark.timeout(300)
def test_a_refusal_is_told_as_any_error_is(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.replace("workload=line", "workload=None"))
    code, verdict, events = verify("job.py", cwd=tmp_path)
    assert (code, verdict) == (2, {})
    assert "names no workload" in events[-1]["message"]
    assert events[-1]["hint"]


@pytest.mark.kill
@pytest.mark.timeout(300)
def test_an_interrupted_run_leaves_nothing_running(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [*heeds_ctrl_c(), "--jobs", "echo", "--keep", "kept", "--json"], cwd=tmp_path,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    with run.stdout:
        for line in run.stdout:
            if json.loads(line)["event"] == "fault":
                run.send_signal(signal.SIGINT)
                break
        last = [json.loads(line) for line in run.stdout]
    assert run.wait() == 130
    assert last[-1]["verdict"] == "unknown"
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(tmp_path) in _command(pid)]


def heeds_ctrl_c() -> list[str]:
    """The command, even if the tests run in the background of a shell, which ignores SIGINT."""
    python, option, code, verify = ONCEFLOW
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    return [python, option, f"{heed}; {code}", verify]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text() + (process / "environ").read_text()
    except OSError:
        return ""
