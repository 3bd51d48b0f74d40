"""What anybody finds in a target, read without onceflow: plain files, pyarrow and sqlite3.

The layout that is followed is the documented one. A folder of `Files` or a log has numbered
commits; a reader takes the newest roll-up, the files of its manifests, and those of the commits
above it. A document of ours is two lines: a head with a checksum, and a body in JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = tuple[Any, ...]

_TAGS = ("_lineage", "_epoch")
_EPOCH = re.compile(r"(?:^|-)(\d{10})-")
_TRIES = 200


@dataclass(frozen=True)
class Target:
    """Where an output of a job goes, and what its rows mean."""

    output: str  # query/output
    kind: str  # files | sqlite | log | kafka | postgres
    path: str = field(repr=False)  # or servers, or a connection string, which may hold a password
    table: str = ""  # or a topic, or schema.table
    key: tuple[str, ...] = ()
    mode: str = "append"

    @property
    def upserted(self) -> bool:
        """Rows of a key replace each other; in a log or topic the last one counts."""
        return bool(self.key) and (self.is_table or self.mode == "update")

    @property
    def is_folder(self) -> bool:
        """With commits, as `Files` and `Log` write them."""
        return self.kind in ("files", "log")

    @property
    def is_table(self) -> bool:
        return self.kind in ("sqlite", "postgres")

    @property
    def is_server(self) -> bool:
        return self.kind in ("kafka", "postgres")


@dataclass
class Published:
    """All rows that are committed, in the order of their commits. `epochs` has the epoch of each
    row where the target tells; `ledger` the last epoch and the highest term that it remembers."""

    names: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)
    epochs: list[int | None] = field(default_factory=list)
    ledger: int | None = None
    files: tuple[str, ...] = ()

    def last_of_key(self, key: tuple[str, ...]) -> dict[Row, Row]:
        at = [self.names.index(name) for name in key] if self.rows else []
        return {tuple(row[i] for i in at): row for row in self.rows}


class Corrupt(Exception):
    """A file does not hold what its commit says, or cannot be read at all."""


class Away(Exception):
    """A server does not answer: nothing was seen, which is no fault of what it holds."""


def read(target: Target, job: str, known: dict[str, Any] | None = None) -> Published:
    """`known` keeps what was read and never changes from one call to the next."""
    if target.kind == "sqlite":
        return _read_table(target, job)
    if target.is_server:
        from onceflow.verify.server_targets import read_server

        return read_server(target, job, known)
    return _read_folder(Path(target.path), f"{job}/{target.output}", {} if known is None else known)


# ---------------------------------------------------------------- folders with commits


def body(path: Path) -> dict[str, Any]:
    """The body of a document of ours. Raises `Corrupt` if its checksum is not that of its head."""
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


def _read_folder(root: Path, output: str, known: dict[str, Any]) -> Published:
    if not (root / "_commits").is_dir():
        return Published()
    for _ in range(_TRIES):
        try:
            commits, ledger = _commits(root, output)
            break
        except FileNotFoundError:
            continue  # rolled up while we read: begin again
    else:
        raise Corrupt(f"{root}: what its commits name cannot be found")
    found = Published(ledger=ledger)
    files = [file for commit in commits for file in commit["files"]]
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


def _commits(root: Path, output: str) -> tuple[list[dict[str, Any]], int | None]:
    folder = root / "_commits"
    names = sorted(os.listdir(folder))
    newest = max((n for n in names if n.startswith("rollup-")), default="")
    found: list[dict[str, Any]] = []
    ledger: int | None = None
    if newest:
        rolled = body(folder / newest)
        at = rolled["ledgers"].get(output, {}).get("at")
        ledger = at["epoch"] if at else None
        for manifest in rolled["manifests"]:
            found += _listed(root, manifest["name"])
    for name in names:
        if name[0].isdigit() and name > newest.removeprefix("rollup-"):
            entry = body(folder / name)
            if entry.get("output") == output and entry["type"] == "epoch":
                ledger = entry["epoch"]
            found += [entry] if entry.get("files") else []
    if max((n for n in os.listdir(folder) if n.startswith("rollup-")), default="") != newest:
        raise FileNotFoundError
    mine = [c for c in found if c.get("output", output) == output]
    return mine, ledger


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
    return names, [tuple(_plain(value) for value in row.values()) for row in listed]


def _plain(value: Any) -> Any:
    """Something that can be counted: nested values become text."""
    return repr(value) if isinstance(value, dict | list) else value


# ---------------------------------------------------------------- tables


def _read_table(target: Target, job: str) -> Published:
    path = Path(target.path)
    if not path.exists():
        return Published()
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            db.execute("BEGIN")  # ledger and rows of one moment
            have = {r[0] for r in db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
            found = Published()
            if "_onceflow_ledger" in have:
                asked = "SELECT epoch FROM _onceflow_ledger WHERE output = ?"
                said = db.execute(asked, (f"{job}/{target.output}",)).fetchone()
                found.ledger = said[0] if said else None
            if target.table in have:
                fill(found, db.execute(f'SELECT * FROM "{target.table}"'))
            return found
    except sqlite3.DatabaseError as error:
        raise Corrupt(f"{path}: {error}") from error


def fill(found: Published, cursor: Any) -> None:
    """The rows of a query, without the columns that tell where they come from."""
    names = [column[0] for column in cursor.description]
    kept = [i for i, name in enumerate(names) if name not in _TAGS]
    epoch = names.index("_epoch") if "_epoch" in names else None
    found.names = tuple(names[i] for i in kept)
    for row in cursor:
        found.rows.append(tuple(row[i] for i in kept))
        found.epochs.append(None if epoch is None else row[epoch])


# ---------------------------------------------------------------- the epoch log


@dataclass(frozen=True)
class Decided:
    """A decision as it stands in the epoch log."""

    epoch: int
    term: int
    end: dict[str, Any]
    watermark: int  # of the next epoch, milliseconds
    stateful: bool
    rows: dict[str, int]  # output -> rows

    def read_to(self, source: str) -> list[int]:
        """How far a source was read: the next offset of each partition."""
        end = self.end[source]
        if "next" in end:
            return list(end["next"])
        ((_, topic),) = end.items()  # of Spark's connector: topic -> partition -> next offset
        return [topic[str(partition)] for partition in range(len(topic))]


def decisions(query: Path) -> list[Decided]:
    """The decisions that the epoch log of a query still names, oldest first."""
    folder = query / "onceflow" / "log"
    for _ in range(_TRIES):
        try:
            return list(map(_decided, _entries(folder)))
        except FileNotFoundError:
            continue
    return []


def _entries(folder: Path) -> list[dict[str, Any]]:
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    newest = max((n for n in names if n.startswith("rollup-")), default="")
    found = list(body(folder / newest)["decisions"]) if newest else []
    above = newest.removeprefix("rollup-")
    entries = [body(folder / n) for n in names if n[0].isdigit() and n > above]
    return found + [entry for entry in entries if entry["type"] == "epoch"]


def _decided(entry: dict[str, Any]) -> Decided:
    rows = {
        name: sum(file["rows"] for file in output["files"])
        for name, output in entry["outputs"].items()
    }
    return Decided(
        entry["epoch"], entry["term"], entry["end"], entry["watermark"], bool(entry["state"]), rows
    )
