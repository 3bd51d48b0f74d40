"""Targets that sinks publish into, looked at from outside, and epochs staged for them."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onceflow.contract.staged_files import describe
from onceflow.files.sink import published_files
from onceflow.log import EmbeddedLog
from onceflow.sinks import Files, Log, Position, Publication, Sink, Sqlite

LINEAGE = "0f8fad5b-d9cb-469f-a165-70867728950e"
OUTPUT = "job/query/counts"


def schema(**kinds: Any) -> str:
    """Spark's JSON for columns; a kind is what Spark writes for it."""
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in kinds.items()
    ]
    return json.dumps({"type": "struct", "fields": fields})


SCHEMA = schema(id="long", name="string")


def rows_of(epoch: int) -> list[int]:
    """The ids that an epoch has: five of its own."""
    return [epoch * 10 + n for n in range(5)]


def table(ids: Sequence[int]) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "name": [f"name {n}" for n in ids]})


def stage(folder: Path, *tables: pa.Table) -> tuple[Any, ...]:
    """One Parquet file for each table, as Spark would stage them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(tables):
        pq.write_table(rows, folder / f"part-{number:05d}.parquet")
    return describe(folder, ())


def stage_lines(folder: Path, ids: Sequence[int]) -> tuple[Any, ...]:
    """One file of JSON lines: less work than Parquet where the format does not matter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "part-00000.json").write_text("".join(f'{{"id":{n}}}\n' for n in ids))
    return describe(folder, ())


def ids_in(path: Path) -> list[int]:
    if path.suffix == ".json":
        return [json.loads(line)["id"] for line in path.read_text().splitlines()]
    return list(pq.ParquetFile(path).read(["id"]).column(0).to_pylist())


def publication(
    root: Path, epoch: int, *tables: pa.Table, term: int = 1, **changes: Any
) -> Publication:
    """A decided epoch, staged under `root`; without tables: two files with `rows_of(epoch)`."""
    files = changes.pop("files", None)
    if files is None:
        ids = rows_of(epoch)
        folder = root / "staged" / f"{LINEAGE[:8]}-{epoch}-{term}-aaaa"
        files = stage(folder, *(tables or (table(ids[:2]), table(ids[2:]))))
    facts: dict[str, Any] = {
        "output": OUTPUT,
        "lineage": LINEAGE,
        "epoch": epoch,
        "term": term,
        "previous": Position(LINEAGE, epoch - 1) if epoch else None,
        "files": files,
        "schema": SCHEMA,
        "mode": "append",
        "decision": f"decision {epoch}",
    }
    return Publication(**{**facts, **changes})


@dataclass(frozen=True)
class FilesTarget:
    root: Path

    @property
    def path(self) -> Path:
        return self.root / "target"

    def sink(self, **settings: Any) -> Sink:
        return Files(self.path, **settings)

    def other(self) -> Sink:
        return self.sink()

    def rows(self) -> list[int]:
        """The ids in all files that the commits list, file by file."""
        ids: list[int] = []
        for file in published_files(self.path):
            found = ids_in(self.path / file["path"])
            assert len(found) == file["rows"]
            ids += found
        return sorted(ids)

    def copy(self, to: Path) -> None:
        shutil.copytree(self.path, to)

    def bring_back(self, copy: Path) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(copy, self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path)


@dataclass(frozen=True)
class LogTarget(FilesTarget):
    """A log: a folder with commits, as `Files` has them, and offsets."""

    def sink(self, **settings: Any) -> Sink:
        """As opening a query makes it: the log gets the columns that were prepared."""
        sink = Log(self.path, **settings)
        sink.prepare(OUTPUT, SCHEMA, "append")
        return sink

    def rows(self) -> list[int]:
        """The ids that a reader of the log gets, who also sees that no offset is left out."""
        if not (self.path / "_commits").exists():
            return []
        log = EmbeddedLog(self.path)
        found = list(log.read(columns=["id", "_partition", "_offset"]))
        if not found:
            return []
        rows = pa.Table.from_batches(found)
        places = zip(rows.column("_partition"), rows.column("_offset"), strict=True)
        assert sorted((p.as_py(), o.as_py()) for p, o in places) == [
            (p, o) for p, end in enumerate(log.view.next) for o in range(log.view.low[p], end)
        ]
        return sorted(rows.column("id").to_pylist())


@dataclass(frozen=True)
class SqliteTarget:
    root: Path

    @property
    def path(self) -> Path:
        return self.root / "target.db"

    def sink(self, **settings: Any) -> Sink:
        return Sqlite(self.path, **{"table": "counts", "timeout": 5.0, **settings})

    def other(self) -> Sink:
        """The same table under another spelling: SQLite's names have no case."""
        return self.sink(table="Counts")

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path)) as db:
            return db.execute(sql).fetchall()

    def rows(self) -> list[int]:
        if not self.query("SELECT 1 FROM sqlite_master WHERE name = 'counts'"):
            return []
        return sorted(row[0] for row in self.query("SELECT id FROM counts"))

    def copy(self, to: Path) -> None:
        shutil.copyfile(self.path, to)

    def bring_back(self, copy: Path) -> None:
        self.remove()
        shutil.copyfile(copy, self.path)

    def remove(self) -> None:
        for path in self.root.glob("target.db*"):
            path.unlink()


Target = FilesTarget | SqliteTarget
