"""Random walks of an output through lineages: epochs, rewinds, and the moves of skip and replay.

What the table must be at each cut is noted when it is there, by a reader that is not the sink.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from onceflow.contract.ledger import Ledger, Outcome, Publication
from onceflow.errors import TargetBehind
from onceflow.testing.stand_in import StandIn

Rows = list[Any]


@dataclass(frozen=True)
class Place:
    """Where the output has been: the decision, and the rows that the table had then."""

    decided: Publication
    rows: Rows


@dataclass
class Walk:
    """`drive`: a driver of a term, a lineage and a mode; `read`: the rows, in an order."""

    drive: Callable[[int, str, str], StandIn]
    read: Callable[[], Rows]
    modes: tuple[str, ...]
    seed: int
    replays: bool = True
    term: int = 0
    cuts: dict[str, dict[int, Place]] = field(default_factory=dict)  # by lineage: all it knows of
    trail: list[Place] = field(default_factory=list)  # what stands
    began: dict[str, Place] = field(default_factory=dict)

    def run(self, moves: int) -> None:
        self.luck = random.Random(self.seed)
        self._enter(str(uuid.uuid4())).fence()
        self.cuts[self.lineage] = {}
        self._publish()
        for _ in range(moves):
            move = self.luck.choices(
                [self._publish, self._go_back, self._cannot_go_back, self._skip, self._replay],
                [6, 2, 1, 1, 1 if self.replays else 0],
            )[0]
            move()
            assert self.read() == self.trail[-1].rows, f"seed {self.seed}, after {move.__name__}"

    def _enter(self, lineage: str) -> StandIn:
        self.lineage, self.term = lineage, self.term + 1
        self.driver = self.drive(self.term, lineage, self.luck.choice(self.modes))
        return self.driver

    def _publish(self) -> None:
        self.driver.mode = self.luck.choice(self.modes)
        epoch = self.trail[-1].decided.epoch + 1 if self.trail else 0
        ids = self.luck.choices(range(6), k=self.luck.randrange(6))
        rows = [{"id": id, "name": f"{self.lineage[:4]} {epoch} {n}"} for n, id in enumerate(ids)]
        self._stands(self.driver.run(epoch, rows))

    def _stands(self, decided: Publication) -> None:
        place = Place(decided, self.read())
        self.trail.append(place)
        self.began.setdefault(decided.lineage, place)
        self.cuts[decided.lineage][decided.epoch] = place

    def _is_there(self, lineage: str, epoch: int) -> bool:
        place = self.cuts[lineage][epoch]
        return any(place is other for other in self.trail) and any(
            self.began[lineage] is other for other in self.trail
        )

    def _all(self, *, there: bool) -> list[tuple[str, int]]:
        known = [(lineage, epoch) for lineage, epochs in self.cuts.items() for epoch in epochs]
        return [cut for cut in known if self._is_there(*cut) is there]

    def _go_back(self) -> None:
        lineage, epoch = self.luck.choice(self._all(there=True))
        place, known = self.cuts[lineage][epoch], self.cuts[lineage]
        cut = replace(place.decided, lineage=lineage, epoch=epoch)
        driver = self._enter(str(uuid.uuid4()))
        driver.fence()
        driver.sink.refuse_rewind(driver.output, cut.position)
        for _ in range(self.luck.randrange(1, 3)):  # a driver that was killed asks again
            driver.rewind(cut)
        while self.trail[-1] is not place:
            self.trail.pop()
        self.cuts[self.lineage] = {n: other for n, other in known.items() if n < epoch}
        self.trail.append(Place(replace(cut, lineage=self.lineage), place.rows))
        self.began[self.lineage] = self.cuts[self.lineage][epoch] = self.trail[-1]

    def _cannot_go_back(self) -> None:
        gone = self._all(there=False)
        last = self.trail[-1].decided
        lineage, epoch = self.luck.choice([*gone, (last.lineage, last.epoch + 1)])
        cut = replace(last, lineage=lineage, epoch=epoch)
        with pytest.raises(TargetBehind):
            self.driver.sink.refuse_rewind(self.driver.output, cut.position)
        with pytest.raises(TargetBehind):
            self.driver.sink.rewind(
                self.driver.output, cut=cut.position, to=replace(cut.position, lineage="new"),
                term=self.term, decision="",
            )  # fmt: skip

    def _skip(self) -> None:
        """A lineage that goes on from an older cut counts its epochs as published."""
        self._bring(self.trail[-1].decided.epoch, dict(self.cuts[self.lineage]))

    def _replay(self) -> None:
        known = self.cuts[self.lineage]
        epoch = self.luck.choice([n for n in known if self._is_there(self.lineage, n)])
        self._bring(epoch, {n: place for n, place in known.items() if n < epoch})

    def _bring(self, epoch: int, known: dict[int, Place]) -> None:
        at = self.trail[-1].decided
        driver = self._enter(str(uuid.uuid4()))
        driver.fence()
        self.cuts[self.lineage] = known
        empty = replace(at, lineage=self.lineage, epoch=epoch, term=self.term, files=(),
                        previous=at.position, mode="append")  # fmt: skip
        assert driver.sink.publish(empty) is Outcome.PUBLISHED
        driver.ledger = Ledger(self.term, empty.position, empty.decision)
        self._stands(empty)
