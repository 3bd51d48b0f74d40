"""Files and standard input as Arrow tables for one append: JSON lines, CSV, text, Parquet.

A line that does not fit is never read as something else and never skipped silently: either the
whole input is read and then refused with a list of errors, or the lines that do not fit are written
durably to a file of their own (`RejectFile`) before the last table is returned.

No library keeps these rules. `pyarrow.csv` reads 1e400 as infinity, 0x10 as 16 and "d"e as de,
accepts a quote that is never closed and the second of two columns of one name, and stops at the
first bad value without the number of its line. `msgspec` accepts the last of two members of one
name and rounds a time that is finer than microseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from onceflow.contract.schema import arrow_schema
from onceflow.errors import BadInput, JobError
from onceflow.log.strict_values import Malformed, from_json, from_text, load_json
from onceflow.log.text_records import Record, cells_of, csv_records, decode, numbered_lines
from onceflow.store.posix import fsync_dir, translate_disk_full

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("json", "csv", "parquet", "text")
_EXTENSIONS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet",
    ".txt": "text",
}  # fmt: skip
_CHUNK_LINES = 100_000
_CHUNK_BYTES = 64 * 1024 * 1024
_LISTED = 20

Row = tuple[Any, ...]
Parse = Callable[[str], Row | None]  # None: an empty line


@dataclass(frozen=True)
class Input:
    """A file, or standard input ("-"), and the format of its rows."""

    path: str
    format: str

    @classmethod
    def of(cls, path: str, format: str | None = None) -> Input:
        found = format or ("json" if path == "-" else _EXTENSIONS.get(Path(path).suffix.lower()))
        if found is None:
            raise JobError(
                f"the format of {path} cannot be told from its name",
                hint=f"say --format {', '.join(FORMATS[:-1])} or {FORMATS[-1]}",
            )
        if path == "-" and found == "parquet":
            raise JobError("Parquet cannot be read from standard input", hint="name the file")
        if path != "-" and (os.path.isdir(path) or not os.path.exists(path)):
            says = "is a folder" if os.path.isdir(path) else "does not exist"
            raise JobError(f"{path} {says}", hint="give the path of a file")
        return cls(path, found)

    @property
    def name(self) -> str:
        return "standard input" if self.path == "-" else self.path

    def open(self) -> contextlib.AbstractContextManager[BinaryIO]:
        if self.path == "-":
            return contextlib.nullcontext(sys.stdin.buffer)
        return open(self.path, "rb")


class RejectFile:
    """A new file with the rejected lines, byte for byte. Without such lines it is not created."""

    def __init__(self, path: Path) -> None:
        if os.path.lexists(path):
            raise JobError(
                f"{path} exists already",
                hint="name a new file, or remove this one if an interrupted append left it",
            )
        if not path.absolute().parent.is_dir():
            raise JobError(f"{path} is in a folder that does not exist", hint="create the folder")
        self.path = path
        self._file: BinaryIO | None = None

    def add(self, record: bytes) -> None:
        with translate_disk_full(self.path):
            if self._file is None:
                self._file = open(self.path, "xb")  # noqa: SIM115 - until `keep` or `drop`
            self._file.write(record if record.endswith(b"\n") else record + b"\n")

    def keep(self) -> None:
        if self._file is not None:
            with translate_disk_full(self.path), self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            fsync_dir(self.path.parent)

    def drop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self.path.unlink(missing_ok=True)


class RowInput:
    """Reads inputs once, from the first to the last, as tables with the columns of a log.

    `schema` is Spark's JSON. `now` (microseconds since 1970) is the event time of lines of text.
    """

    def __init__(
        self,
        inputs: Iterable[Input],
        schema: str,
        *,
        now: int,
        rejects: RejectFile | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.inputs = list(inputs)
        self.fields: list[dict[str, Any]] = json.loads(schema)["fields"]
        self.rows = self.bad = 0
        self._schema = schema
        self._now = now
        self._rejects = rejects
        self._progress = progress
        self._complaints: list[str] = []
        self._digest = hashlib.sha256()
        for source in self.inputs:
            if source.format == "text":
                self._refuse_text()
            if source.format == "parquet" and rejects is not None:
                raise JobError("a Parquet file has no lines to reject", hint="leave out --reject")

    def digest(self) -> str:
        """A digest of the bytes that were read: the same for the same input."""
        return self._digest.hexdigest()[:32]

    def tables(self) -> Generator[pa.Table]:
        """All rows that fit, in order. Raises `BadInput` at the end if some do not fit and there is
        no file for them; then the caller must discard the tables."""
        whole = False
        try:
            for source in self.inputs:
                self._digest.update(f"{source.format}\n".encode())
                read = self._parquet if source.format == "parquet" else self._lines
                yield from read(source)
            if self.bad and self._rejects is None:
                raise self._refusal()
            if self._rejects is not None:
                self._rejects.keep()
            whole = True
        finally:
            if not whole and self._rejects is not None:
                self._rejects.drop()

    # -------------------------------------------------------------- lines

    def _lines(self, source: Input) -> Iterator[pa.Table]:
        rows: list[Row] = []
        size = 0
        with source.open() as file:
            records = numbered_lines(file, self._digest.update)
            if source.format == "csv":
                records = csv_records(records, source.name)
                parse = self._csv_parser(records, source.name)
            else:
                parse = self._json_parser() if source.format == "json" else self._text_parser()
            for line, record in records:
                try:
                    row = parse(decode(record))
                except Malformed as error:
                    self._refuse(f"{source.name}, line {line}: {error}", record)
                    continue
                if row is None:
                    continue
                rows.append(row)
                size += len(record)
                if len(rows) >= _CHUNK_LINES or size >= _CHUNK_BYTES:
                    yield from self._table(rows)
                    rows, size = [], 0
        yield from self._table(rows)

    def _table(self, rows: list[Row]) -> Iterator[pa.Table]:
        import pyarrow as pa

        self.rows += len(rows)
        self._progress(self.rows)
        if rows and (not self.bad or self._rejects is not None):
            schema = arrow_schema(self._schema)
            columns = zip(*rows, strict=True)
            arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
            yield pa.table(arrays, schema=schema)

    def _refuse(self, complaint: str, record: bytes) -> None:
        self.bad += 1
        if self._rejects is not None:
            self._rejects.add(record)
        elif len(self._complaints) < _LISTED:
            self._complaints.append(complaint)

    def _refusal(self) -> BadInput:
        more = self.bad - len(self._complaints)
        listed = [*self._complaints, *([f"and {more:,} more"] if more else [])]
        lines = "line does" if self.bad == 1 else "lines do"
        return BadInput(
            f"{self.bad:,} {lines} not fit, so nothing was appended:\n  " + "\n  ".join(listed),
            hint="correct them, or send them to a file of their own: --reject FILE",
        )

    # -------------------------------------------------------------- formats

    def _json_parser(self) -> Parse:
        parse = from_json({"type": "struct", "fields": self.fields})
        return lambda line: parse(load_json(line)) if line.strip() else None

    def _text_parser(self) -> Parse:
        row: list[Any] = [None] * len(self.fields)
        kinds = [(field["name"], field["type"]) for field in self.fields]
        if ("event_time", "timestamp") in kinds:
            row[kinds.index(("event_time", "timestamp"))] = self._now
        at = kinds.index(("value", "string"))
        return lambda line: (*row[:at], line, *row[at + 1 :]) if line else None

    def _refuse_text(self) -> None:
        if ("value", "string") not in [(field["name"], field["type"]) for field in self.fields]:
            raise JobError(
                "lines of text need a log with a column value of type string",
                hint="append JSON or CSV, or create a log with that column",
            )

    def _csv_parser(self, records: Iterator[Record], name: str) -> Parse:
        """Reads the header, the first of the records."""
        line, header = next(((n, r) for n, r in records if r.strip()), (1, b""))
        try:
            names = [cell or "" for cell in cells_of(decode(header))]
            self._refuse_header(names)
        except Malformed as error:
            raise BadInput(
                f"{name}, line {line}: {error}; nothing was appended",
                hint="the first line names the columns: "
                + ",".join(field["name"] for field in self.fields),
            ) from None
        parsers = {field["name"]: from_text(field["type"]) for field in self.fields}
        order = [
            (names.index(field["name"]) if field["name"] in names else None, field["name"])
            for field in self.fields
        ]

        def parse(line: str) -> Row | None:
            if not line:
                return None
            cells = cells_of(line)
            if len(cells) != len(names):
                raise Malformed(f"there are {len(cells)} fields, the header has {len(names)}")
            row = []
            for at, column in order:
                cell = None if at is None else cells[at]
                try:
                    row.append(None if cell is None else parsers[column](cell))
                except Malformed as error:
                    raise error.inside(column) from None
            return tuple(row)

        return parse

    def _refuse_header(self, names: list[str]) -> None:
        known = [field["name"] for field in self.fields]
        if names == [""]:
            raise Malformed("there is no header line")
        for name in names:
            if name not in known:
                raise Malformed(f"there is no column {json.dumps(name, ensure_ascii=False)}")
            if names.count(name) > 1:
                raise Malformed(f"column {name} is there twice")

    def _parquet(self, source: Input) -> Iterator[pa.Table]:
        import pyarrow as pa

        with source.open() as file:
            while data := file.read(1024 * 1024):
                self._digest.update(data)
        with parquet_file(source.path) as rows:
            yield rows.schema_arrow.empty_table()  # to refuse columns that do not fit at once
            batches = rows.iter_batches(_CHUNK_LINES)
            while (batch := _next(batches, source.path)) is not None:
                self.rows += batch.num_rows
                self._progress(self.rows)
                yield pa.Table.from_batches([batch])


# ---------------------------------------------------------------- Parquet


@contextlib.contextmanager
def parquet_file(path: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise _not_parquet(path, error) from error
    with file:
        yield file


def _next(batches: Iterator[pa.RecordBatch], path: str) -> pa.RecordBatch | None:
    import pyarrow as pa

    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        raise _not_parquet(path, error) from error


def _not_parquet(path: str, error: BaseException) -> BadInput:
    return BadInput(
        f"{path} cannot be read as Parquet: {error}; nothing was appended",
        hint="write the file again, or say --format for what it is",
    )
