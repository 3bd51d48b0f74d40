"""Values that PostgreSQL cannot store: they are found before an epoch is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from onceflow.contract.unstorable import is_text, leaves, not_utf8, outside, time_kind
from onceflow.postgres.values import bytes_of, postgres_type

_FIRST_DAY = -2_440_588  # 4714-11-24 BC, of dates and timestamps
_LAST_DAY = 2_145_042_905  # of dates; Spark's timestamps end before PostgreSQL's
_INDEX_ROW, _HEADER = 2704, 8  # bytes; a btree stores at most a third of a page


def always_fits(kind: Any) -> bool:
    return isinstance(kind, str) and kind not in ("string", "date", "timestamp", "timestamp_ntz")


def count_unstorable(batch: Any, kinds: Mapping[str, Any], key: Sequence[str]) -> Counter[str]:
    """Kind of value that PostgreSQL cannot store -> how many."""
    found: Counter[str] = Counter()
    for name in batch.schema.names:
        column = batch.column(name)
        for leaf in leaves(column):
            if is_text(leaf.type):
                found[f"text that is not UTF-8 in column {name}"] += (broken := not_utf8(leaf))
                nuls = 0 if broken else _with_nul(leaf)
                found[f"text with a NUL character in column {name}"] += nuls
            elif kind := time_kind(leaf.type):
                far = outside(leaf, _FIRST_DAY, _LAST_DAY)
                found[f"a {kind} that is out of PostgreSQL's range in column {name}"] += far
        if name in key:
            found[f"null in key column {name}"] += column.null_count
    if key:
        found[
            f"a key that may take more than {_INDEX_ROW:,} bytes of an index (F.sha2 of it would "
            f"not) in column {', '.join(key)}"
        ] += _too_long(batch, kinds, key)
    return +found


def _with_nul(text: Any) -> int:
    import pyarrow.compute as pc

    if (bytes_of(text) == 0).any():
        return pc.sum(pc.match_substring(text, "\0")).as_py() or 0
    return 0


# ---------------------------------------------------------------- how long a key is


def _too_long(batch: Any, kinds: Mapping[str, Any], key: Sequence[str]) -> int:
    """How many keys may be too long for an index. A longer key may fit if it can be compressed,
    but that depends on settings of the server, which may change once the epoch is decided."""
    total = _HEADER + sum(index_bytes(batch.column(name), kinds[name]) for name in key)
    return int((total > _INDEX_ROW).sum())


def index_bytes(column: Any, kind: Any) -> Any:
    """An upper bound for the bytes of each value in an index, with alignment."""
    return _bytes(column, kind, in_json=postgres_type(kind) == "jsonb")


def _bytes(column: Any, kind: Any, *, in_json: bool) -> Any:
    """In jsonb each value has an entry of 4 bytes, numbers are `numeric`, times are text."""
    import numpy as np
    import pyarrow.compute as pc

    def inner(values: Any, of: Any) -> Any:
        return _bytes(values, of, in_json=in_json)

    match kind:
        case {"type": "struct", "fields": fields}:
            total = np.full(len(column), 16, np.int64)
            for number, field in enumerate(fields):
                total += _aligned(len(field["name"].encode()) + 4)
                total += inner(pc.struct_field(column, [number]), field["type"])
            return total
        case {"type": "array", "elementType": of}:
            return 32 + _sums(
                column, inner(column.values, of) + 1
            )  # and a bit for each that may be null
        case {"type": "map", "keyType": key, "valueType": of}:
            return 16 + _sums(column, inner(column.keys, key) + inner(column.items, of))
        case "string" | "binary":
            lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
            lengths = lengths.astype(np.int64)
            return _aligned((lengths * 2 + 2 if in_json and kind == "binary" else lengths) + 4)
    plain = 48 if in_json else 32 if kind.startswith("decimal") else 8
    return np.full(len(column), plain, np.int64)


def _aligned(size: Any) -> Any:
    return (size + 7) // 8 * 8


def _sums(lists: Any, sizes: Any) -> Any:
    """The size of each list, from the sizes of all elements."""
    import numpy as np

    offsets = lists.offsets.to_numpy()
    until = np.concatenate(([0], np.cumsum(sizes)))
    return until[offsets[1:]] - until[offsets[:-1]]
