"""The server of the page, in the foreground or in a thread.

with Page(home) as page:
    page.url, page.token
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from onceflow.errors import SetupError
from onceflow.page.access import new_token
from onceflow.page.app import create
from onceflow.page.guard import LARGEST_HEAD
from onceflow.page.sse import LiveViews

DEFAULT_PORT = 8765
_HEAD_SECONDS = 5.0  # in which the head of a request must have come
_MOST_WAITING = 200  # connections that wait for the head of a request
_UNREAD = 256 * 1024  # bytes that the system keeps for a slow reader
_UNREAD_MS = 20_000  # a connection whose other end reads nothing for so long is closed
_START_SECONDS = 20.0


class _Protocol(H11Protocol):
    """A connection. It waits a few seconds for the head of a request; `waiting` holds the
    connections that wait, oldest first, and the oldest one is closed when there are too many.

    Connections without a request therefore take nothing from those who look at the page: the
    limit of requests is the guard's (`guard.MOST_REQUESTS`)."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, waiting: dict[_Protocol, None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting = waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._timer is None:
            self._timer = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)
            self._waiting[self] = None
            if len(self._waiting) > _MOST_WAITING:
                next(iter(self._waiting)).give_up()

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def give_up(self) -> None:
        self._stop_waiting()
        self.transport.abort()


class _Server(uvicorn.Server):
    """Ends live views first, because they never end by themselves."""

    def __init__(self, config: uvicorn.Config, live: LiveViews) -> None:
        super().__init__(config)
        self._live = live

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._live.close()
        await super().shutdown(sockets)


class Page:
    """The page of a home; as a context manager, in a thread.

    `port` None: 8765, or a free one if that is taken (`moved`). 0: any free one."""

    def __init__(
        self,
        home: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        token: str | None = None,
        read_only: bool = False,
        allow_hosts: Iterable[str] = (),
        log_level: str = "critical",
    ) -> None:
        self.token = None if read_only else token or new_token()
        self._socket = _bind(host, DEFAULT_PORT if port is None else port, free=port is None)
        self.port = int(self._socket.getsockname()[1])
        self.moved = port is None and self.port != DEFAULT_PORT
        self.url = f"http://{_shown(host)}:{self.port}/"
        live = LiveViews()
        app = create(home, token=self.token, host=host, allow_hosts=allow_hosts, live=live)
        self.app = app
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(_Protocol, waiting={})),
            ws="none",
            lifespan="on",
            loop="asyncio",
            log_config=None,
            log_level=log_level,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=LARGEST_HEAD,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=3,
        )
        self._server = _Server(config, live)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Stop soon. A signal handler may call it, even before the page has started."""
        self._server.should_exit = True

    def serve(self) -> None:
        """Serve in this thread until SIGINT or SIGTERM. Their handlers are restored afterwards."""
        with contextlib.closing(self._socket):
            self._server.run(sockets=[self._socket])

    def __enter__(self) -> Page:
        self._thread = threading.Thread(target=self._run, name="onceflow page", daemon=True)
        self._thread.start()
        for _ in range(int(_START_SECONDS / 0.01)):
            if self._server.started or self._failure is not None or not self._thread.is_alive():
                break
            time.sleep(0.01)
        if not self._server.started:
            self.close()
            raise SetupError(f"the page did not start: {self._failure}", hint="try another --port")
        return self

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except BaseException as error:
            self._failure = error

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join(15)
        self._socket.close()


def _bind(host: str, port: int, *, free: bool) -> socket.socket:
    """A listening socket. `free`: on any free port if that one is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol: asyncio sets TCP_NODELAY only on sockets that name TCP.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    try:
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        if free and port:
            return _bind(host, 0, free=False)
        raise SetupError(
            f"the page cannot be served on {host}, port {port}: {error.strerror}",
            hint="name another --port, or --port 0 for a free one",
        ) from error
    return found


def _shown(host: str) -> str:
    """The host as a person on this machine types it."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
