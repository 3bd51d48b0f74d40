"""The PostgreSQL sink, held to the contract that every sink is held to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from onceflow.sinks import Postgres, Sink
from onceflow.testing import SinkContract
from onceflow.testing.servers import Postgres as Server


class PostgresContract(SinkContract):
    tries = 1000 if os.environ.get("ONCEFLOW_TEST_ALL") else 8

    @pytest.fixture(autouse=True)
    def _server(self, postgres: Server) -> None:
        self.dsn = postgres.dsn
        self.secret = str(conninfo_to_dict(self.dsn)["password"])  # type: ignore[misc]

    @contextmanager
    def commit_fails(self, sink: Any, *, landed: bool) -> Iterator[None]:
        """The server ends the connection just before or just behind COMMIT."""
        execute, ended = psycopg.Connection.execute, []

        def failing(db: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            if query != "COMMIT" or ended:
                return execute(db, query, *args, **kwargs)
            ended.append(db.info.backend_pid)
            if landed:
                execute(db, query)
            with psycopg.connect(self.dsn, autocommit=True) as other:
                execute(other, "SELECT pg_terminate_backend(%s, 5000)", ended)
            return execute(db, "SELECT 1" if landed else query)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(psycopg.Connection, "execute", failing)
            yield
        assert ended

    def sink_in(self, folder: Path, **settings: Any) -> Sink:
        """Each test has a schema of its own, and with it a ledger."""
        with psycopg.connect(self.dsn, autocommit=True) as db:
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {folder.name}")
        return Postgres(self.dsn, table="rows", schema=folder.name, **settings)

    def read_rows(self, folder: Path) -> list[dict[str, Any]]:
        if not self._has(folder, "rows"):
            return []
        with psycopg.connect(self.dsn, options="-c timezone=UTC", row_factory=dict_row) as db:
            return db.execute(f"SELECT * FROM {folder.name}.rows").fetchall()

    def has_target(self, folder: Path) -> bool:
        return self._has(folder, "%")

    def _has(self, folder: Path, table: str) -> bool:
        with psycopg.connect(self.dsn) as db:
            query = "SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename LIKE %s"
            return bool(db.execute(query, (folder.name, table)).fetchall())


class TestPostgres(PostgresContract):
    modes = ("append", "complete")

    def make_sink(self, folder: Path) -> Sink:
        return self.sink_in(folder)


class TestPostgresWithEpochColumn(PostgresContract):
    """Its rows can be taken back."""

    modes = ("append", "complete")

    def make_sink(self, folder: Path) -> Sink:
        return self.sink_in(folder, epoch_column="epoch")


class TestPostgresWithKey(PostgresContract):
    modes = ("append", "update", "complete")
    upserts = True

    def make_sink(self, folder: Path) -> Sink:
        return self.sink_in(folder, key="id")
