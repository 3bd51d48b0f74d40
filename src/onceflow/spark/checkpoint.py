"""The files that Spark keeps for a query: metadata, offsets, commits, sources, state."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onceflow.errors import CheckpointRefused, PlanChanged
from onceflow.spark.file_source_log import (
    SourceEntries,
    SourceLog,
    crc_of,
    identity_of,
    is_file_offset,
    names_in,
    numbers_in,
    remove,
)
from onceflow.spark.state_files import PARTS, stores_of
from onceflow.store.posix import replace_file


def parse_offsets(text: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and source -> offset of an `offsets/<N>` file (format 2: by source name)."""
    lines = text.split("\n")
    if re.fullmatch(r"v\d+", lines[0]) and lines[0] != "v2":
        raise CheckpointRefused(
            f"{where} has offset log format {lines[0]}: sources are not named in it",
            hint="it was written with weaker settings; start the job under a new home",
        )
    try:
        if lines[0] != "v2":
            raise ValueError(lines[0])
        metadata = json.loads(lines[1])
        offsets = {}
        for line in filter(None, lines[2:]):
            name, _, offset = line.partition(":")
            offsets[name] = json.loads(offset)
    except (ValueError, IndexError):
        raise PlanChanged(f"{where} is not readable", hint="start the job again") from None
    return metadata, offsets


def advance_watermark(offsets: str, watermark: int, time_ms: int) -> str | None:
    """The offsets entry of the epoch without data; None if the watermark did not move."""
    head, metadata, *rest = offsets.split("\n")
    fields = json.loads(metadata)
    if watermark <= fields["batchWatermarkMs"]:
        return None
    fields.update(batchWatermarkMs=watermark, batchTimestampMs=time_ms)
    return "\n".join([head, json.dumps(fields, separators=(",", ":")), *rest])


def offset_after(start: Any, end: Any) -> bool:
    """Does `start` lie behind `end`, as far as JSON offsets can be compared?"""
    if isinstance(start, dict) and isinstance(end, dict):
        return any(offset_after(start[key], end[key]) for key in start if key in end)
    numbers = (int, float)
    return isinstance(start, numbers) and isinstance(end, numbers) and start > end


class Checkpoint:
    """The files that Spark keeps for one query. Local file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stores: dict[Path, list[Path]] = {}
        self._durable: dict[Path, set[Path]] = {}  # snapshots that `new_snapshots` has returned

    # .............................................................. identity

    def query_id(self) -> str | None:
        try:
            return str(json.loads((self.root / "metadata").read_text())["id"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise CheckpointRefused(
                f"{self.root / 'metadata'} is not readable",
                hint="put it back from a backup of the home",
            ) from None

    def set_query_id(self, query_id: str) -> None:
        replace_file(self.root / "metadata", json.dumps({"id": query_id}).encode())

    # .............................................................. offsets and commits

    def offsets(self, epoch: int) -> str | None:
        try:
            return (self.root / "offsets" / str(epoch)).read_text()
        except FileNotFoundError:
            return None

    def set_offsets(self, epoch: int, text: str) -> None:
        self._set(self.root / "offsets" / str(epoch), text)

    def set_commit(self, epoch: int, watermark: int, state: dict[str, list[list[str]]]) -> None:
        body = {"nextBatchWatermarkMs": watermark, "stateUniqueIds": state}
        self._set(
            self.root / "commits" / str(epoch), "v2\n" + json.dumps(body, separators=(",", ":"))
        )

    def committed(self) -> list[int]:
        return numbers_in(self.root / "commits")

    def drop_offsets_above(self, epoch: int) -> list[int]:
        above = [n for n in numbers_in(self.root / "offsets") if n > epoch]
        for n in sorted(above, reverse=True):  # Spark refuses a gap, which a crash here could leave
            remove(self.root / "offsets" / str(n))
        return above

    @staticmethod
    def _set(path: Path, text: str) -> None:
        crc_of(path).unlink(missing_ok=True)
        if not path.exists() or path.read_bytes() != text.encode():
            replace_file(path, text.encode())

    # .............................................................. the file source's own log

    def source_entries(self, start: dict[str, Any], end: dict[str, Any]) -> SourceEntries:
        """The log entries of the range for each file source, verbatim."""
        found: SourceEntries = {}
        for name, offset in end.items():
            if not is_file_offset(offset):
                continue
            first = start[name]["logOffset"] + 1 if start.get(name) else 0
            log = SourceLog(self.root / "sources" / name)
            numbers = range(first, offset["logOffset"] + 1)
            found[name] = {str(n): log.entry(n) for n in numbers}
        return found

    def epoch_files(
        self, epoch: int, end: dict[str, Any], state: dict[str, list[list[str]]]
    ) -> list[Path]:
        """All files that Spark wrote for this epoch and that must survive a power cut."""
        sources = [
            path
            for name, offset in end.items()
            if is_file_offset(offset)
            for path in SourceLog(self.root / "sources" / name).holders(offset["logOffset"])
        ]
        return [self.root / "offsets" / str(epoch), *sources, *self.state_files(epoch, state)]

    def new_snapshots(self, files: list[Path]) -> list[Path]:
        """Snapshots that these state files may need, except those that an earlier call returned:
        Spark writes snapshots after the epochs, and removes old ones."""
        found = []
        for store in {path.parent for path in files if path.is_relative_to(self.root / "state")}:
            known = self._durable.get(store, set())
            existing = {store / name for name in names_in(store) if ".zip" in name}
            if existing - known:
                existing |= {store / of / name for of in PARTS for name in names_in(store / of)}
                found += sorted(existing - known)
                self._durable[store] = existing
        return found

    def set_sources(
        self,
        entries: list[SourceEntries],
        end: dict[str, Any],
        compact_interval: int,
        check: Callable[[], object],
    ) -> None:
        """Make the logs of the file sources agree with the decisions, and remove later entries.

        `check`: as in `clear`.
        """
        ours = {name for name, offset in end.items() if is_file_offset(offset)}
        for name in sorted({*names_in(self.root / "sources"), *ours} - (set(end) - ours)):
            log = SourceLog(self.root / "sources" / name)
            if name in ours or log.is_file_log():
                wanted = {
                    int(n): lines
                    for decided in entries
                    for n, lines in decided.get(name, {}).items()
                }
                last = end[name]["logOffset"] if name in ours else -1
                log.restore(wanted, last, compact_interval, check)

    # .............................................................. state

    def clear(self, check: Callable[[], object]) -> None:
        """Empty the checkpoint: nothing is decided, and Spark refuses to begin beside old files,
        even a partial one.

        `check` raises if a newer driver leads. Files that exist before the check are of earlier
        drivers, and only these are removed: we may be paused here while a successor works.
        """
        seen = [
            (path, identity_of(path))
            for name in ("offsets", "commits", "state")
            for path in sorted((self.root / name).rglob("*"), reverse=True)
        ]
        check()
        for path, identity in seen:
            with contextlib.suppress(OSError):  # it is gone, or a folder with new files in it
                if path.is_dir():
                    path.rmdir()
                elif identity_of(path) == identity:
                    path.unlink()
        for name in ("offsets", "commits", "state"):
            with contextlib.suppress(OSError):
                (self.root / name).rmdir()

    def state_files(self, epoch: int, state: dict[str, list[list[str]]]) -> list[Path]:
        """The files of this epoch's state ids; `CheckpointRefused` if one is missing."""
        found = []
        for operator, partitions in state.items():
            for partition, ids in enumerate(partitions):
                stores = self._stores_of(self.root / "state" / operator / str(partition))
                for state_id in ids:
                    stem = f"{epoch + 1}_{state_id}"
                    files = [
                        path
                        for store in stores
                        for suffix in (".changelog", ".zip")
                        for path in (store / (stem + suffix), store / (stem + suffix + ".crc"))
                        if path.exists()
                    ]
                    if not files:
                        raise CheckpointRefused(
                            f"state {stem} of operator {operator}, partition {partition} is "
                            f"missing under {self.root / 'state'}",
                            hint="put the checkpoint back from a backup of the home",
                        )
                    found += files
        return found

    def _stores_of(self, partition: Path) -> list[Path]:
        if partition not in self._stores:
            self._stores[partition] = stores_of(partition)
        return self._stores[partition]
