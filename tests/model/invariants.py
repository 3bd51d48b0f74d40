"""The rules that hold in every state, and the protocol as a system for the explorer."""

from __future__ import annotations

from collections.abc import Iterator

from model import protocol, spark  # noqa: F401 - they register their steps
from model.explorer import Broken, follow
from model.steps import Settings, moves, quiet
from model.world import Driver, Target, World

RULES = {
    "never lost": "decided ranges have no gap, what Spark committed is in every output, and "
    "whatever crashed, a driver that is left alone publishes all",
    "never twice": "no range is decided twice, and no output shows an epoch twice",
    "never torn": "outputs show the attempts that were decided, each with the state of the one "
    "before, and in the end all outputs show the same",
    "fenced": "below a fence nobody decides, below the term of a ledger nobody publishes",
}


class Onceflow:
    """Drivers that run the epoch protocol on one query."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._ends_well: set[tuple[World, Driver]] = set()

    def begin(self) -> tuple[World, tuple[Driver, ...]]:
        s = self.settings
        files = (None,) * (s.epochs + 1)
        world = World(targets=(Target(),) * len(s.outputs), offsets=files, commits=files)
        return world, (Driver(),) * s.drivers

    def steps(self, world: World, driver: Driver) -> Iterator[tuple[str, World, Driver]]:
        for point, reached, note, after, moved in moves(self.settings, world, driver):
            where = point if reached else f"not {point}"
            name = f"driver {moved.term or driver.term}  {where:24}{note}"
            yield name.rstrip(), after, moved

    def quiet(self, driver: Driver) -> bool:
        return quiet(driver)

    def judge(self, world: World) -> Broken | None:
        return self._judge_decisions(world) or self._judge_outputs(world)

    def _judge_decisions(self, world: World) -> Broken | None:
        epoch, end, term = 0, 0, 0
        for attempt in world.decided:
            if attempt.epoch < epoch or attempt.start < end:
                return Broken("never twice", f"decided again: {attempt}")
            if attempt.epoch > epoch or attempt.start > end:
                return Broken("never lost", f"decided was row {end}, next is: {attempt}")
            if attempt.base != term:
                what = f"{attempt} goes on from the state of driver {attempt.base}"
                return Broken("never torn", f"{what}, but driver {term}'s was decided")
            epoch, end, term = epoch + 1, attempt.end, attempt.term
        return None

    def _judge_outputs(self, world: World) -> Broken | None:
        committed = sum(state is not None for state in world.commits)
        for name, target in zip(self.settings.outputs, world.targets, strict=True):
            epochs = [attempt.epoch for attempt in target.shown]
            if len(epochs) > len(set(epochs)):
                return Broken("never twice", f"the {name} shows epoch {epochs[-1]} twice")
            for number, attempt in enumerate(target.shown):
                if attempt not in world.decided:
                    return Broken("never torn", f"the {name} shows what is not decided: {attempt}")
                if attempt.epoch != number:
                    return Broken("never lost", f"the {name} lacks epoch {number}")
            if target.epoch + 1 < committed:
                return Broken("never lost", f"commits/{committed - 1}, but the {name} lacks it")
        return None

    def judge_step(self, before: World, driver: Driver, after: World) -> Broken | None:
        if after.decided != before.decided and driver.term < before.fenced:
            return Broken("fenced", f"driver {driver.term} decides behind fence({before.fenced})")
        for name, old, new in zip(
            self.settings.outputs, before.targets, after.targets, strict=True
        ):
            if new.shown != old.shown and driver.term < old.term:
                what = f"driver {driver.term} publishes into the {name}, which has term {old.term}"
                return Broken("fenced", what)
        return None

    def judge_end(self, world: World) -> Broken | None:
        """All drivers crash here; one more is started and left alone."""
        trace: list[str] = []
        driver, broken = Driver(), None
        passed = [(world, driver)]
        while not broken and driver.next not in ("done", "stopped"):
            if (world, driver) in self._ends_well:
                break
            before, mover = world, driver
            names, world, driver = next(follow(self, before, mover))
            passed.append((world, driver))
            trace += names
            broken = self.judge_step(before, mover, world) or self.judge(world)
        if driver.next == "stopped":
            why = trace[-1].partition(" not ")[-1]
            broken = broken or Broken("never lost", f"a driver that is left alone stops: {why}")
        if driver.next == "done":
            broken = broken or self._judge_complete(world)
        if broken:
            return broken._replace(then=tuple(trace))
        self._ends_well.update(passed)
        return None

    def _judge_complete(self, world: World) -> Broken | None:
        if not world.decided or world.decided[-1].end != self.settings.rows:
            return Broken("never lost", "the input is used up, but not all of it is decided")
        for name, target in zip(self.settings.outputs, world.targets, strict=True):
            if target.shown != world.decided:
                return Broken("never lost", f"the input is used up, but the {name} lacks rows")
        return None
