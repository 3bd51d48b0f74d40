"""A decided epoch is adopted, never evaluated again: rows and state are of one attempt."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from story import FILES, ROWS, Story
from waiting import wait_for

import onceflow
from onceflow import faults, sinks, sources
from onceflow.contract.staged_files import harden
from onceflow.protocol import epoch


def state(spark: Any, story: Story) -> dict[int, int]:
    """What Spark's own reader finds in the state store."""
    rows = spark.read.format("statestore").load(str(story.checkpoint)).collect()
    return {row.key[0]: row.value["count"] for row in rows}


def published(story: Story) -> dict[int, int]:
    return dict(story.published().keys())


def test_state_is_what_was_published_though_the_query_rolls_dice(
    tmp_path: Path, spark: Any
) -> None:
    story = Story(str(tmp_path), "random", "sqlite")
    story.write_input(range(2))
    faults.arm("epoch.decided", "raise", visit=2)
    with pytest.raises(faults.InjectedFault):
        story.live()
    faults.disarm()
    assert not (story.checkpoint / "commits" / "1").exists()
    decided = story.log_entries()[-1]

    story.live()  # nothing new has come: it only recovers
    assert state(spark, story) == published(story)
    assert sum(published(story).values()) == 2 * ROWS
    assert story.log_entries()[-2]["nonce"] == decided["nonce"]  # then came a fence, no epoch

    story.write_input(range(2, FILES))
    story.live()
    assert state(spark, story) == published(story)
    assert sum(published(story).values()) == FILES * ROWS


def test_a_lost_commit_file_is_written_from_the_decision(tmp_path: Path, spark: Any) -> None:
    story = Story(str(tmp_path), "random", "sqlite")
    story.write_input(range(2))
    story.live()
    before, committed = published(story), story.newest("commits").read_text()
    story.newest("commits").unlink()
    story.live()
    assert published(story) == before == state(spark, story)
    assert Counter(story.newest("commits").read_text()) == Counter(committed)


@pytest.mark.parametrize("query", ["sum", "join"])
def test_a_query_goes_on_from_snapshots_of_its_state(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    """Spark writes one now and then, behind the epochs; a session may not stand in its way."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    written = 0

    def more(rows: int = 100) -> None:
        nonlocal written
        numbers = pa.array(range(written, written + rows), pa.int64())
        pq.write_table(pa.table({"id": numbers}), tmp_path / "next.parquet")
        (tmp_path / "next.parquet").rename(source / f"{written:06d}.parquet")
        written += rows

    def start(**options: Any) -> Any:
        def rows(name: str) -> Any:
            files = sources.Files(source, schema="id long", max_files_per_epoch=1)
            return files.stream(spark, name)

        if query == "sum":
            df = rows("rows").selectExpr("id % 50 AS key", "id").groupBy("key").agg({"id": "sum"})
            df, mode = df.withColumnRenamed("sum(id)", "value"), "update"
            to: Any = sinks.Sqlite(tmp_path / "out.db", table="result", key="key")
        else:
            df, mode = rows("rows").join(rows("others"), "id"), "append"
            to = sinks.Files(target)
        return onceflow.write(df, "result", to=to, mode=mode, home=tmp_path / "home", **options)

    synced: list[Path] = []

    def spied(files: list[Path], root: Path, known: set[Path], passing: list[Path]) -> None:
        synced.extend(passing)
        harden(files, root, known, passing)

    monkeypatch.setattr(epoch, "harden", spied)

    def found(names: str) -> list[Path]:
        return list((tmp_path / "home").glob(f"result/lineages/*/result/{names}"))

    running, epochs = start(every="100 ms"), 0
    try:
        while not found("state/**/*.zip"):
            assert epochs < 100, "no snapshot of state was written"
            more()
            wait_for(lambda n=epochs: found(f"commits/{n}") or running.exception(), 60)
            assert running.exception() is None
            epochs += 1
    finally:
        running.stop()
    first = {*found("state/**/*.zip"), *found("state/**/*.sst")}
    for _ in range(2):
        more()
        start(once=True).awaitTermination(120)
    assert first <= set(synced)  # before the next epoch is decided
    if query == "join":
        assert sorted(pq.read_table(target)["id"].to_pylist()) == list(range(written))
    else:
        with closing(sqlite3.connect(tmp_path / "out.db")) as db:
            assert dict(db.execute("SELECT key, value FROM result")) == {
                key: sum(range(key, written, 50)) for key in range(50)
            }
