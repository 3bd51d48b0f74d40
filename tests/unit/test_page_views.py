"""The views: every state in words, numbers with units, and text of files only as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import reading
from alive import Alive
from visited import Got, ask, served

from onceflow.harness import charts
from onceflow.page import home_reader
from onceflow.page.server import Page
from onceflow.service.journal import Journal
from onceflow.snapshots.savepoints import Savepoints

pytestmark = pytest.mark.usefixtures("no_fsync")

EVIL = "<script>alert(1)</script>\"'><img src=x>"
VOID = {"meta", "link", "input", "br", "img"}


class Checked(HTMLParser):
    """Checks that a page is well formed: elements closed, ids unique, headings in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.heard: list[int] = []  # how deep the elements are that are read aloud by themselves
        self.ids: list[str] = []
        self.headings: list[int] = []
        self.labelled: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if found.get("role") == "status":
            self.heard.append(len(self.open))
        assert tag != "time" or not self.heard, "a moment that is read aloud each second"
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if found.get("aria-labelledby"):
            self.labelled.append(str(found["aria-labelledby"]))
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "svg":
            assert "aria-hidden" in found or "aria-label" in found, "a picture without words"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        self.heard = [depth for depth in self.heard if depth < len(self.open)]
        assert self.open.pop() == tag, f"</{tag}> closes something else"


def seen(page: Page, path: str) -> str:
    """A whole page, checked."""
    got = ask(page, path)
    assert got.status == 200, got.text
    found = Checked(got.text)
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert set(found.labelled) <= set(found.ids)
    assert found.headings[0] == 1
    assert found.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(found.headings, found.headings[1:], strict=False))
    assert '<a class="skip" href="#main">' in got.text
    assert "None" not in text_of(got.text)
    return got.text


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def board(home: Path, lines: list[dict[str, Any]], **head: Any) -> None:
    (home / "_boards").mkdir(exist_ok=True)
    first = {"board": "ads", "title": "Ads", "unit": {"clicks": "clicks", "spend": "EUR"}, **head}
    text = "".join(json.dumps(line) + "\n" for line in [first, *lines])
    (home / "_boards" / "ads.jsonl").write_text(text)


def sample(t: float, clicks: int, *, paused: bool = False, name: str = "pasta") -> dict[str, Any]:
    truth = {"truth_clicks": clicks + 1, "truth_spend_micros": (clicks + 1) * 250_000}
    counts = {"clicks": clicks, "spend_micros": clicks * 250_000, **truth}
    one = {"campaign": name, "budget_micros": 10_000_000, "paused": paused, **counts}
    return {"at": "2026-01-01T00:00:00Z", "t": t, "totals": counts, "campaigns": [one]}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(3, rows=1234)
    shop.tell()
    return tmp_path


@pytest.fixture
def page(home: Path) -> Iterator[Page]:
    with served(home) as found:
        yield found


# ---------------------------------------------------------------- jobs


def test_an_empty_home_says_so_and_what_to_do(tmp_path: Path) -> None:
    with served(tmp_path) as page:
        text = text_of(seen(page, "/"))
        assert "No job has run here yet" in text
        assert f"onceflow run job.py --home {tmp_path}" in text
        assert "No run is kept here yet" in text_of(seen(page, "/verify"))
    with served(tmp_path / "not" / "there") as page:
        assert "No job has run here yet" in seen(page, "/")


def test_jobs_are_shown_in_words_and_numbers_with_units(page: Page) -> None:
    text = text_of(seen(page, "/"))
    for said in ("shop", "running", "exactly-once", "every row reaches its target exactly once",
                 "lag 0.7 s", "in 30 rows/s", "last epoch 2", "term 1"):  # fmt: skip
        assert said in text, said
    bare = re.findall(r"<dt>([^<]+)</dt><dd>[\d,.]+</dd>", seen(page, "/"))
    assert set(bare) <= {"last epoch", "term", "restarts"}  # which, not how much


def test_a_damaged_job_is_shown_beside_the_others(home: Path, page: Page) -> None:
    Alive(home, "other").start()
    path = home / "other" / "job.json"
    path.write_bytes(path.read_bytes()[:-20])
    text = text_of(seen(page, "/"))
    assert "damaged" in text
    assert "running" in text
    for path_ in ("/jobs/other", "/jobs/other/lineages"):
        assert "job.json" in text_of(seen(page, path_))


def test_a_job_is_shown_before_its_first_start_is_complete(tmp_path: Path) -> None:
    Journal(tmp_path / "young").starting()
    with served(tmp_path) as page:
        assert "starting" in text_of(seen(page, "/"))
        text = text_of(seen(page, "/jobs/young"))
        assert "No query has started yet" in text
        assert "The job has not started yet" in text_of(seen(page, "/jobs/young/lineages"))


def test_a_job_is_shown_with_all_its_parts(home: Path, page: Page) -> None:
    Savepoints(Alive(home).folder).create("monday", {})
    html = seen(page, "/jobs/shop")
    text = text_of(html)
    for said in ("lines", "rejected", "rows/s", "check", "sweep", "committed within", "late rows",
                 "started, process 1, term 1, from the beginning", "savepoint monday"):  # fmt: skip
        assert said in text, said
    assert re.findall(r'id="e-out-(\d+)"', html) == ["0", "1", "2"]
    assert 'href="/jobs/shop/epochs/2" tabindex="0"' in html
    assert "epoch 2 at " in text
    assert 'class="mark m-savepoint"' in html


def test_an_epoch_is_shown_by_its_steps(page: Page) -> None:
    text = text_of(seen(page, "/jobs/shop/epochs/1"))
    assert "1,234 rows" in text
    assert "one entry in the epoch log: the commit point" in text
    got = ask(page, "/jobs/shop/epochs/7")
    assert got.status == 404
    assert "the nearest: 2" in got.text


@pytest.mark.parametrize("part", ["state", "ledgers"])
def test_details_are_pages_of_their_own_too(page: Page, part: str) -> None:
    whole, bare = (
        seen(page, f"/jobs/shop/{part}"),
        ask(page, f"/jobs/shop/{part}", HX_Request="true"),
    )
    assert "<html" in whole
    assert "<html" not in bare.text
    assert "out" in text_of(bare.text)


def test_a_name_from_a_file_is_only_text(home: Path) -> None:
    shop = Alive(home, "evil", outputs={EVIL: {"kind": EVIL, "guarantee": EVIL, "path": EVIL}})
    shop.start()
    shop.run(1)
    shop.journal.event("error", message=EVIL)
    board(home, [{"t": EVIL, "mark": EVIL, "what": EVIL}, {"t": 1.0, "mark": EVIL, "what": EVIL},
                 sample(1.0, 5, name=EVIL), {**sample(2.0, 6), "t": EVIL}], title=EVIL)  # fmt: skip
    run = home / "_verify" / "run-1"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text(
        json.dumps({"event": "begin", "at": EVIL, "command": EVIL}) + "\n"
        + json.dumps({"event": "fault", "kind": EVIL, "what": EVIL, "at_s": 1}) + "\n"
    )  # fmt: skip
    with served(home) as page:
        for path in ("/", "/jobs/evil", "/boards/ads", "/verify", "/verify/run-1",
                     "/jobs/evil/ledgers", "/jobs/evil/lineages"):  # fmt: skip
            got = ask(page, path)
            assert got.status == 200, path
            assert "<script>alert" not in got.text, path
            assert "<img src=x" not in got.text, path


def test_a_job_that_was_rolled_back_any_number_of_times_is_shown(
    home: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: dict[str, Any] = reading.lineages(home, "shop")[0]
    ids = [f"{number:08d}-x" for number in range(3000)]
    chain = [{**first, "lineage": one, "parent": ids[n - 1] if n else None, "current": n == 2999}
             for n, one in enumerate(ids)]  # fmt: skip
    aside = {**first, "lineage": "aside-xx", "parent": ids[0], "current": False}
    monkeypatch.setattr(home_reader, "lineages", lambda *_: [*chain, aside])
    html = seen(page, "/jobs/shop/lineages")
    order = re.findall(r'<li class="in-(\d)[^"]*">\s*<div[^>]*>\s*<p><code title="([^"]+)"', html)
    assert [one for _, one in order] == [*ids, "aside-xx"]
    assert [int(depth) for depth, _ in order] == [*range(8), *[8] * 2992, 1]
    assert html.count(">current</b>") == 1


# ---------------------------------------------------------------- boards


def test_a_board_shows_expected_numbers_and_kills(home: Path, page: Page) -> None:
    kill = {"t": 2.0, "mark": "kill", "what": "kill -9 of aggregation: 14 processes"}
    start = {"t": 4.0, "mark": "start", "what": "aggregation goes on after epoch 3"}
    board(home, [sample(1.0, 10), kill, start, sample(5.0, 40, paused=True)])
    html = seen(page, "/boards/ads")
    text = text_of(html)
    for said in ("40 clicks", "expected 41 clicks", "10 EUR", "paused: its budget is spent",
                 "1 kill so far", "kill -9 of aggregation: 14 processes", "100 %"):  # fmt: skip
        assert said in text, said
    assert '<a href="/boards/ads" aria-current="page">Ads</a>' in html
    assert html.count('class="mark m-kill"') == 2  # in both charts
    assert "Exact" not in text
    verdict = {"t": 6.0, "mark": "verdict", "exact": True, "what": "lost 0, duplicated 0"}
    board(home, [sample(1.0, 10), verdict])
    assert "Exact lost 0, duplicated 0" in text_of(seen(page, "/boards/ads"))


def test_a_board_without_a_sample_says_so(home: Path, page: Page) -> None:
    board(home, [])
    text = text_of(seen(page, "/boards/ads"))
    assert "No sample yet" in text
    assert "No campaign has a click yet" in text


def test_a_long_line_is_drawn_with_as_many_points_as_can_be_seen() -> None:
    points = [(float(t), float(t)) for t in range(5000)]
    drawn = charts.line_chart([charts.Line("committed", points)], [], "clicks")
    assert drawn is not None
    path = re.search(r'points="([^"]+)"', drawn.svg)
    assert path
    assert len(path[1].split()) <= 242
    assert path[1].endswith("1000.0,0.02")  # the last one is there
    assert drawn.scale == [5000, 2500, 0]


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (0.3, 0.5), (1, 1), (1.2, 2), (9, 10), (2100, 2500), (6e6, 1e7)]
)
def test_a_scale_ends_at_a_round_number(value: float, top: float) -> None:
    assert charts.round_up(value) == pytest.approx(top)


# ---------------------------------------------------------------- verify


def test_runs_are_shown_with_their_verdict_and_a_sandboxed_report(home: Path, page: Page) -> None:
    run = home / "_verify" / "run-1"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text('{"event": "begin", "at": "2026-01-01T00:00:00Z"}\n')
    assert "interrupted: it ended without a verdict" in text_of(seen(page, "/verify"))
    assert ask(page, "/verify/run-1/report").status == 404
    faults = [{"kind": "kill-jvm", "what": "kill -9 of JVM 7", "at_s": 3.25, "hit": True}]
    result = {
        "verdict": "valid", "seed": 7, "seconds": 312.0, "struck": 1, "violations": [],
        "faults": faults, "began": "2026-01-01T00:00:00Z", "command": "onceflow verify",
    }  # fmt: skip
    (run / "result.json").write_text(json.dumps(result))
    (run / "report.html").write_text("<script>1</script>")
    with served(home) as again:  # the first page keeps its answer for a moment
        text = text_of(seen(again, "/verify/run-1"))
        for said in (
            "valid: no row lost, no row duplicated",
            "1 fault",
            "kill -9 of JVM 7",
            "5 min",
        ):
            assert said in text, said
        assert 'sandbox title="the report of run run-1"' in seen(again, "/verify/run-1")
        report = ask(again, "/verify/run-1/report")
        assert report.status == 200
        assert "; sandbox;" in report.headers["content-security-policy"]
        assert "script-src" not in report.headers["content-security-policy"]
        saved = ask(again, "/verify/run-1/report?download=1")
        assert saved.headers["content-disposition"] == 'attachment; filename="run-1.html"'


# ---------------------------------------------------------------- static files


def test_files_are_kept_by_a_browser_until_they_change(page: Page) -> None:
    names = re.findall(r'(?:href|src)="(/static/[^"]+)"', ask(page, "/").text)
    assert len(names) == 5
    for name in names:
        got = ask(page, name)
        assert got.status == 200
        assert "immutable" in got.headers["cache-control"]
        again = ask(page, name, If_None_Match=got.headers["etag"])
        assert (again.status, again.body) == (304, b"")


def test_a_page_is_small(page: Page) -> None:
    css = next(n for n in re.findall(r'href="(/static/[^"]+)"', ask(page, "/").text) if "css" in n)
    sizes: dict[str, Got] = {"/": ask(page, "/"), "css": ask(page, css)}
    assert all(len(got.body) < 32_000 for got in sizes.values())


def test_colours_are_remembered_by_the_browser(page: Page) -> None:
    assert 'data-theme="dark"' in ask(page, "/", Cookie="onceflow-theme=dark").text
    assert "data-theme=" not in ask(page, "/", Cookie="onceflow-theme=x").text
