"""Rows into the embedded log, published by its numbered commits."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from onceflow.contract.abilities import HasReaders
from onceflow.contract.ledger import Ledger, Outcome, Position, Publication
from onceflow.contract.quantities import parse_bytes
from onceflow.contract.schema import columns, refuse_difference
from onceflow.errors import JobError, OnceflowError, TargetBehind
from onceflow.folders.commit_log import Commit, CommitLog
from onceflow.folders.folder import FolderSink
from onceflow.log.commits import Facts
from onceflow.log.embedded import EmbeddedLog
from onceflow.log.new_log import refuse_facts
from onceflow.log.reader_positions import readers
from onceflow.log.segments import key_partition
from onceflow.log.take_back import published_after, remove_dropped, take_back
from onceflow.store.posix import LocalStore

_logger = logging.getLogger(__name__)


class Log(FolderSink, HasReaders):
    """Every row of a decided epoch is in the log exactly once; readers see whole epochs.

    The rows of one epoch have no order. Rows of one `key` are in one partition, in the order of
    epochs. In update mode each row is a new version of its key: the last one counts.

    If there is no log, the first run creates it with the columns of the rows, `partitions` and
    `key`. Several outputs and producers may share one log.
    """

    kind = "log"
    modes = ("append", "update")
    shared = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: str | Iterable[str] | None = None,
        partitions: int | None = None,
        roll: str = "256 MB",
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.key = None if key is None else (key,) if isinstance(key, str) else tuple(key)
        self.partitions = partitions
        self.roll_bytes = parse_bytes(roll)
        self._schema = self._output = ""
        self._log: EmbeddedLog | None = None

    def __str__(self) -> str:
        return f"Log({str(self.path)!r})"

    def arguments(self) -> dict[str, Any]:
        return {
            "path": str(self.path), "key": self.key and list(self.key),
            "partitions": self.partitions, "roll": f"{self.roll_bytes} B",
        }  # fmt: skip

    # -------------------------------------------------------------- before an epoch

    def prepare(self, output: str, schema: str, mode: str) -> None:
        self.refuse_mode(mode, "use Sqlite(path, table=…, key=…) for complete")
        self._schema, self._output = schema, output
        log = self._existing()
        if log is None:
            refuse_facts(Facts("", schema, self.partitions or 1, self.key or ()))
            return
        self._refuse_other(log)

    def _refuse_other(self, log: EmbeddedLog) -> None:
        refuse_difference(str(self), columns(log.facts.schema), columns(self._schema))
        if self.key is not None and self.key != log.facts.key:
            has = f"key {', '.join(log.facts.key)}" if log.facts.key else "no key"
            raise JobError(
                f"{self} has {has}, the sink says key {', '.join(self.key)}",
                hint="leave key= out, or write to a new log",
            )
        if self.partitions not in (None, log.facts.partitions):
            raise JobError(
                f"{self} has {log.facts.partitions} partitions, the sink says {self.partitions}",
                hint="leave partitions= out, or write to a new log",
            )

    def _existing(self) -> EmbeddedLog | None:
        """The log, if it exists and its creation was completed."""
        if self._log is None:
            strange = self.path.exists() and any(self.path.iterdir())
            if not (self.path / "_commits").is_dir():
                if strange:
                    raise JobError(f"{self.path} is not a log", hint="name a log or a new folder")
                return None
            if not any(LocalStore(self.path).list("_commits")):
                return None  # its creator was killed meanwhile
            self._log = EmbeddedLog(self.path)
        return self._log

    @property
    def by(self) -> tuple[str, ...]:  # type: ignore[override]
        facts = self._log.facts if self._log else None
        keyed = facts.key and facts.partitions > 1 if facts else False
        return ("partition",) if keyed else ()

    def by_columns(self) -> list[Any]:
        assert self._log is not None
        facts = self._log.facts
        return [key_partition(facts.key, facts.partitions, columns(facts.schema))]

    def sweep(self, *, below_term: int) -> None:
        super().sweep(below_term=below_term)
        assert self._log is not None
        remove_dropped(self._log)
        self.tidy()

    def _own(self, folder: str) -> Path:
        assert self._output
        return self.path / folder / _short(self._output)

    # -------------------------------------------------------------- ledger and publish

    @property
    def _commit_log(self) -> CommitLog:  # type: ignore[override]
        assert self._log is not None
        return self._log.commit_log

    def published(self, output: str) -> Ledger:
        return Ledger() if self._existing() is None else super().published(output)

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        self._output, log = output, self._existing()
        if log is not None:
            log.commit_log.catch_up()
        if log is None or log.view.facts is None:
            self._log = EmbeddedLog.create(
                self.path, self._schema, partitions=self.partitions or 1, key=self.key or (),
                exist_ok=True,
            )  # fmt: skip
        if self._schema and self._log is not None:
            self._refuse_other(self._log)  # another program may have created it since `prepare`
        return super().fence(output, term=term, token=token)

    def publish(self, publication: Publication) -> Outcome:
        self._open_for(publication)
        return super().publish(publication)

    def add(self, publication: Publication) -> None:
        self._open_for(publication)
        super().add(publication)

    def _open_for(self, publication: Publication) -> None:
        self._output = publication.output
        if self._existing() is None:
            raise self._gone()

    def rewind(self, output: str, *, cut: Position, to: Position, term: int, decision: str) -> None:
        log = self._existing()
        if log is None:
            raise self._gone()
        take_back(log, output, cut=cut, to=to, term=term, decision=decision)

    def refuse_rewind(self, output: str, cut: Position) -> None:
        log = self._existing()
        if log is None:
            raise self._gone()
        published_after(log.refresh(), output, cut)

    def refuse_readers(
        self, output: str, cut: Position, offsets: Callable[[str, str], list[int] | None]
    ) -> None:
        first: dict[int, int] = {}
        for segment in published_after(EmbeddedLog(self.path).refresh(), output, cut):
            first[segment.partition] = min(
                segment.first, first.get(segment.partition, segment.first)
            )
        for reader in readers(self.path):
            at = offsets(reader.home, reader.name) or list(reader.needs)
            if any(at[partition] > offset for partition, offset in first.items()):
                job, _, rest = reader.name.partition("/")
                raise JobError(
                    f"{self}: {reader.name} of {reader.home} has read rows that this would take "
                    "back",
                    hint=f"first return {job} to an epoch before it read them: onceflow rollback "
                    f"{job} --home {reader.home} --to …; or choose --published skip; or, if {rest} "
                    f"is no longer needed: onceflow log trim {self.path} --forget {reader.name}",
                )

    def tidy(self) -> None:
        assert self._log is not None
        try:
            self._log.keep_house()
        except (OnceflowError, OSError) as error:  # the epoch does not depend on it
            _logger.warning("%s: housekeeping failed: %s", self, error)

    def _gone(self) -> TargetBehind:
        return TargetBehind(
            f"{self} is gone: it was set back, replaced or emptied",
            hint="bring back the log as it was (its newest copy)",
        )

    def _facts(self) -> Facts:
        if self._log is None or self._log.view.facts is None:
            raise self._gone()  # while this driver runs
        return self._log.facts

    def _partition(self, publication: Publication, number: int) -> int:
        folder = publication.files[number].partition
        if folder:
            return int(folder.partition("=")[2])
        return (publication.epoch + number) % self._facts().partitions

    def _final(self, publication: Publication, number: int) -> Path:
        """Files of outputs that are staged together have the same names, so the name of the output
        is added."""
        name = os.path.basename(publication.files[number].path).removesuffix(".staged")
        whose = f"{publication.lineage[:8]}-{_short(publication.output)}"
        unique = f"{whose}-{publication.epoch:010d}-{name}"
        return self.path / f"partition={self._partition(publication, number)}" / unique

    def _listed(self) -> set[str]:
        assert self._log is not None
        commits = self._log.refresh().commit_log.remembered()
        return {file["path"] for commit in commits for file in commit["files"]}

    def _commit(self, publication: Publication) -> Commit:
        assert self._log is not None
        files = [
            {**self._entry(publication, n), "partition": self._partition(publication, n)}
            for n in range(len(publication.files))
        ]
        return {**self._log.commit_of(files), "rows": publication.rows}


def _short(output: str) -> str:
    return f"{zlib.crc32(output.encode()):08x}"
