"""Make Spark's files agree with the epoch log."""

from __future__ import annotations

import time
from typing import Any

from onceflow.faults.points import reach
from onceflow.protocol.epoch_log import Decision, EpochLog
from onceflow.spark.checkpoint import Checkpoint, advance_watermark
from onceflow.spark.file_source_log import COMPACT_INTERVAL, SourceEntries


class CheckpointRepair:
    """Corrects Spark's checkpoint of one query from its decisions."""

    def __init__(self, checkpoint: Checkpoint, log: EpochLog, compact_interval: str) -> None:
        self._checkpoint, self._log = checkpoint, log
        self._compact_interval = int(compact_interval)

    @classmethod
    def of(cls, checkpoint: Checkpoint, log: EpochLog, spark: Any) -> CheckpointRepair:
        return cls(checkpoint, log, spark.conf.get(COMPACT_INTERVAL, "10"))

    def repair(self) -> None:
        """Commit what is decided in Spark's checkpoint, and remove the rest from it."""
        decisions, last = self._log.decisions, self._log.last
        self._set_sources([d.sources for d in decisions], {} if last is None else last.end)
        reach("open.sources-repaired")
        if last is None:
            self._checkpoint.clear(self._log.check)
            reach("open.checkpoint-cleared")
        else:
            self._checkpoint.state_files(last.epoch, last.state)  # raises if a file is missing
            for decision in decisions[-2:]:
                self._checkpoint.set_offsets(decision.epoch, decision.offsets)
                reach("open.offsets-repaired")
            self._checkpoint.set_commit(last.epoch, last.watermark, last.state)
            reach("open.commit-repaired")
        self._checkpoint.drop_offsets_above(-1 if last is None else last.epoch)
        reach("open.offsets-dropped")

    def plan_epoch(self, wanted: Decision) -> None:
        """Plan the next epoch with the boundaries that it had in the parent lineage."""
        entries = [*(decision.sources for decision in self._log.decisions), wanted.sources]
        self._set_sources(entries, wanted.end)
        self._checkpoint.set_offsets(wanted.epoch, wanted.offsets)

    def plan_no_data_epoch(self) -> None:
        """Plan the epoch without data that is due if the watermark moved in the last epoch."""
        last = self._log.last
        if last is None or not last.state:
            return
        due = advance_watermark(last.offsets, last.watermark, int(time.time() * 1000))
        if due is not None:
            self._checkpoint.set_offsets(last.epoch + 1, due)
            reach("open.no-data-planned")

    def _set_sources(self, entries: list[SourceEntries], end: dict[str, Any]) -> None:
        self._checkpoint.set_sources(entries, end, self._compact_interval, self._log.check)
