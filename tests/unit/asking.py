"""Asks an ASGI application without a network: for tests of the HTTP API."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def asked(
    app: Starlette, target: str, *, until: bytes | None = None, accept: str = "*/*"
) -> Answer:
    """GET `target`. An endless answer is read up to `until`; then the client disconnects."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": unquote(path), "raw_path": path.encode(),
        "query_string": query.encode(), "root_path": "",
        "headers": [(b"host", b"127.0.0.1"), (b"accept", accept.encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    status, headers, body = 0, {}, b""
    gone = asyncio.Event()
    asked_once = False

    async def receive() -> dict[str, Any]:
        nonlocal asked_once
        if not asked_once:
            asked_once = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, headers, body
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            body += message.get("body", b"")
            if until is not None and until in body:
                gone.set()

    async with asyncio.timeout(30):
        await app(scope, receive, send)
    return Answer(status, headers, body)


def ask(app: Starlette, target: str, *, until: bytes | None = None, accept: str = "*/*") -> Answer:
    return asyncio.run(asked(app, target, until=until, accept=accept))
