"""The page in a real browser while a job runs: what it shows, a kill, a savepoint by click."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from shown import fill
from staged import TOKEN, Process, Words, onceflow, patiently
from tabs import PHONE, Open, Tab

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def url(served: Process) -> str:
    return str(served.hear("serving")["url"])


def audit(words: Words, file: str = "_audit.jsonl") -> list[dict[str, Any]]:
    path = words.home / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def unlock(tab: Tab, token: str) -> None:
    tab.page.get_by_role("link", name="Unlock actions", exact=True).click()
    tab.page.get_by_label("Token").fill(token)
    tab.page.get_by_role("button", name="Unlock").click()


# ---------------------------------------------------------------- alive


def test_a_job_comes_to_life_without_a_reload(url: str, tab: Open) -> None:
    jobs = tab(url).go_live("/")
    card = jobs.main.get_by_role("listitem").filter(has=jobs.page.get_by_text("words", exact=True))
    expect(card).to_contain_text("running")
    expect(card).to_contain_text("exactly-once")
    expect(jobs.figure("in")).to_have_text(re.compile(r"[1-9][\d.,]* ?k? rows/s"))
    expect(jobs.figure("last epoch")).to_have_text(re.compile(r"\d+"))
    epoch, clock = jobs.number("last epoch"), jobs.page.locator("[sse-swap=beat]").inner_text()
    patiently(lambda: jobs.number("last epoch") > epoch + 1)
    expect(jobs.page.locator("[sse-swap=beat]")).not_to_have_text(clock)
    expect(jobs.figure("published")).to_have_text(re.compile(r"\d+ s ago"))
    expect(jobs.figure("term")).to_have_text("1")
    expect(jobs.page.get_by_role("img", name="rows published a second")).to_be_visible()
    assert jobs.was_not_reloaded()
    jobs.is_clean()


def test_a_job_is_shown_with_its_rates_and_its_epochs_step_by_step(url: str, tab: Open) -> None:
    job = tab(url).go_live("/jobs/words")
    graph = job.page.get_by_role("group", name="query counts")
    expect(graph.get_by_role("list", name="sources")).to_contain_text("lines")
    expect(graph.get_by_role("list", name="outputs")).to_contain_text("long")
    expect(graph.get_by_role("list", name="outputs")).to_contain_text("short")
    rate = re.compile(r"[1-9][\d.,]* ?k? rows/s")
    expect(graph.get_by_role("list", name="rows in").get_by_role("listitem")).to_have_text(rate)
    outs = graph.get_by_role("list", name="rows out").get_by_role("listitem")
    expect(outs).to_have_text([rate, rate])

    columns = job.page.locator(".plot .column")
    seen = columns.count()
    patiently(lambda: columns.count() > seen)
    told = columns.last.locator("title").text_content() or ""
    assert re.match(r"epoch \d+ at .+ UTC: .*stage \d+.*decide .*publish .* out; term 1", told)
    for name in ("committed within", "90 % within", "99 % within"):
        expect(job.figure(name)).to_have_text(re.compile(r"[\d.,]+ m?s"))
    expect(job.figure("watermark")).to_have_text(re.compile(r"20\d\d-.* UTC"))
    expect(job.figure("late rows")).to_have_text("0 rows")
    expect(job.figure("state")).to_have_text(re.compile(r"\d+ rows"))

    job.page.get_by_text("State, by operator and key group").click()
    expect(job.page.locator("#state")).to_contain_text("keyed step seen by word string")
    expect(job.page.get_by_role("img", name="key groups")).to_be_visible()
    job.page.get_by_text("What each target itself says is published").click()
    expect(job.page.get_by_role("row", name="counts/long")).to_contain_text("out/long")
    assert job.was_not_reloaded()
    job.is_clean()

    columns.last.dispatch_event("click")  # one of them may be renewed under the mouse
    expect(job.page.get_by_role("heading", name=re.compile(r"Epoch \d+"))).to_be_visible()
    job.is_clean()


@pytest.mark.kill
def test_a_kill_is_shown_and_epochs_continue_after_it(url: str, tab: Open, words: Words) -> None:
    job, jobs = tab(url).go_live("/jobs/words"), tab(url).go_live("/")
    expect(jobs.main).to_contain_text("running")
    term, killed, epoch = job.number("term"), words.driver(), job.number("last epoch")

    os.kill(killed, signal.SIGKILL)

    expect(job.page.locator(".standing")).to_contain_text(re.compile("restarting|starting"))
    happened = job.page.get_by_role("region", name="What happened")
    expect(happened.locator(".m-killed")).to_contain_text(
        "the driver was ended by SIGKILL; it restarts"
    )
    expect(jobs.main).to_contain_text(re.compile("restarting|starting"))
    expect(job.live).to_have_text("live")  # the page itself goes on

    expect(job.figure("term")).to_have_text(str(term + 1))
    expect(job.page.locator(".standing")).to_contain_text("running")
    expect(jobs.main).to_contain_text("running")
    expect(jobs.main).to_contain_text("1 restart on record")
    expect(job.figure("restarts")).to_have_text("1")
    patiently(lambda: job.number("last epoch") > epoch + 3)
    assert words.driver() != killed
    picture = job.page.locator(".plot")
    expect(picture.locator(".mark.m-killed title")).to_contain_text("UTC")
    kinds = [
        "killed" if "m-killed" in (part.get_attribute("class") or "") else "epoch"
        for part in picture.locator(".column, .mark.m-killed").all()
    ]
    at = kinds.index("killed")
    assert "epoch" in kinds[:at]
    assert "epoch" in kinds[at:]
    assert job.was_not_reloaded()
    assert jobs.was_not_reloaded()
    job.is_clean()
    jobs.is_clean()


# ---------------------------------------------------------------- a savepoint by click


def test_without_the_token_nothing_is_done_and_the_attempt_is_noted(
    url: str, tab: Open, words: Words
) -> None:
    lineages = tab(url).go_live("/jobs/words/lineages")
    expect(lineages.main).to_contain_text("Needs the token")
    expect(lineages.page.get_by_role("button", name="Create a savepoint")).to_have_count(0)
    post = "fetch('/jobs/words/savepoints', {method: 'POST', body: new URLSearchParams('name=no')})"
    assert lineages.page.evaluate(f"{post}.then((answer) => answer.status)") == 401
    line = audit(words, "_refused.jsonl")[-1]
    assert (line["action"], line["job"], line["arguments"]) == (
        "savepoint", "words", {"name": "no"},
    )  # fmt: skip
    assert line["outcome"].startswith("refused: ")

    unlock(lineages, "not-the-token")
    expect(lineages.page.get_by_role("alert")).to_contain_text("that is not the token")
    assert audit(words, "_refused.jsonl")[-1]["action"] == "unlock"
    assert onceflow("savepoint", "list", "words", "--home", words.home)["savepoints"] == []
    lineages.is_clean(but=("status of 401",))


def test_a_savepoint_is_created_by_click_and_a_plan_shows_the_way_back(
    url: str, tab: Open, words: Words
) -> None:
    lineages, job = tab(url).go_live("/jobs/words/lineages"), tab(url).go_live("/jobs/words")
    unlock(lineages, TOKEN)
    expect(lineages.page).to_have_url(re.compile("/jobs/words/lineages$"))
    lineages.page.evaluate("window.loaded = 'once'")
    lineages.page.get_by_label("Name").fill("monday")
    lineages.page.get_by_role("button", name="Create a savepoint").click()
    expect(lineages.main).to_contain_text("Savepoint monday is created")
    expect(lineages.page.locator(".points")).to_contain_text("monday after counts epoch")
    (made,) = onceflow("savepoint", "list", "words", "--home", words.home)["savepoints"]
    assert made["name"] == "monday"
    outcomes = [line["outcome"] for line in audit(words) if line["arguments"] == {"name": "monday"}]
    assert outcomes == ["began", "done: savepoint monday"]
    happened = job.page.get_by_role("region", name="What happened")
    expect(happened.locator(".m-savepoint")).to_contain_text("savepoint monday")
    expect(job.page.locator(".plot .m-savepoint title")).to_contain_text("savepoint monday")
    assert job.was_not_reloaded()
    job.is_clean()

    lineages.page.get_by_role("link", name="What would a restore do?").click()
    plan = lineages.page.get_by_role("region", name="plan", exact=True)
    expect(plan).to_contain_text("Restore of savepoint monday")
    command = f"onceflow restore words monday --published rewind --home {words.home}"
    expect(plan).to_contain_text(command)
    expect(plan).to_contain_text("It must be stopped first")
    expect(plan).to_contain_text("Nothing was changed")
    assert len(onceflow("lineages", "words", "--home", words.home)) == 1
    assert lineages.was_not_reloaded()
    lineages.is_clean()


def test_a_form_of_a_closed_session_is_refused(url: str, tab: Open, words: Words) -> None:
    lineages = tab(url).go_live("/jobs/words/lineages")
    unlock(lineages, TOKEN)
    expect(lineages.page.get_by_role("button", name="Create a savepoint")).to_be_visible()
    tab(url).go("/").page.get_by_role("button", name="Lock actions").click()
    lineages.page.get_by_label("Name").fill("tuesday")
    lineages.page.get_by_role("button", name="Create a savepoint").click()
    expect(lineages.page.get_by_role("alert")).to_contain_text("this needs the token")
    assert audit(words, "_refused.jsonl")[-1]["outcome"].startswith("refused: ")
    lineages.is_clean(but=("status of 401",))


# ---------------------------------------------------------------- without a mouse


def test_everything_can_be_reached_by_keyboard(url: str, tab: Open) -> None:
    jobs = tab(url).go_live("/")
    press = jobs.page.keyboard.press
    press("Tab")
    assert jobs.focused == "Skip to the content"
    expect(jobs.page.locator("a.skip")).to_be_in_viewport()
    press("Enter")
    jobs.tab_to("words")
    epoch = jobs.number("last epoch")
    patiently(lambda: jobs.number("last epoch") > epoch)
    assert jobs.focused == "words", "the focus is lost when numbers are renewed"
    press("Enter")
    expect(jobs.page).to_have_url(re.compile("/jobs/words$"))

    expect(jobs.live).to_have_text("live")
    jobs.tab_to("epoch")
    newest = jobs.focused
    press("ArrowLeft")
    assert jobs.focused.startswith("epoch")
    before = jobs.focused
    assert before != newest
    expect(jobs.page.locator(".readout")).to_have_text(before)
    columns = jobs.page.locator(".plot .column")
    last = columns.last.get_attribute("id")
    patiently(lambda: columns.last.get_attribute("id") != last)
    assert jobs.focused == before, "the focus is lost when the picture is renewed"

    jobs.tab_to("State, by operator")
    press("Enter")
    expect(jobs.page.locator("#state")).to_contain_text("keyed step seen")
    jobs.is_clean()

    jobs.go_live("/jobs/words/lineages")
    jobs.tab_to("Unlock actions")
    press("Enter")
    expect(jobs.page.get_by_label("Token")).to_be_focused()
    jobs.page.keyboard.type(TOKEN)
    press("Enter")
    expect(jobs.page.get_by_role("button", name="Lock actions")).to_be_visible()
    jobs.is_clean()


# ---------------------------------------------------------------- every view


@pytest.fixture(scope="module")
def views(words: Words) -> dict[str, str]:
    """All views by name, with a board, runs of verify and a savepoint."""
    run = fill(words.home)
    savepoints = onceflow("savepoint", "list", "words", "--home", words.home)["savepoints"]
    if not savepoints:
        onceflow("savepoint", "create", "words", "--home", words.home, "--name", "monday")
    return {
        "jobs": "/",
        "job": "/jobs/words",
        "lineages": "/jobs/words/lineages",
        "state": "/jobs/words/state",
        "ledgers": "/jobs/words/ledgers",
        "epoch": "/jobs/words/epochs/3",
        "plan": "/jobs/words/plan?restore=monday",
        "board": "/boards/ads",
        "verify": "/verify",
        "run": f"/verify/{run}",
        "access": "/access",
        "problem": "/jobs/nothing-of-that-name",
    }


@pytest.mark.parametrize("kind", ["light", "dark", "phone", "phone-dark"])
def test_every_view_fits_and_is_accessible(
    kind: str, url: str, tab: Open, views: dict[str, str], screenshots: Path
) -> None:
    options: dict[str, Any] = {"color_scheme": "dark" if "dark" in kind else "light"}
    if "phone" in kind:
        options |= {"viewport": PHONE, "device_scale_factor": 2, "has_touch": True}
    tab = tab(url, **options)
    for name, path in views.items():
        tab.go(path)
        if tab.live.count():
            expect(tab.live).to_have_text("live")
        if name == "run":
            tab.page.locator("iframe").scroll_into_view_if_needed()
            report = tab.page.frame_locator("iframe").locator("body")
            expect(report).to_contain_text("Every expected row is in its target exactly once")
        tab.shoot(screenshots, f"{name}-{kind}")
        assert (name, tab.too_wide()) == (name, "")
        assert (name, tab.structure()) == (name, [])
    tab.is_clean(but=("status of 404",))
