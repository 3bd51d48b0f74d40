"""Steps, the settings of an exploration, and the rules that mutants turn off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from model.world import STOPPED, Driver, World


class Mutant(Enum):
    """The protocol with one rule turned off. Each must lead to a violation."""

    PUBLISH_FIRST = "publish-before-deciding"
    NO_LEDGER = "skip-the-ledger"
    NO_FENCE = "no-fence-entry"
    NO_TERM = "ignore-the-term-in-the-ledger"
    NO_OFFSETS = "decision-without-offsets"
    TRUST_FILE = "trust-the-offsets-file"  # another driver's Spark may have written it
    NO_ROLL_UP = "prune-without-a-roll-up"
    SWEEP_FIRST = "sweep-before-fencing"
    EVALUATE_AGAIN = "recover-by-evaluating-again"
    BELIEVE_WON = "believe-a-put-that-won"  # without looking for a roll-up that covers it
    BELIEVE_LOST = "believe-a-put-that-lost"  # without reading whose entry is there
    REMOVE_STATE = "remove-the-state-of-nobody"  # a successor may have decided it since


@dataclass(frozen=True)
class Settings:
    """The size of the exploration, and the rule that is turned off."""

    drivers: int = 2  # at the same time, each at its own pace
    rows: int = 3  # of input
    most: int = 99  # rows of an epoch; it has at least one
    no_data: bool = False  # add epochs without rows, behind one that moved the watermark
    roll_ups: bool = True
    outputs: tuple[str, ...] = ("table", "folder")
    mutant: Mutant | None = None

    @property
    def epochs(self) -> int:
        """The highest possible number of epochs."""
        return self.rows * 2 if self.no_data else self.rows

    def has(self, mutant: Mutant) -> bool:
        return self.mutant is mutant


class Short(NamedTuple):
    """A step that does not reach its point: the driver stops, or does something else first."""

    note: str
    world: World
    driver: Driver = STOPPED


Moves = Iterator[tuple[str, World, Driver] | Short]  # a note, and the state after the step
Step = Callable[[Settings, World, Driver], Moves]

STEPS: dict[str, Step] = {}
QUIET: set[str] = set()  # points that a driver reaches without a read or a write


def step(point: str, *, quiet: bool = False) -> Callable[[Step], Step]:
    """Register the step by which a driver reaches `point`."""

    def register(function: Step) -> Step:
        STEPS[point] = function
        if quiet:
            QUIET.add(point)
        return function

    return register


def quiet(driver: Driver) -> bool:
    return driver.next in QUIET or driver.sweeping in QUIET


class Move(NamedTuple):
    point: str
    reached: bool
    note: str
    world: World
    driver: Driver


def moves(settings: Settings, world: World, driver: Driver) -> Iterator[Move]:
    """The possible next moves of a driver: its own next step, or that of its sweep beside Spark."""
    points = [driver.next, driver.sweeping]
    for point in [p for p in points if p in QUIET] or points:
        if point in STEPS:
            for move in STEPS[point](settings, world, driver):
                yield Move(point, not isinstance(move, Short), *move)
