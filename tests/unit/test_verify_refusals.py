"""Commands that `onceflow verify` runs may refuse, for reasons that it knows by their text."""

from __future__ import annotations

import ast
from pathlib import Path

import onceflow
from onceflow.harness import snapshot_faults

SOURCE = Path(onceflow.__file__).parent


def texts(path: Path) -> list[str]:
    """All texts in a file, those of several lines joined."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_a_command_still_refuses_with_the_texts_that_verify_knows() -> None:
    errors = [
        text
        for folder in ("snapshots", "tables", "protocol")
        for path in sorted((SOURCE / folder).glob("*.py"))
        for text in texts(path)
    ]
    for reason in snapshot_faults.REFUSALS:
        assert any(reason in text for text in errors), reason
