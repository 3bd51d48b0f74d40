"""The audit log: every action, and, in a file of its own, every refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_page_actions import by_program, savepoints, unlocked
from test_restore_edges import Driver
from visited import TOKEN, ask, audit, post, refusals, served

from onceflow.page import access, guard
from onceflow.page.access import Audit
from onceflow.page.guard import CSP
from onceflow.page.server import Page
from onceflow.protocol.home import JobFolder
from onceflow.sinks import Files

pytestmark = pytest.mark.usefixtures("no_fsync")

OTHER = {"Origin": "http://evil.example"}
HINT = "let the page write"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    Driver(JobFolder(home, "shop"), "out", {"out": Files(str(tmp_path / "out"))}).open().run(2)
    return home


@pytest.fixture
def page(home: Path) -> Iterator[Page]:
    with served(home) as found:
        yield found


def full(home: Path) -> None:
    """Make both logs unwritable."""
    for name in ("_audit.jsonl", "_refused.jsonl"):
        (home / name).unlink(missing_ok=True)
        (home / name).mkdir()


# ---------------------------------------------------------------- lines that cannot be written


def test_an_action_that_cannot_be_noted_is_not_done(page: Page, home: Path) -> None:
    cookie, csrf = unlocked(page)
    full(home)
    for more in ({}, {"HX_Request": "true"}):
        fields = {"csrf": csrf, "name": "x"}
        got = post(page, "/jobs/shop/savepoints", fields, Cookie=cookie, **more)
        assert got.status == 500
        assert "not done, because the audit log cannot be written: Is a directory" in got.text
        assert HINT in got.text
    told = by_program(page, {"name": "x"}, X_Onceflow_Token=TOKEN)
    assert (told.status, told.json["kind"]) == (500, "AuditFailed")
    assert HINT in told.json["hint"]
    assert savepoints(home) == []


def test_the_next_savepoint_works_once_the_log_can_be_written_again(page: Page, home: Path) -> None:
    full(home)
    assert by_program(page, {"name": "x"}, X_Onceflow_Token=TOKEN).status == 500
    (home / "_audit.jsonl").rmdir()
    assert by_program(page, {"name": "x"}, X_Onceflow_Token=TOKEN).status == 200
    assert savepoints(home) == ["x"]


def test_actions_stay_locked_if_the_log_cannot_be_written(page: Page, home: Path) -> None:
    full(home)
    got = post(page, "/access", {"token": TOKEN})
    assert (got.status, got.headers["set-cookie"]) == (500, None)
    assert HINT in got.text


def test_a_refusal_that_cannot_be_noted_is_still_a_refusal(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full(home)
    with served(home) as page:
        answers = {
            403: post(page, "/jobs/shop/savepoints", {"name": "x"}, **OTHER),
            401: post(page, "/access", {"token": "wrong"}),
            400: ask(page, "/access", "POST", body=b"{", Origin=f"http://127.0.0.1:{page.port}"),
        }
    with served(home, token=None, read_only=True) as page:
        answers[403, "read-only"] = post(page, "/access", {"token": TOKEN})
    for status, got in answers.items():
        assert got.status == (status if isinstance(status, int) else status[0])
        assert got.headers["content-security-policy"] == CSP
    assert caplog.text.count("a refusal could not be noted") == 4


def test_failures_have_the_headers_of_every_answer(
    page: Page, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("of the guard itself")

    monkeypatch.setattr(guard, "refuse_cross_site", broken)
    for path in ("/", "/api/jobs"):
        got = ask(page, path)
        assert (got.status, got.headers["content-security-policy"]) == (500, CSP)
        assert "of the guard itself" not in got.text


# ---------------------------------------------------------------- who was refused


def test_refusals_never_push_out_what_was_done(
    page: Page, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_LARGEST_AUDIT", 300)
    assert by_program(page, {"name": "mine"}, X_Onceflow_Token=TOKEN).status == 200
    done = audit(home)
    for _ in range(5):
        assert by_program(page, {"name": "../up"}, X_Onceflow_Token=TOKEN).status == 400
        assert post(page, "/jobs/shop/savepoints", {"name": "x"}, **OTHER).status == 403
        assert post(page, "/jobs/shop/savepoints", {"name": "x" * 200}).status == 401
        assert post(page, "/access", {"token": "wrong"}).status == 401
        assert by_program(page, [1]).status == 400
    assert audit(home) == done
    assert [line["outcome"] for line in done] == ["began", "done: savepoint mine"]
    assert not (home / "_audit.jsonl.1").exists()
    assert (home / "_refused.jsonl.1").exists()


def test_a_line_is_no_longer_for_a_long_name(page: Page, home: Path) -> None:
    long = "x" * 5000
    by_program(page, {"name": long}, X_Onceflow_Token=TOKEN)
    by_program(page, {"name": long})
    post(page, "/jobs/shop/savepoints", {"name": long})
    post(page, "/" + long[:1500], {}, **OTHER)
    ask(page, f"/api/jobs/{long[:1500]}/savepoints", "POST")
    lines = refusals(home)
    assert len(lines) == 5
    for line in lines:
        values = [line["job"], *(line["arguments"] or {}).values()]
        assert all(len(value) <= 100 for value in values if value is not None)


def test_the_files_do_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_LARGEST_AUDIT", 500)
    audit_log = Audit(tmp_path)
    for number in range(20):
        for refused in (False, True):
            name = {"name": str(number)}
            audit_log.note({"who": "x"}, "savepoint", "shop", name, "done", refused=refused)
    for name, found in (("_audit.jsonl", audit), ("_refused.jsonl", refusals)):
        assert found(tmp_path)[-1]["arguments"] == {"name": "19"}
        assert json.loads((tmp_path / f"{name}.1").read_text().splitlines()[-1])
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert sum(path.stat().st_size for path in tmp_path.glob(f"{name}*")) < 2000
