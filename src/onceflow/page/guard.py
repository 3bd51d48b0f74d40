"""What no request gets past: a host that is not ours, another site, a size, a missing header.

1. **Host**: a name that is not the page's own is refused, so that a name which an attacker points
   at this machine (DNS rebinding) reads nothing. An address cannot be pointed elsewhere.
2. **Cross-site**: whatever is not a GET or HEAD must come from a page of ours, if a browser sends
   it. There is no CORS, so no other site reads an answer; what asks targets is not even asked for
   another site, unless a person follows a link.
3. **Framing**: a request with `Transfer-Encoding` must be HTTP/1.1 and have no `Content-Length`.
   A proxy in front may read such a request in another way, and take a part of its body for the
   next request. Other bad framing (two lengths, an unknown encoding) is refused by h11.
4. **Sizes**: of the address, of the headers (the server's own limit), of the body; and the number
   of requests that are answered at the same time.
5. **Headers** of every answer: nothing but our own scripts and styles, no frame around us.
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

from onceflow.page.access import Refusal

_log = logging.getLogger(__name__)

LARGEST_BODY = 64 * 1024
LARGEST_HEAD = 16 * 1024
LONGEST_URL = 2048
MOST_REQUESTS = 300  # that are answered at the same time, live views among them
_BODY_SECONDS = 10.0
READING = {"GET", "HEAD"}
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


class Hosts:
    """The names under which the page answers."""

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        self._names = {name.lower().rstrip(".") for name in (bound, *allowed)} | {"localhost"}
        self._everywhere = not is_loopback(bound)

    def refuse(self, headers: Headers) -> Refusal | None:
        given = headers.getlist("host")
        found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None or int((found[2] or ":0")[1:]) > 65535:
            return Refusal(400, "a request must name one host")
        name = found[1].strip("[]").lower().rstrip(".")
        if name in self._names or is_loopback(name) or (self._everywhere and _is_address(name)):
            return None
        return Refusal(
            421, "this page does not answer under that name",
            f"if the name is right: onceflow serve --allow-host {name}",
        )  # fmt: skip


def is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def refuse_cross_site(method: str, path: str, headers: Headers) -> Refusal | None:
    """A browser says where a request comes from; what is no browser has no session to abuse."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if method in READING:
        ours = site in (None, "same-origin", "none")
        if ours or headers.get("sec-fetch-mode") == "navigate" or not _ASKS.fullmatch(path):
            return None
        return Refusal(403, "requests from other sites are refused")
    if origin is not None:
        try:
            same = urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
        except ValueError:
            same = False
        if not same:
            return Refusal(403, "requests from other sites are refused")
    if site not in (None, "same-origin"):
        return Refusal(403, "requests from other sites are refused")
    return None


class Guard:
    """The outermost layer of the page. `refused` makes the answer to a request that is refused,
    `failed` to one that failed; a stack goes to the log and nowhere else."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Hosts,
        refused: Callable[[Request, Refusal], Awaitable[Response]],
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
                response = await self._words(Request(scope), error)
                await response(scope, receive, send_guarded)
        finally:
            self._active -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        found: Refusal | bytes | None = self._refuse(scope)
        if found is None and scope["method"] not in READING:
            found = await _body(Headers(scope=scope), receive)
        if isinstance(found, Refusal):
            response = await self._refused(Request(scope), found)
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app(scope, receive if found is None else _replay(found, receive), send)

    async def _words(self, request: Request, error: Exception) -> Response:
        try:
            return await self._failed(request, error)
        except Exception:  # the edge of the edge: the words could not be made either
            _log.exception("no words for it")
            return PlainTextResponse("this could not be answered\n", 500)

    def _refuse(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        if self._active > MOST_REQUESTS:
            return Refusal(503, "the page answers too many requests already", "try again soon")
        if "transfer-encoding" in headers and (
            "content-length" in headers or scope["http_version"] != "1.1"
        ):
            return Refusal(400, "the length of that request is not clear")
        length = len(scope["raw_path"]) + len(scope["query_string"])
        if length > LONGEST_URL:
            return Refusal(414, "that address is too long")
        if sum(len(name) + len(value) for name, value in headers.raw) > LARGEST_HEAD:
            return Refusal(431, "the head of that request is too large")
        return self._hosts.refuse(headers) or refuse_cross_site(
            scope["method"], scope["path"], headers
        )


async def _body(headers: Headers, receive: Receive) -> bytes | Refusal:
    """The whole body, if it is small and comes soon."""
    too_large = Refusal(413, f"a request has at most {LARGEST_BODY // 1024} KiB")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > LARGEST_BODY:
        return too_large
    body = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return Refusal(400, "the request ended too soon")
                body += bytes(message.get("body", b""))
                if len(body) > LARGEST_BODY:
                    return too_large
                if not message.get("more_body"):
                    return body
    except TimeoutError:
        return Refusal(408, "the request did not come in time")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then what the connection says next."""
    waiting = [body]

    async def replayed() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replayed


# ---------------------------------------------------------------- who asks


def address(request: Request) -> str:
    return request.client.host if request.client else "-"


def who(request: Request) -> dict[str, str]:
    """For the audit log. What a proxy says about its client is noted as a claim."""
    claimed = request.headers.get("x-forwarded-for")
    return {"who": address(request), **({"forwarded_for": claimed[:100]} if claimed else {})}


def cookie_name(request: Request) -> str:
    """Cookies do not know ports: two pages of one machine must not take each other's."""
    port = urlsplit(f"//{request.headers.get('host', '')}").port
    return f"onceflow-{port or 'web'}"


def cookie(request: Request) -> str | None:
    """That of our session. Other applications of this machine have cookies here too, of any
    shape: they are passed over, one by one."""
    name = cookie_name(request)
    pairs = (part.strip().partition("=") for part in request.headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), None)
