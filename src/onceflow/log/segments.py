"""Segments: Parquet files with consecutive rows of one partition of a log.

`_partition`, `_offset` and `_appended_at` are not in the files: the commit says them, so a
producer that lost a race has nothing to write again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.errors import Damaged, JobError
from onceflow.log.commits import Segment
from onceflow.storage import make_dirs, translate_disk_full

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
    """The same rows with exactly these columns; types may only be widened without loss."""
    import pyarrow as pa

    missing = [name for name in schema.names if name not in rows.column_names]
    strange = [name for name in rows.column_names if name not in schema.names]
    if missing or strange:
        said = [f"{name} is missing" for name in missing]
        said += [f"{name} is not a column of the log" for name in strange]
        raise JobError(
            f"the rows do not fit {target}: {', '.join(said)}",
            hint=f"its columns are {', '.join(schema.names)}",
        )
    try:
        return rows.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise JobError(f"the rows do not fit {target}: {error}", hint="cast the column") from error


# ---------------------------------------------------------------- keys


def refuse_key(key: Sequence[str], kinds: dict[str, str]) -> None:
    for name in key:
        if name not in kinds:
            raise JobError(f"there is no column {name} to be the key", hint="name one that is")
        if kinds[name] not in _KEYS:
            raise JobError(
                f"column {name} ({kinds[name]}) cannot be a key",
                hint="cast it to string, or choose a column of "
                f"type {', '.join(_KEYS[:-1])} or {_KEYS[-1]}",
            )


def split_by_key(rows: pa.Table, key: Sequence[str], partitions: int) -> dict[int, pa.Table]:
    """Partition -> its rows, in their order. `key_partition` in Spark's words does the same."""
    import numpy as np
    import pyarrow as pa

    if partitions == 1:
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
    values = [*(_code(value) for value in encoded.dictionary.to_pylist()), 0]
    indices = encoded.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
    return np.array(values, np.int64)[indices]


def _code(value: Any) -> int:
    if isinstance(value, bool):
        value = "true" if value else "false"
    return zlib.crc32(value if isinstance(value, bytes) else str(value).encode())


def key_partition(key: Sequence[str], partitions: int, kinds: dict[str, str]) -> Any:
    """The partition of a row, as a Spark column."""
    from pyspark.sql import functions as F

    from onceflow.schema import quoted

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
    """The rows of a slice as Arrow batches with these columns. `schema` has the log's own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    segment, path = part.segment, Path(root, part.segment.path)
    _refuse_other_size(path, segment)
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
            array = pa.array(np.full(count, segment.partition, np.int32))
        elif field.name == OFFSET:
            array = pa.array(np.arange(first, first + count, dtype=np.int64))
        elif field.name == APPENDED_AT:
            array = pa.array(np.full(count, segment.at, np.int64)).cast(field.type)
        else:
            array = rows.column(field.name)
            array = array if array.type == field.type else array.cast(field.type)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _refuse_other_size(path: Path, segment: Segment) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != segment.bytes:
        says = "is missing" if found is None else f"has {found} bytes"
        raise Damaged(
            f"{path} {says}, committed were {segment.bytes} bytes",
            hint="put the file back from a backup",
        )
