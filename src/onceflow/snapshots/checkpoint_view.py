"""Read a query's Spark checkpoint, without Spark: its epochs, and all that one of them needs.

Decisions are in the epoch log. This module reads what the epoch log does not hold: the files of
state, Spark's notes about them, and the logs of file sources.
"""

from __future__ import annotations

from pathlib import Path

from onceflow.errors import CheckpointRefused
from onceflow.protocol.epoch_log import Decision
from onceflow.spark.file_source_log import SourceLog, is_file_offset, numbers_in
from onceflow.spark.state_files import files_of, stores_of


class ReadCheckpoint:
    """Spark's checkpoint of one query. Changes nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # .............................................................. epochs

    def planned(self) -> list[int]:
        """Epochs that have offsets."""
        return numbers_in(self.root / "offsets")

    def committed(self) -> list[int]:
        return numbers_in(self.root / "commits")

    # .............................................................. what an epoch needs

    def state_files(self, epoch: int, state: dict[str, list[list[str]]]) -> list[Path]:
        """The files that Spark loads the state of this epoch from, however far back they reach."""
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
            hint="name a newer epoch, or restore the checkpoint from a backup of the home",
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
    """Did Spark write this note about its operators in a later epoch, which ran other code?"""
    return path.name.isdigit() and int(path.name) > epoch
