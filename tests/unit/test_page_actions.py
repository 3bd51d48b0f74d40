"""Actions of the page: savepoints, which need the token, and plans, which change nothing."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_page_views import Checked
from test_restore_edges import Driver
from visited import TOKEN, Got, ask, audit, patiently, post, refusals, served

from onceflow.page import home_reader, plans
from onceflow.page.actions import Actions, SavepointRequest
from onceflow.page.server import Page
from onceflow.protocol.home import JobFolder
from onceflow.sinks import Files
from onceflow.snapshots.savepoints import Savepoints

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    Driver(JobFolder(home, "shop"), "out", {"out": Files(str(tmp_path / "out"))}).open().run(4)
    return home


@pytest.fixture
def page(home: Path) -> Iterator[Page]:
    with served(home) as found:
        yield found


def unlocked(page: Page) -> tuple[str, str]:
    """A cookie, and the secret that its forms repeat."""
    cookie = post(page, "/access", {"token": TOKEN}).headers["set-cookie"].partition(";")[0]
    form = ask(page, "/jobs/shop/lineages", Cookie=cookie).text
    found = re.search(r'name="csrf" value="([^"]+)"', form)
    assert found
    return cookie, found[1]


def by_program(page: Page, body: Any = None, **headers: str) -> Got:
    data = None if body is None else json.dumps(body).encode()
    return ask(page, "/api/jobs/shop/savepoints", "POST", body=data, **headers)


def savepoints(home: Path) -> list[str]:
    return Savepoints(JobFolder(home, "shop")).names()


# ---------------------------------------------------------------- savepoints


def test_a_savepoint_by_form_shows_its_progress_and_its_result(page: Page, home: Path) -> None:
    cookie, csrf = unlocked(page)
    fields = {"csrf": csrf, "name": "monday"}
    got = post(page, "/jobs/shop/savepoints", fields, Cookie=cookie)
    assert (got.status, got.headers["location"]) == (303, "/jobs/shop/lineages")
    text = patiently(lambda: _taken(page))
    assert "Savepoint monday is created" in text
    assert "What would a restore do?" in text
    assert savepoints(home) == ["monday"]
    lines = [(one["action"], one["arguments"], one["outcome"]) for one in audit(home)]
    assert lines == [
        ("unlock", None, "done"),
        ("savepoint", {"name": "monday"}, "began"),
        ("savepoint", {"name": "monday"}, "done: savepoint monday"),
    ]
    assert {one["who"] for one in audit(home)} == {"127.0.0.1"}


def _taken(page: Page) -> str:
    text = ask(page, "/jobs/shop/lineages").text
    return text if "is created" in text else ""


def test_modules_in_the_working_directory_are_not_imported(
    page: Page, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('of somebody else')")
    monkeypatch.chdir(tmp_path)
    assert by_program(page, {"name": "monday"}, X_Onceflow_Token=TOKEN).status == 200
    assert savepoints(home) == ["monday"]


def test_a_taken_name_is_refused_with_its_fix(page: Page, home: Path) -> None:
    Savepoints(JobFolder(home, "shop")).create("monday", {})
    cookie, csrf = unlocked(page)
    post(page, "/jobs/shop/savepoints", {"csrf": csrf, "name": "monday"}, Cookie=cookie)
    patiently(lambda: "No savepoint" in ask(page, "/jobs/shop/lineages").text)
    assert "fix: choose another name" in ask(page, "/jobs/shop/lineages").text
    assert audit(home)[-1]["outcome"] == "failed: savepoint 'monday' exists already"


@pytest.mark.parametrize("name", ["../up", "-rf", "a b", "a\x00b", "x" * 101, "--home=/tmp"])
def test_an_invalid_name_is_refused_before_anything_runs(page: Page, home: Path, name: str) -> None:
    cookie, csrf = unlocked(page)
    got = post(
        page,
        "/jobs/shop/savepoints",
        {"csrf": csrf, "name": name},
        Cookie=cookie,
        HX_Request="true",
    )
    assert got.status == 400
    assert "is not a name for a savepoint" in got.text
    assert "<html" not in got.text
    assert savepoints(home) == []
    assert refusals(home)[-1]["outcome"].startswith("refused: ")


@pytest.mark.parametrize(
    ("cookie", "csrf", "status"),
    [("", "", 401), ("onceflow-{}=guess", "guess", 401), ("{}", "", 403), ("{}", "guess", 403)],
)
def test_without_a_session_and_its_secret_nothing_is_done(
    page: Page, home: Path, cookie: str, csrf: str, status: int
) -> None:
    ours, _ = unlocked(page)
    given = ours if cookie == "{}" else cookie.format(page.port)
    got = post(page, "/jobs/shop/savepoints", {"csrf": csrf, "name": "x"}, Cookie=given)
    assert got.status == status
    assert savepoints(home) == []
    assert refusals(home)[-1]["outcome"].startswith("refused: ")


def test_a_program_gives_the_token_in_a_header_and_waits(page: Page, home: Path) -> None:
    got = by_program(page, {"name": "nightly"}, X_Onceflow_Token=TOKEN)
    assert got.status == 200
    assert got.json["name"] == "nightly"
    assert got.json["epochs"] == {"out": 3}
    assert savepoints(home) == ["nightly"]
    again = by_program(page, {"name": "nightly"}, X_Onceflow_Token=TOKEN)
    assert again.status == 409
    assert again.json["kind"] == "JobError"
    assert again.json["hint"] == "choose another name"
    listed = ask(page, "/api/jobs/shop/savepoints").json["savepoints"]
    assert [one["name"] for one in listed] == ["nightly"]


@pytest.mark.parametrize("headers", [{}, {"X_Onceflow_Token": ""}, {"X_Onceflow_Token": "wrong"}])
def test_a_program_without_the_token_is_refused(
    page: Page, home: Path, headers: dict[str, str]
) -> None:
    got = by_program(page, {"name": "x"}, **headers)
    assert got.status == 401
    assert got.json["event"] == "error"
    assert savepoints(home) == []
    assert refusals(home)[-1]["action"] == "savepoint"


def test_a_session_needs_its_secret_for_the_api_too(page: Page, home: Path) -> None:
    cookie, csrf = unlocked(page)
    assert by_program(page, Cookie=cookie).status == 403
    assert by_program(page, {}, Cookie=cookie, X_Onceflow_CSRF=csrf).status == 200
    assert len(savepoints(home)) == 1


@pytest.mark.parametrize("body", [b"[]", b"{", b'"x"', b'{"name": 7}', b'{"name": ["a"]}', b"\xff"])
def test_an_invalid_body_is_refused(page: Page, home: Path, body: bytes) -> None:
    got = ask(page, "/api/jobs/shop/savepoints", "POST", body=body, X_Onceflow_Token=TOKEN)
    assert got.status == 400
    assert got.json["event"] == "error"
    assert savepoints(home) == []
    noted = refusals(home)[-1]
    assert (noted["action"], noted["job"]) == ("savepoint", "shop")
    assert noted["outcome"] == f"refused: {got.json['message']}"


def test_a_job_that_does_not_exist_is_refused(page: Page, home: Path) -> None:
    got = ask(page, "/api/jobs/none/savepoints", "POST", X_Onceflow_Token=TOKEN)
    assert got.status == 404
    assert refusals(home)[-1]["job"] == "none"


def test_one_savepoint_of_a_job_at_a_time(
    page: Page, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, inside = threading.Event(), threading.Event()

    def slowly(self: Actions, request: SavepointRequest) -> str:
        inside.set()
        assert go.wait(30)
        request.state, request.made = "done", {"name": "x", "files": 0, "bytes": 0, "epochs": {}}
        return "done"

    monkeypatch.setattr(Actions, "_create", slowly)
    first: list[Got] = []
    asking = threading.Thread(
        target=lambda: first.append(by_program(page, {}, X_Onceflow_Token=TOKEN))
    )
    asking.start()
    assert inside.wait(30)
    text = ask(page, "/jobs/shop/lineages").text
    assert "<b>Creating savepoint" in text
    assert re.search(r'role="status"[^>]*>creating a savepoint', text)
    Checked(text)  # nothing that counts seconds is read aloud
    second = by_program(page, {}, X_Onceflow_Token=TOKEN)
    go.set()
    asking.join()
    assert (first[0].status, second.status) == (200, 409)
    assert second.json["kind"] == "Busy"


def test_a_claim_of_a_proxy_is_noted_as_one(page: Page, home: Path) -> None:
    by_program(page, {}, X_Forwarded_For="10.1.2.3" + "x" * 500)
    noted = refusals(home)[-1]
    assert noted["who"] == "127.0.0.1"
    assert noted["forwarded_for"].startswith("10.1.2.3")
    assert len(noted["forwarded_for"]) == 100


# ---------------------------------------------------------------- plans


def before_and_after(home: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in home.parent.rglob("*") if path.is_file()}


def test_a_plan_says_what_would_be_done_and_changes_nothing(page: Page, home: Path) -> None:
    Savepoints(JobFolder(home, "shop")).create("monday", {})
    held = before_and_after(home)
    got = ask(page, "/api/jobs/shop/plan?rollback=1&published=rewind")
    assert got.status == 200
    assert got.json["outputs"][0]["says"] == "the rows of 2 epochs are taken back"
    assert shlex.split(got.json["command"]) == [
        "onceflow", "rollback", "shop", "--to", "1", "--published", "rewind", "--home", str(home),
    ]  # fmt: skip
    restore = ask(page, "/api/jobs/shop/plan?restore=monday").json
    assert restore["outputs"][0]["says"] == "nothing was published after the cut"
    text = ask(page, "/jobs/shop/plan?rollback=1").text
    for choice in ("rewind", "skip", "replay"):
        assert f"--published {choice} --home {home}" in text
    assert before_and_after(home) == held


def test_a_target_that_does_not_answer_is_named_in_the_error(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(home_reader, "_PLAN_WITHIN", 0.05)
    monkeypatch.setattr(plans, "plan", lambda *_, **__: go.wait(60))
    got = ask(page, "/api/jobs/shop/plan?rollback=1")
    assert (got.status, got.json["kind"], got.json["retryable"]) == (503, "ServerSilent", True)
    for headers in ({}, {"HX_Request": "true"}):
        seen = ask(page, "/jobs/shop/plan?rollback=1", **headers)
        assert (seen.status, "a target has not answered" in seen.text) == (503, True)
    go.set()


def test_an_impossible_plan_says_why(page: Page) -> None:
    got = ask(page, "/api/jobs/shop/plan?rollback=99")
    assert got.status == 404
    assert got.json["hint"] == "it has 0 to 3; the nearest: 3"
    assert "the nearest: 3" in ask(page, "/jobs/shop/plan?rollback=99", HX_Request="true").text
    assert ask(page, "/api/jobs/shop/plan?rollback=1&published=all").status == 400
    assert ask(page, "/api/jobs/shop/plan").status == 400


def test_a_plan_reads_savepoints_of_the_job_and_nothing_else(
    page: Page, home: Path, tmp_path: Path
) -> None:
    made = Savepoints(JobFolder(home, "shop")).create("monday", {})
    elsewhere = tmp_path / "elsewhere"
    made.folder.rename(elsewhere)
    for name in (str(elsewhere), "../../../elsewhere", "..", "%2e%2e"):
        got = ask(page, f"/api/jobs/shop/plan?restore={name}")
        assert got.status in (400, 404)
        assert "outputs" not in got.json
