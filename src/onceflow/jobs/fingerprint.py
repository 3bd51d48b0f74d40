"""A fingerprint of a job's code, so that a snapshot records which code made it."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onceflow.jobs.job import import_root


def fingerprint(function: Callable[..., Any]) -> str | None:
    """SHA-256 of the file that has the function, and of the files beside it or in its package that
    it imports directly or through others. In a notebook, of the function alone. None if there is no
    source.

    It leaves out installed packages, files that are read at run time, and where the files are.
    """
    found: dict[str, bytes] = {}
    try:
        file = inspect.getsourcefile(function)
        if file is not None and Path(file).is_file():
            _collect(Path(file).absolute(), found)
        else:
            found[""] = inspect.getsource(function).encode()
    except (OSError, TypeError):
        return None
    digest = hashlib.sha256()
    for name, source in sorted(found.items()):
        digest.update(f"{name}\0{hashlib.sha256(source).hexdigest()}\n".encode())
    return digest.hexdigest()


def _collect(file: Path, found: dict[str, bytes]) -> None:
    root, left = import_root(file), [file]
    while left:
        path = left.pop()
        name = (
            str(path.relative_to(root)) if path != file else ""
        )  # renaming the job file changes nothing
        if name in found:
            continue
        found[name] = path.read_bytes()
        for imported in _imports(found[name]):
            left += [p for p in _places(root, imported) if p.is_file()]


def _imports(source: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _places(root: Path, module: str) -> Iterator[Path]:
    """The files of a module in that folder, and of the packages that contain it."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:depth])
        yield place / "__init__.py"
        yield place.with_suffix(".py")
