"""A job on disk as a driver and Spark leave it, without either: for tests of snapshots."""

from __future__ import annotations

import json
import uuid
import zipfile
from pathlib import Path
from typing import Any

from onceflow.protocol.epoch_log import Decision, EpochLog
from onceflow.protocol.home import JobFolder, Query, now
from onceflow.snapshots.savepoint import installed_spark

SPARK = installed_spark() or "4.2.1"


class Saved:
    """A job with one query that has state. Each epoch makes a snapshot of it."""

    def __init__(self, home: Path, job: str = "shop", query: str = "out") -> None:
        self.folder = JobFolder(home, job)
        self.query: Query = self.folder.query(self.folder.open_lineage(SPARK), query)
        self.log: EpochLog = self.query.epoch_log()
        self.shared = ""

    def lead(self, term: int = 1, **facts: Any) -> None:
        facts = {"at": now(), "spark": SPARK, "code": "c0de", "outputs": {"out": {}}, **facts}
        self.log.fence(term, facts)

    def decide(self, epochs: int = 1, *, term: int = 1) -> None:
        for _ in range(epochs):
            epoch = self.log.last.epoch + 1 if self.log.last else 0
            self.log.decide(self.decision(epoch, term))
            self._write(f"commits/{epoch}", b"v2\n{}")  # Spark does, when it is published

    def decision(self, epoch: int, term: int = 1) -> Decision:
        state_id = uuid.uuid4().hex
        self._write_state(epoch + 1, state_id)
        end = {"lines": {"logOffset": epoch}}
        line = json.dumps({"path": f"{epoch}.txt", "timestamp": 0, "batchId": epoch})
        self._write(f"sources/lines/{epoch}", f"v1\n{line}".encode())
        offsets = f'v2\n{{"batchWatermarkMs":0}}\nlines:{json.dumps(end["lines"])}'
        self._write(f"offsets/{epoch}", offsets.encode())
        start = {"lines": {"logOffset": epoch - 1}} if epoch else {}
        return Decision(
            epoch, term, now(), start, end, offsets, {"lines": {str(epoch): [line]}},
            {"0": [[state_id]]}, 0, {},
        )  # fmt: skip

    def _write_state(self, version: int, state_id: str) -> None:
        """What it shares with the one before, and a file of its own."""
        store, names = "state/0/0", [f"{state_id}.sst"]
        self._write(f"{store}/SSTs/{state_id}.sst", state_id.encode() * 100)
        self.shared = self.shared or state_id
        if self.shared != state_id:
            names.append(f"{self.shared}.sst")
        path = self.query.folder / store / f"{version}_{state_id}.zip"
        files = {"sstFiles": [{"dfsSstFileName": name} for name in names]}
        with zipfile.ZipFile(path, "w") as held:
            held.writestr("metadata", "v1\n" + json.dumps(files))
        if not (self.query.folder / "state/0/_metadata").exists():  # Spark writes it once
            self._write("state/0/_metadata/metadata", b"v1\n{}")

    def _write(self, name: str, data: bytes) -> None:
        path = self.query.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
