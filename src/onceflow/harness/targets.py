"""The committed rows of a target, read without onceflow: by plain files, pyarrow and sqlite3.

It follows the documented layout. A folder of `Files` or a log has numbered commits. The rows are
those of the files that the manifests of the newest roll-up name, and of the files of all commits
above it. A later `drop` takes rows back: in a folder of `Files` all epochs above one, in a log
ranges of offsets. A document of onceflow has two lines: a head with a checksum, a body in JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = tuple[Any, ...]

TAGS = ("_lineage", "_epoch")
_EPOCH = re.compile(r"(?:^|-)(\d{10})-")
_TRIES = 200


@dataclass(frozen=True)
class Target:
    """Where an output of a job goes, and what its rows mean."""

    output: str  # query/output
    kind: str  # files | sqlite | log | kafka | postgres, or that of a sink of another package
    path: str = field(repr=False)  # or servers, or a connection string, which may hold a password
    table: str = ""  # or a topic, or schema.table
    key: tuple[str, ...] = ()
    mode: str = "append"
    settings: Mapping[str, Any] | None = None  # of its sink, if the rows are read back by that
    rewinds: bool = True  # can the sink take back rows?

    @property
    def upserted(self) -> bool:
        """Does a row replace earlier ones of its key? In a log or topic the last one counts."""
        return bool(self.key) and (self.is_table or self.mode == "update")

    @property
    def is_folder(self) -> bool:
        """Does it have numbered commits, as `Files` and `Log` write them?"""
        return self.kind in ("files", "log")

    @property
    def is_table(self) -> bool:
        return not self.is_folder and self.kind != "kafka"

    @property
    def is_server(self) -> bool:
        return self.kind in ("kafka", "postgres")


@dataclass
class Published:
    """All committed rows, in the order of their commits. `epochs` has the epoch of each row, unless
    `has_epochs` is false; `ledger` and `lineage` are the last epoch in its ledger."""

    names: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)
    epochs: list[int | None] = field(default_factory=list)
    has_epochs: bool = True
    ledger: int | None = None
    lineage: str = ""
    files: tuple[str, ...] = ()

    def last_of_key(self, key: tuple[str, ...]) -> dict[Row, Row]:
        at = [self.names.index(name) for name in key] if self.rows else []
        return {tuple(row[i] for i in at): row for row in self.rows}


class Corrupt(Exception):
    """A file does not hold what its commit says, or cannot be read at all."""


class Away(Exception):
    """A server does not answer, so nothing was seen. That says nothing about its rows."""


# ---------------------------------------------------------------- folders with commits


def body(path: Path) -> dict[str, Any]:
    """The body of a document of onceflow. Raises `Corrupt` if its checksum is wrong."""
    head, _, rest = path.read_bytes().partition(b"\n")
    try:
        facts = json.loads(head)
        said = facts.pop("sha256")
        if hashlib.sha256(json.dumps(facts).encode() + b"\n" + rest[:-1]).hexdigest() != said:
            raise Corrupt(f"{path} does not match its checksum")
        found: dict[str, Any] = json.loads(rest)
    except (ValueError, KeyError, AttributeError) as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error
    return found


def read_folder(root: Path, output: str, known: dict[str, Any]) -> Published:
    if not (root / "_commits").is_dir():
        return Published()
    for _ in range(_TRIES):
        try:
            files, found = _commits(root, output)
            break
        except FileNotFoundError:
            continue  # rolled up while we read: begin again
    else:
        raise Corrupt(f"{root}: what its commits name cannot be found")
    found.files = tuple(file["path"] for file in files)
    for file in files:
        if file["path"] not in known:
            known[file["path"]] = _read_file(root, file)
        names, rows = known[file["path"]]
        found.names = found.names or names
        epoch = _EPOCH.search(os.path.basename(file["path"]))
        found.rows += rows
        found.epochs += [int(epoch[1]) if epoch else None] * len(rows)
    return found


def _commits(root: Path, output: str) -> tuple[list[dict[str, Any]], Published]:
    """The committed files of an output, oldest first, and its ledger."""
    folder = root / "_commits"
    names = sorted(os.listdir(folder))
    newest = max((n for n in names if n.startswith("rollup-")), default="")
    found: list[dict[str, Any]] = []
    said = Published()
    above: list[list[int]] = []  # commit, and the epoch above which it took back earlier rows
    ranges: list[list[int]] = []  # partition, first offset, end
    if newest:
        rolled = body(folder / newest)
        at = rolled["ledgers"].get(output, {}).get("at")
        said.ledger, said.lineage = (at["epoch"], at["lineage"]) if at else (None, "")
        above, ranges = list(rolled.get("drops", ())), [d[1:] for d in rolled.get("dropped", ())]
        for manifest in rolled["manifests"]:
            found += _listed(root, manifest["name"])
    for name in names:
        if name[0].isdigit() and name > newest.removeprefix("rollup-"):
            entry = body(folder / name)
            number = int(name.partition(".")[0])
            if entry.get("output") == output and entry["type"] in ("epoch", "drop"):
                said.ledger, said.lineage = entry["epoch"], entry.get("lineage", "")
            if entry["type"] == "drop" and "above" in entry:
                above.append([number, entry["above"]])
            ranges += entry.get("drop", ())
            found += [{"number": number, **entry}] if entry.get("files") else []
    if max((n for n in os.listdir(folder) if n.startswith("rollup-")), default="") != newest:
        raise FileNotFoundError
    files = [
        file
        for commit in found
        if output in ("", commit.get("output", output))  # "": of all outputs
        and not any(commit["number"] < drop and commit["epoch"] > epoch for drop, epoch in above)
        for file in commit["files"]
        if not any(file["partition"] == p and a <= file["first"] < b for p, a, b in ranges)
    ]
    return files, said


def _listed(root: Path, name: str) -> Iterator[dict[str, Any]]:
    """A manifest lists commits, or manifests of the level below."""
    said = body(root / "_manifests" / name)
    yield from said.get("commits", ())
    for below in said.get("manifests", ()):
        yield from _listed(root, below["name"])


def _read_file(root: Path, file: dict[str, Any]) -> tuple[tuple[str, ...], list[Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = root / file["path"]
    try:
        data = path.read_bytes()
        if (len(data), zlib.crc32(data)) != (file["bytes"], file["crc32"]):
            raise Corrupt(f"{path} is not what its commit says")
        if path.suffix == ".json":
            listed = [json.loads(line) for line in data.splitlines()]
        else:
            listed = pq.read_table(pa.BufferReader(data)).to_pylist()
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error
    if len(listed) != file["rows"]:
        raise Corrupt(f"{path} has {len(listed)} rows, its commit says {file['rows']}")
    names = tuple(listed[0]) if listed else ()
    return names, [tuple(plain(value) for value in row.values()) for row in listed]


def plain(value: Any) -> Any:
    """A value that can be counted: nested values become text."""
    return repr(value) if isinstance(value, dict | list) else value


# ---------------------------------------------------------------- tables


def read_table(target: Target, job: str) -> Published:
    path = Path(target.path)
    if not path.exists():
        return Published()
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            db.execute("BEGIN")  # ledger and rows of the same moment
            have = {r[0] for r in db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
            found = Published()
            if "_onceflow_ledger" in have:
                asked = "SELECT epoch, lineage FROM _onceflow_ledger WHERE output = ?"
                said = db.execute(asked, (f"{job}/{target.output}",)).fetchone()
                found.ledger, found.lineage = (said[0], said[1] or "") if said else (None, "")
            if target.table in have:
                fill(found, db.execute(f'SELECT * FROM "{target.table}"'))
            return found
    except sqlite3.DatabaseError as error:
        raise Corrupt(f"{path}: {error}") from error


def fill(found: Published, cursor: Any) -> None:
    """The rows of a query, without the columns for lineage and epoch."""
    names = [column[0] for column in cursor.description]
    kept = [i for i, name in enumerate(names) if name not in TAGS]
    epoch = names.index("_epoch") if "_epoch" in names else None
    found.names = tuple(names[i] for i in kept)
    for row in cursor:
        found.rows.append(tuple(row[i] for i in kept))
        found.epochs.append(None if epoch is None else row[epoch])
