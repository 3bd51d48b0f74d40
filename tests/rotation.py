"""Which tests run today, and in which order: `scripts/test` has a quarter of an hour on two cores.

Every test that takes less than LONG seconds runs every day, and so does one that is marked `daily`
and one whose seconds are not known yet. The others run on one day of DAYS, each day another share
of them, and all with ONCEFLOW_TEST_ALL=1 (`scripts/test --all`). The day is the date's, or
ONCEFLOW_TEST_DAY's, and is printed, so that a run can be repeated.

The seconds are stored beside this file. They cut the long tests into days of equal length, and
order the files, so that two workers end at the same time. Write them anew from a whole run on an
idle machine: `scripts/test --all --store-durations`.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest

DAYS = 10
# Of the contract, so of every sink: it cannot be marked where users of the contract have no marks.
KILLS = "test_a_publish_that_is_killed_shows_its_epoch_whole_or_not_at_all"
STORED = Path(__file__).with_name("durations.json")
LONG = 2.0  # seconds
STORED_FROM = 0.2  # seconds: what takes less is not stored


def today() -> int:
    """Days since 1970, so that a test comes back after DAYS days."""
    return int(os.environ.get("ONCEFLOW_TEST_DAY") or time.time() // 86_400)


def runs_all() -> bool:
    return os.environ.get("ONCEFLOW_TEST_ALL") == "1"


def stored() -> dict[str, float]:
    """Test -> seconds."""
    found: dict[str, dict[str, float]] = json.loads(STORED.read_text()) if STORED.exists() else {}
    return {f"{file}::{test}": s for file, tests in found.items() for test, s in tests.items()}


def chosen(long: list[str], seconds: dict[str, float], day: int) -> set[str]:
    """The share of a day. Over any DAYS days in a row every test comes once.

    `long`: the tests that take turns. They lie in the order of a hash, so that those of one file
    come on different days and a new test moves few others.
    """
    line = sorted(long, key=lambda name: (crc32(name.encode()), name))
    length = [max(seconds.get(name, STORED_FROM), STORED_FROM) for name in line]
    share, begins, found = sum(length) / DAYS or 1.0, 0.0, set()
    for name, takes in zip(line, length, strict=True):
        if min(int((begins + takes / 2) / share), DAYS - 1) == day % DAYS:
            found.add(name)
        begins += takes
    return found


class Durations:
    """Writes down how long each test took."""

    def __init__(self) -> None:
        self._took: dict[str, float] = defaultdict(float)
        self._setup: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":  # the first test that needs a session or a server starts it
            self._setup[report.nodeid] = report.duration
            return
        if report.when == "call":
            self._took[report.nodeid] += min(self._setup.pop(report.nodeid), report.duration)
        self._took[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        files: dict[str, dict[str, float]] = defaultdict(dict)
        for name, took in sorted({**stored(), **self._took}.items()):
            if took >= STORED_FROM:
                file, _, test = name.partition("::")
                files[file][test] = round(took, 1)
        STORED.write_text(json.dumps(files, indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("ONCEFLOW_STORE_DURATIONS") == "1" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


def pytest_report_header() -> str:
    if runs_all():
        return "all tests"
    return f"day {today()} of the long tests (ONCEFLOW_TEST_DAY={today()} repeats it)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = stored()
    if not runs_all():
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)
    if not runs_all() and not names_a_test(config):
        long = [item.nodeid for item in items if takes_turns(item, seconds)]
        left_out = set(long) - chosen(long, seconds, today())
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    if os.environ.get("PYTEST_XDIST_WORKER"):
        longest_file_first(items, seconds)


def takes_turns(item: pytest.Item, seconds: dict[str, float]) -> bool:
    if item.get_closest_marker("daily") or item.name == KILLS:
        return False
    return seconds.get(item.nodeid, 0.0) >= LONG


def names_a_test(config: pytest.Config) -> bool:
    """Whoever names one test wants it, whatever day it is."""
    return bool(config.getoption("keyword")) or any("::" in arg for arg in config.args)


def longest_file_first(items: list[pytest.Item], seconds: dict[str, float]) -> None:
    """Behind the unit tests, which need no Spark and are the first to find a mistake."""
    files: dict[Path, float] = defaultdict(float)
    for item in items:
        files[item.path] += seconds.get(item.nodeid, 0.01)
    unit = Path(__file__).parent / "unit"
    items.sort(key=lambda i: (unit not in i.path.parents, -files[i.path], str(i.path)))
