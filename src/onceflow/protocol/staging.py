"""Stage the rows of an epoch where no reader sees them, in one Spark action.

Spark's own Parquet writer stages them: rows stay in the JVM, and Spark picks the winning task
attempts, the same attempts whose state counts. If the rows need no column of ours, the writer runs
the plan of the epoch itself, which saves one copy of each row. Several outputs share the action; an
integer column says which output a row goes to. (Partitioning by the user's own string would turn ""
into null.)

The driver collects and writes a small epoch itself, which takes a third of the time: the result of
a task is that of its first attempt to succeed, and so is its state.

The plan counts the rows of each output on the way (`contract/observation.py`). Staged files that
hold another number of rows are refused before anything is decided on them: if the staging folder of
a worker is another folder than the driver's, its task leaves no file here, and no error.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from onceflow.contract.abilities import CanPartition, CanRefuseRows, Staged, partition_names, stage
from onceflow.contract.ledger import Committable
from onceflow.contract.observation import Observed
from onceflow.contract.schema import (
    arrow_schema,
    columns,
    quoted,
    selected,
)
from onceflow.contract.sink import Sink
from onceflow.contract.staged_files import BY as _BY
from onceflow.contract.staged_files import (
    COMMITTER,
    NULL_FOLDER,
    describe,
    folder_name,
    keep_columns,
    read_staged,
    refuse_long_folder,
    set_apart,
    split,
)
from onceflow.errors import BadRows, JobError, StagingDiffers
from onceflow.faults.points import reach
from onceflow.spark.running_query import Load, RunningQuery
from onceflow.store.posix import translate_disk_full

_logger = logging.getLogger(__name__)
_ROUTE = "_onceflow_route"
_NOWHERE = -1
_SMALL_ROWS, _SMALL_BYTES = 25_000, 4_000_000  # limits for the epoch before
_SMALL_IN_MEMORY = 32_000_000  # bytes of that epoch as Arrow; a file is compressed
_GROWS = 4  # an epoch with more than so many times the input of the one before is not small
_SMALL_STATE = 50_000  # rows of state: all windows of a query may close in one epoch
_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.maxConcurrentOutputFileWriters": "16",
    # pyarrow and other readers do not know the Julian calendar.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
}
_QUICK = {"parquet.compression.codec.zstd.level": "1"}  # if the session writes zstd
_WIDTHS = {
    "boolean": 1,
    "byte": 1,
    "short": 2,
    "integer": 4,
    "float": 4,
    "string": 24,
    "binary": 24,
}


class Stager:
    """Stages the epochs of one query for its outputs."""

    def __init__(
        self,
        outputs: Mapping[str, Sink],
        by: str | None,
        schema: str,
        on_bad: str | None = None,
        columns_of: Mapping[str, Sequence[str]] | None = None,
        *,
        bad_only: bool = False,
    ) -> None:
        """`columns_of`: the columns of outputs that do not get all. `on_bad`: the output that gets
        rows which their own output cannot store; `bad_only`: it gets no other rows."""
        self._outputs = outputs
        self.routes = {n: s for n, s in outputs.items() if not (bad_only and n == on_bad)}
        self._columns_of = columns_of or {}
        self._on_bad = on_bad
        self._route_by = by
        self._schema = schema
        self._bytes_per_row = float(sum(_WIDTHS.get(t, 8) for t in columns(schema).values()))
        self._last: tuple[int, int, int] | None = None  # rows, bytes and input of the epoch before
        self._in_memory = 0  # bytes of the last epoch that the driver collected

    def stage(
        self,
        batch: Any,
        folder: Path,
        load: Load,
        observed: Callable[[], Observed],
        running: RunningQuery | None = None,
    ) -> dict[str, tuple[Committable, ...]]:
        """Run the one action over `batch` and return the staged files of each output.

        `observed` returns what that action observed. `running`: the query, if `batch` is its plan
        unchanged. The name of every file that is written contains the name of `folder`.
        """
        self._refuse_folders_for_unfit()
        spark, rows, tag = batch.sparkSession, self._with_routes(batch), folder.name
        if self._is_small(load):
            self._collect(rows, folder / "rows")
        else:
            self._write(rows, folder / "rows", running)
        reach("stage.written")
        counted = observed()
        self._refuse_unrouted(folder / "rows", counted.unrouted)
        roots = self._roots(folder / "rows")
        found = {
            name: describe(roots[name], partition_names(sink))
            for name, sink in self._outputs.items()
        }
        expected = {name: counted.rows.get(name, 0) for name in self._outputs}
        for name, files in found.items():
            refuse_other_rows(f"output {name!r}", expected[name], files, roots[name])
        if self._on_bad is not None:
            self._set_apart(found, roots, self._on_bad, folder / "judged", expected)
            self._narrow(roots)
            for name in self._columns_of:
                found[name] = describe(roots[name], partition_names(self._outputs[name]))
        staged, total = {}, [0, 0]
        for route, (name, sink) in enumerate(self._outputs.items()):
            root, files = roots[name], found[name]
            self._note_row_size(files)
            total = [total[0] + sum(f.rows for f in files), total[1] + sum(f.bytes for f in files)]
            schema, scratch = self._schema_of(name), folder / f"{route}"
            read = partial(read_staged, spark, root, schema, partition_names(sink))
            staged[name] = stage(sink, Staged(files, folder, scratch, tag, schema, read))
            refuse_other_rows(f"output {name!r}", expected[name], staged[name], folder)
        self._last = (total[0], total[1], load.input)
        return staged

    def _is_small(self, load: Load) -> bool:
        """Is this epoch expected to be small? The first one of a driver is not: it may have to
        catch up."""
        if self._last is None:
            return False
        rows, size, before = self._last
        return (
            rows <= _SMALL_ROWS
            and size <= min([_SMALL_BYTES, *self._rolls])
            and self._in_memory <= _SMALL_IN_MEMORY
            and load.input <= max(_GROWS * before, _SMALL_ROWS)
            and load.state_rows <= _SMALL_STATE
            and self._is_collectable
        )

    @cached_property
    def _is_collectable(self) -> bool:
        """Does Arrow have a type for every column?"""
        try:
            arrow_schema(self._schema)
        except JobError:
            return False
        return True

    def _collect(self, rows: Any, root: Path) -> None:
        import pyarrow.parquet as pq

        table = rows.toArrow()
        self._in_memory = table.nbytes
        parts = [(root, table)]
        for name in _folder_columns(table.column_names):
            parts = [
                (folder / folder_name(name, value), chosen)
                for folder, part in parts
                for value, chosen in split(part, name)
            ]
        roots = self._roots(root)
        fewer = {roots[name]: list(names) for name, names in self._columns_of.items()}
        fewer = fewer if self._on_bad is None else {}
        with translate_disk_full(root):
            for folder, part in parts:
                names = next((n for at, n in fewer.items() if folder.is_relative_to(at)), None)
                self._make_folder(folder, root)
                chosen = part if names is None else part.select(names)
                pq.write_table(chosen, folder / f"part-{uuid.uuid4()}.parquet")

    def _make_folder(self, folder: Path, root: Path) -> None:
        if "\0" in str(folder):
            raise BadRows(
                f"a value of {folder.name.replace(chr(0), '?')!r} has a null character in it, "
                "which the name of a folder cannot have",
                hint="remove it before the write: F.translate(column, chr(0), '')",
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                self._refuse_long_folder(str(folder), root)
            raise

    def _write(self, rows: Any, root: Path, running: RunningQuery | None) -> None:
        set_for_writing(rows.sparkSession)
        options, folders = {**COMMITTER, **_QUICK}, _folder_columns(rows.columns)
        if self._rolls:
            most = max(1, int(min(self._rolls) / max(self._bytes_per_row, 1.0)))
            options["maxRecordsPerFile"] = str(most)
        if folders:
            from py4j.protocol import Py4JError
            from pyspark.errors import PySparkException

            try:
                rows.write.options(**options).partitionBy(*folders).parquet(str(root))
            except (Py4JError, PySparkException) as error:
                # If the name of a folder is too long, Spark says only that it cannot create it.
                message = r"Mkdirs failed to create (.*?)(?: \(exists=|$)"
                if failed := re.search(message, str(error), re.MULTILINE):
                    self._refuse_long_folder(failed[1], root)
                raise
        elif running is None:
            rows.write.options(**options).parquet(str(root))
        else:
            running.write_parquet(root, options)
        if self._on_bad is None:
            self._narrow(self._roots(root))

    def _narrow(self, roots: Mapping[str, Path]) -> None:
        """Keep in the files of each output only the columns that it gets. Rows that their output
        cannot store must be set apart before, with all their columns."""
        for name, names in self._columns_of.items():
            keep_columns(roots[name], names)

    def _refuse_long_folder(self, folder: str, root: Path) -> None:
        route = re.search(rf"/{_ROUTE}=(\d+)/", folder)
        sink = list(self._outputs.values())[int(route[1]) if route else 0]
        for name in folder.split("/"):
            if by := re.match(rf"{_BY}(\d+)=", name):
                refuse_long_folder(name, partition_names(sink)[int(by[1])], str(sink), root)

    @property
    def _rolls(self) -> list[int]:
        """The file sizes at which outputs begin a new file."""
        sinks = (sink for sink in self._outputs.values() if isinstance(sink, CanPartition))
        return [sink.roll_bytes for sink in sinks if sink.roll_bytes]

    @property
    def _by_columns(self) -> int:
        """The number of folder columns. Read it late: some sinks, such as a log, read their key
        from the target when they are fenced."""
        return max((len(partition_names(sink)) for sink in self._outputs.values()), default=0)

    def _schema_of(self, output: str) -> str:
        names = self._columns_of.get(output)
        return self._schema if names is None else selected(self._schema, names)

    @property
    def _routed(self) -> bool:
        return len(self.routes) > 1

    def _with_routes(self, batch: Any) -> Any:
        from pyspark.sql import functions as F

        rows = batch
        if self._routed:
            assert self._route_by is not None
            routes = " ".join(f"when '{name}' then {n}" for n, name in enumerate(self.routes))
            value = quoted(self._route_by)
            rows = rows.withColumn(_ROUTE, F.expr(f"case {value} {routes} else {_NOWHERE} end"))
        for i in range(self._by_columns):
            folder = F.lit(None).cast("string")
            for number, sink in enumerate(self._outputs.values()):
                if isinstance(sink, CanPartition) and i < len(sink.by):
                    text = sink.by_columns()[i].cast("string")
                    # Spark puts these values into the folder of null. As values of their own they
                    # would share a file with null, too. The files keep the column: nothing is lost.
                    text = F.when(~text.isin("", NULL_FOLDER), text)
                    mine = F.col(_ROUTE) == F.lit(number) if self._routed else F.lit(True)
                    folder = F.when(mine, text).otherwise(folder)
            rows = rows.withColumn(f"{_BY}{i}", folder)
        return rows

    def _roots(self, rows: Path) -> dict[str, Path]:
        """Output -> the folder of its staged rows."""
        roots = dict.fromkeys(self.routes, rows)
        if self._routed:
            roots = {name: rows / f"{_ROUTE}={n}" for n, name in enumerate(self.routes)}
        if self._on_bad is not None and self._on_bad not in roots:
            roots[self._on_bad] = rows.parent / "bad"
        return roots

    def _set_apart(
        self,
        found: dict[str, tuple[Committable, ...]],
        roots: Mapping[str, Path],
        to: str,
        scratch: Path,
        expected: dict[str, int],
    ) -> None:
        """Move the rows that their sink can never store to output `to`, and expect them there.
        Nothing is decided yet."""
        for name, sink in self._outputs.items():
            if name == to or not isinstance(sink, CanRefuseRows):
                continue
            reasons: list[str] = []
            for file in found[name]:
                unfit = sink.unstorable(
                    self._as_published(name, file, scratch), self._schema_of(name)
                )
                if unfit:
                    set_apart(file, unfit, roots[to])
                    reasons += unfit.values()
            if reasons:
                found[name], found[to] = (
                    describe(roots[name], partition_names(sink)),
                    describe(roots[to], ()),
                )
                count = len(reasons)
                expected[name], expected[to] = expected[name] - count, expected[to] + count
                _logger.warning("%d rows for output %s go to %s: %s", count, name, to, reasons[0])

    def _as_published(self, output: str, file: Committable, scratch: Path) -> Committable:
        """A copy of the file with only the columns that the output gets."""
        if output not in self._columns_of:
            return file
        folder = scratch / uuid.uuid4().hex
        folder.mkdir(parents=True)
        shutil.copyfile(file.path, folder / Path(file.path).name)
        keep_columns(folder, self._columns_of[output])
        (copy,) = describe(folder, ())
        return copy

    def _refuse_folders_for_unfit(self) -> None:
        if self._on_bad is not None and partition_names(self._outputs[self._on_bad]):
            raise JobError(
                f"on_bad={self._on_bad!r}: {self._outputs[self._on_bad]} puts its rows into "
                "sub-folders or partitions by a column",
                hint="let bad rows go to an output without by= or key=",
            )

    def _refuse_unrouted(self, root: Path, counted: int) -> None:
        lost = describe(root / f"{_ROUTE}={_NOWHERE}", ())
        refuse_other_rows("rows without an output", counted, lost, root)
        if not lost:
            return
        import pyarrow.parquet as pq

        assert self._route_by is not None
        values: set[str] = set()
        for file in lost:
            column = pq.ParquetFile(file.path).read([self._route_by]).column(0)
            values |= {repr(v) for v in column.unique().to_pylist()[:5]}
        raise BadRows(
            f"{sum(f.rows for f in lost)} rows have no output: their {self._route_by!r} is "
            f"{', '.join(sorted(values)[:5])}",
            hint=f"give every row one of {', '.join(map(repr, self.routes))}; null is none",
        )

    def _note_row_size(self, files: tuple[Committable, ...]) -> None:
        rows = sum(file.rows for file in files)
        if rows >= 1000:
            self._bytes_per_row = sum(file.bytes for file in files) / rows


def refuse_other_rows(
    whose: str, observed: int, files: Sequence[Committable], folder: Path
) -> None:
    """Raise `StagingDiffers` unless the staged files hold as many rows as Spark observed."""
    rows = sum(file.rows for file in files)
    if rows != observed:
        raise staging_differs(
            f"{whose}: Spark counted {observed:,} rows, and the files that this driver finds under "
            f"{folder} hold {rows:,}"
        )


def staging_differs(what: str) -> StagingDiffers:
    return StagingDiffers(
        f"{what}; nothing of this epoch is decided",
        hint="put the home on a file system that the driver and every worker see at the same path, "
        "or run with --master local",
    )


def set_for_writing(spark: Any) -> None:
    """Set how Parquet is written: readable for every reader, whatever the session is set to."""
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
        # Tasks read local properties; Spark copies the session's settings there before an epoch.
        spark.sparkContext.setLocalProperty(name, value)


def _folder_columns(names: list[str]) -> list[str]:
    """The columns that `_with_routes` added: each becomes a level of folders, not a column of the
    files."""
    return [name for name in names if name.startswith((_ROUTE, _BY))]
