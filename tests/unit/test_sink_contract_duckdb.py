"""The sink of another package (tests/third_party), held to the contract as its author would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import duckdb
from onceflow_duckdb import DuckDB

from onceflow.harness.target_reader import read
from onceflow.harness.targets import Published, Target, plain
from onceflow.sinks import Sink, open_target
from onceflow.testing import SinkContract


class TestDuckDB(SinkContract):
    def make_sink(self, folder: Path) -> Sink:
        return DuckDB(folder / "out.duckdb", table="rows")

    def read_rows(self, folder: Path) -> list[dict[str, Any]]:
        if not (folder / "out.duckdb").exists():
            return []
        with closing(duckdb.connect(folder / "out.duckdb")) as db:
            db.execute("SET TimeZone = 'UTC'")
            try:
                return db.sql("FROM rows").to_arrow_table().to_pylist()
            except duckdb.CatalogException:
                return []

    @contextmanager
    def commit_fails(self, sink: Any, *, landed: bool) -> Iterator[None]:
        commit = sink._commit

        def failing(db: Any) -> None:
            sink._commit = commit
            commit(db if landed else Refusing(db))
            commit(Refusing(db))

        sink._commit = failing
        yield

    def test_verify_reads_the_rows_and_the_ledger_of_one_moment(self) -> None:
        driver = self.driver(1)
        settings = driver.sink.describe()
        target = Target("query/output", "duckdb", settings["path"], settings=settings)
        assert read(target, "job") == Published()
        last = self.run(driver.open(), 0, 1)
        found = read(target, "job")
        assert (found.ledger, found.lineage) == (last.epoch, last.lineage)
        assert found.names == tuple(self.rows(0)[0])
        wanted = [tuple(map(plain, row.values())) for row in self.rows(0, 1)]
        assert Counter(found.rows) == Counter(wanted)
        assert found.has_epochs
        assert found.epochs.count(1) == len(self.rows(1))


class Refusing:
    def __init__(self, db: duckdb.DuckDBPyConnection) -> None:
        self._db = db

    def execute(self, sql: str) -> None:
        raise duckdb.IOException("the disk does not answer")


def test_the_package_is_installed_and_offers_its_sink(tmp_path: Path) -> None:
    (offered,) = entry_points(group="onceflow.sinks", name="duckdb")
    assert offered.dist is not None
    assert offered.dist.name == "onceflow-duckdb"
    sink = DuckDB(tmp_path / "out.duckdb", table="rows")
    found = open_target(sink.describe())
    assert isinstance(found, DuckDB)
    assert found.describe() == sink.describe()
