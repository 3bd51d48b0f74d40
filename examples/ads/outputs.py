"""Read the outputs with plain tools. An output that does not exist yet has no rows."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ads.budget import budget_file
from ads.database import rows
from ads.places import Places
from ads.topics import committed
from onceflow.log import EmbeddedLog

Row = dict[str, Any]
_TIMES = {"at", "received", "minute", "ordered_at", "matched_at"}  # the columns that hold times


def stream(places: Places, name: str, region: str) -> list[Row]:
    """The committed rows of a log or topic."""
    if places.kafka is not None:
        messages = committed(places.kafka, places.topic(name, region))
        return [_with_times(json.loads(message.value())) for message in messages]
    log = EmbeddedLog(places.log(name, region))
    return [row for batch in log.read() for row in batch.to_pylist()]


def late(places: Places, job: str) -> list[Row]:
    path = places.late_log(job)
    if not path.exists():
        return []
    return [row for batch in EmbeddedLog(path).read() for row in batch.to_pylist()]


def table(places: Places, name: str) -> list[Row]:
    """The rows of a table of the serving database."""
    if places.dsn is None:
        return _sqlite(places.serving_file, name)
    return _postgres(places.dsn, name)


def answers(places: Places) -> list[Row]:
    """The staged answers of the order service."""
    if places.dsn is None:
        return _sqlite(places.folder / "answers.db", "answers")
    return _postgres(places.dsn, "answers")


def charges(places: Places) -> list[Row]:
    return _sqlite(budget_file(places), "charges")


def warehouse(places: Places, name: str) -> list[Row]:
    """The rows of the Parquet files of a table."""
    import pyarrow.dataset as ds

    folder = places.warehouse_folder(name)
    if not folder.exists():
        return []
    found = ds.dataset(folder, format="parquet", partitioning="hive").to_table()
    return [row for batch in found.to_batches() for row in batch.to_pylist()]


def _sqlite(path: Path, name: str) -> list[Row]:
    return [_with_times(row) for row in rows(path, f"SELECT * FROM {name}")]


def _postgres(dsn: str, name: str) -> list[Row]:
    import psycopg
    from psycopg.rows import dict_row

    with psycopg.connect(dsn, row_factory=dict_row, connect_timeout=10) as db:
        if db.execute("SELECT to_regclass(%s) AS it", [name]).fetchone() == {"it": None}:
            return []
        return [_with_times(row) for row in db.execute(f"SELECT * FROM {name}").fetchall()]


def _with_times(row: Row) -> Row:
    for name in _TIMES & row.keys():
        row[name] = _time(row[name])
    return row


def _time(value: datetime | str | None) -> datetime | None:
    """In UTC. Times without a zone are stored in UTC."""
    if value is None:
        return None
    at = datetime.fromisoformat(value) if isinstance(value, str) else value
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
