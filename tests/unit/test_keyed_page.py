"""The examples of the page on keyed state do what the page says."""

from __future__ import annotations

import inspect
from typing import Any

from onceflow.state.binding import _HELPERS
from onceflow.state.process import KeyedProcess
from onceflow.state.ready import join_last, running, sessions
from onceflow.testing import KeyedHarness
from pages import DOCS, blocks

PAGE = DOCS / "state.md"


def test_the_examples_of_the_page_hold() -> None:
    names: dict[str, Any] = {}
    for language, text in blocks(PAGE):
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), names)
    assert issubclass(names["Spend"], KeyedProcess)


def test_every_process_that_is_ready_made_and_every_helper_is_on_the_page() -> None:
    text = PAGE.read_text()
    for module in (running, sessions, join_last):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and not name.startswith("_"):
                assert f"`{name}(" in text
    for name in (*_HELPERS, *(n for n in vars(KeyedHarness) if not n.startswith("_"))):
        assert f"`{name}" in text or f"`self.{name}" in text or f"`.{name}" in text, name
