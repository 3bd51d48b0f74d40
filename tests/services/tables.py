"""What tests of the PostgreSQL sink share: a schema of their own, and drivers without Spark."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from onceflow.contract.schema import parse_schema
from onceflow.sinks import Postgres
from onceflow.testing.servers import Postgres as Server
from onceflow.testing.stand_in import StandIn, folder_values

COLUMNS = "id long, name string"


class Place:
    """A schema of a test, with a table `rows` in it for a sink to write to."""

    def __init__(self, server: Server, home: Path) -> None:
        self.server, self.home = server, home
        self.schema = f"t{uuid.uuid4().hex[:12]}"
        self.run(f"CREATE SCHEMA {self.schema}")

    @property
    def table(self) -> str:
        return f"{self.schema}.rows"

    def sink(self, dsn: str = "", **settings: Any) -> Postgres:
        settings = {"table": "rows", "schema": self.schema, **settings}
        return Postgres(dsn or self.server.dsn, **settings)

    def driver(self, sink: Postgres, term: int = 1, columns: str = COLUMNS, **more: Any) -> StandIn:
        return StandIn(sink=sink, home=self.home, schema=parse_schema(columns), term=term,
                       folders=folder_values, **more)  # fmt: skip

    def run(self, *queries: str) -> None:
        with psycopg.connect(self.server.dsn, autocommit=True) as db:
            for query in queries:
                db.execute(query)

    def read(self, query: str = "") -> list[dict[str, Any]]:
        query = query or f"SELECT * FROM {self.table} ORDER BY id"
        with psycopg.connect(
            self.server.dsn, options="-c timezone=UTC", row_factory=dict_row
        ) as db:
            return db.execute(query).fetchall()

    def ids(self) -> list[int]:
        return [row["id"] for row in self.read()]

    def tables(self) -> set[str]:
        query = f"SELECT tablename FROM pg_tables WHERE schemaname = '{self.schema}'"
        return {row["tablename"] for row in self.read(query)}

    @contextmanager
    def role(self, *, grants: tuple[str, ...] = ()) -> Iterator[str]:
        """A DSN of a role that has these rights and no others; its password is its name."""
        name = f"r{uuid.uuid4().hex[:12]}"
        self.run(f"CREATE ROLE {name} LOGIN PASSWORD '{name}'",
                 *(f"GRANT {grant} TO {name}" for grant in grants))  # fmt: skip
        try:
            yield make_conninfo(self.server.dsn, user=name, password=name)
        finally:
            self.run(f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


def row(number: int, name: str = "") -> dict[str, Any]:
    return {"id": number, "name": name or f"name {number}"}
