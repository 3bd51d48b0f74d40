"""Read the committed rows of a target of any kind, without any reader of the product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onceflow.harness.server_targets import read_server
from onceflow.harness.targets import Published, Target, read_folder, read_table


def read(target: Target, job: str, known: dict[str, Any] | None = None) -> Published:
    """`known` keeps immutable parts from one call to the next."""
    if target.kind == "sqlite":
        return read_table(target, job)
    if target.is_server:
        return read_server(target, job, known)
    return read_folder(Path(target.path), f"{job}/{target.output}", {} if known is None else known)
