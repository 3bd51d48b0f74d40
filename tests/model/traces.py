"""Compare the traces of real drivers with the model, so that the code and the model agree.

A trace is a file of `onceflow.faults.points.record`: one line for each point that a driver reached,
for several drivers one after the other or in turns. A driver that crashed writes no further lines.
A point names the place of a driver, not all steps on the way. So the comparison follows every state
that the model can be in at the same time: before each line, every driver may take any steps that
have no line of their own. If no state is left, the trace is refused.

Points inside a put, a sink or a roll-up are not compared, nor are the ranges of epochs: in the
model each has one row. The outputs of a query must stay the same, with the full guarantee.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model.invariants import Onceflow
from model.steps import Settings, moves
from model.world import STOPPED, Driver, World
from onceflow.faults.points import EPOCH, OPENING

_COMPARED = frozenset(OPENING + EPOCH)
Event = dict[str, Any]
_Drivers = tuple[Driver, ...]  # in the order of their terms
_State = tuple[World, _Drivers]


@dataclass(frozen=True)
class Refusal:
    line: int
    event: Event
    allowed: tuple[str, ...]

    def __str__(self) -> str:
        facts = ", ".join(f"{k} {v}" for k, v in self.event.items() if k not in ("driver", "point"))
        allowed = " or ".join(self.allowed) or "nothing"
        return f"line {self.line}: {self.event['point']} ({facts}); the model allows {allowed}"


class _Seen(NamedTuple):
    """The facts of a step of the model that a line can have."""

    point: str  # "" if it has no line
    epoch: int
    output: int

    def fits(self, event: Event, outputs: list[str]) -> bool:
        return (
            self.point == event["point"]
            and event.get("epoch", self.epoch) == self.epoch
            and ("output" not in event or outputs[self.output] == event["output"])
        )


def accept(lines: Iterable[str]) -> Refusal | None:
    """None, or the first line that the model cannot follow."""
    queries: dict[str, list[tuple[int, Event]]] = {}
    query_of: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        event = json.loads(line)
        if event["point"] in _COMPARED:
            query_of.setdefault(event["term"], event.get("query", ""))
            queries.setdefault(query_of[event["term"]], []).append((number, event))
    refusals = [_Follower(events).run() for events in queries.values()]
    return min((r for r in refusals if r), key=lambda r: r.line, default=None)


class _Follower:
    """Follows the drivers of one query."""

    def __init__(self, events: list[tuple[int, Event]]) -> None:
        self.events = events
        self.terms = sorted({event["term"] for _, event in events})
        self.outputs = list(dict.fromkeys(e["output"] for _, e in events if "output" in e))
        self.last_line = {event["term"]: line for line, event in events}
        epochs = {event.get("epoch", 0) for _, event in events}
        self.settings = Settings(
            drivers=len(self.terms),
            rows=max(epochs) + 2,
            most=1,
            roll_ups=False,
            outputs=("table",) * max(1, len(self.outputs)),
        )
        self._moves: dict[tuple[World, Driver], list[tuple[_Seen, World, Driver]]] = {}

    def run(self) -> Refusal | None:
        states = {Onceflow(self.settings).begin()}
        for line, event in self.events:
            place = self.terms.index(event["term"])
            allowed: set[str] = set()
            reached: set[_State] = set()
            for world, drivers in self._without_lines(states):
                for seen, after, driver in self._next(world, drivers[place]):
                    if seen.point and driver.term == place + 1:
                        allowed.add(self._show(seen))
                        if seen.fits(event, self.outputs):
                            reached.add((after, _replaced(drivers, place, driver)))
            if not reached:
                return Refusal(line, event, tuple(sorted(allowed)))
            states = reached
            if event["point"] == "open.ledgers-read":
                states = {(w, self._without_the_dead(line, place, ds)) for w, ds in states}
        return None

    def _without_the_dead(self, line: int, place: int, drivers: _Drivers) -> _Drivers:
        """Stop drivers without further lines that are older than a driver that has fenced
        everything. Their later writes to Spark's files could only stop other drivers, and a driver
        that stops has no line for it."""
        return tuple(
            STOPPED if n < place and self.last_line[term] <= line else driver
            for n, (term, driver) in enumerate(zip(self.terms, drivers, strict=True))
        )

    def _without_lines(self, states: set[_State]) -> set[_State]:
        """All states that steps without a line, of any driver, can reach."""
        found, left = set(states), list(states)
        while left:
            world, drivers = left.pop()
            for place, driver in enumerate(drivers):
                for seen, after, moved in self._next(world, driver):
                    state = (after, _replaced(drivers, place, moved))
                    if not seen.point and state not in found:
                        found.add(state)
                        left.append(state)
        return found

    def _next(self, world: World, driver: Driver) -> list[tuple[_Seen, World, Driver]]:
        pair = world, driver
        if pair not in self._moves:
            self._moves[pair] = list(self._steps(*pair))
        return self._moves[pair]

    def _steps(self, world: World, driver: Driver) -> Iterator[tuple[_Seen, World, Driver]]:
        for point, reached, _, after, moved in moves(self.settings, world, driver):
            attempt = moved.last if point == "open.fenced" else driver.attempt or driver.last
            line = point if reached and point in _COMPARED else ""
            yield _Seen(line, attempt.epoch if attempt else -1, driver.output), after, moved

    def _show(self, seen: _Seen) -> str:
        epoch = f" of epoch {seen.epoch}" if seen.point.startswith("epoch.") else ""
        return seen.point + epoch


def _replaced(drivers: _Drivers, place: int, driver: Driver) -> _Drivers:
    return (*drivers[:place], driver, *drivers[place + 1 :])
