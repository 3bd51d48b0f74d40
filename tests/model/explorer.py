"""Explores every reachable state of a few processes that share a world, breadth first.

A state is the world and the memory of each process; both are hashable values. A step takes one
process from one state to the next and is atomic. Its effect depends only on the world and on that
process. A process that is never scheduled again has crashed, one that is scheduled late was paused:
to explore every order of steps is to crash and to pause anywhere.

Three things keep it fast. Each is sound for every system of this shape:

- A step is computed once for each pair of world and process, and a world is judged once.
- Processes have no names beside their memory, so states that differ only in the order of the
  processes are one state.
- A quiet step neither reads nor writes the world. It commutes with all steps of others, so it is
  taken together with the step before it.

States are found in the order of their distance, so the first trace to a violation is a shortest;
among those it is the one that stays longest with one process.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

W = TypeVar("W", bound=Hashable)  # a world
P = TypeVar("P", bound=Hashable)  # a process: what it remembers
T = TypeVar("T", bound=Hashable)


class Broken(NamedTuple):
    """A rule that does not hold, and the steps that show it from here on."""

    rule: str
    what: str
    then: tuple[str, ...] = ()


class System(Protocol[W, P]):
    def begin(self) -> tuple[W, tuple[P, ...]]: ...

    def steps(self, world: W, process: P) -> Iterable[tuple[str, W, P]]:
        """What the process may do next: its name, the world and the process after it."""

    def quiet(self, process: P) -> bool:
        """Does the next step of the process neither read nor write the world?"""

    def judge(self, world: W) -> Broken | None:
        """The rule that this world breaks."""

    def judge_step(self, before: W, process: P, after: W) -> Broken | None:
        """The rule that the process breaks by making one world of the other."""

    def judge_end(self, world: W) -> Broken | None:
        """The rule that breaks if all processes crash here and what comes then is left alone."""


@dataclass(frozen=True)
class Violation:
    rule: str
    what: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = (f"{number:3d}. {step}" for number, step in enumerate(self.trace, 1))
        return "\n".join([f"{self.rule}: {self.what}", *steps])


@dataclass(frozen=True)
class Explored:
    states: int
    transitions: int
    worlds: int
    depth: int  # distance of the state that is farthest from the first
    violation: Violation | None


def explore(system: System[W, P]) -> Explored:
    """All states, or those on the way to the first violation."""
    return _Exploration(system).run()


def follow(system: System[W, P], world: W, process: P) -> Iterator[tuple[list[str], W, P]]:
    """The steps of a process, each with the quiet ones behind it."""
    for name, after, moved in system.steps(world, process):
        names, last = [name], moved
        while system.quiet(last):
            ((quiet, _, last),) = system.steps(after, last)
            names.append(quiet)
        yield names, after, last


class _Numbers(Generic[T]):
    """Equal values have one number, so that a state is a tuple of small integers."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def __call__(self, value: T) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


_State = tuple[int, ...]  # the number of the world, then those of the processes, sorted


class _Exploration(Generic[W, P]):
    def __init__(self, system: System[W, P]) -> None:
        self.system = system
        self.worlds: _Numbers[W] = _Numbers()
        self.processes: _Numbers[P] = _Numbers()
        self.moves: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.came_from: dict[_State, _State | None] = {}
        self.transitions = self.depth = 0

    def run(self) -> Explored:
        world, processes = self.system.begin()
        first = (self.worlds(world), *sorted(map(self.processes, processes)))
        self.came_from[first] = None
        broken = self.system.judge(world)
        violation = self._violation(broken, first) if broken else self._walk(first)
        return Explored(
            violation=violation or self._look_ahead(),
            states=len(self.came_from),
            transitions=self.transitions,
            worlds=len(self.worlds.values),
            depth=self.depth,
        )

    def _walk(self, first: _State) -> Violation | None:
        came_from, moves = self.came_from, self.moves
        level = [(first, first[1])]  # with the process that moved last, which moves first
        while level:
            found = []
            for state, mover in level:
                for number in sorted(state[1:], key=mover.__ne__):
                    pair = state[0], number
                    if pair not in moves:
                        violation = self._compute(state, *pair)
                        if violation:
                            return violation
                    others = _without(state, number)
                    for world, process in moves[pair]:
                        after = (world, *sorted((process, *others)))
                        if after not in came_from:
                            came_from[after] = state
                            found.append((after, process))
                    self.transitions += len(moves[pair])
            level = found
            self.depth += bool(found)
        return None

    def _compute(self, state: _State, world: int, process: int) -> Violation | None:
        """Compute the states that the process can reach by one step."""
        before, mover = self.worlds.values[world], self.processes.values[process]
        reached = self.moves[world, process] = []
        for names, after, moved in follow(self.system, before, mover):
            known = len(self.worlds.values)
            reached.append((self.worlds(after), self.processes(moved)))
            broken = self.system.judge_step(before, mover, after)
            if not broken and len(self.worlds.values) > known:
                broken = self.system.judge(after)
            if broken:
                return self._violation(broken, state, names)
        return None

    def _look_ahead(self) -> Violation | None:
        """Worlds have numbers in the order in which they were found."""
        for number, world in enumerate(self.worlds.values):
            broken = self.system.judge_end(world)
            if broken:
                state = next(state for state in self.came_from if state[0] == number)
                return self._violation(broken, state)
        return None

    def _violation(self, broken: Broken, state: _State, last: Iterable[str] = ()) -> Violation:
        return Violation(broken.rule, broken.what, (*self._trace(state), *last, *broken.then))

    def _trace(self, state: _State) -> Iterator[str]:
        path = [state]
        while (before := self.came_from[path[-1]]) is not None:
            path.append(before)
        for before, after in pairwise(reversed(path)):
            yield from self._names(before, after)

    def _names(self, before: _State, state: _State) -> list[str]:
        for number in before[1:]:
            world, process = self.worlds.values[before[0]], self.processes.values[number]
            for names, after, moved in follow(self.system, world, process):
                moved_on = sorted((self.processes(moved), *_without(before, number)))
                if state == (self.worlds(after), *moved_on):
                    return names
        raise AssertionError("no step leads here")


def _without(state: _State, number: int) -> _State:
    place = state.index(number, 1)
    return state[1:place] + state[place + 1 :]
