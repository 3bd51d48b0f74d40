"""One reader for all viewers: the home is read once, and only when somebody asks."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import reading
from alive import Alive

from onceflow.errors import JobError, ServerSilent
from onceflow.page import home_reader
from onceflow.page.home_reader import HomeReader

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(3)
    shop.tell()
    return tmp_path


def test_fifty_viewers_cost_one_reading_and_one_answer(home: Path) -> None:
    reader = HomeReader(home, every=3600)

    async def look() -> list[Any]:
        return await asyncio.gather(
            *(reader.jobs() for _ in range(50)), *(reader.job("shop") for _ in range(50))
        )

    answers = asyncio.run(look())
    assert reader.reads == 1
    assert len({id(answer) for answer in answers}) == 2
    assert answers[0][0]["job"] == "shop"


def test_nothing_is_read_while_nobody_asks_and_changes_are_seen(home: Path) -> None:
    reader = HomeReader(home, every=0.0)
    assert reader.reads == 0

    async def story() -> None:
        assert [job["epoch"] for job in await reader.jobs()] == [2]
        Alive(home, "other").start()
        assert [job["job"] for job in await reader.jobs()] == ["other", "shop"]
        assert (await reader.job("other"))["state"] == "running"

    asyncio.run(story())
    assert reader.reads == 3


def test_answers_equal_those_that_are_read_anew(home: Path) -> None:
    (home / "_boards").mkdir()
    (home / "_boards" / "ads.jsonl").write_text('{"board": "ads"}\n{"t": 1, "totals": {"n": 1}}\n')
    reader = HomeReader(home)

    async def story() -> None:
        assert await reader.epoch("shop", 1) == reading.epoch(home, "shop", 1)
        assert await reader.lineages("shop") == reading.lineages(home, "shop")
        assert await reader.savepoints("shop") == reading.savepoints(home, "shop")
        assert await reader.state("shop") == reading.state(home, "shop")
        assert await reader.ledgers("shop") == reading.ledgers(home, "shop")
        assert await reader.boards() == reading.boards(home)
        assert await reader.board("ads") == reading.board(home, "ads")
        assert await reader.verify_runs() == []
        for wrong in (reader.job("nobody"), reader.board("none"), reader.verify_run("none")):
            with pytest.raises(JobError):
                await wrong

    asyncio.run(story())


def test_simultaneous_requests_share_one_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ledgers(_: Path, job: str) -> list[Any]:
        asked.append(job)
        return []

    monkeypatch.setattr(home_reader, "ledgers", ledgers)
    reader = HomeReader(home)

    async def story() -> None:
        await asyncio.gather(*(reader.ledgers("shop") for _ in range(20)))
        assert asked == ["shop"]
        reader.forget()
        await reader.ledgers("shop")
        assert asked == ["shop", "shop"]

    asyncio.run(story())


def test_a_target_that_hangs_delays_nothing_else(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(home_reader, "ledgers", lambda *_: go.wait(60))
    reader = HomeReader(home, every=0.0)

    async def story() -> None:
        waiting = [asyncio.create_task(reader.ledgers("shop")) for _ in range(20)]
        for _ in range(20):
            assert (await reader.jobs())[0]["state"] == "running"
        assert not any(task.done() for task in waiting)
        go.set()
        await asyncio.gather(*waiting)

    asyncio.run(story())


def test_simultaneous_requests_share_one_plan_even_if_it_is_refused(
    home: Path,
) -> None:
    asked: list[str] = []

    def plan() -> str:
        asked.append("plan")
        return "as it is"

    def refused() -> str:
        asked.append("refused")
        raise JobError("no such savepoint")

    reader = HomeReader(home)

    async def story() -> None:
        found = await asyncio.gather(*(reader.plan("a", plan) for _ in range(20)))
        assert set(found) == {"as it is"}
        told = await asyncio.gather(
            *(reader.plan("b", refused) for _ in range(20)), return_exceptions=True
        )
        assert {str(error) for error in told} == {"no such savepoint"}
        assert asked == ["plan", "refused"]

    asyncio.run(story())


def test_plans_that_hang_are_given_up_and_delay_neither_ledgers_nor_each_other(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_reader, "_PLAN_WITHIN", 0.05)
    go = threading.Event()
    reader = HomeReader(home)

    async def story() -> None:
        waiting = [reader.plan(number, lambda: go.wait(60)) for number in range(20)]
        told = await asyncio.gather(*waiting, reader.ledgers("shop"), return_exceptions=True)
        assert told.pop() == reading.ledgers(home, "shop")
        assert all(isinstance(error, ServerSilent) for error in told)
        late = [error for error in told if "has not answered within 0.05 s" in str(error)]
        assert len(late) == 8  # the others are not asked: no thread more for each who asks
        go.set()
        for thread in threading.enumerate():
            if thread.name == "onceflow target":
                thread.join()
        assert await reader.plan("later", lambda: "as it is") == "as it is"

    asyncio.run(story())


def test_nothing_is_kept_of_unknown_or_deleted_jobs_and_boards(home: Path) -> None:
    (home / "_boards").mkdir()
    (home / "_boards" / "ads.jsonl").write_text('{"board": "ads"}\n')
    reader = HomeReader(home, every=0.0)

    async def story() -> None:
        for number in range(50):
            with pytest.raises(JobError):
                await reader.lineages(f"made-up-{number}")
        await reader.lineages("shop")
        await reader.board("ads")
        assert (set(reader._logs), set(reader._boards)) == ({"shop"}, {"ads"})
        (home / "shop").rename(home / "_gone")
        (home / "_boards" / "ads.jsonl").unlink()
        assert await reader.jobs() == []
        with pytest.raises(JobError):
            await reader.board("ads")
        assert (reader._logs, reader._boards) == ({}, {})

    asyncio.run(story())


def test_looking_loads_neither_spark_nor_arrow(home: Path) -> None:
    import subprocess
    import sys

    code = (
        "import asyncio, sys; from onceflow.page.home_reader import HomeReader\n"
        "from onceflow.page.metrics import exposition\n"
        f"reader = HomeReader({str(home)!r})\n"
        "async def look():\n"
        "    await reader.jobs(); await reader.job('shop')\n"
        "    await reader.of_jobs(1, lambda home, _: exposition().encode(home.jobs))\n"
        "    await reader.lineages('shop'); await reader.savepoints('shop')\n"
        "asyncio.run(look())\n"
        "print(*{n.partition('.')[0] for n in sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"pyspark", "py4j", "pyarrow", "numpy", "pandas", "psycopg", "confluent_kafka"}
    assert heavy.isdisjoint(ran.stdout.split())
