"""Jobs that write to PostgreSQL, with Spark's tasks copying: broken, and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict
from tables import Place

import onceflow
from onceflow import faults, sources
from onceflow.cli.ledger import command as ledger_command
from onceflow.errors import BadRows
from onceflow.sinks import Postgres
from onceflow.testing.servers import Postgres as Server

EPOCHS, ROWS = 3, 40
SCHEMA = "id long, key string"


class Apart(Postgres):
    """Every epoch is large."""

    copied_apart_from = 1


class Job:
    """Numbers that count up, a file for each epoch, into a table; by key the last one counts."""

    def __init__(self, place: Place, key: str, kind: type[Postgres] = Apart) -> None:
        self.place, self.key, self.kind = place, key, kind
        self.home, self.input = place.home / "home", place.home / "in"
        self.input.mkdir(exist_ok=True)

    def sink(self, dsn: str = "") -> Postgres:
        dsn, key = dsn or self.place.server.dsn, self.key or ()
        return self.kind(dsn, table="rows", schema=self.place.schema, key=key)

    def add(self, number: int) -> None:
        ids = list(range(number * ROWS, (number + 1) * ROWS))
        part = self.input / f".{number}"
        pq.write_table(pa.table({"id": ids, "key": [f"k{i % 7}" for i in ids]}), part)
        os.utime(part, (1_700_000_000 + number,) * 2)
        part.rename(self.input / f"{number}.parquet")

    def live(self, dsn: str = "") -> None:
        """One life of a driver in this process, on the session that is there."""

        @onceflow.job("numbers", every="0ms")
        def numbers(flow: onceflow.Flow) -> None:
            files = sources.Files(self.input, schema=SCHEMA, max_files_per_epoch=1)
            rows = flow.read("rows", files).repartition(3)
            flow.write("numbers", rows, to=self.sink(dsn))

        onceflow.start(numbers, home=self.home, once=True).wait()

    def check(self) -> None:
        ids = list(range(EPOCHS * ROWS))
        found = self.place.read(f"SELECT id, key FROM {self.place.table} ORDER BY id")
        if self.key:
            assert {row["key"]: row["id"] in ids[-ROWS:] for row in found} == {
                f"k{n}": True for n in range(7)
            }
        else:
            assert found == [{"id": i, "key": f"k{i % 7}"} for i in ids]
        left = {name for name in self.place.tables() if name.startswith("_onceflow_")}
        kept = {"_onceflow_rewind", "_onceflow_before_rows"} if self.key else set[str]()
        assert left == {"_onceflow_ledger", *kept}, "copies are left"


@pytest.fixture
def place(postgres: Server, tmp_path: Path) -> Place:
    return Place(postgres, tmp_path)


@pytest.fixture(params=["", "key"], ids=["append", "upsert"])
def job(place: Place, request: pytest.FixtureRequest) -> Job:
    found = Job(place, request.param)
    for number in range(EPOCHS):
        found.add(number)
    return found


@pytest.mark.parametrize("point", faults.POSTGRES)
def test_a_job_that_is_broken_in_a_publish_loses_and_doubles_nothing(
    job: Job, spark: Any, point: str
) -> None:
    faults.arm(point, "raise", visit=2)
    with pytest.raises(faults.InjectedFault):
        job.live()
    faults.disarm()
    job.live()
    job.check()


@pytest.mark.daily
def test_a_driver_that_is_killed_in_a_transaction_loses_and_doubles_nothing(
    place: Place, spark: Any
) -> None:
    job = Job(place, "")
    for number in range(EPOCHS):
        job.add(number)
    life = (
        "import sys; sys.path.insert(0, sys.argv[1]); import onceflow, test_postgres_jobs as t\n"
        "from onceflow import faults; from pathlib import Path; from types import "
        "SimpleNamespace as N\n"
        "place = N(server=N(dsn=sys.argv[2]), schema=sys.argv[3], home=Path(sys.argv[4]))\n"
        "faults.arm('postgres.written', 'kill', visit=2)\n"
        "onceflow.get_session('local[2]'); t.Job(place, '').live()\n"
    )
    given = (str(Path(__file__).parent), place.server.dsn, place.schema, str(place.home))
    died = subprocess.run(
        [sys.executable, "-c", life, *given], capture_output=True, text=True, check=False
    )
    assert died.returncode == -9, died.stderr
    assert len(place.ids()) == ROWS
    job.live()
    job.check()


def test_copies_that_a_crash_of_the_server_emptied_are_counted_and_copied_again(
    job: Job, spark: Any
) -> None:
    emptied: list[int] = []

    def crash(_: str) -> None:
        (copies,) = (name for name in job.place.tables() if name.count("_") == 4)
        count = f"SELECT count(*) AS n FROM {job.place.schema}.{copies}"
        assert job.place.read(count) == [{"n": ROWS}]
        job.place.server.kill()
        job.place.server.start()
        emptied.append(job.place.read(count)[0]["n"])

    faults.arm("postgres.copied", crash, visit=2)
    job.live()
    assert emptied == [0]
    job.check()


def test_rows_of_an_attempt_that_does_not_count_are_not_moved(job: Job, spark: Any) -> None:
    def another_attempt(_: str) -> None:
        (copies,) = (name for name in job.place.tables() if name.count("_") == 4)
        row = ", _onceflow_row" if job.key else ""
        numbers = ", 999" if job.key else ""
        job.place.run(
            f"INSERT INTO {job.place.schema}.{copies} (id, key, _onceflow_tag{row}) "
            f"SELECT id, 'of nobody', 1{numbers} FROM {job.place.schema}.{copies}"
        )

    faults.arm("postgres.copied", another_attempt)
    job.live()
    job.check()


def test_without_the_right_to_create_tables_the_driver_copies(place: Place, spark: Any) -> None:
    job = Job(place, "")
    for number in range(EPOCHS):
        job.add(number)
    place.run(f"CREATE TABLE {place.table} (id bigint, key text)")
    job.sink().fence("numbers/numbers/numbers", term=1, token="")  # makes the ledger
    rights = (
        f"USAGE ON SCHEMA {place.schema}",
        f"SELECT, INSERT, UPDATE ON {place.schema}._onceflow_ledger",
        f"INSERT ON {place.table}",
    )
    with place.role(grants=rights) as dsn:
        job.live(dsn)
    job.check()


def test_no_password_is_written_anywhere_and_the_ledger_is_found_without(
    place: Place, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(place, "")
    for number in range(EPOCHS):
        job.add(number)
    job.live()
    password = str(conninfo_to_dict(place.server.dsn)["password"])
    written = [path for path in job.home.rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if password.encode() in path.read_bytes()]
    ask = ["numbers", "--home", str(job.home), "--json"]
    (said,) = json.loads(CliRunner().invoke(ledger_command, ask).output)
    assert "PGPASSWORD" in said["says"]
    monkeypatch.setenv("PGPASSWORD", password)
    (said,) = json.loads(CliRunner().invoke(ledger_command, ask).output)
    assert said["published"] == said["decided"] == EPOCHS - 1
    assert said["says"] == "all that is decided is published"


def test_rows_that_cannot_be_stored_stop_the_job_before_they_are_decided(
    place: Place, spark: Any
) -> None:
    job = Job(place, "", kind=Postgres)
    table = pa.table({"id": [1, 2], "key": ["fine", "a\0b"]})
    pq.write_table(table, job.input / "0.parquet")
    with pytest.raises(BadRows, match=r"NUL character in column key \(1 values\)"):
        job.live()
    assert "rows" not in place.tables()
