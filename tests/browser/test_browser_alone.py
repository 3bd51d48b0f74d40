"""The page in a real browser where no job runs: a server that goes away, boards, colours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect
from shown import Ads
from staged import Process, serve
from tabs import Open


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone") / "home"


@pytest.fixture(scope="module")
def url(home: Path, browser: Browser) -> Iterator[str]:
    with serve(home) as page:
        yield str(page.hear("serving")["url"])


def test_an_empty_home_says_what_to_do(url: str, tab: Open, home: Path) -> None:
    jobs = tab(url).go_live("/")
    expect(jobs.main).to_contain_text("No job has run here yet")
    expect(jobs.main).to_contain_text(f"onceflow run job.py --home {home}")
    verify = tab(url).go_live("/verify")
    expect(verify.main).to_contain_text("onceflow verify")
    for each in (jobs, verify):
        assert each.structure() == []
        each.is_clean()


def test_a_board_grows_while_somebody_looks_and_shows_the_time_of_a_kill(
    url: str, tab: Open, home: Path
) -> None:
    ads = Ads(home)
    board = tab(url).go_live("/boards/ads")
    expect(board.main).to_contain_text("No sample yet")
    for _ in range(3):
        ads.second()
    clicks = board.page.locator(".chart").filter(has_text="Clicks")
    expect(clicks).to_contain_text("48 clicks")
    expect(clicks).to_contain_text("expected 48 clicks")
    expect(clicks).to_contain_text("no kill so far")
    assert _points(clicks) == 3

    ads.board.mark("kill", "kill -9 of aggregation: 14 processes")
    for _ in range(4):
        ads.second(committed=False)
    expect(clicks).to_contain_text("expected 112 clicks")
    expect(clicks.locator(".now")).to_contain_text(re.compile("^48 clicks"))
    expect(clicks.locator(".mark.m-kill title")).to_have_text(
        "3.0 s: kill -9 of aggregation: 14 processes"
    )
    expect(clicks.locator(".strip .m-kill")).to_contain_text("killed")
    expect(clicks).to_contain_text("1 kill so far")
    happened = board.page.get_by_role("region", name="What happened")
    expect(happened).to_contain_text("kill -9 of aggregation: 14 processes")

    for _ in range(40):
        ads.second()
    expect(clicks.locator(".now")).to_contain_text("752 clicks; expected 752 clicks")
    assert _points(clicks) == 47
    expect(board.page.get_by_role("row", name="dinner")).to_contain_text("live")
    ads.board.mark("verdict", "exact: lost 0, duplicated 0", exact=True)
    expect(board.main).to_contain_text("exact: lost 0, duplicated 0")
    assert board.was_not_reloaded()
    board.is_clean()


def _points(chart: object) -> int:
    """Of the committed line."""
    line = chart.locator(".l-committed[points]")  # type: ignore[attr-defined]
    return len((line.get_attribute("points") or "").split())


def test_it_is_not_called_live_while_the_server_is_away(tab: Open, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serve(home) as page:
        url = str(page.hear("serving")["url"])
        port = urlsplit(url).port
        assert port is not None
        jobs = tab(url).go_live("/")
    expect(jobs.live).to_have_text(re.compile("not live: reconnecting"))
    again: Process = serve(home, port)
    with again:
        again.hear("serving")
        expect(jobs.live).to_have_text("live")
        assert jobs.was_not_reloaded()
        jobs.is_clean(but=("net::ERR_", "[object Event]"))


def test_it_is_not_called_live_while_the_files_cannot_be_read(
    url: str, tab: Open, home: Path
) -> None:
    ads, path = Ads(home), home / "_boards" / "ads.jsonl"
    ads.second()
    board = tab(url).go_live("/boards/ads")
    path.rename(path.with_suffix(".away"))
    expect(board.live).to_have_text(
        re.compile(r"not live: cannot be read since [\d:]+ UTC: there is no board ads; as of")
    )
    expect(board.page.locator("[sse-swap=beat] time")).to_be_visible()
    path.with_suffix(".away").rename(path)
    expect(board.live).to_have_text("live")
    assert board.was_not_reloaded()
    board.is_clean()


def test_the_choice_of_colours_is_remembered(url: str, tab: Open) -> None:
    jobs = tab(url, color_scheme="light").go("/")
    switch = jobs.page.locator("#theme")
    expect(switch).to_have_accessible_name(re.compile("those of the system"))
    light = jobs.colours()
    switch.click()
    assert jobs.colours() == light
    switch.click()
    dark = jobs.colours()
    assert dark != light
    expect(switch).to_have_accessible_name(re.compile("Colours: dark"))
    assert jobs.go("/verify").colours() == dark
    expect(jobs.page.locator("#theme")).to_have_text(re.compile("dark"))
    jobs.page.locator("#theme").click()
    assert jobs.colours() == light
    jobs.page.emulate_media(color_scheme="dark")
    assert jobs.go("/").colours() == dark
    jobs.is_clean()


def test_nothing_moves_where_reduced_motion_is_preferred(url: str, tab: Open, home: Path) -> None:
    turning = """() => {
      const sign = document.createElement("i");
      document.querySelector("h1").append(sign);
      sign.parentElement.className = "state is-restarting";
      return document.getAnimations().length;
    }"""
    assert tab(url, reduced_motion="reduce").go("/").page.evaluate(turning) == 0
    assert tab(url, reduced_motion="no-preference").go("/").page.evaluate(turning) == 1


def test_without_scripts_it_shows_the_same(url: str, tab: Open, home: Path) -> None:
    plain = tab(url, java_script_enabled=False)
    plain.page.goto(url)
    expect(plain.main).to_contain_text("No job has run here yet")
    expect(plain.page.locator("noscript meta[http-equiv=refresh]")).to_have_count(1)
