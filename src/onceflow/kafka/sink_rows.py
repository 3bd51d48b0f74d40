"""Rows as Kafka's messages: Arrow columns to lists of bytes, a batch at a time.

Arrow's own functions build the JSON column by column: Python runs for each row only to encode bytes
(base64) and headers. A message has every field, null or not; times are in UTC with microseconds;
decimals are numbers; NaN and infinities, which JSON does not have, are strings.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onceflow.contract.ledger import Committable
from onceflow.contract.schema import columns, leaf_types
from onceflow.contract.unstorable import SEND_ELSEWHERE
from onceflow.errors import BadRows, JobError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 10_000  # rows
_OVERHEAD = 128  # bytes of a message beside key, value and headers, at most
_ESCAPED = 6  # a string can become this many times longer in JSON
_RAW = ("string", "binary")
_TEXT = ("boolean", "byte", "short", "integer", "long", "date", "timestamp", "timestamp_ntz")
_PLAIN_FIELD = 48  # bytes: the longest field that is no text, a decimal, with its comma
_HEADERS = (
    "map<string, string>", "map<string, binary>",
    "array<struct<key: string, value: string>>", "array<struct<key: string, value: binary>>",
)  # fmt: skip
_NAMED = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}

Columns = str | tuple[str, ...] | None
Messages = tuple[list[bytes | None], list[bytes | None], list[Any] | None]


@dataclass(frozen=True)
class Layout:
    """Which columns make a message's key, value and headers."""

    key: Columns = None  # one column: unchanged; several: JSON; None: no key
    value: Columns = None  # None: all columns that key and headers do not use
    headers: str | None = None

    def refuse(self, sink: str, schema: str) -> None:
        """`JobError` for columns that do not exist or whose types cannot be sent."""
        kinds = columns(schema)
        named = [*_names(self.key), *_names(self.value), *_names(self.headers)]
        missing = [name for name in named if name not in kinds]
        if missing:
            raise JobError(
                f"{sink}: there is no column {', '.join(missing)}",
                hint=f"the columns are {', '.join(kinds)}",
            )
        if not self._values(list(kinds)):
            raise JobError(f"{sink}: no column is left for the value", hint="name one with value=")
        for name in (self.key, self.value):
            if isinstance(name, str) and not _is_plain(kinds[name]):
                raise JobError(
                    f"{sink}: column {name} is {kinds[name]}, which cannot be a message by itself",
                    hint=f"cast it to string or binary, or name it in a list: [{name!r}]",
                )
        if self.headers and kinds[self.headers] not in _HEADERS:
            raise JobError(
                f"{sink}: column {self.headers} is {kinds[self.headers]}, which cannot be headers",
                hint=f"make it {_HEADERS[1]} or {_HEADERS[3]}",
            )
        leaves = leaf_types(schema)
        wrong = [name for name in named or kinds if any(map(_no_form, leaves[name]))]
        if wrong:
            raise JobError(
                f"{sink} cannot send column {', '.join(f'{n} ({kinds[n]})' for n in wrong)}",
                hint="cast it, for instance to string",
            )

    def messages(self, batch: pa.RecordBatch) -> Messages:
        """Key, value and headers of each row."""
        none: list[bytes | None] = [None] * batch.num_rows
        keys = none if self.key is None else self._encode(batch, self.key)
        values = self._encode(batch, self._values(batch.schema.names))
        if self.headers is None:
            return keys, values, None
        return keys, values, [_headers(row) for row in batch.column(self.headers).to_pylist()]

    def read(self, path: str) -> Iterator[Messages]:
        import pyarrow.parquet as pq

        file = pq.ParquetFile(path)
        for batch in file.iter_batches(BATCH, columns=self._used(file.schema_arrow.names)):
            yield self.messages(batch)

    def refuse_too_large(self, sink: str, file: Committable, limit: int) -> None:
        """`BadRows` if a row makes a message that is too large for the topic."""
        for _, why in self.too_large(file, limit):
            raise BadRows(
                f"{sink}: {why}",
                hint="raise max.message.bytes of the topic, make such rows smaller, or "
                + SEND_ELSEWHERE,
            )

    def too_large(self, file: Committable, limit: int) -> Iterator[tuple[int, str]]:
        """The rows whose messages are too large for the topic: number, and what is wrong.

        Nearly always the size of the file (unless it is nested: a small array may have a long
        text), or else the longest values of a batch, show that no message can be that large. Only
        otherwise this function makes the messages.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        parquet = pq.ParquetFile(file.path)
        used = self._used(parquet.schema_arrow.names)
        names = sum(len(json.dumps(name)) + _PLAIN_FIELD for name in used) + _OVERHEAD
        nested = any(pa.types.is_nested(parquet.schema_arrow.field(name).type) for name in used)
        groups = [parquet.metadata.row_group(n) for n in range(parquet.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        if not nested and size * _ESCAPED + names <= limit:
            return
        first = 0
        for batch in parquet.iter_batches(BATCH, columns=used):
            if sum(_most(batch.column(name)) for name in used) + names > limit:
                for n, why in self._too_large(batch, limit):
                    yield first + n, why
            first += batch.num_rows

    def _too_large(self, batch: pa.RecordBatch, limit: int) -> Iterator[tuple[int, str]]:
        keys, values, headers = self.messages(batch)
        for n, (key, value) in enumerate(zip(keys, values, strict=True)):
            size = len(key or b"") + len(value or b"") + _OVERHEAD
            for name, content in (headers[n] if headers else None) or ():
                size += len(name) + len(content or b"") + 8
            if size > limit:
                yield (
                    n,
                    f"the row with key {_show(key)} makes a message of {size:,} bytes, the topic "
                    f"accepts {limit:,}",
                )

    def _values(self, names: list[str]) -> str | tuple[str, ...]:
        if self.value is not None:
            return self.value
        taken = {*_names(self.key), *_names(self.headers)}
        return tuple(name for name in names if name not in taken)

    def _used(self, names: list[str]) -> list[str]:
        named = {*_names(self.key), *_names(self._values(names)), *_names(self.headers)}
        return [name for name in names if name in named]

    @staticmethod
    def _encode(batch: pa.RecordBatch, names: str | tuple[str, ...]) -> list[bytes | None]:
        if isinstance(names, str):
            return bytes_of(_text(batch.column(names)))
        return bytes_of(_object({name: batch.column(name) for name in names}, batch.num_rows))


def _names(of: Columns) -> tuple[str, ...]:
    return () if of is None else (of,) if isinstance(of, str) else of


def _is_plain(kind: str) -> bool:
    return kind in _RAW or kind in _TEXT or kind.startswith(("decimal", "varchar", "char"))


def _no_form(leaf: str) -> bool:
    return leaf.startswith(("time(", "variant", "interval", "void", "geo", "day", "year"))


def _headers(row: Any) -> list[tuple[str, bytes | None]] | None:
    if row is None:
        return None
    pairs = [(e["key"], e["value"]) if isinstance(e, dict) else e for e in row if e is not None]
    return [(k, v.encode() if isinstance(v, str) else v) for k, v in pairs if k is not None]


def _show(key: bytes | None) -> str:
    return "null" if key is None else repr(key[:80].decode(errors="replace"))


def _most(column: pa.Array) -> int:
    """An upper bound for the length of a value of this column in JSON."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        named = sum(len(json.dumps(field.name)) + 2 for field in fields)
        return 4 + named + sum(_most(column.field(n)) for n in range(len(fields)))
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        parts = (column.keys, column.items) if pa.types.is_map(kind) else (column.values,)
        longest = int(np.diff(column.offsets).max(initial=0))
        return 4 + longest * sum(_most(part) + 1 for part in parts)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return 4 + _ESCAPED * (pc.max(pc.binary_length(column)).as_py() or 0)
    return _PLAIN_FIELD


# ---------------------------------------------------------------- columns to bytes


def bytes_of(column: pa.Array) -> list[bytes | None]:
    """A column of strings or bytes as Python's bytes, cut out of one buffer."""
    import numpy as np
    import pyarrow as pa

    if len(column) == 0:
        return []
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.string()).cast(pa.binary())
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = column.buffers()[2].slice(first, last - first).to_pybytes() if last > first else b""
    at = (offsets - first).tolist()
    found: list[bytes | None] = [data[a:b] for a, b in itertools.pairwise(at)]
    if column.null_count:
        for n in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            found[n] = None
    return found


def _text(column: pa.Array) -> pa.Array:
    """A plain column without quotes, as a key or a value by itself."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types

    kind = column.type
    if types.is_binary(kind) or types.is_string(kind):
        return column
    if types.is_timestamp(kind):
        plain = column.cast(pa.timestamp("us"))  # Arrow writes time zones slowly
        text = pc.replace_substring(plain.cast(pa.string()), " ", "T")
        return pc.binary_join_element_wise(text, "Z", "") if kind.tz else text
    return column.cast(pa.string())


def json_of(column: pa.Array) -> pa.Array:
    """A column as JSON text; never null."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types

    kind = column.type
    if types.is_struct(kind):
        fields = dict(zip([f.name for f in kind], column.flatten(), strict=True))
        found = _object(fields, len(column))
        return pc.if_else(column.is_valid(), found, "null") if column.null_count else found
    if types.is_map(kind) or types.is_list(kind):
        return _many(column)
    if types.is_binary(kind):
        coded = [None if v is None else base64.b64encode(v).decode() for v in bytes_of(column)]
        return _quote(pa.array(coded, pa.string())).fill_null("null")
    if types.is_floating(kind):
        text = column.cast(pa.string())
        odd = pc.invert(pc.is_finite(column))
        if pc.any(odd).as_py():
            names = pc.replace_substring(
                pc.replace_substring(text, "inf", "Infinity"), "nan", "NaN"
            )
            text = pc.if_else(odd, _quote(names), text)
        return text.fill_null("null")
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return column.cast(pa.string()).fill_null("null")
    text = _text(column)
    return _quote(_escape(text) if types.is_string(kind) else text).fill_null("null")


def _object(fields: dict[str, pa.Array], rows: int) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    parts: list[Any] = []
    for n, (name, column) in enumerate(fields.items()):
        parts += [("," if n else "{") + json.dumps(name, ensure_ascii=False) + ":", json_of(column)]
    if not parts:
        return pa.array(["{}"] * rows, pa.string())
    return pc.binary_join_element_wise(*parts, "}", "")


def _many(column: pa.Array) -> pa.Array:
    """Lists, and maps as objects: the JSON of their values, joined row by row."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    is_map = pa.types.is_map(column.type)
    entries = column.cast(pa.list_(_entries(column.type))) if is_map else column
    lengths = pc.list_value_length(entries).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = entries.flatten()
    if is_map:
        names = _quote(_escape(_text(values.field(0)).cast(pa.string())))
        tokens = pc.binary_join_element_wise(names, ":", json_of(values.field(1)), "")
    else:
        tokens = json_of(values)
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), tokens), ",")
    ends = ("{", "}") if is_map else ("[", "]")
    found = pc.binary_join_element_wise(ends[0], joined, ends[1], "")
    return pc.if_else(column.is_valid(), found, "null") if column.null_count else found


def _entries(kind: Any) -> Any:
    import pyarrow as pa

    return pa.struct([("key", kind.key_type), ("value", kind.item_type)])


def _quote(text: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    return pc.binary_join_element_wise('"', text, '"', "")


def _escape(text: pa.Array) -> pa.Array:
    """Escape what JSON requires: quotes, backslashes, control characters."""
    import numpy as np
    import pyarrow.compute as pc

    data = text.buffers()[2]
    if data is None:
        return text
    held = np.frombuffer(data, np.uint8)
    special = (held < 0x20) | (held == 0x22) | (held == 0x5C)
    if not special.any():
        return text
    for code in sorted({*np.unique(held[special]).tolist()}, reverse=True):  # the backslash first
        wanted = _NAMED.get(code) or (f"\\{chr(code)}" if code >= 0x20 else f"\\u{code:04x}")
        text = pc.replace_substring(text, chr(code), wanted)
    return text
