"""A sink of onceflow that writes into a table of a DuckDB database."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import duckdb

from onceflow.contract.ledger import needs_rewind, refuse_older, staged_file_gone
from onceflow.contract.schema import columns, refuse_difference
from onceflow.errors import (
    JobError,
    PublishFailed,
    PublishUnknown,
    TargetBehind,
    TargetForeign,
)
from onceflow.sinks import (
    CanReadBack,
    CanRewind,
    Ledger,
    Outcome,
    Position,
    Publication,
    Sink,
    Verdict,
    judge,
)


class DuckDB(Sink, CanRewind, CanReadBack):
    """Every row of a decided epoch is in the table exactly once; readers see whole epochs only.

    Each row has its `_lineage` and `_epoch`, so that epochs can be taken back. One process at a
    time has a DuckDB database open, so the sink waits for its turn and lets go after each call.
    """

    kind = "duckdb"
    place = "path"

    def __init__(self, path: str | os.PathLike[str], *, table: str) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", table):
            raise JobError(f"{table!r} is not a name for a table", hint="use letters and digits")
        self.path, self.table = os.path.abspath(path), table

    def __str__(self) -> str:
        return f"DuckDB({self.path!r}, table={self.table!r})"

    # -------------------------------------------------------------- the three methods

    def published(self, output: str) -> Ledger:
        if not os.path.exists(self.path):
            return Ledger()
        with self._transaction() as db:
            return _ledger(self._said(db, output))

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with self._transaction() as db:
            said = self._said(db, output)
            refuse_older(said["term"], term, self, is_ours=said["token"] == token)
            return _ledger(self._say(db, {**said, "term": term, "token": token}))

    def publish(self, publication: Publication) -> Outcome:
        with self._transaction() as db:
            said = self._said(db, publication.output)
            if judge(_ledger(said), publication, str(self)) is Verdict.ALREADY_PUBLISHED:
                return Outcome.ALREADY_PUBLISHED
            self._insert(db, publication)
            said["columns"] = columns(publication.schema)
            said["lineages"][publication.lineage] = publication.epoch
            self._say(db, {**said, "decision": publication.decision})
        return Outcome.PUBLISHED

    def _insert(self, db: duckdb.DuckDBPyConnection, publication: Publication) -> None:
        paths = [file.path for file in publication.files]
        for path in paths:
            if not os.path.exists(path):
                raise staged_file_gone(str(self), path, publication.epoch)
        if not paths:
            return
        rows = "SELECT *, ?::VARCHAR AS _lineage, ?::BIGINT AS _epoch FROM read_parquet(?)"
        whose = [publication.lineage, publication.epoch, paths]
        db.execute(f"CREATE TABLE IF NOT EXISTS {self.table} AS {rows} LIMIT 0", whose)
        db.execute(f"INSERT INTO {self.table} BY NAME {rows}", whose)

    # -------------------------------------------------------------- what it can do beside that

    def prepare(self, output: str, schema: str, mode: str) -> None:
        self.refuse_mode(mode)
        if os.path.exists(self.path):
            with self._transaction() as db:
                said = self._said(db, output)
            if said["columns"]:
                refuse_difference(str(self), said["columns"], columns(schema))

    def read_back(self) -> list[dict[str, Any]]:
        if not os.path.exists(self.path):
            return []
        with self._transaction() as db:
            if not _has(db, self.table):
                return []
            db.execute("SET TimeZone = 'UTC'")
            rows: list[dict[str, Any]] = db.sql(f"FROM {self.table}").to_arrow_table().to_pylist()
            return rows

    def refuse_rewind(self, output: str, cut: Position) -> None:
        with self._transaction() as db:
            self._up_to(cut, self._said(db, output)["lineages"])

    def rewind(self, output: str, *, cut: Position, to: Position, term: int, decision: str) -> None:
        with self._transaction() as db:
            said = self._said(db, output)
            if not needs_rewind(_ledger(said), to, term=term, target=self):
                return
            kept = self._up_to(cut, said["lineages"])
            if _has(db, self.table):
                stays = " OR ".join("(_lineage = ? AND _epoch <= ?)" for _ in kept)
                known = [part for item in kept.items() for part in item]
                db.execute(f"DELETE FROM {self.table} WHERE NOT ({stays})", known)
            said["lineages"] = {**kept, to.lineage: to.epoch}
            self._say(db, {**said, "decision": decision})

    def _up_to(self, cut: Position, lineages: dict[str, int]) -> dict[str, int]:
        """The lineages that led to the cut, each with the last epoch of it that stays."""
        if lineages.get(cut.lineage, -1) < cut.epoch:
            raise TargetBehind(f"{self} does not have epoch {cut.epoch} of {cut.lineage}")
        names = list(lineages)
        led = names[: names.index(cut.lineage) + 1]
        return {name: min(lineages[name], cut.epoch) for name in led}

    # -------------------------------------------------------------- the ledger: a row of JSON

    def _said(self, db: duckdb.DuckDBPyConnection, output: str) -> dict[str, Any]:
        table, found = f"{self.table}_ledger", None
        if _has(db, table):
            found = db.execute(f"SELECT said FROM {table}").fetchone()
        nothing = {"output": output, "term": 0, "token": "", "lineages": {}, "decision": "",
                   "columns": {}}  # fmt: skip
        said: dict[str, Any] = nothing if found is None else json.loads(found[0])
        if said["output"] != output:
            raise TargetForeign(f"{self} belongs to output {said['output']}, not to {output}")
        return said

    def _say(self, db: duckdb.DuckDBPyConnection, said: dict[str, Any]) -> dict[str, Any]:
        table = f"{self.table}_ledger"
        db.execute(f"CREATE TABLE IF NOT EXISTS {table} (one INTEGER PRIMARY KEY, said VARCHAR)")
        db.execute(f"INSERT OR REPLACE INTO {table} VALUES (1, ?)", [json.dumps(said)])
        return said

    @contextmanager
    def _transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with open(f"{self.path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                with closing(duckdb.connect(self.path)) as db:
                    db.execute("BEGIN")
                    yield db
                    self._commit(db)
            except duckdb.Error as error:
                raise PublishFailed(f"{self}: {error}", hint="it is tried again") from error

    def _commit(self, db: duckdb.DuckDBPyConnection) -> None:
        try:
            db.execute("COMMIT")
        except duckdb.Error as error:
            raise PublishUnknown(
                f"{self}: no answer to COMMIT: {error}",
                hint="start the job again; it reads the ledger",
            ) from error


def _has(db: duckdb.DuckDBPyConnection, table: str) -> bool:
    return bool(db.execute("FROM duckdb_tables() WHERE table_name = ?", [table]).fetchone())


def _ledger(said: dict[str, Any]) -> Ledger:
    positions = [Position(*item) for item in said["lineages"].items()]
    return Ledger(said["term"], positions[-1] if positions else None, said["decision"])
