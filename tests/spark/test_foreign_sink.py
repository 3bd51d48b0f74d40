"""A sink of another package (tests/third_party) in a job, and under the commands that go back."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from commands import onceflow as command
from onceflow_duckdb import DuckDB

import onceflow
from onceflow import Flow, job
from onceflow.sources import Files


class World:
    """A job that copies files into DuckDB; each file is an epoch."""

    def __init__(self, root: Path, spark: Any) -> None:
        self.root, self.home, self.spark, self.files = root, root / "home", spark, 0
        (root / "in").mkdir()

    def run(self, **settings: Any) -> None:
        """With one file more than before, unless it is a fork."""
        if "fork" not in settings:
            written = self.root / f"{self.files}.parquet"
            pq.write_table(pa.table({"id": self.rows(self.files, self.files + 1)}), written)
            written.rename(self.root / "in" / written.name)
            self.files += 1
        copy = job("copy")(self._declare)
        onceflow.start(copy, home=self.home, spark=self.spark, once=True, **settings).wait(120)

    def _declare(self, flow: Flow) -> None:
        source = Files(self.root / "in", schema="id long", max_files_per_epoch=1)
        sink = DuckDB(self.root / "out.duckdb", table="rows")
        flow.write("out", flow.read("rows", source), to=sink)

    def command(self, *arguments: object) -> str:
        done = command(*arguments, "--home", self.home, cwd=self.root)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def check(self) -> None:
        assert published(self.root / "out.duckdb") == self.rows(0, self.files)
        (ledger,) = json.loads(self.command("ledger", "copy", "--json"))
        assert ledger["target"] == str(DuckDB(self.root / "out.duckdb", table="rows"))
        assert ledger["says"] == "all that is decided is published"

    @staticmethod
    def rows(first: int, end: int) -> list[int]:
        return [10 * file + n for file in range(first, end) for n in range(3)]


def published(path: Path) -> list[int]:
    with closing(duckdb.connect(path)) as db:
        return [id for (id,) in db.execute("SELECT id FROM rows ORDER BY id").fetchall()]


def test_commands_restore_roll_back_and_fork_a_job_with_a_sink_of_another_package(
    tmp_path: Path, spark: Any
) -> None:
    world = World(tmp_path, spark)
    world.run()
    world.command("savepoint", "create", "copy", "--name", "first")
    world.run()
    world.check()
    assert "DuckDB" in world.command("restore", "copy", "first", "--published", "rewind")
    world.run()
    world.check()
    world.command("rollback", "copy", "--to", 1, "--published", "rewind")
    world.run()
    world.check()
    world.command("fork", "copy", "--as", "other", "--from", "first", "--outputs", "forked")
    world.run(fork="other")
    assert published(tmp_path / "forked" / "out" / "out.duckdb") == world.rows(1, world.files)
    world.check()
    assert "copy" in world.command("status")
