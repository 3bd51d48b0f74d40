"""Live views: HTML fragments over server-sent events, made once for all who look.

A view is looked at once a second while somebody looks at it, and rendered once however many look.
A viewer gets what changed since what it got last. Nothing is queued: one that reads slowly finds
the newest fragments when it comes back, however many it missed, so it costs no memory and slows
nobody; one that takes nothing at all is cut off.

A `beat` says that what a viewer has is what is. While a view cannot be made, a `stale` takes its
place, which says since when and why, as HTML.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from markupsafe import escape
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onceflow.errors import OnceflowError
from onceflow.protocol.home import now

Fragments = dict[str, str]  # the name of the event -> HTML
Render = Callable[[], Awaitable[Fragments]]

MOST_VIEWERS = 200
_EVERY = 1.0  # seconds between two looks
_BEAT_AFTER = 5.0  # seconds without news; then a sign of life
_STUCK_AFTER = 20.0  # seconds in which a viewer takes nothing
_KEPT = 16  # answers that are kept in bytes, for viewers that are a little behind

_log = logging.getLogger(__name__)


@dataclass
class _View:
    """One view, and all who look at it."""

    render: Render
    fragments: Fragments = field(default_factory=dict)
    version: int = 0
    stale: str | None = None  # since when and why it cannot be made
    pokes: set[asyncio.Event] = field(default_factory=set)  # one for each viewer: there is news
    worker: asyncio.Task[None] | None = None
    _changed: dict[str, int] = field(default_factory=dict)  # fragment -> the version it is of
    _made: dict[int, bytes] = field(default_factory=dict)

    async def work(self) -> None:
        """Look at it again and again, until nobody else does."""
        while True:
            try:
                self._put(await self.render())
            except Exception as error:  # viewers keep what they have; the next look may do better
                if self.stale is None:
                    _log.exception("a live view could not be made")
                    self.stale = f"cannot be read since {now()[11:19]} UTC: {_why(error)}"
                    self._poke()
            await asyncio.sleep(_EVERY)

    def _put(self, fragments: Fragments) -> None:
        different = [n for n, html in fragments.items() if self.fragments.get(n) != html]
        if different:
            self.version += 1
            self.fragments = fragments
            self._changed.update(dict.fromkeys(different, self.version))
            self._made.clear()
        if different or self.stale is not None:
            self.stale = None
            self._poke()

    def _poke(self) -> None:
        for poke in self.pokes:
            poke.set()

    def since(self, version: int) -> bytes:
        """What a viewer lacks that has got a version: made once for all who have got the same."""
        if version not in self._made:
            if len(self._made) >= _KEPT:
                self._made.clear()
            self._made[version] = b"".join(
                message(name, html)
                for name, html in self.fragments.items()
                if self._changed[name] > version
            )
        return self._made[version]


class Live:
    """The live views of one page."""

    def __init__(self, most: int = MOST_VIEWERS) -> None:
        self._most = most
        self._views: dict[str, _View] = {}
        self.viewers = 0
        self.closing = False

    @property
    def full(self) -> bool:
        return self.viewers >= self._most

    def close(self) -> None:
        """End all streams: the page stops."""
        self.closing = True
        for view in self._views.values():
            for poke in view.pokes:
                poke.set()

    @contextlib.contextmanager
    def looking(self, name: str, render: Render, poke: asyncio.Event) -> Iterator[_View]:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = _View(render)
            view.worker = asyncio.create_task(view.work())
        view.pokes.add(poke)
        self.viewers += 1
        try:
            yield view
        finally:
            self.viewers -= 1
            view.pokes.discard(poke)
            if not view.pokes:
                del self._views[name]
                assert view.worker is not None
                view.worker.cancel()


class Stream(Response):
    """A view as an endless answer, until the viewer or the page goes."""

    media_type = "text/event-stream"

    def __init__(self, live: Live, name: str, render: Render) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._live, self._name, self._render = live, name, render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def give(data: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(_STUCK_AFTER):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        poke = asyncio.Event()
        gone = asyncio.create_task(_gone(receive))
        gone.add_done_callback(lambda _: poke.set())
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            gone.cancel()
            await give(b"", more=False)
            return
        try:
            with self._live.looking(self._name, self._render, poke) as view:
                await give(b"retry: 2000\n\n")
                seen, stale = 0, None
                while not gone.done() and not self._live.closing:
                    poke.clear()
                    if view.version > seen or view.stale != stale:
                        news, seen, stale = view.since(seen), view.version, view.stale
                        await give(news + _sign(stale))
                        continue
                    try:
                        async with asyncio.timeout(_BEAT_AFTER):
                            await poke.wait()
                    except TimeoutError:
                        await give(_sign(view.stale))
                if not gone.done():
                    await give(b"", more=False)
        except TimeoutError:
            pass  # it takes nothing: that the answer has no end closes the connection
        finally:
            gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def message(name: str, html: str) -> bytes:
    """One event. A line break would end a line of it."""
    lines = "".join(f"data: {line}\n" for line in html.splitlines()) or "data:\n"
    return f"event: {name}\n{lines}\n".encode()


def _sign(stale: str | None) -> bytes:
    """A sign of life, or why there is none."""
    if stale is not None:
        return message("stale", str(escape(stale)))
    at = now()
    return message("beat", f'<time datetime="{at}">{at[11:19]} UTC</time>')


def _why(error: Exception) -> str:
    """In words that a person may see: of what is not expected, none."""
    if isinstance(error, OnceflowError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "the log of the page says why"
