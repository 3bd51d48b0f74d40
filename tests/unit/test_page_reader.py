"""One reader for all who look: however many they are, the home is read once, and only if asked."""

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


def test_fifty_viewers_cost_one_look_and_one_answer(home: Path) -> None:
    watch = HomeReader(home, every=3600)

    async def look() -> list[Any]:
        return await asyncio.gather(
            *(watch.jobs() for _ in range(50)), *(watch.job("shop") for _ in range(50))
        )

    answers = asyncio.run(look())
    assert watch.reads == 1
    assert len({id(answer) for answer in answers}) == 2
    assert answers[0][0]["job"] == "shop"


def test_nobody_looks_nothing_is_read_and_what_is_new_is_seen(home: Path) -> None:
    watch = HomeReader(home, every=0.0)
    assert watch.reads == 0

    async def story() -> None:
        assert [job["epoch"] for job in await watch.jobs()] == [2]
        Alive(home, "other").start()
        assert [job["job"] for job in await watch.jobs()] == ["other", "shop"]
        assert (await watch.job("other"))["state"] == "running"

    asyncio.run(story())
    assert watch.reads == 3


def test_answers_of_the_watch_are_those_of_the_model(home: Path) -> None:
    (home / "_boards").mkdir()
    (home / "_boards" / "ads.jsonl").write_text('{"board": "ads"}\n{"t": 1, "totals": {"n": 1}}\n')
    watch = HomeReader(home)

    async def story() -> None:
        assert await watch.epoch("shop", 1) == reading.epoch(home, "shop", 1)
        assert await watch.lineages("shop") == reading.lineages(home, "shop")
        assert await watch.savepoints("shop") == reading.savepoints(home, "shop")
        assert await watch.state("shop") == reading.state(home, "shop")
        assert await watch.ledgers("shop") == reading.ledgers(home, "shop")
        assert await watch.boards() == reading.boards(home)
        assert await watch.board("ads") == reading.board(home, "ads")
        assert await watch.verify_runs() == []
        for wrong in (watch.job("nobody"), watch.board("none"), watch.verify_run("none")):
            with pytest.raises(JobError):
                await wrong

    asyncio.run(story())


def test_those_who_ask_together_get_one_answer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ledgers(_: Path, job: str) -> list[Any]:
        asked.append(job)
        return []

    monkeypatch.setattr(home_reader, "ledgers", ledgers)
    watch = HomeReader(home)

    async def story() -> None:
        await asyncio.gather(*(watch.ledgers("shop") for _ in range(20)))
        assert asked == ["shop"]
        watch.forget()
        await watch.ledgers("shop")
        assert asked == ["shop", "shop"]

    asyncio.run(story())


def test_a_target_that_hangs_holds_up_nothing_else(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(home_reader, "ledgers", lambda *_: go.wait(60))
    watch = HomeReader(home, every=0.0)

    async def story() -> None:
        waiting = [asyncio.create_task(watch.ledgers("shop")) for _ in range(20)]
        for _ in range(20):
            assert (await watch.jobs())[0]["state"] == "running"
        assert not any(task.done() for task in waiting)
        go.set()
        await asyncio.gather(*waiting)

    asyncio.run(story())


def test_a_plan_is_made_once_for_those_who_ask_together_and_also_if_it_is_refused(
    home: Path,
) -> None:
    asked: list[str] = []

    def plan() -> str:
        asked.append("plan")
        return "as it is"

    def refused() -> str:
        asked.append("refused")
        raise JobError("no such savepoint")

    watch = HomeReader(home)

    async def story() -> None:
        found = await asyncio.gather(*(watch.plan("a", plan) for _ in range(20)))
        assert set(found) == {"as it is"}
        told = await asyncio.gather(
            *(watch.plan("b", refused) for _ in range(20)), return_exceptions=True
        )
        assert {str(error) for error in told} == {"no such savepoint"}
        assert asked == ["plan", "refused"]

    asyncio.run(story())


def test_plans_that_hang_are_given_up_and_hold_up_neither_ledgers_nor_each_other(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_reader, "_PLAN_WITHIN", 0.05)
    go = threading.Event()
    watch = HomeReader(home)

    async def story() -> None:
        waiting = [watch.plan(number, lambda: go.wait(60)) for number in range(20)]
        told = await asyncio.gather(*waiting, watch.ledgers("shop"), return_exceptions=True)
        assert told.pop() == reading.ledgers(home, "shop")
        assert all(isinstance(error, ServerSilent) for error in told)
        late = [error for error in told if "has not answered within 0.05 s" in str(error)]
        assert len(late) == 8  # the others are not asked: no thread more for each who asks
        go.set()
        for thread in threading.enumerate():
            if thread.name == "onceflow target":
                thread.join()
        assert await watch.plan("later", lambda: "as it is") == "as it is"

    asyncio.run(story())


def test_nothing_is_kept_of_jobs_and_boards_that_are_made_up_or_gone(home: Path) -> None:
    (home / "_boards").mkdir()
    (home / "_boards" / "ads.jsonl").write_text('{"board": "ads"}\n')
    watch = HomeReader(home, every=0.0)

    async def story() -> None:
        for number in range(50):
            with pytest.raises(JobError):
                await watch.lineages(f"made-up-{number}")
        await watch.lineages("shop")
        await watch.board("ads")
        assert (set(watch._logs), set(watch._boards)) == ({"shop"}, {"ads"})
        (home / "shop").rename(home / "_gone")
        (home / "_boards" / "ads.jsonl").unlink()
        assert await watch.jobs() == []
        with pytest.raises(JobError):
            await watch.board("ads")
        assert (watch._logs, watch._boards) == ({}, {})

    asyncio.run(story())


def test_looking_loads_neither_spark_nor_arrow(home: Path) -> None:
    import subprocess
    import sys

    code = (
        "import asyncio, sys; from onceflow.page.home_reader import HomeReader\n"
        "from onceflow.page.metrics import exposition\n"
        f"watch = HomeReader({str(home)!r})\n"
        "async def look():\n"
        "    await watch.jobs(); await watch.job('shop')\n"
        "    await watch.of_jobs(1, lambda home, _: exposition().encode(home.jobs))\n"
        "    await watch.lineages('shop'); await watch.savepoints('shop')\n"
        "asyncio.run(look())\n"
        "print(*{n.partition('.')[0] for n in sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"pyspark", "py4j", "pyarrow", "numpy", "pandas", "psycopg", "confluent_kafka"}
    assert heavy.isdisjoint(ran.stdout.split())
