"""Break a keyed job at every point, its tasks too: rows and state stay those of one attempt."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from test_keyed import World, in_two_steps, two_step_truth
from waiting import wait_for

from onceflow import Flow, faults
from onceflow.protocol.keyed_runner import manifest_of
from onceflow.protocol.keyed_spec import Keyed
from onceflow.spark.session import AGEING, get_session
from onceflow.state.process import KeyedProcess
from onceflow.state.states import ReducingState

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find it

POINTS = (
    *faults.KEYED,
    "epoch.staged",
    "epoch.hardened",
    "epoch.decided",
    "epoch.output-published",
)
STEPS = ("sums", "halves")


def visit_of(point: str) -> int:
    """In the second epoch: in its first step, or in its second one."""
    return {"keyed.ran": 3, "keyed.listed": 4, "keyed.step-staged": 3}.get(point, 2)


class Crashing(World):
    """The same world with two steps in a row."""

    def live(self, make: Any = in_two_steps, **written: Any) -> None:
        super().live(make, **written)

    def check(self, files: int | None = None) -> None:
        assert self.published() == two_step_truth(self.added if files is None else files)

    def check_swept(self) -> None:
        """Nothing is there but what a retained epoch needs."""
        for step in STEPS:
            needed = {d.keyed[step]["manifest"] for d in self.decisions()}
            for decision in self.decisions():
                needed |= set(manifest_of(self.query.folder, decision, step).run_names())
            assert set(os.listdir(self.kept(step))) == needed
        assert not list(self.query.staged.iterdir())

    def spawn(self, fault: str, host: str = "", **orders: Any) -> subprocess.Popen[bytes]:
        """A driver process of its own."""
        quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        faulty = {"ONCEFLOW_FAULT": fault, "ONCEFLOW_HOST": host, "JDK_JAVA_OPTIONS": quick}
        with open(self.root / "said", "wb") as said:
            return subprocess.Popen(
                [sys.executable, __file__, json.dumps({"root": str(self.root), **orders})],
                env={**os.environ, **faulty},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return (self.root / "said").read_text()


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> Crashing:
    return Crashing(tmp_path, spark)


# ---------------------------------------------------------------- the driver


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_that_fails_at_any_point_is_followed_by_an_exact_one(
    world: Crashing, point: str
) -> None:
    world.add(3)
    faults.arm(point, "raise", visit=visit_of(point))
    with pytest.raises(faults.InjectedFault):
        world.live()
    faults.disarm()
    commits = [p for p in (world.query.folder / "commits").iterdir() if p.name.isdigit()]
    max(commits, key=lambda p: int(p.name)).unlink()  # Spark has forgotten what it committed
    world.live()
    world.check()
    world.check_swept()


@pytest.mark.kill
@pytest.mark.parametrize("points", [POINTS[:3], POINTS[3:5], POINTS[5:]], ids="-".join)
def test_drivers_killed_at_one_point_after_the_other(
    world: Crashing, points: tuple[str, ...]
) -> None:
    world.add(5)
    truth = two_step_truth(world.added)
    for point in points:
        driver = world.spawn(f"{point}:kill:{visit_of(point)}")
        assert driver.wait(120) == -signal.SIGKILL, f"{point} was not reached: {world.said}"
        assert not world.published() - truth, point
    world.live()
    world.check()
    world.check_swept()


# ---------------------------------------------------------------- tasks


@contextlib.contextmanager
def broken_task(spark: SparkSession, point: str, folder: Path) -> Iterator[None]:
    """The first task that comes to the point is killed."""
    environment = spark.sparkContext.environment
    environment["ONCEFLOW_TASK_FAULT"] = f"{point}:kill:{folder}"
    try:
        yield
    finally:
        del environment["ONCEFLOW_TASK_FAULT"]


@pytest.mark.kill
def test_an_epoch_whose_task_is_killed_for_good_is_not_decided(world: Crashing) -> None:
    """A local session tries a task once."""
    for point in faults.TASK:
        world.add()
        with (
            broken_task(world.spark, point, world.root),
            pytest.raises(Exception, match=r"exited unexpectedly|crashed"),
        ):
            world.live()
        assert (world.root / point).exists()
        world.check(files=world.added - 1)
        world.live()
        world.check()
        world.check_swept()


class Dice(KeyedProcess):
    """Emits a number for each row that nobody can know before, and keeps their sum."""

    output = "k long, r long"
    given = ReducingState("long", "sum")

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        dice = random.SystemRandom()
        thrown = pa.array([dice.randrange(10**9) for _ in range(len(rows))])
        return {"k": rows["k"], "r": thrown}, {"given": self.fold("given", thrown)}


class Mortal(KeyedProcess):
    """Emits what it is given, and keeps the sum. Dies once, in the second epoch."""

    output = "g long, r long, luck long"
    got = ReducingState("long", "sum", of="r")
    luck = ReducingState("long", "sum", of="luck")

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        died = Path(self.folder, "died")
        if self.time.epoch == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rows.select(["g", "r", "luck"]), self.folded()


def by_chance(root: Path) -> Any:
    def make(flow: Flow, rows: DataFrame) -> Keyed:
        luck = (F.rand() * 1e9).cast("long")
        thrown = flow.keyed(rows, by="k", process=Dice())
        mixed = thrown.then(lambda df: df.select((df.k % 3).alias("g"), "r", luck.alias("luck")))
        return flow.keyed(mixed, by="g", process=Mortal(str(root)))

    return make


@pytest.mark.kill
def test_a_task_that_is_killed_is_repeated_inside_its_epoch(
    tmp_path: Path, spark: SparkSession
) -> None:
    """In a session that tries tasks again; one after the other, since it takes long to start."""
    worlds = {point: Crashing(tmp_path / point, spark) for point in faults.TASK}
    chance = Crashing(tmp_path / "chance", spark)
    for world in (*worlds.values(), chance):
        world.add(3)
    driver = chance.spawn("", tasks=str(tmp_path))
    assert driver.wait(240) == 0, chance.said

    for point, world in worlds.items():
        assert (world.root / point).exists(), "no task was killed"
        world.check()
        assert {decision.term for decision in world.decisions()} == {1}, "the driver failed too"
    world.add()
    world.live()
    world.check()
    world.check_swept()  # also what killed attempts left

    assert (chance.root / "died").exists()
    emitted = list(chance.published().elements())
    assert len(emitted) == 3 * 20
    given = sum(row["given"] for row in chance.state("dice").values())
    mortal = chance.state("mortal").values()
    assert sum(r for _, r, _ in emitted) == given == sum(row["got"] for row in mortal)
    assert sum(luck for *_, luck in emitted) == sum(row["luck"] for row in mortal)


# ---------------------------------------------------------------- a driver that wakes up


@pytest.mark.parametrize(
    ("point", "visit"), [("keyed.ran", 3), ("epoch.published", 1), ("open.spark-agrees", 1)]
)
def test_a_paused_driver_that_wakes_up_decides_nothing_and_removes_nothing(
    world: Crashing, monkeypatch: pytest.MonkeyPatch, point: str, visit: int
) -> None:
    monkeypatch.setenv("ONCEFLOW_HOST", "elsewhere")
    if point.startswith("open."):
        world.add()
        world.live()
    world.add(3)
    sleeper = world.spawn(f"{point}:pause:{visit}:{world.root}", host="first", take_over=True)
    wait_for(lambda: (world.root / "paused").exists() or sleeper.poll() is not None, 120)
    assert sleeper.poll() is None, world.said
    world.live(take_over=True)
    before = world.published()
    (world.root / "resume").touch()
    assert sleeper.wait(120) != 0, world.said
    assert "Fenced" in world.said
    assert world.published() == before
    world.add()
    world.live(take_over=True)
    world.check()
    world.check_swept()
    terms = [decision.term for decision in world.decisions()]
    assert terms == sorted(terms)


# ---------------------------------------------------------------- a driver of its own


def main() -> None:
    orders = json.loads(sys.argv[1])
    faults.arm_from_environment()
    spark = get_session("local[2,4]" if "tasks" in orders else "local[2]", AGEING)
    if "tasks" in orders:
        for point in faults.TASK:
            root = Path(orders["tasks"], point)
            with broken_task(spark, point, root):
                Crashing(root, spark).live()
    world = Crashing(Path(orders["root"]), spark)
    make = by_chance(world.root) if "tasks" in orders else in_two_steps
    world.live(make, take_over=orders.get("take_over", False))
    os._exit(0)


if __name__ == "__main__":
    main()


def test_the_folder_of_a_steps_state_survives_a_power_cut(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every folder above it was synced with its name in it before the first decision."""
    synced: dict[int, set[str]] = {}
    sync = os.fsync

    def record(file: int) -> None:
        sync(file)
        if stat.S_ISDIR(os.fstat(file).st_mode):
            synced[os.fstat(file).st_ino] = set(os.listdir(file))

    world = Crashing(tmp_path, spark)
    world.add()
    monkeypatch.setattr(os, "fsync", record)
    faults.arm("epoch.decided", "raise")
    with pytest.raises(faults.InjectedFault):
        world.live()
    place = world.query.folder / "onceflow" / "keyed" / STEPS[0]
    for _ in range(3):
        assert place.name in synced.get(place.parent.stat().st_ino, set()), place
        place = place.parent
