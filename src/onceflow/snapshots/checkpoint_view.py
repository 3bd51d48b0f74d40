"""What Spark keeps for a query, read without Spark: which epochs, and all that one of them takes.

The epoch log is the truth about a query (`epoch_log.py`); this is what it does not hold itself:
the files of state, what Spark knows about them, and the file sources' own logs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.errors import CheckpointRefused
from onceflow.protocol.epoch_log import Decision
from onceflow.spark.checkpoint import parse_offsets
from onceflow.spark.file_source_log import SourceLog, is_file_offset, names_in, numbers_in
from onceflow.spark.state_files import files_of, stores_of


@dataclass(frozen=True)
class Commit:
    """Spark's own record of an epoch that it has finished."""

    epoch: int
    watermark: int  # of the next epoch, milliseconds
    state: dict[str, list[list[str]]]  # operator -> partition -> ids of the state written


class ReadCheckpoint:
    """A checkpoint of Spark's, of one query. Nothing is changed, and no Spark is needed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # .............................................................. epochs

    def planned(self) -> list[int]:
        """Epochs that have offsets."""
        return numbers_in(self.root / "offsets")

    def committed(self) -> list[int]:
        return numbers_in(self.root / "commits")

    def offsets(self, epoch: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What Spark noted beside them, and source -> offset."""
        path = self.root / "offsets" / str(epoch)
        return parse_offsets(self._read(path), str(path))

    def commit(self, epoch: int) -> Commit:
        path = self.root / "commits" / str(epoch)
        version, _, body = self._read(path).partition("\n")
        try:
            if version != "v2":
                raise ValueError(version)
            fields = json.loads(body)
            return Commit(epoch, fields["nextBatchWatermarkMs"], fields["stateUniqueIds"] or {})
        except (ValueError, KeyError, TypeError):
            raise CheckpointRefused(
                f"{path} is not readable", hint="start the job once: it is written again"
            ) from None

    def _read(self, path: Path) -> str:
        try:
            return path.read_text()
        except FileNotFoundError:
            raise CheckpointRefused(
                f"{path} is missing: Spark keeps the newest epochs only",
                hint="name an epoch that is retained",
            ) from None

    def source_names(self) -> list[str]:
        """The sources that keep something of their own in the checkpoint."""
        return sorted(names_in(self.root / "sources"))

    # .............................................................. all that an epoch takes

    def state_files(self, epoch: int, state: dict[str, list[list[str]]]) -> list[Path]:
        """What the state of this epoch is loaded from, however far back that reaches."""
        found: dict[Path, None] = {}  # a set that keeps its order
        for operator, partitions in state.items():
            for number, ids in enumerate(partitions):
                partition = self.root / "state" / operator / str(number)
                for state_id in ids:
                    store = self._store(partition, epoch, state_id)
                    found |= dict.fromkeys(files_of(store, epoch + 1, state_id))
        for about in sorted((self.root / "state").glob("**/_*/")):  # operators and schemas
            files = (path for path in sorted(about.rglob("*")) if path.is_file())
            found |= dict.fromkeys(path for path in files if not _is_after(path, epoch))
        return list(found)

    def _store(self, partition: Path, epoch: int, state_id: str) -> Path:
        stem = f"{epoch + 1}_{state_id}"
        for store in stores_of(partition):
            if any((store / (stem + end)).exists() for end in (".zip", ".changelog")):
                return store
        raise CheckpointRefused(
            f"state {stem} of {partition} is missing",
            hint="name a newer epoch, or put the checkpoint back from a backup of the home",
        )

    def source_lines(self, decision: Decision) -> dict[str, list[str]]:
        """File source -> the entries of its log up to this epoch, verbatim."""
        found = {}
        for name, offset in decision.end.items():
            if is_file_offset(offset):
                log = SourceLog(self.root / "sources" / name)
                found[name] = log.up_to(offset["logOffset"])
        return found


def _is_after(path: Path, epoch: int) -> bool:
    """What Spark noted of its operators when a later epoch began with other code."""
    return path.name.isdigit() and int(path.name) > epoch
