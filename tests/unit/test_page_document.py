"""Every refusal of the page is listed in its OpenAPI document."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.client import HTTPMessage
from pathlib import Path

import pytest
from alive import Alive
from visited import SECONDS, TOKEN, Got, ask, served

from onceflow.page import guard
from onceflow.page.api import OPERATIONS
from onceflow.page.openapi import document
from onceflow.page.server import Page

pytestmark = pytest.mark.usefixtures("no_fsync")

SAVEPOINTS = "/api/jobs/{job}/savepoints"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(2)
    with served(tmp_path) as found:
        yield found


def is_listed(path: str, method: str, got: Got, status: int) -> None:
    assert got.status == status
    assert str(status) in document(OPERATIONS)["paths"][path][method]["responses"]
    assert set(got.json) == set(
        document(OPERATIONS)["components"]["schemas"]["Error"]["properties"]
    )


def test_refusals_of_readers_are_in_the_document(page: Page) -> None:
    for path, methods in document(OPERATIONS)["paths"].items():
        if "get" not in methods:
            continue
        real = path.format(job="shop", epoch=1, board="ads", run="r")
        is_listed(path, "get", ask(page, real, Host="evil.example"), 421)
        is_listed(path, "get", ask(page, f"{real}?{'x' * 3000}"), 414)
        many = {f"X_{number}": "x" * 600 for number in range(28)}
        is_listed(path, "get", ask(page, real, **many), 431)
    other = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors"}
    for name in ("ledgers", "plan"):
        got = ask(page, f"/api/jobs/shop/{name}?rollback=1", **other)
        is_listed(f"/api/jobs/{{job}}/{name}", "get", got, 403)


def test_refusals_of_actions_are_in_the_document(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SAVEPOINTS.format(job="shop")
    for status, body, headers in (
        (400, b'{"name": "../up"}', {"X_Onceflow_Token": TOKEN}),
        (400, b"[", {"X_Onceflow_Token": TOKEN}),
        (403, b"{}", {"Origin": "http://evil.example"}),
        (413, b"x" * 70_000, {}),
        (421, b"{}", {"Host": "evil.example"}),
        *((401, b"{}", {"X_Onceflow_Token": "wrong"}) for _ in range(5)),
        (429, b"{}", {"X_Onceflow_Token": TOKEN}),
    ):
        is_listed(SAVEPOINTS, "post", ask(page, real, "POST", body=body, **headers), status)
    monkeypatch.setattr(guard, "_BODY_SECONDS", 0.05)
    is_listed(SAVEPOINTS, "post", _half(page, real), 408)


def _half(page: Page, path: str) -> Got:
    """A request whose body does not come."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS) as line:
        line.sendall(head.encode())
        said = b""
        while part := line.recv(65536):
            said += part
    first, _, body = said.partition(b"\r\n\r\n")
    return Got(int(first.split()[1]), HTTPMessage(), body)
