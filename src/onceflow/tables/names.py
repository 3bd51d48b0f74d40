"""Names in SQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def list_of(names: Iterable[str], of: str = "") -> str:
    """Names for a statement; `of` stands before each."""
    return ", ".join(f"{of}{quote(name)}" for name in names)


def definitions(columns: Mapping[str, str]) -> str:
    """Columns and their types, for CREATE TABLE."""
    return ", ".join(f"{quote(name)} {kind}" for name, kind in columns.items())


def on_conflict(key: Iterable[str], names: Iterable[str]) -> str:
    """Replace the row of the same key."""
    key = list(key)
    rest = [name for name in names if name not in key]
    sets = ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in rest)
    return f"ON CONFLICT ({list_of(key)}) DO {f'UPDATE SET {sets}' if rest else 'NOTHING'}"
