"""Every row of an epoch reaches the target unchanged and just as often, in every mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onceflow.contract.abilities import CanReadBack
from onceflow.contract.ledger import Outcome
from onceflow.errors import BadRows
from onceflow.testing.rows import awkward_rows
from onceflow.testing.stand_in import StandIn
from onceflow.testing.under_test import SinkUnderTest, same

CHILD = "2b8fad5b-d9cb-469f-a165-70867728950e"


class Rows(SinkUnderTest):
    """Tests of the rows in the target."""

    def test_values_come_back_as_they_were(self) -> None:
        rows = awkward_rows(self.schema, 0)
        self.driver(1).open().run(0, rows)
        same(self.read_rows(self.folder), rows)

    def test_equal_rows_are_all_there(self) -> None:
        """In one file, in two files of an epoch, and in two epochs."""
        driver = self.driver(1).open()
        if self.upserts:
            pytest.skip("the target keeps one row of each id")
        one, other = self.rows(0)[:2]
        epochs = [[one, one, other, one], [one, other, other, one]]
        for epoch, rows in enumerate(epochs):
            driver.run(epoch, rows)
        same(self.read_rows(self.folder), [*epochs[0], *epochs[1]])

    def test_rows_of_all_row_groups_are_there(self) -> None:
        driver = self.driver(1).open()
        driver.publish(driver.stage(0, self.rows(0), group=2))
        same(self.read_rows(self.folder), self.rows(0))

    def test_rows_behind_an_empty_file_are_there(self) -> None:
        driver = self.driver(1).open()
        driver.publish(driver.stage(0, self.rows(0), empty=True))
        same(self.read_rows(self.folder), self.rows(0))

    def test_a_lineage_that_publishes_epochs_once_more_adds_their_rows(self) -> None:
        """After a restore with `--published replay`, the numbers of epochs come twice."""
        first = self.run(self.driver(1).open(), 0)
        last = self.run(self.driver(2).open(), 1, 2)
        child = self.driver(3, lineage=CHILD).open()
        moved = replace(
            first, lineage=CHILD, epoch=0, previous=last.position, files=(), term=child.term
        )
        assert child.publish(moved) is Outcome.PUBLISHED
        child.run(1, self.rows(11))
        decided = child.run(2, self.rows(12))
        self.check(decided, 0, 1, 2, 11, 12, term=3)

    # -------------------------------------------------------------- modes

    def test_update_mode_keeps_the_last_row_of_each_key(self) -> None:
        driver = self._in_mode("update")
        old, new = self.rows(0), self.rows(0, version=1)
        driver.open().run(0, old)
        driver.run(1, [*new[:2], *self.rows(1)])
        same(self.read_latest(self.folder), [*new[:2], *old[2:], *self.rows(1)])

    def test_of_two_rows_of_a_key_in_one_epoch_the_later_one_stays(self) -> None:
        driver = self._in_mode("update")
        (old, *_), (new, *_) = self.rows(0), self.rows(0, version=1)
        driver.open().run(0, [old, new, *self.rows(1)])
        same(self.read_latest(self.folder), [new, *self.rows(1)])

    def test_null_is_refused_as_a_key_or_is_one_key(self) -> None:
        driver = self._in_mode("update")
        if type(self).read_latest is not SinkUnderTest.read_latest:
            pytest.skip("the target keeps every row of a key")
        (old, *_), (new, *_) = self.rows(0), self.rows(0, version=1)
        driver.open()
        for epoch, row in enumerate((old, new)):
            try:
                decided = driver.stage(epoch, [{**row, "id": None}])
            except BadRows:
                return
            driver.publish(decided)
        same(self.read_latest(self.folder), [{**new, "id": None}])

    def test_complete_mode_replaces_all_rows(self) -> None:
        driver = self._in_mode("complete")
        self.run(driver.open(), 0, 1)
        same(self.read_rows(self.folder), self.rows(1))

    def test_complete_mode_without_rows_leaves_none(self) -> None:
        driver = self._in_mode("complete").open()
        self.run(driver, 0)
        driver.run(1, [])
        same(self.read_rows(self.folder), [])

    def test_keeping_house_changes_neither_rows_nor_ledger(self) -> None:
        driver = self.driver(1).open()
        last = self.run(driver, *range(20))
        self.check(last, *range(20))
        self.driver(2).open()
        self.check(last, *range(20), term=2)

    def test_what_the_sink_reads_back_is_what_readers_see(self) -> None:
        driver = self.driver(1)
        if not isinstance(driver.sink, CanReadBack):
            pytest.skip("the sink does not read its rows back")
        assert list(driver.sink.read_back()) == []
        self.run(driver.open(), 0, 1)
        found = [dict(row) for row in driver.sink.read_back()]
        same(found, self.rows(0, 1), "read_back")
        assert all(row["id"] // 10_000 == row.get("_epoch", row["id"] // 10_000) for row in found)

    def _in_mode(self, mode: str) -> StandIn:
        driver = self.driver(1, mode=mode)
        if mode not in self.modes_of(driver.sink):
            pytest.skip(f"the sink does not take {mode} mode")
        return driver
