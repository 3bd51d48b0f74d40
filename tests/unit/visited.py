"""The page on a real socket, and a client that can send anything: for tests of the page."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from onceflow.page.server import Page

SECONDS = 30  # until a condition must hold
TOKEN = "correct-horse-battery-staple"


@dataclass(frozen=True)
class Got:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextmanager
def served(home: Path, **options: Any) -> Iterator[Page]:
    with Page(home, port=0, **{"token": TOKEN, **options}) as page:
        page.app.state.access.slow_s = 0.0
        yield page


def ask(
    page: Page, path: str, method: str = "GET", *, body: bytes | None = None, **headers: str
) -> Got:
    """Header names are written with _ in place of -."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=SECONDS)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, body=body, headers=named)
        answer = connection.getresponse()
        return Got(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def post(page: Page, path: str, fields: dict[str, str], **headers: str) -> Got:
    """A form, as a browser sends it from one of our pages, unless `headers` say otherwise."""
    sent = {
        "Content_Type": "application/x-www-form-urlencoded",
        "Origin": f"http://127.0.0.1:{page.port}",
        "Sec_Fetch_Site": "same-origin",
        **headers,
    }
    kept = {name: value for name, value in sent.items() if value}
    return ask(page, path, "POST", body=urlencode(fields).encode(), **kept)


def raw(page: Page, data: bytes) -> bytes:
    """Send bytes as they are; return all that comes back until the other end closes."""
    with socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS) as line:
        line.sendall(data)
        found = b""
        while part := _received(line):
            found += part
        return found


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(65536)
    except ConnectionResetError:
        return b""


def audit(home: Path) -> list[dict[str, Any]]:
    """The lines of the audit log."""
    return _lines(home / "_audit.jsonl")


def refusals(home: Path) -> list[dict[str, Any]]:
    return _lines(home / "_refused.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def patiently(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return found
