"""A real browser: Chromium of this system, without a window.

`$ONCEFLOW_CHROMIUM` names it; else it is looked for. Where there is none, these tests are skipped;
one that was named and does not start fails them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, expect, sync_playwright
from staged import SECONDS, Process, Words, serve
from tabs import DESK, Open, Tab

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one file: its event loop must not stay for the tests after it."""
    named = os.environ.get("ONCEFLOW_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: install it, or name one by ONCEFLOW_CHROMIUM")
    options = ["--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=found, args=options)
        except Error as error:
            if named:
                pytest.fail(f"ONCEFLOW_CHROMIUM, {named}, does not start: {error}", pytrace=False)
            pytest.skip(f"{found} does not start: {error}")
        with opened:
            yield opened


@pytest.fixture
def tab(browser: Browser) -> Iterator[Open]:
    """Opens a tab at an address. Tabs of one test share cookies, unless `alone`."""
    shared: dict[str, Any] = {}

    def new(url: str, *, alone: bool = False, **options: Any) -> Tab:
        if alone or options or "context" not in shared:
            context = browser.new_context(**{"viewport": DESK, **options})
            context.set_default_timeout(SECONDS * 1000)
            opened.append(context)
            if alone or options:
                return Tab(context, url)
            shared["context"] = context
        return Tab(shared["context"], url)

    opened: list[Any] = []
    yield new
    for context in opened:
        context.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for screenshots of the views: `$ONCEFLOW_SCREENSHOTS`, or a temporary one."""
    named = os.environ.get("ONCEFLOW_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Words]:
    """One job for all stories; `browser` first, so that nothing starts where there is none."""
    job = Words(tmp_path_factory.mktemp("words"))
    yield job
    job.close()


@pytest.fixture(scope="module")
def served(words: Words) -> Iterator[Process]:
    """The page of its home."""
    with serve(words.home) as page:
        yield page
