"""Staged files: list them, verify their checksums, and sync them to the disk."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from onceflow.contract.ledger import Committable
from onceflow.contract.schema import quoted
from onceflow.errors import BadRows, Damaged
from onceflow.store.posix import fsync_dir, fsync_file, translate_disk_full

# Task attempts become visible in the staging area only when the whole job commits.
COMMITTER = {
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
# Names with *, ? or [ in them are names, not patterns; all dates are of one calendar.
AS_WRITTEN = {
    "__globPaths__": "false",
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
}
T = TypeVar("T")
_FEW, _SMALL = 8, 1 << 20
BY = "_onceflow_by"  # folders of the staging area that stand for the target's sub-folders
NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
# The characters that Spark's writer escapes in the name of a folder.
_ESCAPED = {ord(c): f"%{ord(c):02X}" for c in (*map(chr, range(1, 32)), *"\"#%'*/:=?\\\x7f{[]^")}


def describe(root: Path, by: tuple[str, ...]) -> tuple[Committable, ...]:
    """Every staged file under `root` that has rows."""
    paths = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [f for f in folders if f != "_temporary"]
        paths += [Path(folder) / n for n in names if n.endswith((".parquet", ".json"))]
    found = _map(lambda path: _describe(path, root, by), sorted(paths))
    return tuple(file for file in found if file.rows)


def _raise(error: OSError) -> None:
    """Fail if a folder cannot be listed: it may have rows. A missing folder has none."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _describe(path: Path, root: Path, by: tuple[str, ...]) -> Committable:
    size, crc = _checksum(path)
    if path.suffix == ".json":
        rows = _lines(path)
    else:
        import pyarrow.parquet as pq

        rows = pq.read_metadata(path).num_rows
    values = [p.partition("=")[2] for p in path.relative_to(root).parts if p.startswith(BY)]
    partition = "/".join(f"{name}={value}" for name, value in zip(by, values, strict=False))
    return Committable(str(path), rows, size, crc, partition)


def set_apart(file: Committable, rows: Collection[int], into: Path) -> None:
    """Move these rows of a staged file to a file of their own under `into`."""
    import numpy as np
    import pyarrow.parquet as pq

    path = Path(file.path)
    into.mkdir(parents=True, exist_ok=True)
    parquet, first, moved = pq.ParquetFile(path), 0, np.array(sorted(rows))
    kept = path.with_name(f"{path.stem}-fit{path.suffix}")  # keeps the prefix that names the task
    other = into / f"part-{uuid.uuid4()}.parquet"
    schema = parquet.schema_arrow
    with (
        translate_disk_full(into),
        pq.ParquetWriter(kept, schema) as stay,
        pq.ParquetWriter(other, schema) as go,
    ):
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number)
            going = np.isin(np.arange(first, first + table.num_rows), moved)
            stay.write_table(table.filter(~going))
            go.write_table(table.filter(going))
            first += table.num_rows
    path.unlink()


def keep_columns(root: Path, names: Sequence[str]) -> None:
    """Remove all other columns from the staged files under `root`."""
    _map(lambda path: _keep_columns(path, list(names)), sorted(root.rglob("*.parquet")))


def _keep_columns(path: Path, names: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet, fewer = pq.ParquetFile(path), path.with_name(f"{path.name}.fewer")
    kept = pa.schema([parquet.schema_arrow.field(name) for name in names])
    with translate_disk_full(path.parent), pq.ParquetWriter(fewer, kept) as writer:
        for number in range(parquet.num_row_groups):
            writer.write_table(parquet.read_row_group(number, names).select(names))
    os.replace(fewer, path)


def folder_name(column: str, value: object) -> str:
    """The folder of a value, with the name that Spark's writer gives it."""
    if value is None:
        return f"{column}={NULL_FOLDER}"
    return f"{column}={str(value).translate(_ESCAPED)}"


def split(table: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """Yield each value of a column with its rows, without the column and in the same order."""
    import numpy as np

    encoded = table.column(name).combine_chunks().dictionary_encode(null_encoding="encode")
    codes, rest = encoded.indices.to_numpy(), table.drop_columns([name])
    order = np.argsort(codes, kind="stable")
    sorted_rows, sorted_codes = rest.take(order), codes[order]
    starts = np.flatnonzero(np.diff(sorted_codes, prepend=-1))
    for start, end in pairwise([*starts, len(codes)]):
        value = encoded.dictionary[sorted_codes[start]].as_py()
        yield value, sorted_rows.slice(start, end - start)


def refuse_long_folder(name: str, column: str, target: str, at: Path) -> None:
    """Raise `BadRows` if `name`, which ends with a value, is too long for a folder under `at`."""
    existing = next(folder for folder in (at, *at.parents) if folder.exists())
    size, most = len(os.fsencode(name)), os.pathconf(existing, "PC_NAME_MAX")
    if size > most:
        value = unquote(name.partition("=")[2])
        raise BadRows(
            f"{target}: a value of column {column} would make a folder name of {size} bytes, and a "
            f"name has at most {most}: {value[:40]!r}…",
            hint=f"shorten {column} before the write (F.substring, F.sha2), or take another by=",
        )


def read_staged(spark: Any, root: Path, schema: str, by: tuple[str, ...]) -> Any:
    """The rows staged under `root` as a Spark DataFrame, with a column for each folder level."""
    from pyspark.sql.types import StringType, StructType

    wanted = StructType.fromJson(json.loads(schema))
    for i in range(len(by)):
        wanted = wanted.add(f"{BY}{i}", StringType())
    reader = spark.read.schema(wanted).options(**AS_WRITTEN).option("basePath", str(root))
    return reader.parquet(str(root)).select(*(quoted(f.name) for f in wanted.fields))


def _checksum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def _lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def verify(file: Committable, at: str | os.PathLike[str]) -> None:
    """Raise `Damaged` unless the file at `at` has the staged size and checksum."""
    size, crc = _checksum(Path(at))
    if (size, crc) != (file.bytes, file.crc32):
        raise Damaged(
            f"{at} is damaged: {size} bytes with checksum {crc:08x}, the decision names "
            f"{file.bytes} bytes with {file.crc32:08x}",
            hint="put the file back from a backup; none of its rows were published",
        )


def harden(
    files: Iterable[str | os.PathLike[str]],
    root: Path,
    known: set[Path],
    passing: Sequence[Path] = (),
) -> None:
    """fsync files, and the folders between them and `root` that have new names. Hadoop does not.

    `known`: folders whose names are on the disk; this adds those that it syncs. `passing`: files
    that Spark may remove in the meantime.
    """
    paths = [Path(file) for file in files]
    folders = {path.parent for path in (*paths, *passing)}
    for parent in list(folders):
        new = parent
        while new != root and new not in known and new.is_relative_to(root):
            known.add(new)
            new = new.parent
            folders.add(new)
    _map(fsync_file, paths)
    for path in passing:
        with contextlib.suppress(FileNotFoundError):
            fsync_file(path)
    _map(fsync_dir, sorted(folders))


def _map(work: Callable[[Path], T], paths: list[Path]) -> list[T]:
    """Run `work` for each path, in threads unless the files are few and small: then threads cost
    more."""
    if len(paths) <= _FEW and sum(path.stat().st_size for path in paths) <= _SMALL:
        return [work(path) for path in paths]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(work, paths))
