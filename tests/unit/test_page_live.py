"""Live views: rendered once for all viewers, sent when they change; a slow viewer delays nobody."""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alive import Alive
from visited import SECONDS, ask, patiently, served

from onceflow.page import sse
from onceflow.page.server import Page
from onceflow.page.sse import LiveViews, Stream, message

pytestmark = pytest.mark.usefixtures("no_fsync")

SCOPE: dict[str, Any] = {"type": "http", "method": "GET"}


class Viewer:
    """A viewer; a `slow` one reads only when it is told to."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, sent: Any) -> None:
        await self.reads.wait()
        self.got.append(sent.get("body", b""))

    @property
    def text(self) -> bytes:
        return b"".join(self.got)

    def look(self, live: LiveViews, render: sse.Render) -> asyncio.Task[None]:
        stream = Stream(live, "view", render)
        return asyncio.create_task(stream(SCOPE, self.receive, self.send))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_EVERY", 0.01)
    monkeypatch.setattr(sse, "_BEAT_AFTER", 0.05)


@pytest.mark.usefixtures("quick")
def test_a_view_is_rendered_once_for_all_viewers_and_sent_when_it_changes() -> None:
    async def story() -> None:
        live, made, value = LiveViews(), 0, "one"

        async def render() -> dict[str, str]:
            nonlocal made
            made += 1
            return {"a": f"<p>{value}</p>\n<p>more</p>", "b": "still"}

        viewers = [Viewer() for _ in range(20)]
        tasks = [viewer.look(live, render) for viewer in viewers]
        await until(lambda: all(b"one" in viewer.text for viewer in viewers))
        assert live.viewers == 20
        before, value = made, "two"
        await until(lambda: all(b"two" in viewer.text for viewer in viewers))
        assert made - before < 20  # not one for each
        for viewer in viewers:
            assert viewer.text.count(b"event: b\n") == 1  # it has not changed
            assert b"event: a\ndata: <p>two</p>\ndata: <p>more</p>\n\n" in viewer.text
        quiet = len(viewers[0].got)
        await until(lambda: len(viewers[0].got) > quiet)  # a sign of life
        assert b"event: beat" in viewers[0].got[-1]
        for viewer in viewers:
            viewer.gone.set()
        await asyncio.gather(*tasks)
        assert live.viewers == 0
        last = made
        await asyncio.sleep(0.1)
        assert made == last  # nobody looks, so nobody reads

    asyncio.run(story())


@pytest.mark.usefixtures("quick")
def test_a_slow_viewer_gets_the_newest_and_delays_nobody() -> None:
    async def story() -> None:
        live, number = LiveViews(), 0

        async def render() -> dict[str, str]:
            nonlocal number
            number += 1
            return {"a": f"number {number};" + "x" * 10_000}

        slow, fast = Viewer(), Viewer()
        tasks = [slow.look(live, render), fast.look(live, render)]
        await until(lambda: slow.got and b"number" in slow.text)
        slow.reads.clear()
        stood = len(slow.got)
        await until(lambda: b"number 40;" in fast.text)
        assert len(slow.got) == stood
        slow.reads.set()
        await until(lambda: len(slow.got) >= stood + 3)
        assert len(slow.got) < len(fast.got)  # what came in between is not sent late
        assert b"number 20;" not in slow.text
        for viewer in (slow, fast):
            viewer.gone.set()
        await asyncio.gather(*tasks)

    asyncio.run(story())


@pytest.mark.usefixtures("quick")
def test_a_viewer_that_takes_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_STUCK_AFTER", 0.05)

    async def story() -> None:
        live, number = LiveViews(), 0

        async def render() -> dict[str, str]:
            nonlocal number
            number += 1
            return {"a": str(number)}

        stuck = Viewer()
        task = stuck.look(live, render)
        await until(lambda: live.viewers == 1)
        stuck.reads.clear()
        await task
        assert live.viewers == 0

    asyncio.run(story())


@pytest.mark.usefixtures("quick")
def test_a_rendering_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        live, tries = LiveViews(), 0

        async def render() -> dict[str, str]:
            nonlocal tries
            tries += 1
            if tries in (2, 3, 4):
                raise OSError("half a file")
            return {"a": str(tries)}

        viewer = Viewer()
        task = viewer.look(live, render)
        await until(lambda: b"data: 5" in viewer.text)
        live.close()
        await task

    asyncio.run(story())
    assert caplog.text.count("a live view could not be made") == 1


@pytest.mark.usefixtures("quick")
def test_a_view_that_cannot_be_made_is_not_called_live() -> None:
    async def story() -> None:
        live, failure = LiveViews(), OSError(5, "<b>Input/output error</b>")
        fails = False

        async def render() -> dict[str, str]:
            if fails:
                raise failure
            return {"a": "as it was"}

        viewer, late = Viewer(), Viewer()
        tasks = [viewer.look(live, render)]
        await until(lambda: b"event: beat" in viewer.text)
        fails = True
        await until(lambda: viewer.got[-1].startswith(b"event: stale"))
        said = viewer.got[-1].decode()
        assert re.search(r"data: cannot be read since \d\d:\d\d:\d\d UTC: &lt;b&gt;Input", said)
        stood = len(viewer.got)
        await until(lambda: len(viewer.got) >= stood + 3)  # again and again, and no beat
        assert {part.decode() for part in viewer.got[stood:]} == {said}
        tasks.append(late.look(live, render))
        await until(lambda: said.encode() in late.text)
        assert b"as it was" in late.text
        assert b"beat" not in late.text
        fails = False
        await until(lambda: viewer.got[-1].startswith(b"event: beat"))
        assert viewer.text.count(b"as it was") == 1  # which has not changed
        live.close()
        await asyncio.gather(*tasks)

    asyncio.run(story())


def test_viewers_see_that_a_job_is_gone(home: Path, shop: Alive) -> None:
    with served(home) as page, look(page, "/live/jobs/shop") as answer:
        read_until(answer, b"event: beat")
        shop.folder.folder.rename(home / "_elsewhere")
        read_until(answer, b"event: stale")
        assert b"no job shop ran under" in read_until(answer, b"\n")


def test_an_event_cannot_end_early() -> None:
    said = message("a", "one\n\nevent: b\r\ndata: two\u2028three")
    assert said.count(b"\n\n") == 1
    assert all(line.startswith((b"event: a", b"data:")) for line in said.split(b"\n") if line)


# ---------------------------------------------------------------- on a socket


@pytest.fixture
def shop(tmp_path: Path) -> Alive:
    found = Alive(tmp_path)
    found.start()
    found.run(2)
    return found


@pytest.fixture
def home(shop: Alive) -> Path:
    return shop.folder.home


def connected(page: Page) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", page.port, timeout=SECONDS)


@contextmanager
def look(page: Page, path: str) -> Iterator[http.client.HTTPResponse]:
    line = connected(page)
    line.request("GET", path)
    with closing(line), closing(line.getresponse()) as answer:
        yield answer


def read_until(answer: http.client.HTTPResponse, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        part = answer.readline()
        assert part, "the stream has ended"
        found += part
    return found


def test_a_new_epoch_is_sent_to_viewers(home: Path, shop: Alive) -> None:
    with served(home) as page:
        with look(page, "/live/jobs/shop") as answer:
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            read_until(answer, b'id="e-out-1"')
            shop.run(1)
            assert b"event: flow" in read_until(answer, b'id="e-out-2"')
        patiently(lambda: page.app.state.live.viewers == 0)


@pytest.mark.parametrize(
    "path", ["/live/jobs", "/live/verify", "/live/jobs/shop/lineages", "/api/events"]
)
def test_each_view_has_a_stream_and_only_a_head_if_that_is_asked(home: Path, path: str) -> None:
    with served(home) as page:
        with look(page, path) as answer:
            read_until(answer, b"event: beat")
        assert ask(page, path, "HEAD").status == 200


def test_streams_of_things_that_do_not_exist_are_refused(home: Path) -> None:
    with served(home) as page:
        for path in ("/live/jobs/none", "/live/boards/none", "/live/verify/none"):
            assert ask(page, path).status == 404


def test_too_many_viewers_are_refused_and_the_page_stays(home: Path) -> None:
    with served(home) as page:
        live = page.app.state.live
        live._most = 2
        with look(page, "/live/jobs"), look(page, "/live/verify"):
            patiently(lambda: live.is_full)
            got = ask(page, "/live/jobs")
            assert got.status == 503
            assert "the page has too many viewers" in got.text
            assert got.headers["retry-after"] == "10"
            events = ask(page, "/api/events")
            assert (events.status, events.headers["retry-after"]) == (503, "10")
            assert ask(page, "/").status == 200
        patiently(lambda: not live.is_full)


def test_a_page_stops_while_people_look(home: Path) -> None:
    with served(home) as page, look(page, "/live/jobs") as answer:
        read_until(answer, b"event: beat")
        page.close()
        while answer.readline():
            pass  # it ends, and does not break off
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", page.port))


def test_an_answer_on_a_kept_connection_is_sent_without_delay(home: Path) -> None:
    with served(home) as page, closing(connected(page)) as line:
        line.request("GET", "/api/jobs")
        assert line.getresponse().read()
        (kept,) = page._server.server_state.connections
        found = kept.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
