"""The contract of sinks that can take back published epochs (`CanRewind`)."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from onceflow.contract.abilities import can_rewind
from onceflow.contract.ledger import Position, Publication
from onceflow.errors import Fenced, TargetBehind
from onceflow.testing.moments import kill_at
from onceflow.testing.processes import is_killed
from onceflow.testing.stand_in import StandIn
from onceflow.testing.under_test import SinkUnderTest, same

OTHER_OUTPUT = "job/query/other"
CHILD = "3c8fad5b-d9cb-469f-a165-70867728950e"
GRANDCHILD = "4d8fad5b-d9cb-469f-a165-70867728950e"


class Rewinding(SinkUnderTest):
    """Tests of `rewind`; they are skipped for a sink that does not have it."""

    def test_a_rewind_takes_back_what_came_after_the_cut(self) -> None:
        cut = self._four_epochs()[1]
        child = self._fenced(2, CHILD)
        child.rewind(cut)
        self.check(replace(cut, lineage=CHILD), 0, 1, term=2)
        self.check(self.run(child, 2), 0, 1, 2, term=2)

    def test_a_rewind_also_takes_back_the_lineages_that_came_after_the_cut(self) -> None:
        first, cut, *_ = self._four_epochs()
        child = self._fenced(2, CHILD)
        child.rewind(cut)
        self.run(child, 2)
        self._fenced(3, GRANDCHILD).rewind(first)
        same(self.read_rows(self.folder), self.rows(0))

    def test_a_rewind_to_an_epoch_without_rows_takes_back_what_came_after_it(self) -> None:
        driver = self._driver()
        decided = driver.stage(0, [])
        driver.publish(decided)
        child = self._fenced(2, CHILD)
        child.rewind(decided)
        self.run(child, 1)
        self._fenced(3, GRANDCHILD).rewind(decided)
        same(self.read_rows(self.folder), [])

    def test_a_rewind_leaves_the_rows_of_other_outputs(self) -> None:
        other = self.driver(1, output=OTHER_OUTPUT)
        if not other.sink.shared:
            pytest.skip("one output has the target to itself")
        cut = self._four_epochs()[1]
        last = self.run(other.open(), 6, 7)
        self._fenced(2, CHILD).rewind(cut)
        self.check(last, 0, 1, 6, 7)

    def test_a_rewind_brings_back_what_updates_changed(self) -> None:
        driver = self._driver("update")
        cuts = [driver.run(0, self.rows(0, 1)), driver.run(1, self.rows(1, version=1))]
        driver.run(2, self.rows(0, 2, version=2))
        driver.run(3, self.rows(0, 1, version=3))
        child = self._fenced(2, CHILD, mode="update")
        child.rewind(cuts[1])
        same(self.read_latest(self.folder), [*self.rows(0), *self.rows(1, version=1)])
        child.run(2, self.rows(0, 3, version=4))
        self._fenced(3, GRANDCHILD, mode="update").rewind(cuts[0])
        same(self.read_latest(self.folder), self.rows(0, 1))

    def test_a_rewind_brings_back_what_complete_mode_replaced(self) -> None:
        driver = self._driver("complete")
        cuts = [driver.run(0, self.rows(0)), driver.run(1, [])]
        driver.run(2, self.rows(0, 1, version=1))
        child = self._fenced(2, CHILD, mode="complete")
        child.rewind(cuts[1])
        same(self.read_rows(self.folder), [])
        child.run(2, self.rows(2))
        self._fenced(3, GRANDCHILD, mode="complete").rewind(cuts[0])
        same(self.read_rows(self.folder), self.rows(0))

    def test_a_rewind_that_was_done_before_changes_nothing(self) -> None:
        cut = self._four_epochs()[1]
        child = self._fenced(2, CHILD)
        child.rewind(cut)
        last = self.run(child, 2, 3)
        self._fenced(3, CHILD).rewind(cut)
        self.check(last, 0, 1, 2, 3, term=3)

    def test_a_driver_of_the_old_lineage_is_refused_after_a_rewind(self) -> None:
        *_, cut, _ = self._four_epochs()
        zombie = self.driver(1)
        zombie.fence()
        decided = replace(zombie.stage(3, self.rows(3)), previous=cut.position)
        self._fenced(2, CHILD).rewind(cut)
        for term in (1, 9):  # the second is of a copy of the home, which does not know
            with pytest.raises((Fenced, TargetBehind)):
                zombie.sink.publish(replace(decided, term=term))
        same(self.read_rows(self.folder), self.rows(0, 1, 2))

    def test_an_older_term_cannot_rewind(self) -> None:
        *_, cut, last = self._four_epochs()
        older = self._fenced(2, CHILD)
        self._fenced(3, CHILD)
        with pytest.raises(Fenced):
            older.rewind(cut)
        self.check(last, 0, 1, 2, 3, term=3)

    def test_a_rewind_to_what_was_not_published_is_refused(self) -> None:
        last = self._four_epochs()[-1]
        with pytest.raises(TargetBehind):
            self._fenced(2, CHILD).rewind(replace(last, epoch=5))
        self.check(last, 0, 1, 2, 3, term=2)

    def test_a_rewind_to_what_was_taken_back_is_refused(self) -> None:
        first, _, gone, _ = self._four_epochs()
        child = self._fenced(2, CHILD)
        child.rewind(first)
        last = self.run(child, 1)
        with pytest.raises(TargetBehind):
            self._fenced(3, GRANDCHILD).rewind(gone)
        self.check(last, 0, 1, term=3)

    def test_a_rewind_that_is_killed_is_done_whole_or_not_at_all(self) -> None:
        cut = self._four_epochs()[0]
        child, kills = self._fenced(2, CHILD), 0
        for moment in self.moments(partial(child.rewind, cut)):
            when = f"after a kill at moment {moment} of a rewind"
            self.run(child, 1, 2)
            cut = replace(cut, lineage=child.lineage)
            lineage = str(uuid.uuid4())
            kills += is_killed(_rewind, self, lineage, child.term + 1, cut, moment)
            child = self.driver(child.term + 2, lineage=lineage)
            is_done = child.fence().position == Position(lineage, 0)
            same(self.read_epochs(self.folder), self.rows(*([0] if is_done else [0, 1, 2])), when)
            child.rewind(cut)
            same(self.read_rows(self.folder), self.rows(0), f"{when}, repeated")
            assert self.ledger().position == Position(lineage, 0), when
        assert kills, "no rewind was killed"

    def _four_epochs(self) -> list[Publication]:
        """The decisions of epochs 0 to 3, all of them published."""
        driver = self._driver()
        return [self.run(driver, epoch) for epoch in range(4)]

    def _driver(self, mode: str | None = None) -> StandIn:
        driver = self.driver(1, **({"mode": mode} if mode else {}))
        if not can_rewind(driver.sink):
            pytest.skip("the sink cannot take back what it published")
        if driver.mode not in self.modes_of(driver.sink):
            pytest.skip(f"the sink does not take {driver.mode} mode")
        return driver.open()

    def _fenced(self, term: int, lineage: str, **changes: Any) -> StandIn:
        driver = self.driver(term, lineage=lineage, **changes)
        driver.fence()
        return driver


def _rewind(case: SinkUnderTest, lineage: str, term: int, cut: Publication, moment: int) -> None:
    driver = case.driver(term, lineage=lineage)
    driver.fence()
    with kill_at(moment):
        driver.rewind(cut)
