"""What a call of a process returned, checked against its declarations, or how it failed.

Values are not changed: numbers may become wider or narrower within their kind if none of them is
lost (a double that is declared float is rounded). Nothing else is cast. A call that fails, or
returns something else, is reported with its epoch, some of its keys and the line of the process.
"""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.errors import OnceflowError, ProcessFailed
from onceflow.state.evolve import is_same_kind
from onceflow.state.vectors import combine, to_array


class UnfitResult(Exception):
    """A result does not fit its declaration. `CallSite` adds which call returned it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def convert(column: Any, declared: pa.DataType, what: str) -> pa.Array:
    """The column in the declared type; `UnfitResult` if a value would be lost."""
    try:
        array = to_array(column)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError) as error:
        raise UnfitResult(
            f"{what} is {type(column).__name__}: {error}", hint="return an Arrow array"
        ) from error
    if array.type == declared:
        return array
    if not is_same_kind(array.type, declared):
        raise UnfitResult(
            f"{what} is of {array.type}, declared is {declared}",
            hint="cast it in the process, or declare the type that it has",
        )
    try:
        return array.cast(declared)
    except pa.ArrowInvalid as error:
        raise UnfitResult(
            f"{what} does not fit {declared}: {error}",
            hint="declare a wider type, or fix the value",
        ) from error


def split_result(returned: Any) -> tuple[Any, Any]:
    """`(out, new_state)`. Each may be None, and None stands for both."""
    if returned is None:
        return None, None
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise UnfitResult(
        f"it returned {_describe(returned)}", hint="return out, new_state; each may be None"
    )


def _describe(value: Any) -> str:
    count = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{count}"


def _columns_by_name(table: Any, what: str) -> Mapping[str, Any]:
    """The columns of a table, record batch or dict."""
    if isinstance(table, pa.Table | pa.RecordBatch):
        twice = sorted({n for n in table.column_names if table.column_names.count(n) > 1})
        if twice:
            raise UnfitResult(f"{what} has {', '.join(twice)} twice", hint="rename one")
        return dict(zip(table.column_names, table.columns, strict=True))
    if isinstance(table, Mapping):
        return table
    raise UnfitResult(
        f"{what} is {_describe(table)}", hint="return a pyarrow Table, or a dict of name to array"
    )


def check_out(returned: Any, schema: pa.Schema) -> pa.Table | None:
    """The rows that a process emits, in the order of its output."""
    if returned is None:
        return None
    columns = _columns_by_name(returned, "out")
    refuse_names("out", columns, schema.names, hint="let output and out have the same names")
    arrays = [convert(columns[f.name], f.type, f"column {f.name} of out") for f in schema]
    lengths = {name: len(array) for name, array in zip(schema.names, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        raise UnfitResult(f"the columns of out differ in length: {lengths}", hint="make them equal")
    return pa.table(arrays, schema=schema)


def refuse_names(
    what: str, given: Collection[Any], declared: Collection[str], *, hint: str
) -> None:
    """`UnfitResult` unless the names are those that are declared, in any order."""
    missing = [name for name in declared if name not in given]
    extra = [str(name) for name in given if name not in declared]
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has {', '.join(extra)}, which is not declared"] if extra else []
    if parts:
        raise UnfitResult(f"{what} {' and '.join(parts)}", hint=hint)


def check_state(returned: Any, keys: pa.Table, declared: pa.Schema) -> dict[str, pa.Array]:
    """The state columns of new_state, each with a value for each key.

    `keys` has the key columns: if the process returns them, they must be unchanged.
    """
    if returned is None:
        return {}
    columns = _columns_by_name(returned, "new_state")
    known = [n for n in (*declared.names, *keys.column_names) if n in columns]
    refuse_names("new_state", columns, known, hint=f"declared are {', '.join(declared.names)}")
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


# ---------------------------------------------------------------- failures

_SHOWN = 3  # keys that a message names
_NOT_USER_CODE = (
    str(Path(__file__).parent), sysconfig.get_paths()["stdlib"], str(Path(pa.__file__).parent),
    str(Path(np.__file__).parent), "pyarrow/",
)  # fmt: skip


@dataclass(frozen=True)
class CallSite:
    """What a message names if a call fails."""

    owner: str  # the class
    method: str
    epoch: int
    keys: pa.Table  # key columns of the slice
    where: str = ""

    @contextlib.contextmanager
    def report_failures(self) -> Iterator[None]:
        """Raise `ProcessFailed` for any error inside; errors of onceflow pass unchanged."""
        try:
            yield
        except OnceflowError:
            raise
        except Exception as error:
            raise self.failure(error) from error

    def failure(self, error: Exception, *, key: int | None = None) -> ProcessFailed:
        """`key`: the number of the key that failed, if it is known."""
        begin = f"{self.where}: " if self.where else ""
        about = f"in epoch {self.epoch}, {_list_keys(self.keys, key)}"
        called = f"{begin}{self.owner}.{self.method}"
        if isinstance(error, UnfitResult):
            said = f"{called} returned what does not fit, {about}: {error}"
            return ProcessFailed(said, hint=error.hint)
        return ProcessFailed(
            f"{called} failed {about}: {type(error).__name__}: {error}{_find_line(error)}",
            hint="fix the process and start the job again; nothing of the epoch was decided. "
            "onceflow.testing.KeyedHarness calls it with rows of your own",
        )


def _list_keys(keys: pa.Table, key: int | None) -> str:
    if key is not None:
        return f"key {_format_key(keys.slice(key, 1))}"
    names = [_format_key(keys.slice(at, 1)) for at in range(min(_SHOWN, len(keys)))]
    more = f" and {len(keys) - len(names)} more" if len(keys) > len(names) else ""
    return f"key{'s' if len(keys) != 1 else ''} {', '.join(names)}{more}"


def _format_key(key: pa.Table) -> str:
    values: list[Any] = [column[0].as_py() for column in key.columns]
    return repr(values[0]) if len(values) == 1 else repr(tuple(values))


def _find_line(error: Exception) -> str:
    """The last line of user code in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not f.filename.startswith(_NOT_USER_CODE)]
    if not lines:
        return ""
    return f" ({lines[-1].filename}, line {lines[-1].lineno}: {lines[-1].line})"
