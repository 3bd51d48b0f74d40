"""Restores that a person may stumble into: idle queries, outputs that come and go, sinks that
cannot take back. Drivers stand in for real ones, without Spark; the sinks are real."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from onceflow.cli import cli
from onceflow.contract.ledger import Guarantee, Ledger, Publication
from onceflow.contract.schema import parse_schema
from onceflow.contract.staged_files import describe
from onceflow.errors import CheckpointRefused, JobError, TargetBehind
from onceflow.protocol.epoch_log import Decision, OutputDecision
from onceflow.protocol.home import JobFolder, now
from onceflow.protocol.lineage import Origin, refuse_foreign
from onceflow.sinks import Files, Sink, Sqlite
from onceflow.snapshots.epochs import cuts_at
from onceflow.snapshots.restore import Restore
from onceflow.snapshots.savepoint import Savepoint, installed_spark
from onceflow.snapshots.savepoint_import import SavepointImport
from onceflow.snapshots.savepoints import Savepoints
from onceflow.spark.checkpoint import Checkpoint

SCHEMA = parse_schema("id long")
OFFSETS = 'v2\n{{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{{}}}}\nlines:{}'


class Driver:
    """A driver of one query: opens the lineage that the job is in, and runs epochs of one row."""

    def __init__(
        self, folder: JobFolder, query: str, outputs: Mapping[str, Sink], guarantee: str = ""
    ) -> None:
        lineage = folder.lineage() or folder.open_lineage(installed_spark() or "4.2.1")
        self.query, self.outputs = folder.query(lineage, query), outputs
        self.guarantee = Guarantee(guarantee or Guarantee.EXACTLY_ONCE)
        self.log = self.query.epoch_log().read()
        self.checkpoint = Checkpoint(self.query.folder)
        self.term = 0
        self.ledgers: dict[str, Ledger] = {}

    @property
    def exact(self) -> bool:
        return self.guarantee is Guarantee.EXACTLY_ONCE

    def open(self) -> Driver:
        targets = {
            name: {"guarantee": self.guarantee, **sink.describe()}
            for name, sink in self.outputs.items()
        }
        seen = [sink.published(self.id(name)).term for name, sink in self.outputs.items()]
        self.term = max(self.log.term, *seen) + 1
        leader = self.log.leader or {}
        former = {**leader.get("former", {}), **leader.get("outputs", {})}
        self.log.fence(self.term, {"at": now(), "former": former, "outputs": targets})
        self.checkpoint.set_query_id(self.query.spark_id)
        for name, sink in self.outputs.items():
            sink.prepare(self.id(name), SCHEMA, "append")
            ledger = sink.fence(self.id(name), term=self.term, token=uuid.uuid4().hex)
            origin = Origin.of(self.log)
            if self.exact:
                refuse_foreign(self.query, name, sink, self.log, ledger)
                if origin is not None:
                    ledger = origin.move_ledger(
                        sink, self.id(name), ledger, term=self.term, schema=SCHEMA, mode="append"
                    )
            self.ledgers[name] = ledger
        return self

    def id(self, output: str) -> str:
        return f"{self.query.job}/{self.query.name}/{output}"

    def run(self, epochs: int = 1, *, published: bool = True) -> Driver:
        for _ in range(epochs):
            self._run(self.log.last.epoch + 1 if self.log.last else 0, published)
        return self

    def _run(self, epoch: int, published: bool) -> None:
        decided = {}
        for name in self.outputs:
            tag = f"{epoch}-{self.term}-{name}"
            root = self.query.staged / tag
            root.mkdir(parents=True)
            pq.write_table(pa.table({"id": pa.array([epoch], pa.int64())}), root / "0.parquet")
            files = tuple(
                replace(file, path=str(Path(file.path).relative_to(self.query.staged)))
                for file in describe(root, ())
            )
            previous = self.ledgers[name].position
            decided[name] = OutputDecision(previous, files, SCHEMA, "append", self.guarantee)
        start = {"lines": epoch - 1} if epoch else {}
        decision = Decision(
            epoch, self.term, now(), start, {"lines": epoch}, OFFSETS.format(epoch), {}, {}, 0,
            decided, digest=epoch,
        )  # fmt: skip
        self.log.decide(decision)
        self.checkpoint.set_offsets(epoch, decision.offsets)
        if published:
            for name in self.outputs:
                self._publish(name, decision)
            self.checkpoint.set_commit(epoch, 0, {})

    def _publish(self, name: str, decision: Decision) -> None:
        output = decision.outputs[name]
        files = tuple(replace(f, path=str(self.query.staged / f.path)) for f in output.files)
        publication = Publication(
            self.id(name), self.query.lineage, decision.epoch, self.term, output.previous, files,
            SCHEMA, "append", decision.nonce,
        )  # fmt: skip
        if not self.exact:
            self.outputs[name].add(publication)
            return
        self.outputs[name].publish(publication)
        self.ledgers[name] = Ledger(self.term, publication.position, decision.nonce)


class World:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = JobFolder(root / "home", "shop")

    def files(self, name: str = "out") -> dict[str, Sink]:
        return {name: Files(self.root / name)}

    def ids(self, name: str = "out") -> list[int]:
        paths = (self.root / name).glob("*.parquet")
        return sorted(i for path in paths for i in pq.ParquetFile(path).read()["id"].to_pylist())

    def driver(self, outputs: Mapping[str, Sink], query: str = "q", **more: Any) -> Driver:
        return Driver(self.folder, query, outputs, **more)

    def savepoint(self) -> Savepoint:
        return Savepoints(self.folder).create("saved", {})

    def restore(self, savepoint: Savepoint, choice: str) -> None:
        restore = Restore(self.folder, savepoint.cuts(), {"": choice}, "restore")
        restore.plan()
        restore.run({})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_query_that_has_decided_nothing_does_not_keep_the_job_in_the_old_lineage(
    world: World,
) -> None:
    idle = world.driver(world.files("alerts"), "alerts").open()
    orders = world.driver(world.files(), "orders").open().run(3)
    savepoint = world.savepoint()
    orders.run(2)
    old = world.folder.lineage()
    world.restore(savepoint, "rewind")
    assert world.folder.lineage() != old
    with pytest.raises(Exception, match="this lineage has ended"):
        idle.run()
    world.driver(world.files("alerts"), "alerts").open().run()
    world.driver(world.files(), "orders").open().run()
    assert (world.ids("alerts"), world.ids()) == ([0], [0, 1, 2, 3])
    assert set(cuts_at(world.folder, "0", lineage=old)) == {"orders"}


def test_a_query_that_began_after_the_savepoint_stays_where_it_is(world: World) -> None:
    orders = world.driver(world.files(), "orders").open().run(2)
    savepoint = world.savepoint()
    orders.run(2)
    world.driver(world.files("alerts"), "alerts").open().run(2)
    world.restore(savepoint, "rewind")
    world.driver(world.files(), "orders").open().run()
    world.driver(world.files("alerts"), "alerts").open().run()
    assert (world.ids("alerts"), world.ids()) == ([0, 1, 2], [0, 1, 2])


@pytest.mark.parametrize("choice", ["rewind", "skip", "replay"])
def test_a_plan_can_be_made_while_the_job_runs(
    world: World, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = world.driver(world.files()).open().run(3)
    savepoint = world.savepoint()
    driver.run(2)
    published, once = Files.published, [True]

    def after_an_epoch(sink: Files, output: str) -> Ledger:
        if once and once.pop():
            driver.run()
        return published(sink, output)

    monkeypatch.setattr(Files, "published", after_an_epoch)
    (answer,) = Restore(world.folder, savepoint.cuts(), {"": choice}, "restore").plan()
    assert (answer.cut, answer.published) == (2, 5)


@pytest.mark.parametrize("choice", ["rewind", "skip", "replay"])
def test_a_query_that_began_after_the_savepoint_may_run_while_a_plan_is_made(
    world: World, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.driver(world.files(), "orders").open().run(2)
    savepoint = world.savepoint()
    alerts = world.driver(world.files("alerts"), "alerts").open().run(2)
    published = Files.published

    def after_an_epoch(sink: Files, output: str) -> Ledger:
        if "/alerts/" in output:
            alerts.run()
        return published(sink, output)

    monkeypatch.setattr(Files, "published", after_an_epoch)
    answers = Restore(world.folder, savepoint.cuts(), {"": choice}, "restore").plan()
    says = {answer.query: (answer.published - answer.cut, answer.says) for answer in answers}
    assert says["alerts"] == (0, "nothing was published after the cut")


def test_the_first_epoch_of_an_output_may_be_published_while_a_plan_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {**world.files("x"), **world.files("y")}
    driver = world.driver(world.files("x")).open().run()
    savepoint = world.savepoint()
    driver = world.driver(both).open()
    published, late = Files.published, [True]

    def before_two_epochs(sink: Files, output: str) -> Ledger:
        seen = published(sink, output)
        if output.endswith("/y") and late and late.pop():
            driver.run(2)
        return seen

    monkeypatch.setattr(Files, "published", before_two_epochs)
    plan = Restore(world.folder, savepoint.cuts(), {"": "rewind"}, "restore").plan
    assert [answer.output for answer in plan()] == ["x", "y"]
    driver.run()
    shutil.rmtree(world.root / "y")
    with pytest.raises(TargetBehind, match="no longer has anything of the job"):
        plan()


@pytest.mark.parametrize("choice", ["rewind", "skip", "replay"])
def test_a_sink_that_cannot_take_back_goes_on_where_nothing_came_after(
    world: World, choice: str
) -> None:
    def table() -> dict[str, Sink]:
        return {"out": Sqlite(world.root / "t.db", table="t", keep_before=0)}

    driver = world.driver(table()).open().run(3)
    savepoint = world.savepoint()
    world.restore(savepoint, choice)
    world.driver(table()).open().run()
    driver = world.driver(table()).open().run()
    assert driver.log.last is not None
    assert driver.log.last.epoch == 4


def test_a_skip_that_was_interrupted_can_be_asked_for_again(world: World) -> None:
    driver = world.driver(world.files()).open().run(3)
    savepoint = world.savepoint()
    driver.run(4)
    later = Savepoints(world.folder).create("later", {})
    world.restore(savepoint, "skip")
    driver = world.driver(world.files()).open()
    before = driver.query.to_replay(3)
    assert before is not None
    driver.log.decide(replace(before, term=driver.term))
    world.restore(savepoint, "skip")
    child = world.driver(world.files()).open()
    waiting = [child.query.to_replay(epoch) for epoch in range(3, 8)]
    assert [decision and decision.epoch for decision in waiting] == [3, 4, 5, 6, None]
    world.restore(later, "rewind")  # all its rows are still there
    world.driver(world.files()).open().run()
    assert world.ids() == list(range(8))


def test_rows_of_an_output_that_the_code_has_no_more_are_taken_back_too(world: World) -> None:
    both = {**world.files("x"), **world.files("y")}
    driver = world.driver(both).open().run(2)
    savepoint = world.savepoint()
    driver.run(1)
    driver = world.driver(world.files("x")).open().run(2)
    world.restore(savepoint, "rewind")
    world.driver({**world.files("x"), **world.files("y")}).open().run()
    assert (world.ids("x"), world.ids("y")) == ([0, 1, 2], [0, 1, 2])


def test_an_epoch_that_was_decided_and_not_added_is_added_by_the_restore(world: World) -> None:
    weaker = {"guarantee": "at-least-once"}
    driver = world.driver(world.files(), **weaker).open().run(2)
    savepoint = world.savepoint()
    driver.run(1, published=False)
    world.restore(savepoint, "skip")
    assert world.ids() == [0, 1, 2]
    assert world.driver(world.files(), **weaker).open().query.to_replay(2) is not None


def test_what_was_added_without_a_ledger_is_not_taken_back(world: World) -> None:
    world.driver(world.files()).open().run(1)
    savepoint = world.savepoint()
    world.driver(world.files(), guarantee="at-least-once").open().run(1)
    world.driver(world.files()).open().run(1)
    with pytest.raises(JobError, match="kept no ledger in epoch 1, by choice"):
        world.restore(savepoint, "rewind")


def test_a_savepoint_whose_epoch_was_taken_back_does_not_arrive(world: World) -> None:
    driver = world.driver(world.files()).open().run(2)
    first = Savepoints(world.folder).create("first", {})
    driver.run(4)
    shutil.copytree(world.savepoint().folder, world.root / "carried")
    world.restore(first, "rewind")
    world.driver(world.files()).open().run(1)
    elsewhere = JobFolder(world.root / "new", "shop")
    for choice in ("rewind", "replay", "skip"):
        with pytest.raises((CheckpointRefused, JobError)):
            SavepointImport(elsewhere, Savepoint.at(world.root / "carried"), {"": choice}).plan()
    assert world.ids() == [0, 1, 2]


def test_after_an_arrival_the_old_home_cannot_open_the_targets(world: World) -> None:
    world.driver(world.files()).open().run(2)
    shutil.copytree(world.savepoint().folder, world.root / "carried")
    elsewhere = JobFolder(world.root / "new", "shop")
    SavepointImport(elsewhere, Savepoint.at(world.root / "carried"), {"": "rewind"}).run({})
    with pytest.raises(CheckpointRefused, match="the target remembers epoch 1 of lineage"):
        world.driver(world.files()).open()
    Driver(elsewhere, "q", world.files()).open().run()
    assert world.ids() == [0, 1, 2]


def carried(world: World) -> Savepoint:
    shutil.copytree(world.savepoint().folder, world.root / "carried")
    return Savepoint.at(world.root / "carried")


def test_a_home_that_arrived_second_goes_back_to_its_savepoint(world: World) -> None:
    world.driver(world.files()).open().run(2)
    savepoint = carried(world)
    for name in ("first", "second"):
        home = JobFolder(world.root / name, "shop")
        SavepointImport(home, savepoint, {"": "rewind"}).run({})
    Driver(home, "q", world.files()).open().run(3)
    restore = Restore(home, savepoint.cuts(), {"": "rewind"}, "restore")
    assert [answer.says for answer in restore.plan()] == ["the rows of 3 epochs are taken back"]
    restore.run({})
    Driver(home, "q", world.files()).open().run()
    assert world.ids() == [0, 1, 2]


def test_a_home_that_arrived_and_was_not_started_can_be_worked_with(world: World) -> None:
    world.driver(world.files()).open().run(2)
    savepoint = carried(world)
    home = JobFolder(world.root / "new", "shop")
    SavepointImport(home, savepoint, {"": "replay"}).run({})
    Savepoints(home).create("again", {}).verify()
    restore = Restore(home, savepoint.cuts(), {"": "rewind"}, "restore")
    restore.plan()
    restore.run({})
    Driver(home, "q", world.files()).open().run()
    assert world.ids() == [0, 1, 2]


@pytest.mark.parametrize("choice", ["rewind", "skip", "replay"])
def test_a_target_that_is_gone_is_named_before_anything_is_touched(
    world: World, choice: str
) -> None:
    def table() -> dict[str, Sink]:
        return {"out": Sqlite(world.root / "t.db", table="t")}

    driver = world.driver(table()).open().run(2)
    savepoint = world.savepoint()
    driver.run(2)
    (world.root / "t.db").rename(world.root / "elsewhere.db")
    restore = Restore(world.folder, savepoint.cuts(), {"": choice}, "restore")
    with pytest.raises(TargetBehind, match="no longer has anything of the job") as refused:
        restore.plan()
    assert "bring back the target" in (refused.value.hint or "")
    assert not (world.root / "t.db").exists()


# ---------------------------------------------------------------- the commands


def fork(world: World, *arguments: str, name: str = "what-if") -> str:
    ran = CliRunner().invoke(
        cli, ["fork", "shop", "--as", name, "--home", str(world.root / "home"), *arguments]
    )
    return ran.output + str(ran.exception or "")


def test_a_fork_goes_into_nothing_that_is_its_parents_or_another_forks(world: World) -> None:
    """Readers of the folder would see both."""
    world.driver({"q": Files(world.root / "out" / "q")}).open().run(2)
    (world.root / "link").symlink_to(world.root / "out")
    for arguments in (
        ["--outputs", world.root / "out"],
        ["--output", f"q/q={world.root / 'out'}"],
        ["--output", f"q/q={world.root / 'x' / '..' / 'out' / 'q'}"],
        ["--output", f"q/q={world.root / 'link' / 'q' / 'below'}"],
    ):
        assert "output q/q of shop is in" in fork(world, *map(str, arguments)), arguments
    assert "run it: onceflow run" in fork(world, "--outputs", str(world.root / "mine"))
    said = fork(world, "--outputs", str(world.root / "mine"), name="other")
    assert "output q/q of fork what-if is in" in said
    assert "run it" in fork(world, "--outputs", str(world.root / "others"), name="other")


def test_a_moved_savepoint_is_looked_at_and_forked_where_nobody_knows_the_job(
    world: World,
) -> None:
    world.driver(world.files()).open().run(2)
    savepoint = str(carried(world).folder)
    home = ["--home", str(world.root / "empty")]
    for command in ("show", "verify"):
        ran = CliRunner().invoke(cli, ["savepoint", command, "shop", savepoint, *home])
        assert ran.exit_code == 0, ran.output
        ran = CliRunner().invoke(cli, ["savepoint", command, "bakery", savepoint, *home])
        assert "is a savepoint of job shop, not of bakery" in ran.output + str(ran.exception)
    more = ["--from", savepoint, "--outputs", str(world.root / "mine"), *home]
    ran = CliRunner().invoke(cli, ["fork", "shop", "--as", "new", *more])
    assert ran.exit_code == 0, ran.output
    assert JobFolder(world.root / "empty", "new").fork() is not None
    assert world.ids() == [0, 1]


def test_a_restore_without_a_choice_names_the_choices(world: World) -> None:
    world.driver(world.files()).open().run(2)
    world.savepoint()
    home = ["--home", str(world.root / "home")]
    for arguments in (["restore", "shop", "saved"], ["rollback", "shop", "--to", "0"]):
        ran = CliRunner().invoke(cli, [*arguments, *home])
        assert ran.exit_code
        error = ran.exception
        assert isinstance(error, JobError)
        assert error.hint == "add --published rewind or skip or replay"


def test_a_plan_on_a_new_home_says_that_it_is_done_at_once(world: World) -> None:
    world.driver(world.files()).open().run(2)
    savepoint = str(carried(world).folder)
    more = ["--published", "rewind", "--plan", "--home", str(world.root / "empty")]
    ran = CliRunner().invoke(cli, ["restore", "shop", savepoint, *more])
    assert "the targets are moved at once" in ran.output
