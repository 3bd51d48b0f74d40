"""Pages of the documentation: what is fenced on them, and whether commands say what they show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[str, str]]:
    """What is fenced on a page: (language, text)."""
    return [(found[1], found[2]) for found in _BLOCK.finditer(path.read_text())]


def missing(expected: str, said: str) -> Iterator[str]:
    """Lines of the page that were not said, or not in this order. `…` stands for anything."""
    left = iter(said.splitlines())
    for line in expected.splitlines():
        pattern = ".*".join(map(re.escape, line.split("…")))
        if not any(re.fullmatch(pattern, heard) for heard in left):
            yield line
