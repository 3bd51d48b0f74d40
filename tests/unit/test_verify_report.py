"""The verdict, and the report that is made of it."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from onceflow.harness.checker import Violation
from onceflow.harness.report import html
from onceflow.harness.result import CaseResult, Result, percentiles

FAULT = {
    "number": 0, "case": 0, "kind": "kill-point", "point": "epoch.decided", "job": "echo",
    "sinks": "files", "at_s": 3.0, "hit": True, "what": "driver 7 <at> epoch.decided",
    "recovery_s": 1.5, "start_up_s": 0.0,
}  # fmt: skip


def result(**more: object) -> Result:
    samples = [(0.0, 0), (2.0, 40), (6.0, 80)]
    case = CaseResult("echo", "files", {"result/result": "exactly-once"}, samples=samples)
    case.seconds = 8.0
    said = Result(7, "onceflow verify --seed 7", "local", "2026-01-01T00:00:00Z", cases=[case])
    said.faults = [FAULT]
    said.seconds = 8.0
    for name, value in more.items():
        setattr(said, name, value)
    return said


def test_valid_invalid_unknown() -> None:
    assert (result().verdict, result().exit_code) == ("valid", 0)
    wrong = result()
    wrong.cases[0].violations = [Violation("lost", "result/result", "1 rows")]
    assert (wrong.verdict, wrong.exit_code) == ("invalid", 1)


@pytest.mark.parametrize("why", ["no fault struck", "a checker crashed", "interrupted"])
def test_what_could_not_be_checked_has_not_passed(why: str) -> None:
    said = result()
    if why == "no fault struck":
        said.faults = [{**FAULT, "hit": False, "recovery_s": None}]
    elif why == "interrupted":
        said.interrupted = True
    else:
        said.cases[0].unknown = "KeyError: 'x'"
    assert (said.verdict, said.exit_code) == ("unknown", 3)


def test_percentiles_are_times_that_were_measured() -> None:
    hundred = [float(number) for number in range(1, 101)]
    assert percentiles(hundred) == {"p50": 50.0, "p95": 95.0, "max": 100.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "max": 3.0}
    assert percentiles([]) == {}


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [str(v) for name, v in attrs if name in ("src", "href")]
        self.outside += [tag] if tag in ("script", "link", "iframe", "img") else []


def test_the_report_needs_nothing_but_itself_and_says_how_to_replay() -> None:
    page = html(result().as_json())
    links = _Links()
    links.feed(page)
    assert links.outside == []
    assert "onceflow verify --seed 7" in page
    assert "exactly-once" in page
    assert "kill-point epoch.decided" in page
    assert "driver 7 &lt;at&gt; epoch.decided" in page
    assert page.count('<g class="mark m-kill"') == 1, "each fault that struck is on the picture"


def test_the_report_of_a_run_that_came_to_nothing() -> None:
    said = Result(1, "onceflow verify", "local", "2026-01-01T00:00:00Z", interrupted=True)
    assert "it was interrupted" in html(said.as_json())
