"""Looking at a job: its state, its epochs and its lineages, while it runs and after a kill."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from at_rest import wait_for_state_at_rest
from click.testing import CliRunner
from commands import onceflow
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from story import BEGIN, FILES, ROWS, WINDOW, Story, key_of
from waiting import wait_for

import onceflow as library
from onceflow import Flow, sources
from onceflow.cli import cli
from onceflow.errors import JobError, OnceflowError
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lease import host_name
from onceflow.sinks import Files
from onceflow.snapshots.state_view import choose_stores, states_at


@pytest.fixture
def story(tmp_path: Path, spark: Any) -> Story:
    story = Story(str(tmp_path), "stateful", "files", keep_epochs=50)
    story.write_input()
    return story


def ask(story: Story, *arguments: object) -> Any:
    """A command in this process, which has a session already."""
    done = CliRunner().invoke(cli, [*map(str, arguments), "--home", str(story.home)])
    if isinstance(done.exception, OnceflowError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def rows(story: Story, *arguments: object) -> list[dict[str, Any]]:
    lines = ask(story, "state", "show", "story", "--json", *arguments).splitlines()
    return [json.loads(line) for line in lines]


def counted(found: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter({
        (row["key"]["window"]["start"][:19], row["key"]["key"]): row["value"]["count"]
        for row in found
    })  # fmt: skip


def open_windows(files: int, since: str) -> Counter[tuple[str, str]]:
    """What is counted of so many files and not yet given out: windows that end after a time."""
    truth: Counter[tuple[str, str]] = Counter()
    for i in range(files * ROWS):
        begin = BEGIN + timedelta(seconds=i // WINDOW * WINDOW)
        if (begin + timedelta(seconds=WINDOW)).isoformat() > since:
            truth[begin.isoformat()[:19], key_of(i)] += 1
    return truth


def watermark(story: Story, epoch: int) -> str:
    """That the epoch ran with: windows that end at or before it are gone from the state."""
    (told,) = json.loads(ask(story, "epoch", "show", "story", epoch - 1, "--json"))
    return (BEGIN + timedelta(milliseconds=told["watermark_ms"] - 1000 * BEGIN.timestamp())
            ).isoformat()  # fmt: skip


# ---------------------------------------------------------------- state


def test_state_of_every_retained_epoch_is_what_was_counted_by_then(story: Story) -> None:
    story.live()
    (told,) = json.loads(ask(story, "state", "list", "story", "--json"))
    assert told["retained"] == [0, told["epoch"]]
    (store,) = told["stores"]
    assert (store["operator"], store["kind"], store["store"]) == (0, "stateStoreSave", "default")
    assert store["key"] == [
        {"name": "window", "type": "struct<start:timestamp,end:timestamp>"},
        {"name": "key", "type": "string"},
    ]
    assert store["value"] == [{"name": "count", "type": "long"}]
    assert store["bytes"] > 0
    with_data = 0
    for epoch in range(1, told["epoch"] + 1):
        (seen,) = json.loads(ask(story, "epoch", "show", "story", epoch, "--json"))
        files = seen["input"][0]["end"]["logOffset"] + 1
        with_data += bool(seen["input"][0]["files"])
        found = rows(story, "--epoch", epoch, "--limit", 1000)
        assert counted(found) == open_windows(files, watermark(story, epoch)), epoch
    assert with_data == FILES - 1

    everything = counted(rows(story, "--limit", 1000))
    (one,) = rows(story, "--key", json.dumps({"key": "b", "window.start": "2026-01-01T00:04:40Z"}))
    assert counted([one]) == Counter({
        ("2026-01-01T00:04:40", "b"): everything["2026-01-01T00:04:40", "b"]
    })  # fmt: skip
    assert {row["key"]["key"] for row in rows(story, "--key", "c")} == {"c"}
    assert rows(story, "--key", "nobody") == []
    assert len(rows(story, "--limit", 3)) == 3
    assert "there are more; --limit 30 shows them" in ask(
        story, "state", "show", "story", "--limit", 3
    )


def test_state_that_is_not_there_is_told_with_what_is(story: Story, spark: Any) -> None:
    story.live()
    wait_for_state_at_rest(spark)
    last = states_at(JobFolder(story.home, "story"), query=None, epoch=None)[0].decision.epoch
    with pytest.raises(JobError) as error:
        rows(story, "--epoch", 99)
    assert error.value.message == "epoch 99 of story/result is not retained"
    assert error.value.hint == f"it has 0 to {last}; the nearest: {last}"
    for arguments, says in (
        (["--operator", 7], "no state of that operator and store"),
        (["--query", "x"], "job story has no query 'x'"),
        (["--key", '{"word": 1}'], "the key of this state has no column 'word'"),
    ):
        with pytest.raises(JobError, match=says):
            rows(story, *arguments)
    for file in story.checkpoint.glob(f"state/0/*/{last + 1}_*"):
        file.unlink()
    with pytest.raises(JobError, match=f"epoch {last} of story/result is not retained") as error:
        rows(story)
    assert error.value.hint == f"it has 0 to {last - 1}; the nearest: {last - 1}"


@pytest.mark.kill
def test_state_and_epoch_are_seen_also_where_spark_has_not_committed(story: Story) -> None:
    assert story.live_apart("epoch.decided:kill:3") == -9
    (told,) = json.loads(ask(story, "state", "list", "story", "--json"))
    assert told["epoch"] not in [int(p.name) for p in (story.checkpoint / "commits").iterdir()
                                 if p.name.isdigit()]  # fmt: skip
    (seen,) = json.loads(ask(story, "epoch", "show", "story", told["epoch"], "--json"))
    files = seen["input"][0]["end"]["logOffset"] + 1
    assert counted(rows(story, "--limit", 1000)) == open_windows(
        files, watermark(story, told["epoch"])
    )
    assert (seen["ms"], seen["rows_in"]) == (None, None)  # it was killed before it could say so
    assert "time by step: not known" in ask(story, "epoch", "show", "story", told["epoch"])


def test_state_of_a_home_that_cannot_be_linked_from_is_read_too(
    story: Story, monkeypatch: pytest.MonkeyPatch, spark: Any
) -> None:
    story.live()
    ((state, store),) = choose_stores(
        states_at(JobFolder(story.home, "story"), query=None, epoch=None), None, None
    )
    linked = state.rows(spark, store, key=None, limit=1000)

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refuse)
        patched.setattr("onceflow.store.posix.os.link", refuse)
        assert state.rows(spark, store, key=None, limit=1000) == linked
    assert linked


def test_stores_and_columns_are_those_that_spark_names(tmp_path: Path, spark: Any) -> None:
    (tmp_path / "in").mkdir()
    rows = [{"id": i, "tags": ["a"] * i, "at": f"2026-01-01T00:00:0{i}Z"} for i in range(5)]
    (tmp_path / "in" / "1.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    schema = "id long, tags array<string>, at timestamp"

    @library.job("joined")
    def joined(flow: Flow) -> None:
        source = sources.Files(tmp_path / "in", format="json", schema=schema)
        left, right = (
            flow.read(name, source).withWatermark("at", "1 minute").alias(name) for name in "lr"
        )
        both = left.join(right, F.expr("l.id = r.id and l.tags = r.tags and l.at = r.at"))
        flow.write("both", both.select("l.id", "r.tags"), to=Files(tmp_path / "out"))

    library.start(joined, home=tmp_path / "home", spark=spark, once=True).wait()
    (state,) = states_at(JobFolder(tmp_path / "home", "joined"), query="both", epoch=None)
    checkpoint = str(state.query.folder)
    metadata = spark.read.format("state-metadata").load(checkpoint).collect()
    assert [(s.operator, s.kind, s.name, s.partitions) for s in state.stores] == [
        (m.operatorId, m.operatorName, m.stateStoreName, m.numPartitions) for m in metadata
    ]
    assert len(state.stores) == 4
    for store in state.stores:
        reader = spark.read.format("statestore").option("storeName", store.name)
        fields = reader.load(checkpoint).schema
        for part in ("key", "value"):
            told = ", ".join(f"{c['name']} {c['type']}" for c in getattr(store, part))
            spark_says = fields[part].dataType.simpleString()
            assert StructType.fromDDL(told).simpleString() == spark_says
        assert state.bytes(store) > 0
    ((_, store),) = choose_stores([state], 0, "left-keyWithIndexToValue")
    for key, ids in (("3", [3]), ('["a","a"]', [2]), ('{"field1": ["a"]}', [1]), ("x", [])):
        found = state.rows(spark, store, key=key, limit=9)
        assert [row["value"]["id"] for row in found] == ids, key


# ---------------------------------------------------------------- epochs


def test_an_epoch_tells_what_went_in_and_out_and_how_long_it_took(story: Story) -> None:
    story.live()
    outputs = 0
    for epoch in range(FILES):
        (told,) = json.loads(ask(story, "epoch", "show", "story", epoch, "--json"))
        files = told["input"][0]["files"]
        assert told["rows_in"] == files * ROWS
        assert list(told["ms"]) == ["check", "stage", "harden", "decide", "publish", "sweep"]
        assert all(ms >= 0 for ms in told["ms"].values())
        assert told["spark_ms"]["addBatch"] >= told["ms"]["stage"]
        assert told["state_rows"] is not None
        assert (told["decision"]["term"], told["outputs"][0]["guarantee"]) == (1, "exactly-once")
        outputs += told["rows_out"]
    text = ask(story, "epoch", "show", "story", 0)
    assert "rows in: 60 rows" in text
    assert "time by step: check " in text
    with pytest.raises(JobError, match="epoch 77 of story/result is not retained"):
        ask(story, "epoch", "show", "story", 77)
    with pytest.raises(JobError, match="has no lineage 'zz'"):
        ask(story, "epoch", "show", "story", 0, "--lineage", "zz")


def test_the_file_of_times_stays_small(tmp_path: Path, spark: Any) -> None:
    story = Story(str(tmp_path), "stateless", "files", keep_epochs=2)
    story.write_input(range(12))
    story.live()
    lines = (story.checkpoint / "onceflow" / "times.jsonl").read_text().splitlines()
    assert 4 <= len(lines) <= 9
    assert json.loads(lines[-1])["epoch"] == 11


# ---------------------------------------------------------------- lineages


def test_lineages_are_a_tree_and_their_epochs_are_found_in_it(story: Story) -> None:
    story.live()
    ask(story, "savepoint", "create", "story", "--name", "whole")
    (first,) = json.loads(ask(story, "lineages", "story", "--json"))
    last = first["queries"]["result"]["last"]
    assert (first["parent"], first["current"], first["reason"]) == (None, True, "start")
    assert [s["name"] for s in first["savepoints"]] == ["whole"]
    assert first["who"] == f"process {os.getpid()} on {host_name()}"

    before = rows(story, "--epoch", 1, "--limit", 1000)
    for _ in range(2):
        ask(story, "rollback", "story", "--to", 2, "--published", "rewind")
        story.live()
    found = json.loads(ask(story, "lineages", "story", "--json"))
    ids = [told["lineage"] for told in found]
    assert [told["parent"] for told in found] == [None, ids[0], ids[1]]
    assert [told["from"] for told in found[1:]] == [{"result": 2}] * 2
    assert [told["current"] for told in found] == [False, False, True]
    assert found[2]["queries"]["result"]["first"] == 3

    ask(story, "rollback", "story", "--lineage", ids[0], "--to", 1, "--published", "rewind")
    text = ask(story, "lineages", "story")
    short = [told["lineage"][:8] for told in json.loads(ask(story, "lineages", "story", "--json"))]
    lines = [line.split("  20")[0] for line in text.splitlines()]
    assert lines[0] == "story"
    assert lines[1] == f"└─ {short[0]}  start"
    assert f"   │  result: epochs 0 to {last}" in lines
    assert f"   │  savepoint whole (after result {last})" in lines
    assert f"   ├─ {short[1]}  rollback to 2, from epoch 2 of {short[0]}" in lines
    assert f"   │  └─ {short[2]}  rollback to 2, from epoch 2 of {short[1]}" in lines
    assert lines[-3] == (f"   └─ {short[3]} (current)  rollback to 1, from epoch 1 of {short[0]}")
    assert lines[-1] == "         result: nothing decided yet"

    # epochs before a cut are looked for where they were decided
    (told,) = json.loads(ask(story, "epoch", "show", "story", 1, "--json"))
    assert told["lineage"] == ids[0]
    assert rows(story, "--epoch", 1, "--limit", 1000) == before
    (told,) = json.loads(ask(story, "epoch", "show", "story", 3, "--lineage", ids[1][:6], "--json"))
    assert told["lineage"] == ids[1]


def test_all_of_it_works_on_a_running_job(tmp_path: Path, spark: Any) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"id": 1}\n{"id": 1}\n')

    @library.job("live", every="0ms")
    def live(flow: Flow) -> None:
        source = sources.Files(tmp_path / "in", format="json", schema="id long")
        seen = flow.read("rows", source).dropDuplicates(["id"])
        flow.write("ids", seen, to=Files(tmp_path / "out"))

    home = ["--home", str(tmp_path / "home")]
    with library.start(live, home=tmp_path / "home", spark=spark) as handle:
        wait_for(lambda: handle.status["queries"]["ids"] is not None)
        for arguments in (["state", "list", "live"], ["lineages", "live"],
                          ["epoch", "show", "live", "0"], ["state", "show", "live"]):  # fmt: skip
            done = onceflow(*arguments, *home, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            loud = arguments[:2] == ["state", "show"]
            assert done.stderr == ("starting Spark to read the state …\n" if loud else "")
        _, head, row = done.stdout.splitlines()
        assert head == "  key.id  value.__dummy__  partition"
        assert row.split()[:2] == ["1", "null"]
        assert handle.status["state"] == "running"
