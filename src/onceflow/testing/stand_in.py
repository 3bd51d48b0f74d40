"""A stand-in for the driver: it calls a sink as `protocol/epoch.py` does, without Spark."""

from __future__ import annotations

import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onceflow.contract.abilities import Staged, clean_up_of, partition_names, require_rewind, stage
from onceflow.contract.ledger import Committable, Ledger, Outcome, Position, Publication
from onceflow.contract.schema import arrow_schema
from onceflow.contract.sink import Sink
from onceflow.contract.staged_files import BY, NULL_FOLDER, describe, harden, read_staged, verify
from onceflow.errors import SetupError
from onceflow.testing.rows import Row

OUTPUT = "job/query/output"
LINEAGE = "0f8fad5b-d9cb-469f-a165-70867728950e"


@dataclass
class StandIn:
    """The driver of one term, for one output. Its steps are those of the epoch protocol."""

    sink: Sink
    home: Path
    schema: str
    term: int
    folders: Callable[[Sink, Row], tuple[str, ...]]  # row -> a value for each level of sub-folders
    output: str = OUTPUT
    mode: str = "append"
    lineage: str = LINEAGE
    session: Any = None
    ledger: Ledger = field(default_factory=Ledger)

    # -------------------------------------------------------------- opening

    def open(self, last: Publication | None = None) -> StandIn:
        """All steps of opening; `last` is the decision that the epoch log has."""
        self.fence()
        if last is not None:
            self.recover(last)
        self.sweep()
        return self

    def fence(self) -> Ledger:
        self.sink.prepare(self.output, self.schema, self.mode)
        self.sink.published(self.output)
        clean_up_of(self.sink).shut_out(self.output)
        self.ledger = self.sink.fence(self.output, term=self.term, token=f"token {self.term}")
        return self.ledger

    def recover(self, last: Publication) -> Outcome:
        if self.ledger.position != last.position:
            for file in last.files:
                if Path(file.path).exists():
                    verify(file, file.path)
        return self.publish(last)

    def sweep(self) -> None:
        for folder in (self.home / "staged").glob("*-*-*-*"):
            if int(folder.name.rsplit("-", 2)[1]) < self.term:
                shutil.rmtree(folder, ignore_errors=True)
        clean_up_of(self.sink).sweep(below_term=self.term)
        clean_up_of(self.sink).settled(self.output)

    def rewind(self, cut: Publication) -> None:
        """Return the target to its state after `cut`, in our own lineage."""
        to = Position(self.lineage, cut.epoch)
        require_rewind(self.sink).rewind(
            self.output, cut=cut.position, to=to, term=self.term, decision=cut.decision
        )
        self.ledger = Ledger(self.term, to, cut.decision)

    # -------------------------------------------------------------- one epoch

    def run(self, epoch: int, rows: Iterable[Row]) -> Publication:
        """Stage, decide, publish, sweep."""
        decided = self.stage(epoch, rows)
        outcome = self.publish(decided)
        assert outcome is Outcome.PUBLISHED, f"publish of a new epoch says: {outcome}"
        self.drop_staged(epoch)
        clean_up_of(self.sink).tidy()
        return decided

    def stage(
        self, epoch: int, rows: Iterable[Row], *, group: int | None = None, empty: bool = False
    ) -> Publication:
        """Stage rows and harden them. Returns the decision of the epoch.

        `group`: rows of a row group. `empty`: add a file without rows between the two others.
        """
        tag = f"{self.lineage[:8]}-{epoch}-{self.term}-{uuid.uuid4().hex[:8]}"
        folder = self.home / "staged" / tag
        root = folder / "rows"
        root.mkdir(parents=True)
        self._write(list(rows), root, group)
        files = describe(root, partition_names(self.sink))
        staged = Staged(
            files=(files[0], self._empty_file(files[0]), *files[1:]) if empty else files,
            folder=folder,
            scratch=folder / "0",
            tag=tag,
            schema=self.schema,
            read=lambda: self._read(root),
        )
        files = stage(self.sink, staged)
        harden([file.path for file in files], self.home, set())
        return self._decision(epoch, files)

    def publish(self, decided: Publication) -> Outcome:
        outcome = self.sink.publish(replace(decided, term=self.term))
        self.ledger = Ledger(self.term, decided.position, decided.decision)
        return outcome

    def drop_staged(self, epoch: int) -> None:
        for folder in (self.home / "staged").glob(f"{self.lineage[:8]}-{epoch}-*-*"):
            shutil.rmtree(folder)

    def _decision(self, epoch: int, files: tuple[Committable, ...]) -> Publication:
        return Publication(
            output=self.output,
            lineage=self.lineage,
            epoch=epoch,
            term=self.term,
            previous=self.ledger.position,
            files=files,
            schema=self.schema,
            mode=self.mode,
            decision=f"decision {epoch} of {self.lineage[:8]}",
        )

    def _write(self, rows: list[Row], root: Path, group: int | None) -> None:
        """Write two files in each folder with several rows, so that tests can see a part."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts: dict[Path, list[Row]] = {}
        for row in rows:
            values = self.folders(self.sink, row)
            folder = root.joinpath(*(f"{BY}{i}={value}" for i, value in enumerate(values)))
            parts.setdefault(folder, []).append(row)
        for folder, part in parts.items():
            folder.mkdir(parents=True, exist_ok=True)
            for number, half in enumerate((part[: len(part) // 2], part[len(part) // 2 :])):
                if half:
                    table = pa.Table.from_pylist(half, arrow_schema(self.schema))
                    # As Spark names them: the order of the names is the order of the rows.
                    name = f"part-{2 * number:05}-{uuid.uuid4()}.parquet"
                    pq.write_table(table, folder / name, row_group_size=group)

    def _empty_file(self, before: Committable) -> Committable:
        """A file without rows in the same folder, with the next name."""
        import pyarrow.parquet as pq

        path = Path(before.path).with_name(f"part-00001-{uuid.uuid4()}.parquet")
        pq.write_table(arrow_schema(self.schema).empty_table(), path)
        data = path.read_bytes()
        return replace(before, path=str(path), rows=0, bytes=len(data), crc32=zlib.crc32(data))

    def _read(self, root: Path) -> Any:
        if self.session is None:
            raise SetupError(
                f"{self.sink} reads the staged rows with Spark, and the contract has no session",
                hint="override the fixture `session` of the contract so that it returns one",
            )
        return read_staged(self.session, root, self.schema, partition_names(self.sink))


def folder_values(sink: Sink, row: Row) -> tuple[str, ...]:
    """The names of the folders that Spark makes for the columns of `by`."""
    return tuple(_text(row[name]) for name in partition_names(sink))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return NULL_FOLDER if value in (None, "") else str(value)
