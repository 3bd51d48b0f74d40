"""Read the committed rows of a target of any kind.

Targets of onceflow's own sinks are read without any code of these sinks, so that a fault in one
does not hide itself. For a sink of another package, the sink reads its rows back (`CanReadBack`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onceflow.contract.abilities import CanReadBack
from onceflow.contract.registry import open_target
from onceflow.errors import Damaged, OnceflowError
from onceflow.harness.server_targets import read_server
from onceflow.harness.targets import (
    TAGS,
    Away,
    Corrupt,
    Published,
    Target,
    plain,
    read_folder,
    read_table,
)

_TRIES = 20


def read(target: Target, job: str, known: dict[str, Any] | None = None) -> Published:
    """`known` keeps immutable parts from one call to the next."""
    if target.settings is not None:
        return _read_back(target, target.settings, job)
    if target.kind == "sqlite":
        return read_table(target, job)
    if target.is_server:
        return read_server(target, job, known)
    return read_folder(Path(target.path), f"{job}/{target.output}", {} if known is None else known)


def _read_back(target: Target, settings: Mapping[str, Any], job: str) -> Published:
    sink, output = open_target(settings).moved(target.path), f"{job}/{target.output}"
    assert isinstance(sink, CanReadBack)
    try:
        for _ in range(_TRIES):
            ledger = sink.published(output)
            rows = list(sink.read_back())
            if sink.published(output) == ledger:  # so rows and ledger are of the same moment
                break
        else:
            raise Away(f"{sink} changes faster than it is read")
    except Damaged as error:
        raise Corrupt(str(error)) from error
    except OnceflowError as error:
        raise Away(str(error)) from error
    at = ledger.position
    found = Published(ledger=at.epoch if at else None, lineage=at.lineage if at else "")
    found.names = tuple(name for name in (rows[0] if rows else ()) if name not in TAGS)
    found.rows = [tuple(plain(row[name]) for name in found.names) for row in rows]
    found.epochs = [row.get("_epoch") for row in rows]
    found.has_epochs = None not in found.epochs
    return found
