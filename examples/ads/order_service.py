"""The order service: the value of an order and its courier, over HTTP.

    GET  /orders/<id>     {"value_cents": 2340, "courier": "courier-17", "answer_id": "…"}
    POST /orders          a JSON list of ids; answers {"<id>": {…}, …}
    GET  /asked           how often it has answered for each order

Every answer has an id of its own: who asks twice and mixes up the answers is found out.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import zlib
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_LONGEST = 1_000_000  # bytes of a request


class OrderService:
    """A server on loopback while it is entered. `url` is where it answers.

    `failing` is the share of the orders that get a 503 when they are first asked for; each answer
    takes `slow` seconds.
    """

    def __init__(self, port: int = 0, *, failing: float = 0.0, slow: float = 0.0) -> None:
        self.asked: Counter[str] = Counter()  # how often each order was answered
        self._failing, self._slow = failing, slow
        self._failed: set[str] = set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OrderService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answers(self, orders: list[str]) -> dict[str, Any] | None:
        """None: not now, ask again."""
        time.sleep(self._slow)
        with self._lock:
            fails = {o for o in orders if _number(o) % 1000 < 1000 * self._failing} - self._failed
            self._failed |= fails
            if fails:
                return None
            self.asked.update(orders)
        return {order: _answer(order) for order in orders}


def _answer(order: str) -> dict[str, Any]:
    number = _number(order)
    return {
        "value_cents": 800 + number % 5_000,
        "courier": f"courier-{number % 97:02d}",
        "answer_id": str(uuid.uuid4()),
    }


def _number(order: str) -> int:
    return zlib.crc32(order.encode())


def _handler(service: OrderService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path == "/asked":
                self._say(200, dict(service.asked))
            elif path.startswith("/orders/") and path != "/orders/":
                order = path.removeprefix("/orders/")
                found = service.answers([order])
                self._say(*((200, found[order]) if found else _NOT_NOW))
            else:
                self._say(404, {"error": "there are /orders/<id>, /orders and /asked"})

        def do_POST(self) -> None:
            body = self._body()
            if body is None:
                return
            try:
                orders = json.loads(body)
            except ValueError:
                orders = None
            if self.path != "/orders":
                self._say(404, {"error": "POST goes to /orders"})
            elif not isinstance(orders, list) or not all(isinstance(o, str) for o in orders):
                self._say(400, {"error": "send a JSON list of order ids"})
            else:
                found = service.answers(orders)
                self._say(*(_NOT_NOW if found is None else (200, found)))

        def _body(self) -> bytes | None:
            length = self.headers.get("Content-Length", "")
            if length.isdecimal() and int(length) <= _LONGEST:
                return self.rfile.read(int(length))
            self.close_connection = True
            self._say(413, {"error": f"send Content-Length, at most {_LONGEST}"})
            return None

        def _say(self, status: int, what: object) -> None:
            body = json.dumps(what).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """No log of requests."""

    return Handler


_NOT_NOW = (503, {"error": "not now, ask again"})
