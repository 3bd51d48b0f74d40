"""Segments: Parquet files with consecutive rows of one partition of a log.

`_partition`, `_offset` and `_appended_at` are not in the files but in the commit, so a producer
that lost a race need not write its files again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.errors import Damaged, JobError
from onceflow.log.commits import Segment
from onceflow.store.posix import make_dirs, translate_disk_full

if TYPE_CHECKING:
    import pyarrow as pa

PARTITION, OFFSET, APPENDED_AT = "_partition", "_offset", "_appended_at"
OURS = {PARTITION: "integer", OFFSET: "long", APPENDED_AT: "timestamp"}
ROW_GROUP = 128 * 1024  # rows: an epoch that begins in the middle of a segment reads from here
_BATCH = 64 * 1024
_KEYS = ("string", "binary", "boolean", "byte", "short", "integer", "long", "date")


@dataclass(frozen=True)
class Slice:
    """Rows `skip` to `skip + take` of a segment: what a task reads."""

    segment: Segment
    skip: int
    take: int


# ---------------------------------------------------------------- writing


def write_segment(rows: pa.Table, path: Path) -> tuple[int, int]:
    """Durably write one segment. Returns its size and checksum."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(rows, buffer, row_group_size=ROW_GROUP, write_page_checksum=True)
    data = buffer.getvalue()
    with translate_disk_full(path):
        make_dirs(path.parent)
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    return data.size, zlib.crc32(data)


def fit(rows: pa.Table, schema: pa.Schema, target: str) -> pa.Table:
    """The same rows with exactly these columns. Types are only widened, without loss."""
    import pyarrow as pa

    have, want = rows.column_names, schema.names
    said = [f"{name} is missing" for name in want if name not in have]
    said += [f"{name} is not a column of the log" for name in have if name not in want]
    said += sorted({f"{name} is there twice" for name in have if have.count(name) > 1})
    if said:
        raise JobError(
            f"the rows do not fit {target}: {', '.join(said)}",
            hint=f"its columns are {', '.join(schema.names)}",
        )
    for field in schema:
        if not _widens(rows.schema.field(field.name).type, field.type):
            raise JobError(
                f"the rows do not fit {target}: {field.name} is {field.type} there, "
                f"not {rows.schema.field(field.name).type}",
                hint="cast the column",
            )
    try:
        return rows.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise JobError(f"the rows do not fit {target}: {error}", hint="cast the column") from error


def _widens(have: pa.DataType, want: pa.DataType) -> bool:
    """May Arrow cast this? It would also drop fields of structs, round, and read numbers as times.
    The cast itself checks whether each value fits into a narrower integer or decimal."""
    from pyarrow import types as t

    if t.is_dictionary(have):
        return _widens(have.value_type, want)
    if have == want or t.is_null(have):
        return True
    if t.is_struct(want):
        names = sorted(field.name for field in want)
        return (
            t.is_struct(have)
            and sorted(field.name for field in have) == names
            and all(_widens(have.field(n).type, want.field(n).type) for n in names)
        )
    if t.is_map(want):
        return (
            t.is_map(have)
            and _widens(have.key_type, want.key_type)
            and _widens(have.item_type, want.item_type)
        )
    if t.is_list(want):
        lists = t.is_list(have) or t.is_large_list(have) or t.is_fixed_size_list(have)
        return lists and _widens(have.value_type, want.value_type)
    if t.is_timestamp(want):  # a time without a zone is read as UTC; the converse is refused
        return t.is_timestamp(have) and (have.tz is None or want.tz is not None)
    families: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...] = (
        ((t.is_integer,), (t.is_integer, t.is_float32, t.is_float64, t.is_decimal)),
        ((t.is_float16, t.is_float32), (t.is_float32, t.is_float64)),
        ((t.is_decimal,), (t.is_decimal,)),
        ((t.is_date,), (t.is_date,)),
        ((t.is_string, t.is_large_string, t.is_string_view), (t.is_string,)),
        ((t.is_binary, t.is_large_binary, t.is_fixed_size_binary, t.is_binary_view),
         (t.is_binary,)),
    )  # fmt: skip
    return any(
        any(check(have) for check in froms) and any(check(want) for check in tos)
        for froms, tos in families
    )


# ---------------------------------------------------------------- keys


def refuse_key(key: Sequence[str], kinds: dict[str, str]) -> None:
    for name in key:
        if name not in kinds:
            raise JobError(
                f"there is no column {name} to be the key",
                hint=f"the columns are {', '.join(kinds)}",
            )
        if kinds[name] not in _KEYS:
            raise JobError(
                f"column {name} ({kinds[name]}) cannot be a key",
                hint="cast it to string, or choose a column of "
                f"type {', '.join(_KEYS[:-1])} or {_KEYS[-1]}",
            )


def split_by_key(rows: pa.Table, key: Sequence[str], partitions: int) -> dict[int, pa.Table]:
    """Partition -> its rows, in their order. `key_partition` does the same in Spark."""
    import numpy as np
    import pyarrow as pa

    if partitions == 1 or not rows.num_rows:
        return {0: rows} if rows.num_rows else {}
    total = np.zeros(rows.num_rows, np.int64)
    for name in key:
        total = (total * 31 + _codes(rows.column(name))) & 0x7FFFFFFF
    numbers = total % partitions
    return {int(p): rows.filter(pa.array(numbers == p)) for p in np.unique(numbers)}


def _codes(column: pa.ChunkedArray) -> Any:
    """A checksum for each value, computed once for each different one; 0 for null."""
    import numpy as np
    import pyarrow as pa

    encoded = pa.chunked_array([column.combine_chunks()]).dictionary_encode().chunk(0)
    try:
        values = [*(_code(value) for value in encoded.dictionary.to_pylist()), 0]
    except (ValueError, OverflowError) as error:
        raise JobError(
            f"a value cannot be a key: {error}", hint="use dates of the years 1 to 9999 in a key"
        ) from error
    indices = encoded.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
    return np.array(values, np.int64)[indices]


def _code(value: Any) -> int:
    if isinstance(value, bool):
        value = "true" if value else "false"
    return zlib.crc32(value if isinstance(value, bytes) else str(value).encode())


def key_partition(key: Sequence[str], partitions: int, kinds: dict[str, str]) -> Any:
    """The partition of a row, as a Spark column."""
    from pyspark.sql import functions as F

    from onceflow.contract.schema import quoted

    total = F.lit(0).cast("long")
    for name in key:
        column = F.col(quoted(name))
        data = column if kinds[name] == "binary" else column.cast("string").cast("binary")
        code = F.coalesce(F.crc32(data), F.lit(0).cast("long"))
        total = (total * F.lit(31).cast("long") + code).bitwiseAND(F.lit(0x7FFFFFFF).cast("long"))
    return (total % F.lit(partitions).cast("long")).cast("int")


# ---------------------------------------------------------------- reading


def read_slice(
    root: str | os.PathLike[str], part: Slice, schema: pa.Schema, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice as Arrow batches with these columns. `schema` is that of the log."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    segment, path = part.segment, Path(root, part.segment.path)
    try:
        _refuse_other_content(path, segment)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing", hint="put the file back from a backup") from None
    wanted = [name for name in columns if name not in OURS]
    fields = [_our_field(n) if n in OURS else schema.field(n) for n in columns]
    target = pa.schema(fields)
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        if file.metadata.num_rows != segment.rows:
            raise Damaged(
                f"{path} has {file.metadata.num_rows} rows, committed were {segment.rows}",
                hint="put the file back from a backup",
            )
        groups, at = _groups(file, part)
        left = part.take
        for batch in file.iter_batches(_BATCH, row_groups=groups, columns=wanted):
            skip = max(0, part.skip - at)
            at += batch.num_rows
            rows = batch.slice(skip, min(left, batch.num_rows - min(skip, batch.num_rows)))
            if rows.num_rows == 0:
                continue
            first = segment.first + part.skip + part.take - left
            yield _complete(rows, segment, first, target)
            left -= rows.num_rows
            if left == 0:
                return
        if left:
            raise Damaged(
                f"{path} ends {left} rows too early", hint="put the file back from a backup"
            )
    except PermissionError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise Damaged(
            f"{path} is damaged: {error}", hint="put the file back from a backup"
        ) from error


def _groups(file: Any, part: Slice) -> tuple[list[int], int]:
    """The row groups that have rows of the slice, and the row at which the first begins."""
    groups: list[int] = []
    begin = at = 0
    for number in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if at + rows > part.skip and at < part.skip + part.take:
            begin = at if not groups else begin
            groups.append(number)
        at += rows
    return groups, begin


def _our_field(name: str) -> pa.Field:
    import pyarrow as pa

    kinds = {PARTITION: pa.int32(), OFFSET: pa.int64(), APPENDED_AT: pa.timestamp("us", "UTC")}
    return pa.field(name, kinds[name], False)


def _complete(
    rows: pa.RecordBatch, segment: Segment, first: int, target: pa.Schema
) -> pa.RecordBatch:
    import numpy as np
    import pyarrow as pa

    count, arrays = rows.num_rows, []
    for field in target:
        if field.name == PARTITION:
            array = _array(np.full(count, segment.partition, np.int32), field.type)
        elif field.name == OFFSET:
            array = _array(np.arange(first, first + count, dtype=np.int64), field.type)
        elif field.name == APPENDED_AT:
            array = _array(np.full(count, segment.at, np.int64), field.type)
        else:
            array = rows.column(field.name)
            array = array if array.type == field.type else array.cast(field.type)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _array(numbers: Any, kind: pa.DataType) -> pa.Array:
    """Like `pa.array`, which would import pandas: that takes longer than a whole small read."""
    import pyarrow as pa

    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _refuse_other_content(path: Path, segment: Segment) -> None:
    """Parquet has checksums of pages only: a flipped bit in a header or the footer can give other
    rows."""
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    if found is None or found.st_size != segment.bytes:
        says = "is missing" if found is None else f"has {found.st_size} bytes"
        raise Damaged(
            f"{path} {says}, committed were {segment.bytes} bytes",
            hint="put the file back from a backup",
        )
    if _crc32(str(path), found.st_ino, found.st_mtime_ns, found.st_size) != segment.crc32:
        raise Damaged(
            f"{path} is damaged: its content does not match its checksum",
            hint="put the file back from a backup",
        )


@lru_cache(maxsize=4096)
def _crc32(path: str, inode: int, modified: int, size: int) -> int:
    """The checksum of a file. Segments never change, so once in a process is enough."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc
