"""A process that fails is named with its epoch, some of its keys and the line that did it."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.errors import OnceflowError, ProcessFailed
from onceflow.state.fit import Unfit

_SHOWN = 3
_NOT_THEIRS = (
    str(Path(__file__).parent), sysconfig.get_paths()["stdlib"], str(Path(pa.__file__).parent),
    str(Path(np.__file__).parent), "pyarrow/",
)  # fmt: skip


@dataclass(frozen=True)
class Blame:
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
        if isinstance(error, Unfit):
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
