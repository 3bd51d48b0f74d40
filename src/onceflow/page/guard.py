"""What every request must pass: its host, its origin, its framing, its size.

1. **Host**: the page answers only under its own names, so that a name which an attacker points at
   this machine (DNS rebinding) reads nothing. An address cannot be pointed elsewhere.
2. **Cross-site**: a request that is not GET or HEAD must come from the page itself, if a browser
   sends it. There is no CORS, so no other site can read an answer. Targets are not even asked for
   another site, unless a person follows a link.
3. **Framing**: a request with `Transfer-Encoding` must be HTTP/1.1 and have no `Content-Length`.
   A proxy in front may read such a request in another way, and take a part of its body for the
   next request. h11 refuses other bad framing, such as two lengths or an unknown encoding.
4. **Sizes**: of the address, of the headers (the server has a limit too), of the body; and the
   number of requests that are answered at the same time.
5. **Headers** of every answer: only scripts and styles of the page, no frame around it.

Starlette's `TrustedHostMiddleware` compares the host with a list of names. The page also answers
under every loopback address, or under every address when it listens on all, and tells what is
wrong, so `AllowedHosts` stays.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onceflow.page.errors import Refused

_log = logging.getLogger(__name__)

LARGEST_BODY = 64 * 1024
LARGEST_HEAD = 16 * 1024
LONGEST_URL = 2048
MOST_REQUESTS = 300  # that are answered at the same time, live views among them
_BODY_SECONDS = 10.0
READ_METHODS = {"GET", "HEAD"}
_ASKS = re.compile(r"(/api)?/jobs/[^/]*/(ledgers|plan)")  # the targets of a job
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]{1,253})(:\d{1,5})?")

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With "no-referrer" a browser says `Origin: null` of our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class AllowedHosts:
    """The names under which the page answers."""

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        self._names = {name.lower().rstrip(".") for name in (bound, *allowed)} | {"localhost"}
        self._everywhere = not is_loopback(bound)

    def refuse(self, headers: Headers) -> Refused | None:
        given = headers.getlist("host")
        found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None or int((found[2] or ":0")[1:]) > 65535:
            return Refused("a request must name one host", status=400)
        name = found[1].strip("[]").lower().rstrip(".")
        if name in self._names or is_loopback(name) or (self._everywhere and _is_address(name)):
            return None
        return Refused(
            "this page does not answer under that name",
            hint=f"if the name is right: onceflow serve --allow-host {name}",
            status=421,
        )


def is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def refuse_cross_site(method: str, path: str, headers: Headers) -> Refused | None:
    """A browser tells where a request comes from; other programs have no session to abuse."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if method in READ_METHODS:
        is_ours = site in (None, "same-origin", "none")
        is_fine = (
            is_ours or headers.get("sec-fetch-mode") == "navigate" or not _ASKS.fullmatch(path)
        )
    else:
        is_fine = site in (None, "same-origin") and (origin is None or _is_of(origin, headers))
    return None if is_fine else Refused("requests from other sites are refused")


def _is_of(origin: str, headers: Headers) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:
        return False


class Guard:
    """The outermost layer of the page. `refused` makes the answer to a refused request, `failed` to
    one that failed. A stack trace goes to the log and nowhere else."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: AllowedHosts,
        refused: Callable[[Request, Refused], Awaitable[Response]],
        failed: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app, self._hosts = app, hosts
        self._refused, self._failed = refused, failed
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        self._active += 1
        try:
            await self._answer(scope, receive, send_guarded)
        except Exception as error:  # the edge
            _log.exception("%s %r failed", scope["method"], scope["path"][:200])
            if not started:
                response = await self._failure(Request(scope), error)
                await response(scope, receive, send_guarded)
        finally:
            self._active -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        found: Refused | bytes | None = self._refuse(scope)
        if found is None and scope["method"] not in READ_METHODS:
            found = await _body(Headers(scope=scope), receive)
        if isinstance(found, Refused):
            response = await self._refused(Request(scope), found)
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app(scope, receive if found is None else _replay(found, receive), send)

    async def _failure(self, request: Request, error: Exception) -> Response:
        try:
            return await self._failed(request, error)
        except Exception:  # the page of the error failed too
            _log.exception("the error could not be shown")
            return PlainTextResponse("this could not be answered\n", 500)

    def _refuse(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        if self._active > MOST_REQUESTS:
            return Refused("the page has too many requests", hint="try again soon", status=503)
        if "transfer-encoding" in headers and (
            "content-length" in headers or scope["http_version"] != "1.1"
        ):
            return Refused("the length of that request is not clear", status=400)
        length = len(scope["raw_path"]) + len(scope["query_string"])
        if length > LONGEST_URL:
            return Refused("that address is too long", status=414)
        if sum(len(name) + len(value) for name, value in headers.raw) > LARGEST_HEAD:
            return Refused("the head of that request is too large", status=431)
        return self._hosts.refuse(headers) or refuse_cross_site(
            scope["method"], scope["path"], headers
        )


async def _body(headers: Headers, receive: Receive) -> bytes | Refused:
    """The whole body, if it is small and comes in time."""
    too_large = Refused(f"a request has at most {LARGEST_BODY // 1024} KiB", status=413)
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > LARGEST_BODY:
        return too_large
    body = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return Refused("the request ended too soon", status=400)
                body += bytes(message.get("body", b""))
                if len(body) > LARGEST_BODY:
                    return too_large
                if not message.get("more_body"):
                    return body
    except TimeoutError:
        return Refused("the request did not come in time", status=408)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then the next messages of the connection."""
    waiting = [body]

    async def replayed() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replayed


# ---------------------------------------------------------------- the sender


def address(request: Request) -> str:
    return request.client.host if request.client else "-"


def requester(request: Request) -> dict[str, str]:
    """For the audit log. The client that a proxy names is noted as a claim."""
    claimed = request.headers.get("x-forwarded-for")
    return {"who": address(request), **({"forwarded_for": claimed[:100]} if claimed else {})}


def cookie_name(request: Request) -> str:
    """Browsers share cookies between ports, so two pages on one machine need two names."""
    port = urlsplit(f"//{request.headers.get('host', '')}").port
    return f"onceflow-{port or 'web'}"


def cookie(request: Request) -> str | None:
    """The cookie of our session. Other applications of this machine have cookies here too, of any
    shape; they are skipped."""
    name = cookie_name(request)
    pairs = (part.strip().partition("=") for part in request.headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), None)
