"""The embedded log: a folder that is a partitioned, append-only, replayable log.

    <log>/partition=<p>/<unique>.parquet   segments; they never change
    <log>/_commits, <log>/_manifests       the committed segments, with their offsets
    <log>/_readers                         the readers, and the rows that each still needs
    <log>/_appending                       running producers, so that files of dead ones are removed
    <log>/_adding                          the same for outputs that keep no ledger

Readers see whole commits only. Any number of producers may append at once: a producer that
loses the put of a commit reads the winner's commit and puts its own behind it, with other offsets
and the same segments.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from onceflow.contract.schema import columns, refuse_difference
from onceflow.errors import JobError, OnceflowError
from onceflow.folders.commit_log import Commit, CommitLog
from onceflow.log.append import Appended, append
from onceflow.log.append_journal import sweep
from onceflow.log.commits import Facts, LogState
from onceflow.log.log_reader import LogReader, now
from onceflow.log.new_log import KIND, refuse_facts, refuse_strange_folder, spark_json
from onceflow.log.retention import retain

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_SCHEMA = "value string, event_time timestamp"
_logger = logging.getLogger(__name__)


class EmbeddedLog(LogReader):
    """Rows that were appended are there exactly once, at offsets that never change.

    There is no order between partitions. The log is made for the disk of one machine: for the
    traffic of many machines use Kafka.
    """

    # -------------------------------------------------------------- creation

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        schema: str | pa.Schema = DEFAULT_SCHEMA,
        *,
        partitions: int = 1,
        key: Iterable[str] = (),
        retain_ms: int | None = None,
        retain_bytes: int | None = None,
        exist_ok: bool = False,
    ) -> EmbeddedLog:
        """Create a log. `exist_ok`: accept an existing log, if it has these columns."""
        root = Path(os.path.abspath(path))
        facts = Facts(
            id=str(uuid.uuid4()),
            schema=spark_json(schema),
            partitions=partitions,
            key=tuple(key),
            retain_ms=retain_ms,
            retain_bytes=retain_bytes,
        )
        refuse_facts(facts)
        refuse_strange_folder(root)
        view = LogState()
        log = CommitLog(root, KIND, view)

        def make() -> Commit | None:
            if view.facts is not None:
                return None
            return {"type": "create", "facts": asdict(facts), "at": now()}

        done = log.append(make)
        if done is None and view.facts is not None and view.facts.id != facts.id:
            if not exist_ok:
                raise JobError(f"{root} is a log already", hint="append to it, or name a new one")
            refuse_difference(f"Log({str(root)!r})", columns(view.facts.schema),
                              columns(facts.schema))  # fmt: skip
        return cls(root)

    # -------------------------------------------------------------- appending

    def append(
        self,
        rows: pa.Table | Iterable[pa.Table],
        *,
        producer: str = "",
        sequence: int | None = None,
        digest: Callable[[], str] | None = None,
    ) -> Appended:
        """Append all rows in one commit, or none of them.

        With `producer` and `sequence` (a number that grows) a repeated append has an effect only
        once: the log remembers the last sequence of each producer. It is the same append if the
        rows are the same, or if `digest`, called after all rows were read, returns the same.
        """
        done = append(self, rows, producer=producer, sequence=sequence, digest=digest)
        if done.commit is not None:
            try:
                self.refresh()
                self.keep_house(done.commit)
            except (OnceflowError, OSError) as error:  # the rows are appended: no reason to retry
                _logger.warning(
                    "%s: the rows are appended, but housekeeping failed: %s", self, error
                )
        return done

    def keep_house(self, commit: int = 0) -> None:
        """After a commit: roll up and apply retention now and then; sweep after dead producers."""
        mine = commit % self.roll_up_every == 0  # else its producer was killed
        if self.roll_up(slack=0 if mine else 2 * self.roll_up_every):
            self.refresh()
            retain(self)
        sweep(self.path, self)
