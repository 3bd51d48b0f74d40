"""Staged files into a table of PostgreSQL by COPY: by the driver, or by the tasks of a Spark job.

Tasks copy into an unlogged table of their own epoch, which no reader reads, each under a tag that
no other attempt has. Spark returns the tags of the attempts that succeeded. A crash of the server
empties such a table, so the transaction that moves its rows counts them first.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from onceflow.contract.ledger import Publication, staged_file_gone
from onceflow.contract.schema import arrow_schema, nullable
from onceflow.errors import PublishFailed
from onceflow.postgres.connection import Server
from onceflow.postgres.table import ROW, TAG
from onceflow.postgres.values import copy_lines, slices
from onceflow.spark.arrow_map import map_in_arrow
from onceflow.tables.names import quote

if TYPE_CHECKING:
    from onceflow.postgres.connection import Db

_ROWS_AT_ONCE = 20_000


@dataclass(frozen=True)
class Rows:
    """Staged rows of one epoch, and the columns that are added to them."""

    epoch: int
    schema: str
    files: tuple[tuple[str, int, int], ...]  # path, rows, number of its first row
    constants: tuple[tuple[str, int], ...] = ()  # column, its value
    numbered: bool = False

    @property
    def count(self) -> int:
        return sum(rows for _, rows, _ in self.files)

    @cached_property
    def kinds(self) -> list[tuple[str, Any]]:
        return [(f["name"], f["type"]) for f in json.loads(self.schema)["fields"]]

    @property
    def columns(self) -> list[str]:
        names = [*(name for name, _ in self.kinds), *(name for name, _ in self.constants)]
        return [*names, ROW] if self.numbered else names

    def tagged(self, tag: int) -> Rows:
        return replace(self, constants=(*self.constants, (TAG, tag)))

    def split(self, most: int) -> tuple[Rows, ...]:
        """At most so many parts, of about as many rows each."""
        parts: list[list[tuple[str, int, int]]] = [[] for _ in range(min(most, len(self.files)))]
        for file in sorted(self.files, key=lambda file: -file[1]):
            min(parts, key=lambda part: sum(rows for _, rows, _ in part)).append(file)
        return tuple(replace(self, files=tuple(part)) for part in parts)


def rows_of(publication: Publication, *, epoch_column: str | None, numbered: bool) -> Rows:
    files, first = [], 0
    for file in publication.files:
        files.append((file.path, file.rows, first))
        first += file.rows
    constants = ((epoch_column, publication.epoch),) if epoch_column is not None else ()
    return Rows(publication.epoch, publication.schema, tuple(files), constants, numbered)


def copy_rows(db: Db, into: str, rows: Rows, target: str) -> None:
    names = ", ".join(map(quote, rows.columns))
    with db.cursor().copy(f"COPY {into} ({names}) FROM STDIN") as copy:
        for path, decided, first in rows.files:
            if not os.path.exists(path):
                raise staged_file_gone(target, path, rows.epoch)
            number = first
            for batch in read_batches(path, rows.schema):
                copy.write(copy_lines(batch, rows.kinds, _ends(rows, number, batch.num_rows)))
                number += batch.num_rows
            if number - first != decided:
                raise PublishFailed(
                    f"{target}: {path} has {number - first} rows, but {decided} were decided",
                    hint="the staged file was changed; put it back from a backup",
                )


def read_batches(path: str, schema: str, names: list[str] | None = None) -> Iterator[Any]:
    """The batches of a staged file, with the Arrow types of its schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = arrow_schema(nullable(schema))
    if names is not None:
        wanted = pa.schema([wanted.field(name) for name in names])
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted.names):
            ordered = [batch.column(f.name).cast(f.type) for f in wanted]
            whole = pa.RecordBatch.from_arrays(ordered, names=wanted.names)
            yield from slices(whole)


def _ends(rows: Rows, first: int, count: int) -> list[Any]:
    import numpy as np
    import pyarrow as pa

    ends: list[Any] = [str(value) for _, value in rows.constants]
    if rows.numbered:
        ends.append(pa.array(np.arange(first, first + count)).cast(pa.string()))
    return ends


# ---------------------------------------------------------------- by the tasks of a Spark job


@dataclass(frozen=True)
class Apart:
    """Copies of an epoch in a table of their own; each part of its rows has a tag there."""

    table: str
    parts: tuple[tuple[int, Rows], ...]

    def complete(self, db: Db, target: str) -> str:
        """Copy the incomplete parts again. Returns the query that selects all parts."""
        counted = f"SELECT {TAG}, count(*) FROM {self.table} GROUP BY {TAG}"
        found: dict[int, int] = dict(db.execute(counted).fetchall())
        for tag, rows in self.parts:
            if found.get(tag, 0) != rows.count:
                db.execute(f"DELETE FROM {self.table} WHERE {TAG} = {tag}")
                copy_rows(db, self.table, rows.tagged(tag), target)
        tags = ", ".join(str(tag) for tag, _ in self.parts)
        return f"(SELECT * FROM {self.table} WHERE {TAG} IN ({tags})) AS copies"


@dataclass(frozen=True)
class CopyTask:
    """The work of a task: it copies its part, and returns the tag of the copies."""

    dsn: str = field(repr=False)
    label: str
    name: str
    seconds: float
    into: str
    parts: tuple[Rows, ...]

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        server = Server(self.dsn, table=self.label, seconds=self.seconds)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                tag = secrets.randbits(62)
                with server.connect(self.name) as db:
                    copy_rows(db, self.into, self.parts[number].tagged(tag), server.label)
                yield pa.RecordBatch.from_pydict({"part": [number], "tag": [tag]})


def copy_apart(session: Any, task: CopyTask) -> Apart:
    """One task for each part, one connection for each task."""
    count = len(task.parts)
    done = map_in_arrow(session.range(0, count, 1, count), task, "part long, tag long").collect()
    return Apart(task.into, tuple((row.tag, task.parts[row.part]) for row in done))


def active_session() -> Any:
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()
