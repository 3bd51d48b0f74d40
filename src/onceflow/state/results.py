"""What a process returned, as it was declared, or a refusal that names the column.

A value is never changed on the way: numbers may get wider or narrower of their own kind, if none
of them is lost by it (a double that is declared float is rounded). Nothing else is cast.
"""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.errors import OnceflowError, ProcessFailed
from onceflow.state.evolve import is_same_kind
from onceflow.state.vectors import combine


class UnfitResult(Exception):
    """What was returned does not fit. The step says by whom."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def convert(column: Any, declared: pa.DataType, what: str) -> pa.Array:
    """The column as the declared type."""
    array = _array(column, declared, what)
    if array.type == declared:
        return array
    if not is_same_kind(array.type, declared):
        raise UnfitResult(
            f"{what} is of {array.type}, declared is {declared}",
            hint="cast it where it is made, or declare the type that it has",
        )
    try:
        return array.cast(declared)
    except pa.ArrowInvalid as error:
        raise UnfitResult(
            f"{what} does not fit {declared}: {error}",
            hint="declare a wider type, or mend the value",
        ) from error


def _array(column: Any, declared: pa.DataType, what: str) -> pa.Array:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return combine(column)
    try:
        return pa.array(column)  # numpy, mostly
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError) as error:
        raise UnfitResult(
            f"{what} is {type(column).__name__}: {error}", hint="return an Arrow array"
        ) from error


def split_result(returned: Any) -> tuple[Any, Any]:
    """(out, new_state), of which each may be None; None is both."""
    if returned is None:
        return None, None
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise UnfitResult(
        f"it returned {_kind(returned)}", hint="return out, new_state; each may be None"
    )


def _kind(value: Any) -> str:
    count = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{count}"


def _by_name(table: Any, what: str) -> Mapping[str, Any]:
    """The columns of a table, record batch or dict."""
    if isinstance(table, pa.Table | pa.RecordBatch):
        twice = sorted({n for n in table.column_names if table.column_names.count(n) > 1})
        if twice:
            raise UnfitResult(f"{what} has {', '.join(twice)} twice", hint="rename one")
        return dict(zip(table.column_names, table.columns, strict=True))
    if isinstance(table, Mapping):
        return table
    raise UnfitResult(
        f"{what} is {_kind(table)}", hint="return a pyarrow Table, or a dict of name to array"
    )


def check_out(returned: Any, schema: pa.Schema) -> pa.Table | None:
    """The rows that a process emits, in the order of its output."""
    if returned is None:
        return None
    columns = _by_name(returned, "out")
    missing = [name for name in schema.names if name not in columns]
    extra = [str(name) for name in columns if name not in schema.names]
    if missing or extra:
        raise UnfitResult(
            describe_difference("out", missing, extra), hint="let output and out agree, by name"
        )
    arrays = [convert(columns[f.name], f.type, f"column {f.name} of out") for f in schema]
    lengths = {name: len(array) for name, array in zip(schema.names, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        raise UnfitResult(f"the columns of out differ in length: {lengths}", hint="make them equal")
    return pa.table(arrays, schema=schema)


def describe_difference(what: str, missing: Iterable[str], extra: Iterable[str]) -> str:
    lacks, has = ", ".join(missing), ", ".join(extra)
    parts = [f"lacks {lacks}"] if lacks else []
    parts += [f"has {has}, which is not declared"] if has else []
    return f"{what} {' and '.join(parts)}"


def check_state(returned: Any, keys: pa.Table, declared: pa.Schema) -> dict[str, pa.Array]:
    """The columns of new_state that say something, each with a value for each key.

    `keys` has the key columns only: if they are returned, they must be what was given.
    """
    if returned is None:
        return {}
    columns = _by_name(returned, "new_state")
    unknown = [n for n in columns if n not in declared.names and n not in keys.column_names]
    if unknown:
        raise UnfitResult(
            describe_difference("new_state", [], map(str, unknown)),
            hint=f"declared are {', '.join(declared.names)}",
        )
    found = {}
    for name, column in columns.items():
        is_key = name in keys.column_names
        kind = keys.schema.field(name).type if is_key else declared.field(name).type
        array = convert(column, kind, f"column {name} of new_state")
        if len(array) != len(keys):
            raise UnfitResult(
                f"column {name} of new_state has {len(array)} rows for {len(keys)} keys",
                hint="return one row for each key, in the order of keys",
            )
        if not is_key:
            found[name] = array
        elif not array.equals(combine(keys[name])):
            raise UnfitResult(
                f"new_state is for other keys than were given: column {name} differs",
                hint="return one row for each key, in the order of keys",
            )
    return found


_SHOWN = 3
_NOT_THEIRS = (
    str(Path(__file__).parent), sysconfig.get_paths()["stdlib"], str(Path(pa.__file__).parent),
    str(Path(np.__file__).parent), "pyarrow/",
)  # fmt: skip


@dataclass(frozen=True)
class CallSite:
    """Who is to be named if a call fails."""

    owner: str  # the class
    method: str
    epoch: int
    keys: pa.Table  # key columns of the slice
    where: str = ""

    @contextlib.contextmanager
    def said(self) -> Iterator[None]:
        """`ProcessFailed` for whatever goes wrong inside. Errors of ours pass as they are."""
        try:
            yield
        except OnceflowError:
            raise
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: Exception, *, key: int | None = None) -> ProcessFailed:
        """`key`: the number of the one key that it was about, if that is known."""
        begin = f"{self.where}: " if self.where else ""
        about = f"in epoch {self.epoch}, {_shown(self.keys, key)}"
        called = f"{begin}{self.owner}.{self.method}"
        if isinstance(error, UnfitResult):
            said = f"{called} returned what does not fit, {about}: {error}"
            return ProcessFailed(said, hint=error.hint)
        return ProcessFailed(
            f"{called} failed {about}: {type(error).__name__}: {error}{_line(error)}",
            hint="mend the process and start the job again; nothing of the epoch was decided. "
            "onceflow.testing.KeyedHarness calls it with rows of your own",
        )


def _shown(keys: pa.Table, key: int | None) -> str:
    if key is not None:
        return f"key {_name(keys.slice(key, 1))}"
    names = [_name(keys.slice(at, 1)) for at in range(min(_SHOWN, len(keys)))]
    more = f" and {len(keys) - len(names)} more" if len(keys) > len(names) else ""
    return f"key{'s' if len(keys) != 1 else ''} {', '.join(names)}{more}"


def _name(key: pa.Table) -> str:
    values: list[Any] = [column[0].as_py() for column in key.columns]
    return repr(values[0]) if len(values) == 1 else repr(tuple(values))


def _line(error: Exception) -> str:
    """The last line of theirs that was run."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_NOT_THEIRS)]
    if not theirs:
        return ""
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno}: {theirs[-1].line})"
