"""Keyed state at the command line: looked at, taken out, corrected, brought along."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from commands import onceflow as command
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from story import Row
from waiting import wait_for

import onceflow
from onceflow import Flow, faults, job, sources
from onceflow.cli import cli
from onceflow.contract.schema import arrow_schema, parse_schema
from onceflow.errors import BadRows, Damaged, JobError, LeaseHeld, OnceflowError
from onceflow.jobs.job import Job
from onceflow.protocol.home import JobFolder
from onceflow.sinks import Files
from onceflow.state.process import KeyedProcess
from onceflow.state.states import ListState, MapState, ReducingState, Timer, ValueState
from onceflow.testing.processes import is_killed

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find it

ROWS = "user string, shop long, n long, word string, at timestamp"
HOUR = 3_600_000_000
AT = pa.timestamp("us", "UTC")
TIMES = pa.list_(pa.field("element", pa.struct([("word", pa.string()), ("at", AT)])))
USERS = ["ann", "bob", "", None, "null"]


class Spend(KeyedProcess):
    """Totals for user and shop, what was bought last, and a reminder an hour later."""

    output = "user string, shop long, total long"
    total = ReducingState("long", "sum", of="n")
    word = ValueState("string", ttl="30 days")
    times = ListState("struct<word: string, at: timestamp>")
    counts = MapState("long", "timestamp")
    remind = Timer("event")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        total, word, at = self.fold("total"), self.last(rows["word"]), self.max(rows["at"])
        bought = zip(word.to_pylist(), at.to_pylist(), strict=True)
        new = {
            "total": total,
            "word": word,
            "times": pa.array([[{"word": w, "at": t}] for w, t in bought], TIMES),
            "counts": pa.array([[(1, t)] for t in at.to_pylist()], pa.map_(pa.int64(), AT)),
            "remind": pc.add(at.cast(pa.int64()), HOUR).cast(AT),
        }
        return {"user": keys["user"], "shop": keys["shop"], "total": total}, new

    def on_timer(self, keys: pa.Table) -> Any:
        gone = pa.array([-1] * len(keys), pa.int64())
        return {"user": keys["user"], "shop": keys["shop"], "total": gone}, {}


class World:
    """Files of rows, one an epoch: each user buys one more than the file's number, at each shop."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root, self.spark, self.home = root, spark, root / "home"
        self.folder = JobFolder(self.home, "shop")
        self.added, self.hours = 0, 0
        (root / "in").mkdir()

    def add(self, files: int = 1) -> None:
        for _ in range(files):
            keys = [(user, shop) for user in USERS for shop in (1, 2)]
            columns = {
                "user": [user for user, _ in keys], "shop": [shop for _, shop in keys],
                "n": [self.added + 1] * len(keys), "word": [f"w{self.added}"] * len(keys),
                "at": [self.added * 1_000_000 + self.hours * HOUR] * len(keys),
            }  # fmt: skip
            part = self.root / "in" / f".{self.added}"
            pq.write_table(pa.table(columns, schema=arrow_schema(parse_schema(ROWS))), part)
            os.utime(part, (1_700_000_000 + self.added,) * 2)
            part.rename(self.root / "in" / f"{self.added:04}.parquet")
            self.added += 1

    def total(self, files: int) -> int:
        return files * (files + 1) // 2

    def job(self, *, keep_epochs: int = 100, **settings: Any) -> Job:
        @job("shop", every="0ms", keep_epochs=keep_epochs)
        def shop(flow: Flow) -> None:
            source = sources.Files(self.root / "in", schema=ROWS, max_files_per_epoch=1)
            keyed = flow.keyed(
                flow.read("rows", source),
                by=["user", "shop"],
                process=Spend(),
                event_time="at",
                watermark="0 ms",
                groups=16,
                **settings,
            )
            flow.write("totals", keyed, to=Files(self.root / "out"))

        return shop

    def live(self, **settings: Any) -> None:
        made = self.job(**settings)
        onceflow.start(made, home=self.home, spark=self.spark, once=True).wait(120)

    def published(self) -> Counter[Row]:
        found = Files.read(self.spark, self.root / "out").collect()
        return Counter(tuple(row) for row in found)

    def ask(self, *arguments: object) -> str:
        done = CliRunner().invoke(cli, [*map(str, arguments), "--home", str(self.home)])
        if isinstance(done.exception, OnceflowError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    def rows(self, *arguments: object) -> list[dict[str, Any]]:
        lines = self.ask("state", "show", "shop", "--json", "--limit", 1000, *arguments)
        return [json.loads(line) for line in lines.splitlines()]

    def totals(self, *arguments: object) -> dict[Row, int]:
        return {tuple(row["key"].values()): row["state"]["total"] for row in self.rows(*arguments)}

    def everywhere(self, total: int) -> dict[Row, int]:
        return {(user, shop): total for user in USERS for shop in (1, 2)}

    def export(self, name: str, *arguments: object) -> Path:
        to = self.root / name
        self.ask("state", "export", "shop", "--step", "spend", "--to", to, *arguments)
        return to

    def take(self, source: Path, *arguments: object) -> Any:
        """`onceflow state import`"""
        told = self.ask(
            "state", "import", "shop", "--step", "spend", "--from", source, "--json", *arguments
        )
        return json.loads(told)


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path, spark)


def corrected(source: Path, to: Path) -> Path:
    """Ann's totals are 1000 more, and Bob is forgotten."""
    table = pq.read_table(source)
    table = table.filter(pc.fill_null(pc.not_equal(table["user"], "bob"), True))
    ann = pc.fill_null(pc.equal(table["user"], "ann"), False)
    at = table.column_names.index("total")
    more = pc.if_else(ann, pc.add(table["total"], 1000), table["total"])
    to.mkdir()
    changed = table.set_column(at, "total", more)
    pq.write_table(changed.slice(0, 3), to / "b.parquet")
    pq.write_table(changed.slice(3), to / "a.parquet")
    return to


# ---------------------------------------------------------------- looking


def test_list_says_what_a_step_keeps_and_how_even_its_key_groups_are(world: World) -> None:
    world.add(3)
    world.live()
    (told,) = json.loads(world.ask("state", "list", "shop", "--json"))
    assert (told["query"], told["epoch"], told["stores"]) == ("totals", 2, [])
    (step,) = told["keyed"]
    assert step["key"] == [{"name": "user", "type": "string"}, {"name": "shop", "type": "long"}]
    assert [state["name"] for state in step["states"]] == ["total", "word", "times", "counts"]
    assert (step["step"], step["timers"], step["groups"]) == ("spend", ["remind"], 16)
    groups = step["by_group"]
    assert [group["group"] for group in groups] == list(range(16))
    assert sum(group["rows"] for group in groups) == step["rows"]
    assert 10 <= step["rows"] <= 30  # older versions are there until they are merged
    assert sum(group["share"] for group in groups) == pytest.approx(1)
    assert abs(sum(group["bytes"] for group in groups) - step["bytes"]) <= 16
    most = max(group["rows"] for group in groups)
    assert step["largest_to_mean"] == pytest.approx(most / (step["rows"] / 16))

    text = world.ask("state", "list", "shop")
    assert "  spend  user string, shop long  total long, word string, " in text
    assert "spend: the largest key groups; the largest has " in text
    assert len(text.splitlines()) == 1 + 2 + 2 + 5
    assert len(world.ask("state", "list", "shop", "--groups").splitlines()) == 1 + 2 + 2 + 16
    spread = Counter(row["group"] for row in world.rows())
    assert {group["group"] for group in groups if group["rows"]} == set(spread)


def test_show_finds_a_key_without_looking_at_the_others(world: World) -> None:
    world.add(3)
    world.live()
    assert world.totals() == world.everywhere(6)
    for key, user, shop in (
        ('{"user": "ann", "shop": 2}', "ann", 2), ('{"shop": 1, "user": null}', None, 1),
        ('["", 1]', "", 1), ("[null, 2]", None, 2), ('["null", 2]', "null", 2),
    ):  # fmt: skip
        (row,) = world.rows("--key", key)
        assert row["key"] == {"user": user, "shop": shop}
        assert row["state"] == {
            "total": 6, "word": "w2", "times": [{"word": "w2", "at": "1970-01-01T00:00:02Z"}],
            "counts": {"1": "1970-01-01T00:00:02Z"},
        }  # fmt: skip
        assert row["timers"] == {"remind": "1970-01-01T01:00:02Z"}
        assert list(row["written"]) == ["word"]
        assert row == next(other for other in world.rows() if other["key"] == row["key"])
    text = world.ask("state", "show", "shop", "--key", '["ann", 1]', "--step", "spend")
    title, head, row = text.splitlines()
    assert title == "totals after epoch 2: keyed step spend"
    assert head.split() == [
        "user", "shop", "total", "word", "times", "counts", "remind", "key", "group",
    ]  # fmt: skip
    assert row.split()[:4] == ["ann", "1", "6", "w2"]

    (nobody,) = world.rows("--key", '["zed", 1]')
    assert (nobody["key"], nobody["state"]) == ({"user": "zed", "shop": 1}, None)
    text = world.ask("state", "show", "shop", "--key", '["zed", 1]')
    assert text.endswith(f"no state for user=zed, shop=1, key group {nobody['group']}\n")

    assert "there are more; --limit 30 shows them" in world.ask(
        "state", "show", "shop", "--limit", 3
    )
    for arguments, says in (
        (["--key", "ann"], "--key ann is not a key of this state"),
        (["--key", '["ann", "one"]'], "is not of type long"),
        (["--step", "nope"], "job shop has no keyed step 'nope'"),
        (["--operator", 0], "totals keeps no state that can be shown"),
        (["--step", "spend", "--store", "default"], "--step is for keyed steps"),
        (["--epoch", 9], "epoch 9 of shop/totals is not retained"),
    ):
        with pytest.raises(JobError, match=says):
            world.rows(*arguments)


def test_every_retained_epoch_can_be_looked_at(world: World) -> None:
    world.add(4)
    world.live()
    for epoch in range(4):
        assert world.totals("--epoch", epoch) == world.everywhere(world.total(epoch + 1))
    out = world.export("older", "--epoch", 1)
    assert set(pq.read_table(out)["total"].to_pylist()) == {3}
    about = json.loads((out / "_onceflow.json").read_text())
    assert (about["epoch"], about["step"], about["rows"], about["complete"]) == (
        1,
        "spend",
        10,
        True,
    )


class Clicks(KeyedProcess):
    n = ReducingState("long", "count")


def test_the_only_column_of_a_key_is_given_as_it_is(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text(
        '{"id": "7"}\n{"id": null}\n{"id": "null"}\n{"id": "7"}'
    )
    rows = spark.readStream.name("rows").schema("id string").json(str(tmp_path / "in"))
    from onceflow.protocol.keyed_spec import keyed

    clicks = keyed(rows, by="id", process=Clicks)
    query = onceflow.write(clicks, "clicks", to=Files(tmp_path / "out"), home=tmp_path / "home")
    home = ["--home", str(tmp_path / "home")]
    try:
        wait_for(
            lambda: (
                "key groups" in CliRunner().invoke(cli, ["state", "list", "clicks", *home]).output
            )
        )
        # while it runs, and as a process of its own: no Spark is started
        for key, n in (("7", 2), ("null", 1), ("[null]", 1), ('{"id": "7"}', 2)):
            done = command("state", "show", "clicks", "--key", key, "--json", *home, cwd=tmp_path)
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout)["state"] == {"n": n}
        done = command("state", "list", "clicks", *home, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        query.stop()


# ---------------------------------------------------------------- correcting


def test_state_is_exported_corrected_imported_and_the_job_goes_on_from_it(world: World) -> None:
    world.add(2)
    world.live()
    before = world.folder.lineage()
    assert before is not None
    out = world.export("out-state")
    told = world.take(corrected(out, world.root / "changed"), "--yes")
    assert (told["rows"], told["absent"], told["epoch"], told["ended"]) == (8, [], 1, before)
    assert {answer["says"] for answer in told["outputs"]} == {"nothing was published after the cut"}
    after = {key: 3 + 1000 * (key[0] == "ann") for key in world.everywhere(3) if key[0] != "bob"}
    assert world.totals() == after

    world.add()
    world.live()
    state = world.everywhere(6) | {("ann", 1): 1006, ("ann", 2): 1006, ("bob", 1): 3, ("bob", 2): 3}
    assert world.totals() == state
    published = Counter((user, shop, total) for (user, shop), total in state.items())
    published += Counter((*key, total) for total in (1, 3) for key in world.everywhere(0))
    assert world.published() == published

    # the lineage before has its state still
    (_, now) = json.loads(world.ask("lineages", "shop", "--json"))
    assert now["reason"] == f"import of the state of spend from {world.root / 'changed'}"
    world.ask("rollback", "shop", "--lineage", before[:8], "--to", 1, "--published", "rewind")
    assert world.totals() == world.everywhere(3)
    world.live()
    assert world.totals() == world.everywhere(6)
    assert world.published() == Counter(
        (*key, total) for total in (1, 3, 6) for key in world.everywhere(0)
    )


def test_what_is_exported_and_imported_is_the_same_state_to_the_last_column(world: World) -> None:
    world.add(2)
    world.live()
    before = world.rows()
    assert all(row["written"]["word"] is not None for row in before)
    out = world.export("one")
    world.take(out, "--yes")
    again = world.export("two")
    assert world.rows() == before
    assert pq.read_table(again).equals(pq.read_table(out))
    # without the hidden column a value counts as written now
    bare = world.root / "bare"
    bare.mkdir()
    pq.write_table(pq.read_table(out).drop_columns(["_written.word", "times"]), bare / "a.parquet")
    assert world.take(bare, "--yes")["absent"] == ["times"]
    for old, new in zip(before, world.rows(), strict=True):
        assert new["state"] == {**old["state"], "times": None}
        assert new["written"]["word"] >= old["written"]["word"]


def test_a_plan_and_a_refusal_change_nothing(world: World) -> None:
    world.add(2)
    world.live()
    before, rows = world.folder.lineage(), world.rows()
    out = world.export("out-state")
    assert world.take(out, "--plan")["lineage"] is None
    assert "10 rows become its state" in world.ask(
        "state", "import", "shop", "--step", "spend", "--from", out, "--plan"
    )
    with pytest.raises(JobError, match="replacing the state of spend needs a yes"):
        world.take(out)
    table = pq.read_table(out)
    wrong: dict[str, tuple[pa.Table, type[OnceflowError], str]] = {
        "twice": (pa.concat_tables([table, table.slice(4, 1)]), BadRows, "keys more than once"),
        "no-key": (table.drop_columns(["shop"]), JobError, "there is no column shop, which is par"),
        "unknown": (table.append_column("x", table["shop"]), JobError, "the state has no column x"),
        "kind": (
            table.set_column(2, "total", table["total"].cast(pa.string())),
            JobError,
            "total was string, now it is int64",
        ),
    }
    for name, (changed, kind, says) in wrong.items():
        (world.root / name).mkdir()
        pq.write_table(changed, world.root / name / "a.parquet")
        with pytest.raises(kind, match=says):
            world.take(world.root / name, "--yes")
    with pytest.raises(JobError, match="exists and is not empty"):
        world.export("twice")
    (out / "_onceflow.json").write_text('{"complete": false}')
    with pytest.raises(JobError, match="of an export that did not come to its end"):
        world.take(out, "--yes")
    with pytest.raises(JobError, match="there is no "):
        world.take(world.root / "nowhere", "--yes")
    with (
        onceflow.start(world.job(), home=world.home, spark=world.spark),
        pytest.raises(LeaseHeld, match="job shop is led by"),
    ):
        world.take(world.root / "twice", "--yes")
    assert (world.folder.lineage(), world.rows()) == (before, rows)
    assert not list((world.folder.folder / "importing").iterdir())


def test_state_can_be_corrected_after_a_rollback_that_nobody_has_run_yet(world: World) -> None:
    world.add(3)
    world.live()
    world.ask("rollback", "shop", "--to", 0, "--published", "skip")
    out = world.export("out-state")
    with pytest.raises(JobError, match="epochs 1 to 2 of totals must still run again"):
        world.take(out, "--yes")
    world.ask("rollback", "shop", "--to", 0, "--published", "rewind")
    told = world.take(corrected(out, world.root / "changed"), "--yes")
    assert told["outputs"][0]["says"] == "the rows of 2 epochs are taken back"
    world.live()
    bob = {("bob", 1): 5, ("bob", 2): 5}
    assert world.totals() == world.everywhere(6) | {("ann", 1): 1006, ("ann", 2): 1006} | bob
    assert sum(world.published().values()) == 30


def test_a_timer_that_was_imported_fires_and_those_that_were_there_fire_no_more(
    world: World,
) -> None:
    world.add(2)
    world.live()
    table = pq.read_table(world.export("out-state"))
    at = table.column_names.index("remind")
    first = [0] + [None] * 9
    changed = table.set_column(at, "remind", pa.array(first, table.schema.field(at).type))
    (world.root / "changed").mkdir()
    pq.write_table(changed, world.root / "changed" / "a.parquet")
    world.take(world.root / "changed", "--yes")
    world.hours = 2  # past all reminders that there were
    world.live()  # nothing new: the timer that is behind the watermark is due all the same
    due = tuple(table.slice(0, 1).select(["user", "shop"]).to_pylist()[0].values())
    assert [row for row in world.published() if row[2] == -1] == [(*due, -1)]
    world.add(2)
    world.live()
    fired = Counter(row[:2] for row in world.published().elements() if row[2] == -1)
    assert fired == Counter([due])


# ---------------------------------------------------------------- bad days


def import_again(root: str, killed_at: str = "") -> None:
    """Maybe in a process of its own."""
    if killed_at:
        faults.arm(killed_at, "kill")
    arguments = ["state", "import", "shop", "--step", "spend", "--from", f"{root}/changed", "--yes"]
    done = CliRunner().invoke(cli, [*arguments, "--home", f"{root}/home"])
    assert done.exit_code == 0, done.exception


@pytest.mark.kill
@pytest.mark.parametrize("point", ["restore.fenced", "restore.made", "restore.ended-one"])
def test_an_import_that_is_killed_has_happened_or_not(world: World, point: str) -> None:
    world.add(2)
    world.live()
    before = world.folder.lineage()
    corrected(world.export("out-state"), world.root / "changed")
    assert is_killed(import_again, str(world.root), point)
    happened = point == "restore.ended-one"
    assert (world.folder.lineage() != before) is happened
    assert world.totals()["ann", 1] == (1003 if happened else 3)
    assert list((world.folder.folder / "importing").iterdir())
    import_again(str(world.root))
    assert not list((world.folder.folder / "importing").iterdir())
    world.add()
    world.live()
    assert world.totals()["ann", 1] == 1006
    assert world.totals()["bob", 1] == 3
    assert sum(world.published().values()) == 30


def test_a_damaged_run_is_named_and_nothing_is_shown_or_left_of_it(world: World) -> None:
    world.add(2)
    world.live()
    (query,) = world.folder.queries()
    runs = sorted((query.folder / "onceflow" / "keyed" / "spend").glob("*.arrow"))
    for run in runs:
        data = bytearray(run.read_bytes())
        data[len(data) // 2] ^= 1
        run.unlink()  # the pages of the file itself may be mapped by somebody
        run.write_bytes(data)
    with pytest.raises(Damaged, match=r"\.arrow is damaged"):
        world.rows()
    with pytest.raises(Damaged, match=r"\.arrow is damaged"):
        world.export("out-state")
    assert not list((world.root / "out-state").iterdir())
    runs[0].unlink()
    with pytest.raises(Damaged, match=r"is missing, and the state has rows in it"):
        world.rows("--epoch", 0)
    assert "spend" in world.ask("state", "list", "shop")


def test_an_epoch_whose_files_went_while_they_were_read_is_not_retained(world: World) -> None:
    world.add(2)
    world.live(keep_epochs=2)
    from onceflow.snapshots.state_view import states_at

    (state,) = states_at(world.folder, query=None, epoch=0)
    (keyed,) = state.keyed
    world.add(8)
    world.live(keep_epochs=2)
    shutil.rmtree(keyed.folder)  # of epoch 0 alone much may be left
    with pytest.raises(JobError, match="epoch 0 of shop/totals is not retained"):
        list(keyed.rows())
    with pytest.raises(Damaged):
        world.rows()


# ---------------------------------------------------------------- bringing along


def test_a_step_begins_with_history(world: World, tmp_path: Path) -> None:
    world.add(3)
    world.live()
    history = world.export("history")
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other", world.spark)
    other.add(2)
    other.live(initial=history)
    assert other.totals() == other.everywhere(6 + 3)
    assert other.totals("--epoch", 0) == other.everywhere(6 + 1)
    (row, *_) = other.rows("--key", '["ann", 1]', "--epoch", 0)
    assert row["state"]["word"] == "w0"

    # it is there before the first epoch alone
    shutil.rmtree(history)
    other.add()
    other.live(initial=history)
    assert other.totals() == other.everywhere(6 + 6)
    folder = other.folder.queries()[0].folder / "onceflow" / "keyed" / "spend"
    assert any("-initial-" in path.name for path in folder.iterdir())


def test_history_that_does_not_fit_is_refused_before_anything_runs(world: World) -> None:
    (world.root / "history").mkdir()
    pq.write_table(pa.table({"user": ["a"], "total": [1]}), world.root / "history" / "a.parquet")
    world.add()
    with pytest.raises(JobError, match="there is no column shop, which is part of the key"):
        world.live(initial=world.root / "history")
    with pytest.raises(JobError, match="there is no "):
        world.live(initial=world.root / "nowhere")
    assert not (world.root / "out" / "_commits").exists()
