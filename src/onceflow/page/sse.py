"""Live views: HTML fragments as server-sent events, made once for all viewers.

While somebody looks at a view, it is rendered once a second, however many viewers it has. A viewer
gets the fragments that changed since it got the last ones. Nothing is queued: a slow viewer gets
the newest fragments when it is ready, however many it missed, so it costs no memory and slows
nobody. A viewer that takes nothing for some time is disconnected.

A `beat` tells that the viewer has the present state. While a view cannot be made, `stale` takes its
place and tells since when and why, as HTML.
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
_EVERY = 1.0  # seconds between two renderings
_BEAT_AFTER = 5.0  # seconds without a change
_STUCK_AFTER = 20.0  # seconds in which a viewer takes nothing
_KEPT = 16  # versions that are kept in bytes, for viewers that are a little behind

_log = logging.getLogger(__name__)


@dataclass
class _View:
    """One view and its viewers."""

    render: Render
    fragments: Fragments = field(default_factory=dict)
    version: int = 0
    stale: str | None = None  # since when it cannot be made, and why
    pokes: set[asyncio.Event] = field(default_factory=set)  # one for each viewer: look again
    worker: asyncio.Task[None] | None = None
    _changed: dict[str, int] = field(default_factory=dict)  # fragment -> its version
    _made: dict[int, bytes] = field(default_factory=dict)

    async def work(self) -> None:
        """Render it again and again; cancelled when the last viewer leaves."""
        while True:
            try:
                self._put(await self.render())
            except Exception as error:  # viewers keep what they have; it is tried again
                if self.stale is None:
                    _log.exception("a live view could not be made")
                    self.stale = f"cannot be read since {now()[11:19]} UTC: {_why(error)}"
                    self.poke()
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
            self.poke()

    def poke(self) -> None:
        for poke in self.pokes:
            poke.set()

    def since(self, version: int) -> bytes:
        """What a viewer of this version lacks; made once for all viewers of the same version."""
        if version not in self._made:
            if len(self._made) >= _KEPT:
                self._made.clear()
            self._made[version] = b"".join(
                message(name, html)
                for name, html in self.fragments.items()
                if self._changed[name] > version
            )
        return self._made[version]


class LiveViews:
    """The live views of one page."""

    def __init__(self, most: int = MOST_VIEWERS) -> None:
        self._most = most
        self._views: dict[str, _View] = {}
        self.viewers = 0
        self.closing = False

    @property
    def is_full(self) -> bool:
        return self.viewers >= self._most

    def close(self) -> None:
        """End all streams, because the page stops."""
        self.closing = True
        for view in self._views.values():
            view.poke()

    @contextlib.contextmanager
    def viewing(self, name: str, render: Render, poke: asyncio.Event) -> Iterator[_View]:
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
    """A view as an endless answer, until the viewer leaves or the page stops."""

    media_type = "text/event-stream"

    def __init__(self, live: LiveViews, name: str, render: Render) -> None:
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
            with self._live.viewing(self._name, self._render, poke) as view:
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
            pass  # the viewer takes nothing: an unfinished answer closes the connection
        finally:
            gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def message(name: str, html: str) -> bytes:
    """One event. A line break in a fragment begins another `data` line."""
    lines = "".join(f"data: {line}\n" for line in html.splitlines()) or "data:\n"
    return f"event: {name}\n{lines}\n".encode()


def _sign(stale: str | None) -> bytes:
    """The beat, or why there is none."""
    if stale is not None:
        return message("stale", str(escape(stale)))
    at = now()
    return message("beat", f'<time datetime="{at}">{at[11:19]} UTC</time>')


def _why(error: Exception) -> str:
    """For people. An unexpected error is only in the log."""
    if isinstance(error, OnceflowError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "see the log of the page"
