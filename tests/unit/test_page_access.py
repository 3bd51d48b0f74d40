"""What the page refuses: hosts, other sites, sizes, framing, names, wrong tokens."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from alive import Alive
from visited import SECONDS, TOKEN, ask, patiently, post, raw, refusals, served

from onceflow.errors import JobError
from onceflow.page import guard
from onceflow.page.access import Access, new_token, token_in
from onceflow.page.guard import CSP
from onceflow.page.server import Page

pytestmark = pytest.mark.usefixtures("no_fsync")

OTHER = "http://evil.example"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("home")
    shop = Alive(found)
    shop.start()
    shop.run(3)
    return found


@pytest.fixture(scope="module")
def page(home: Path) -> Iterator[Page]:
    """Shared by tests that do not change it."""
    with served(home) as found:
        yield found


@pytest.fixture
def fresh(home: Path) -> Iterator[Page]:
    """For tests that try wrong tokens or change the page."""
    (home / "_refused.jsonl").unlink(missing_ok=True)
    with served(home) as found:
        yield found


def unlocked(page: Page) -> tuple[str, str]:
    """A cookie, and the secret that its forms repeat."""
    got = post(page, "/access", {"token": TOKEN, "next": "/jobs/shop/lineages"})
    assert (got.status, got.headers["location"]) == (303, "/jobs/shop/lineages")
    cookie = got.headers["set-cookie"].partition(";")[0]
    form = ask(page, "/jobs/shop/lineages", Cookie=cookie).text
    found = re.search(r'name="csrf" value="([^"]+)"', form)
    assert found
    return cookie, found[1]


# ---------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "localhost:9", "[::1]:8765", "127.9.9.9"]
)
def test_the_page_answers_under_names_of_this_machine(page: Page, host: str) -> None:
    assert ask(page, "/", Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example", "[::2]"],
)
def test_a_foreign_name_that_points_at_this_machine_reads_nothing(page: Page, host: str) -> None:
    for path in ("/", "/api/jobs", "/metrics", "/live/jobs"):
        got = ask(page, path, Host=host)
        assert got.status == 421
        assert b"shop" not in got.body


@pytest.mark.parametrize("host", ["", "a b", "x@y", "localhost:port", "a" * 300])
def test_an_invalid_host_is_refused(page: Page, host: str) -> None:
    line = b"GET / HTTP/1.1\r\nHost: " + host.encode() + b"\r\nConnection: close\r\n\r\n"
    assert raw(page, line).startswith(b"HTTP/1.1 400")


def test_two_hosts_or_none_are_refused(page: Page) -> None:
    for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        said = raw(page, b"GET / HTTP/1.1\r\n" + hosts + b"Connection: close\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 400")


def test_a_name_can_be_allowed_for_a_proxy(home: Path) -> None:
    with served(home, allow_hosts=["flow.example"]) as page:
        assert ask(page, "/", Host="flow.example").status == 200
        assert ask(page, "/", Host="other.example").status == 421


# ---------------------------------------------------------------- other sites


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": OTHER},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://[not"},
        {"Origin": "", "Sec_Fetch_Site": "cross-site"},
        {"Origin": "", "Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "none"},
    ],
)
def test_nothing_is_done_for_another_site(page: Page, home: Path, headers: dict[str, str]) -> None:
    cookie, csrf = unlocked(page)
    fields = {"csrf": csrf, "name": "theirs"}
    got = post(page, "/jobs/shop/savepoints", fields, Cookie=cookie, **headers)
    assert got.status == 403
    assert refusals(home)[-1]["outcome"] == "refused: requests from other sites are refused"
    assert not (home / "shop" / "savepoints").exists()


def test_no_other_site_may_read_or_frame(page: Page) -> None:
    got = ask(page, "/api/jobs", Origin=OTHER)
    assert "access-control-allow-origin" not in got.headers
    preflight = ask(page, "/api/jobs", "OPTIONS", Origin=OTHER, Sec_Fetch_Site="cross-site")
    assert preflight.status == 403
    assert "frame-ancestors 'none'" in got.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["ledgers", "plan?rollback=1"])
def test_targets_are_not_asked_for_another_site(page: Page, path: str) -> None:
    for start in ("/jobs/shop/", "/api/jobs/shop/"):
        for site in ("cross-site", "same-site"):
            got = ask(page, start + path, Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")
            assert (got.status, "shop" in got.text) == (403, False)
            asked = ask(page, start + path, Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")
            assert asked.status != 403
        assert ask(page, start + path, Sec_Fetch_Site="same-origin").status != 403
    assert ask(page, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 200


# ---------------------------------------------------------------- headers of every answer


@pytest.mark.parametrize(
    "path", ["/", "/jobs/shop", "/nothing", "/api/jobs", "/api/nothing", "/metrics", "/access"]
)
def test_every_answer_has_the_headers_that_protect_it(page: Page, path: str) -> None:
    got = ask(page, path)
    assert got.headers["content-security-policy"] == CSP
    assert "unsafe" not in CSP
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["cache-control"] == "no-store"
    assert got.headers["referrer-policy"] == "same-origin"
    assert "server" not in got.headers


def test_a_page_needs_nothing_inline_and_nothing_from_elsewhere(page: Page) -> None:
    cookie, _ = unlocked(page)
    for path in ("/", "/jobs/shop", "/jobs/shop/lineages", "/verify", "/access"):
        text = ask(page, path, Cookie=cookie).text
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", text)
        assert not re.search(r"(?:src|href|action)=[\"'](?!/|#)", text), path


# ---------------------------------------------------------------- sizes, names, methods


def test_too_much_is_refused(page: Page) -> None:
    assert ask(page, "/jobs/" + "a" * 5000).status == 414
    assert ask(page, "/?" + "a" * 5000).status == 414
    assert ask(page, "/", Cookie="x" * 50_000).status in (400, 431)  # the server's limit, or ours
    assert ask(page, "/", Cookie="x" * 16_500).status in (400, 431)
    assert post(page, "/access", {"token": "x" * 70_000}).status == 413


def test_a_chunked_body_is_limited_too(page: Page) -> None:
    head = (
        b"POST /access HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/x-www-form-urlencoded\r\n\r\n"
    )
    part = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    assert raw(page, head + part * 4).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "body", [b"\xff\xfe", b"&" * 3000, b"token=%00%ff", b"token", b"", b'{"token": 1}']
)
def test_an_invalid_form_is_refused(fresh: Page, body: bytes) -> None:
    kind = "application/x-www-form-urlencoded"
    got = ask(fresh, "/access", "POST", body=body, Content_Type=kind)
    assert got.status in (400, 401)
    other = ask(fresh, "/access", "POST", body=body, Content_Type="multipart/form-data; boundary=x")
    assert other.status == 400


@pytest.mark.parametrize(
    "path",
    [
        "/jobs/..", "/jobs/%2e%2e", "/jobs/..%2f..%2fetc", "/jobs/%00", "/jobs/.hidden",
        "/jobs/_boards", "/jobs/a%0d%0aSet-Cookie:x", "/jobs/shop/epochs/-1",
        "/jobs/shop/epochs/99", "/jobs/shop/epochs/9999999999999999999999", "/jobs/shop/epochs/x",
        "/boards/..", "/boards/%2e%2e%2fshop", "/boards/nothing", "/verify/..", "/verify/nothing",
        "/verify/%2e%2e/report", "/verify/..%2fshop/report", "/live/jobs/..", "/live/boards/%2e%2e",
        "/live/nothing", "/static/x/page.css", "/static/x/../app.py", "/static/..%2f..%2fapp.py",
        "/static/0000000000000000/vendor/README", "/../../etc/passwd", "//etc/passwd",
    ],
)  # fmt: skip
def test_names_with_path_parts_are_refused(page: Page, path: str) -> None:
    got = ask(page, path)
    assert got.status in (400, 404), got.text
    assert "Traceback" not in got.text
    assert "set-cookie" not in got.headers


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "FOO"])
def test_other_methods_are_refused(page: Page, method: str) -> None:
    assert ask(page, "/jobs/shop", method).status in (400, 404, 405)


def test_bytes_that_are_not_http_are_refused(page: Page) -> None:
    assert raw(page, b"\x16\x03\x01\x00\xa5\x01\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert ask(page, "/").status == 200


def test_a_connection_without_a_whole_head_is_closed(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceflow.page.server._HEAD_SECONDS", 0.05)
    for begun in (b"", b"GET / HTTP/1.1\r\nHost: lo", b"POST /access HTTP/1.1\r\n"):
        assert raw(page, begun) == b""


def test_a_failure_is_shown_without_a_stack_trace(
    fresh: Page, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError("secret of the machine")

    monkeypatch.setattr(fresh.app.state.reader, "verify_runs", fail)
    with caplog.at_level(logging.ERROR):
        got, api = ask(fresh, "/verify"), ask(fresh, "/api/verify")
    assert (got.status, api.status) == (500, 500)
    for said in (got.text, api.text):
        assert "secret" not in said
        assert "Traceback" not in said
    assert got.headers["content-security-policy"] == CSP
    assert api.json["message"] == "this could not be answered"
    assert "secret of the machine" in caplog.text


# ---------------------------------------------------------------- the token


def test_the_token_opens_a_session_hidden_from_scripts_and_other_sites(page: Page) -> None:
    got = post(page, "/access", {"token": f" {TOKEN}\n"})
    said = got.headers["set-cookie"].lower()
    assert said.startswith(f"onceflow-{page.port}=")
    assert "httponly" in said
    assert "samesite=strict" in said
    assert TOKEN.lower() not in said
    assert "secure" not in said
    behind = post(page, "/access", {"token": TOKEN}, X_Forwarded_Proto="https")
    assert "secure" in behind.headers["set-cookie"].lower()


@pytest.mark.parametrize(
    "next_", ["//evil.example", "https://evil.example", "/\\evil.example", "/a\r\nx: y", "evil"]
)
def test_a_session_begins_on_this_page(page: Page, next_: str) -> None:
    assert post(page, "/access", {"token": TOKEN, "next": next_}).headers["location"] == "/"
    assert f'value="{next_}"' not in ask(page, "/access?next=https://evil.example").text


def test_after_some_wrong_tokens_every_token_is_refused_for_a_while(
    fresh: Page, home: Path
) -> None:
    for _ in range(5):
        assert post(fresh, "/access", {"token": "wrong"}).status == 401
    late = post(fresh, "/access", {"token": TOKEN})
    assert late.status == 429
    assert 1 <= int(late.headers["retry-after"]) <= 60
    assert "set-cookie" not in late.headers
    assert ask(fresh, "/").status == 200  # reading is not affected
    api = ask(fresh, "/api/jobs/shop/savepoints", "POST", X_Onceflow_Token=TOKEN)
    assert api.status == 429
    assert [line["action"] for line in refusals(home)] == ["unlock"] * 6 + ["savepoint"]


def test_wrong_tokens_are_forgotten_after_a_minute() -> None:
    now = [0.0]
    access = Access("right", clock=lambda: now[0])
    for _ in range(5):
        assert access.refuse_token("wrong", "here")
    refusal = access.refuse_token("right", "here")
    assert refusal is not None
    assert refusal.status == 429
    assert access.refuse_token("right", "elsewhere") is None
    now[0] = 61.0
    assert access.refuse_token("right", "here") is None


def test_a_session_works_beside_cookies_of_other_applications(page: Page) -> None:
    ours, _ = unlocked(page)
    theirs = '{"a": 1}; b[]="x; ta ble=1; é=1; =; ;; onceflow-1=guess'
    for cookies in (f"{theirs}; {ours}", f"{ours}; {theirs}", f"{theirs};{ours}"):
        assert "Lock actions" in ask(page, "/", Cookie=cookies).text
    assert "Unlock actions" in ask(page, "/", Cookie=theirs).text


def test_sessions_expire_and_are_limited() -> None:
    now = [0.0]
    access = Access("right", clock=lambda: now[0])
    keys = [access.open() for _ in range(101)]
    assert access.session(keys[0]) is None
    assert access.session(keys[-1]) is not None
    now[0] = 13 * 3600.0
    assert access.session(keys[-1]) is None
    assert access.session(None) is None


def test_locking_ends_the_session(page: Page) -> None:
    cookie, csrf = unlocked(page)
    assert post(page, "/access/leave", {"csrf": "guess"}, Cookie=cookie).status == 403
    assert post(page, "/access/leave", {"csrf": csrf}, Cookie=cookie).status == 303
    assert "Lock actions" not in ask(page, "/", Cookie=cookie).text


def test_the_token_is_only_in_memory(fresh: Page, home: Path) -> None:
    unlocked(fresh)
    post(fresh, "/access", {"token": "a wrong one"})
    for path in home.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes()
            assert b"a wrong one" not in path.read_bytes()


def test_a_page_without_a_token_only_reads(home: Path) -> None:
    with served(home, read_only=True) as page:
        assert page.token is None
        assert "read-only" in ask(page, "/").text
        assert post(page, "/access", {"token": "x" * 20}).status == 403
        assert post(page, "/jobs/shop/savepoints", {"name": "a"}).status == 403
        assert ask(page, "/api/jobs/shop/savepoints", "POST", X_Onceflow_Token="x").status == 403


def test_a_token_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert token_in(str(path)) == (TOKEN, None)
    path.chmod(0o644)
    assert "chmod 600" in str(token_in(str(path))[1])
    path.write_text("short")
    with pytest.raises(JobError, match="shorter than 16") as refused:
        token_in(str(path))
    assert "short" not in refused.value.message.replace("shorter", "")
    with pytest.raises(JobError, match="no token can be read"):
        token_in(str(tmp_path / "none"))
    assert new_token() != new_token()


# ---------------------------------------------------------------- connections, framing


@contextmanager
def half_open(page: Page, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Connections on which no whole request comes."""
    with ExitStack() as lines:
        opened = []
        for _ in range(count):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", page.port)))
            line.sendall(sent)
            opened.append(line)
        yield opened


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: loc"])
def test_connections_without_a_request_do_not_take_the_place_of_a_viewer(
    page: Page, sent: bytes
) -> None:
    with half_open(page, 310, sent):
        assert ask(page, "/").status == 200


def test_the_oldest_of_too_many_connections_without_a_request_is_closed(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceflow.page.server._MOST_WAITING", 3)
    with half_open(page, 5, b"") as lines:
        assert [_ended(line) for line in lines[:2]] == [True, True]
        lines[2].sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert lines[2].recv(12) == b"HTTP/1.1 200"


def _ended(line: socket.socket) -> bool:
    line.settimeout(SECONDS)
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def test_too_many_requests_at_once_are_refused_and_later_ones_are_answered(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MOST_REQUESTS", 1)
    with half_open(page, 1, b"GET /live/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n") as (line,):
        line.settimeout(SECONDS)
        assert line.recv(12) == b"HTTP/1.1 200"
        assert ask(page, "/api/jobs").status == 503
    patiently(lambda: ask(page, "/api/jobs").status == 200)


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding:\r\n chunked\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding : chunked\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5, 6\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: +5\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n",
    ],
)
def test_a_request_whose_length_is_not_clear_is_refused_and_nothing_after_it_is_read(
    page: Page, head: bytes
) -> None:
    hidden = b"0\r\n\r\nGET /api/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    said = raw(page, head + b"Host: localhost\r\n\r\n" + hidden)
    assert said.startswith(b"HTTP/1.1 400")
    assert said.count(b"HTTP/1.1 ") == 1
    assert b"shop" not in said
