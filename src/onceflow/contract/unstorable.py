"""Find values that a target can never store.

This happens before an epoch is decided: a decided epoch must be published, so the job would stop at
such a row forever.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onceflow.errors import BadRows

US_A_DAY = 86_400_000_000
# Days since 1970 of 0001-01-01 and 10000-01-01: Arrow and Python write the years between correctly.
YEAR_1, YEAR_10000 = -719_162, 2_932_897
_SHOWN = 60  # characters of a key
SEND_ELSEWHERE = 'send them to another output: add on_bad=Files("rejected") to flow.write(…)'


def refuse_unstorable(
    target: str,
    batches: Iterable[Any],
    unfit: Callable[[Any], Mapping[str, int]],
    key: Sequence[str],
) -> None:
    """Raise `BadRows` that names each kind of value, how often it occurs, and its first row.

    `unfit`: a batch -> the kinds of values that the target cannot store, with their counts.
    """
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for batch in batches:
        found = unfit(batch)
        counts.update(found)
        for what in found.keys() - first.keys():
            first[what] = _first_row(batch, unfit, what, key)
    if counts:
        raise BadRows(
            f"{target} cannot store "
            + "; ".join(f"{what} ({n:,} values){first[what]}" for what, n in counts.items()),
            hint=f"filter these rows out, or {SEND_ELSEWHERE}",
        )


def unstorable_rows(
    batches: Iterable[Any], unfit: Callable[[Any], Mapping[str, int]]
) -> dict[int, str]:
    """The rows with values that the target cannot store: number of the row -> kinds of values."""
    found: dict[int, str] = {}
    first = 0
    for batch in batches:
        found |= _unstorable_rows(batch, unfit, first)
        first += batch.num_rows
    return found


def _unstorable_rows(
    batch: Any, unfit: Callable[[Any], Mapping[str, int]], first: int
) -> dict[int, str]:
    """Find the rows by bisection: nearly all rows fit."""
    wrong = unfit(batch)
    if not wrong:
        return {}
    if batch.num_rows == 1:
        return {first: ", ".join(wrong)}
    half = batch.num_rows // 2
    rest = _unstorable_rows(batch.slice(half), unfit, first + half)
    return _unstorable_rows(batch.slice(0, half), unfit, first) | rest


def leaves(column: Any) -> Iterator[Any]:
    """The plain values of a column, at any depth."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(column.type):
        for number in range(column.type.num_fields):
            yield from leaves(pc.struct_field(column, [number]))
    elif pa.types.is_map(column.type):
        begin, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        for child in (column.keys, column.items):
            yield from leaves(child.slice(begin, end - begin))
    elif pa.types.is_nested(column.type):
        yield from leaves(column.flatten())
    else:
        yield column


def is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def time_kind(kind: Any) -> str | None:
    """Spark's name for a date or timestamp type; None for other types."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return "date" if pa.types.is_date(kind) else None


def not_utf8(text: Any) -> int:
    """The number of strings that are not UTF-8. Spark's strings can hold any bytes, and Parquet
    stores them unchanged."""
    import pyarrow as pa

    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return sum(not _is_utf8(value) for value in text.cast(pa.binary()).to_pylist())
    return 0


def outside(column: Any, least: int, last: int) -> int:
    """The number of dates or timestamps before day `least` or after day `last` (since 1970)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_date(column.type):
        numbers = column.cast(pa.int32()).cast(pa.int64())
    else:
        numbers = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        least, last = least * US_A_DAY, min((last + 1) * US_A_DAY - 1, 2**63 - 1)
    if between(numbers, least, last + 1):
        return 0
    return int(pc.sum(pc.or_(pc.less(numbers, least), pc.greater(numbers, last))).as_py())


def between(numbers: Any, least: int, end: int) -> bool:
    import pyarrow.compute as pc

    ends = pc.min_max(numbers).as_py()
    return ends["min"] is None or (ends["min"] >= least and ends["max"] < end)


def _is_utf8(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _first_row(
    batch: Any, unfit: Callable[[Any], Mapping[str, int]], what: str, key: Sequence[str]
) -> str:
    """The key of the first row with that kind of value, shortened, for a message."""
    import pyarrow as pa

    plain = [name for name in key if not pa.types.is_nested(batch.column(name).type)]
    if not plain:
        return ""
    number = bisect.bisect_left(
        range(batch.num_rows), True, key=lambda n: what in unfit(batch.slice(0, n + 1))
    )
    shown = (f"{name} = {_shown(batch.column(name)[number])}" for name in plain)
    return f", the first where {', '.join(shown)}"


def _shown(value: Any) -> str:
    import pyarrow as pa

    if not value.is_valid:
        return "null"
    if is_text(value.type):
        return repr(value.cast(pa.binary()).as_py().decode(errors="replace")[:_SHOWN])
    try:
        return str(value.as_py())[:_SHOWN]
    except (ValueError, OverflowError):
        return "a time that Python does not have"
