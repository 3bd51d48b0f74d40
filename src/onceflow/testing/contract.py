"""The contract of a sink, as a pytest suite. A sink that passes it may be called exactly-once.

    from onceflow.testing import SinkContract

    class TestMySink(SinkContract):
        def make_sink(self, folder): return MySink(folder / "target")
        def read_rows(self, folder): ...

It needs no JVM: a stand-in for the driver stages rows and calls the sink. The optional hooks are
those of `SinkUnderTest`; `docs/write-a-sink.md` builds a sink with it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onceflow.contract.abilities import clean_up_of
from onceflow.contract.ledger import Ledger, Outcome, Position, Publication
from onceflow.contract.schema import parse_schema
from onceflow.contract.staged_files import verify
from onceflow.errors import (
    Damaged,
    Fenced,
    JobError,
    OnceflowError,
    SchemaMismatch,
    TargetBehind,
    TargetForeign,
)
from onceflow.testing.commit_errors import CommitErrors
from onceflow.testing.moments import Aside, at_moments, kill_at
from onceflow.testing.processes import in_another_process, is_killed
from onceflow.testing.rewinding import Rewinding
from onceflow.testing.row_tests import Rows
from onceflow.testing.rows import Row
from onceflow.testing.stand_in import LINEAGE, OUTPUT, StandIn
from onceflow.testing.under_test import SinkUnderTest, same

OTHER_OUTPUT = "job/query/other"
OTHER_LINEAGE = "1a8fad5b-d9cb-469f-a165-70867728950e"
_TRIES_OF_MANY, _LOOKS_AT_MANY = 5, 12  # at so many moments of a publish of many rows


class SinkContract(Rows, CommitErrors, Rewinding):
    """Subclass it, name the class `Test…`, and give it `make_sink` and `read_rows`."""

    @pytest.fixture
    def session(self) -> Any:
        """Override it to return a Spark session, if `stage` of the sink reads the rows with one."""
        return None

    @pytest.fixture(autouse=True)
    def _begin(self, tmp_path: Path, session: Any) -> None:
        self.begin(tmp_path, session)

    # -------------------------------------------------------------- all or nothing

    def test_a_publish_that_is_killed_shows_its_epoch_whole_or_not_at_all(self) -> None:
        driver, kills, epoch = self.driver(1).open(), 0, 1
        self.run(driver, 0)
        for many, tries in ((False, self.tries), (True, _TRIES_OF_MANY)):
            self.large |= set(range(epoch, epoch + tries + 1)) if many else set()
            moments = self.moments(
                partial(driver.publish, driver.stage(epoch, self.rows(epoch))), tries
            )
            inner = moments[1:-1] if many else moments
            for epoch, moment in enumerate(inner, start=epoch + 1):  # noqa: B020
                when = f"after a kill at moment {moment} of the publish of epoch {epoch}"
                decided = driver.stage(epoch, self.rows(epoch))
                kills += is_killed(_publish, self, decided, driver.term + 1, moment)
                driver = self.driver(driver.term + 2)
                is_there = driver.fence().position == decided.position
                same(self.read_epochs(self.folder), self.rows(*range(epoch + is_there)), when)
                outcome = driver.recover(decided)
                assert (outcome is Outcome.ALREADY_PUBLISHED) == is_there, when
                driver.sweep()
                self.check(decided, *range(epoch + 1), term=driver.term, when=f"{when}, recovered")
            epoch += 1
        assert kills, "no publish was killed"

    def test_a_reader_sees_whole_epochs_and_none_of_them_goes(self) -> None:
        driver = self.driver(1).open()
        self.run(driver, 0)
        self.large = {3, 4}
        looks: list[Aside] = []
        seen: list[list[Row]] = []

        def look() -> None:
            if not looks or looks[-1].ended:
                looks.append(Aside(lambda: seen.append(self.read_epochs(self.folder))))
            looks[-1].let_go_first()

        for epoch in (1, 2):
            decided = driver.stage(epoch, self.rows(epoch))
            with at_moments(lambda _: look()):
                driver.publish(decided)
        publish = partial(driver.publish, driver.stage(3, self.rows(3)))
        chosen = set(self.moments(publish, _LOOKS_AT_MANY))
        decided = driver.stage(4, self.rows(4))
        with at_moments(lambda moment: look() if moment in chosen else None):
            driver.publish(decided)
        for aside in looks:
            aside.end()
        shown = 0
        wholes = [self.rows(*range(epoch + 1)) for epoch in range(5)]
        for rows in (*seen, self.read_epochs(self.folder)):
            fits = [number for number, whole in enumerate(wholes) if len(whole) <= len(rows)]
            shown = max([shown, *fits])
            same(rows, wholes[shown], "a reader in the middle of a publish")
        assert shown == 4

    # -------------------------------------------------------------- once

    def test_an_epoch_that_is_published_again_adds_nothing(self) -> None:
        driver = self.driver(1).open()
        first, second = (self.run(driver, epoch) for epoch in (0, 1))
        for decided in (second, first, second):
            assert driver.sink.publish(decided) is Outcome.ALREADY_PUBLISHED
        self.check(second, 0, 1)

    def test_an_epoch_whose_answer_got_lost_is_published_once_by_the_next_driver(self) -> None:
        driver = self.driver(1).open()
        decided = driver.stage(0, self.rows(0))
        driver.publish(decided)
        successor = self.driver(2).open(decided)
        self.check(decided, 0, term=2)
        self.check(self.run(successor, 1), 0, 1, term=2)

    def test_an_epoch_without_rows_moves_the_ledger(self) -> None:
        driver = self.driver(1).open()
        for epoch in (0, 2):
            assert driver.publish(driver.stage(epoch, [])) is Outcome.PUBLISHED
            assert self.ledger().position == Position(LINEAGE, epoch)
            last = self.run(driver, epoch + 1)
        self.check(last, 1, 3)

    def test_the_ledger_is_the_same_in_another_process(self) -> None:
        last = self.run(self.driver(7).open(), 0, 1)
        found = in_another_process(_ledger, self)
        assert found == Ledger(7, last.position, last.decision) == self.ledger()

    def test_another_decision_of_the_same_epoch_is_refused(self) -> None:
        driver = self.driver(1).open()
        first = self.run(driver, 0)
        other = replace(driver.stage(0, self.rows(5)), decision="of a copy of the home")
        with pytest.raises(Fenced):
            driver.sink.publish(other)
        self.check(first, 0)

    # -------------------------------------------------------------- fencing

    def test_an_older_term_publishes_nothing(self) -> None:
        older = self.driver(1).open()
        first, decided = self.run(older, 0), older.stage(1, self.rows(1))
        newer = self.driver(2)
        newer.fence()
        with pytest.raises(Fenced):
            older.publish(decided)
        self.check(first, 0, term=2)
        assert newer.recover(decided) is Outcome.PUBLISHED  # its files are still there
        self.check(decided, 0, 1, term=2)

    def test_a_driver_that_was_overtaken_hears_that_it_is_fenced(self) -> None:
        """It works on a copy of the home: another decision stood where the ledger was."""
        copy = self.driver(1).open()
        self.run(copy, 0)
        decided = replace(copy.stage(1, self.rows(5)), decision="of a copy of the home")
        last = self.run(self.driver(2).open(), 1, 2)
        with pytest.raises(Fenced):
            copy.publish(decided)
        self.check(last, 0, 1, 2, term=2)

    def test_a_driver_that_is_replaced_in_the_middle_of_a_publish_changes_nothing(self) -> None:
        """Even if it had read the ledger before its successor came."""
        self._replace(sweeps=True)

    def test_a_driver_that_is_replaced_by_one_that_has_not_swept_changes_nothing(self) -> None:
        """The staged files are still there when the older driver wakes up."""
        self._replace(sweeps=False)

    def _replace(self, *, sweeps: bool) -> None:
        driver = self.driver(1).open()
        self.run(driver, 0)
        # With its staged files gone, an older driver fails for many reasons; so this looks closer.
        tries = self.tries if sweeps else 3 * self.tries
        moments = self.moments(partial(driver.publish, driver.stage(1, self.rows(1))), tries)
        for number, moment in enumerate(moments, start=1):
            epoch = 2 * number
            decided = driver.stage(epoch, self.rows(epoch))
            driver = self._replaced(driver, decided, moment, sweeps=sweeps)
            when = f"a successor came at moment {moment} of the publish of epoch {epoch}"
            same(self.read_rows(self.folder), self.rows(*range(epoch + 2)), when)
            assert self.ledger() == driver.ledger, when

    def _replaced(
        self, driver: StandIn, decided: Publication, moment: int, *, sweeps: bool
    ) -> StandIn:
        """Publish; at that moment a successor publishes the same, if nothing that the older driver
        holds keeps it from that until the older one has ended. `sweeps`: it then sweeps and runs
        one epoch more, at once; else when the older driver has ended."""
        successor = self.driver(driver.term + 1)
        came: list[Aside] = []

        def take_over() -> None:
            if successor.fence().position != decided.position:
                successor.recover(decided)
            if sweeps:
                go_on()

        def go_on() -> None:
            successor.sweep()
            self.run(successor, decided.epoch + 1)

        def act(reached: int) -> None:
            if reached == moment:
                came.append(Aside(take_over))
                came[0].let_go_first()

        with suppress(Exception), at_moments(act):  # the error says that it was replaced
            driver.publish(decided)
        if not came:
            act(moment)
        came[0].end()
        if not sweeps:
            go_on()
        return successor

    def test_a_lower_term_cannot_fence(self) -> None:
        zombie = self.driver(1)
        zombie.fence()
        self.driver(3).fence()
        for older in (zombie, self.driver(2)):
            with pytest.raises(Fenced):
                older.fence()
        assert self.ledger().term == 3

    def test_the_same_term_of_another_driver_cannot_fence(self) -> None:
        self.driver(3).fence()
        other = self.driver(3)
        other.sink.prepare(OUTPUT, self.schema, other.mode)
        with pytest.raises(Fenced):
            other.sink.fence(OUTPUT, term=3, token="of another driver")

    def test_a_fence_whose_answer_got_lost_can_be_asked_for_again(self) -> None:
        driver = self.driver(3)
        last = self.run(driver.open(), 0)
        assert driver.fence() == Ledger(3, last.position, last.decision)

    # -------------------------------------------------------------- what does not follow

    def test_a_gap_between_the_ledger_and_an_epoch_is_refused(self) -> None:
        driver = self.driver(1).open()
        last, decided = self.run(driver, 0, 1), driver.stage(2, self.rows(2))
        with pytest.raises(TargetBehind):
            driver.sink.publish(replace(decided, epoch=3, previous=Position(LINEAGE, 2)))
        self.check(last, 0, 1)
        assert driver.publish(decided) is Outcome.PUBLISHED

    def test_an_epoch_of_another_lineage_is_refused(self) -> None:
        last = self.run(self.driver(1).open(), 0, 1)
        other = self.driver(2, lineage=OTHER_LINEAGE).open()
        for epoch in (0, 1, 2):
            previous = Position(OTHER_LINEAGE, epoch - 1) if epoch else None
            with pytest.raises(TargetBehind):
                other.publish(replace(other.stage(epoch, self.rows(5)), previous=previous))
        self.check(last, 0, 1, term=2)

    def test_outputs_that_share_a_target_do_not_disturb_each_other(self) -> None:
        one, other = self.driver(5), self.driver(1, output=OTHER_OUTPUT)
        if not one.sink.shared:
            pytest.skip("one output has the target to itself")
        self.run(one.open(), 0)
        self.run(other.open(), 5)
        self.check(self.run(one, 1), 0, 1, 5, term=5)
        self.check(self.run(other, 6), 0, 1, 5, 6)

    def test_a_target_of_another_output_is_refused(self) -> None:
        driver = self.driver(1)
        if driver.sink.shared:
            pytest.skip("several outputs may share the target")
        last = self.run(driver.open(), 0)
        with pytest.raises(TargetForeign):
            self.driver(2, output=OTHER_OUTPUT).open()
        self.check(last, 0)

    # -------------------------------------------------------------- before an epoch

    def test_other_columns_are_refused_before_anything_is_staged(self) -> None:
        driver = self.driver(1).open()
        last = self.run(driver, 0)
        retyped = self.columns.replace("id long", "id string", 1)
        for columns in (retyped, f"{self.columns}, extra string"):
            with pytest.raises(SchemaMismatch):
                driver.sink.prepare(OUTPUT, parse_schema(columns), driver.mode)
        with pytest.raises((SchemaMismatch, JobError)):  # a key may be among those that are gone
            driver.sink.prepare(OUTPUT, parse_schema("id long"), driver.mode)
        self.check(last, 0)

    def test_a_mode_that_the_sink_does_not_take_is_refused(self) -> None:
        driver = self.driver(1)
        for mode in {"append", "update", "complete", "sideways"} - {*self.modes_of(driver.sink)}:
            with pytest.raises(JobError):
                driver.sink.prepare(OUTPUT, self.schema, mode)

    def test_asking_what_is_published_creates_nothing(self) -> None:
        assert self.ledger() == Ledger()
        assert not self.has_target(self.folder)

    def test_the_target_is_described_without_a_secret(self) -> None:
        sink = self.make_sink(self.folder)
        told = f"{json.dumps(sink.describe())} {sink} {sink!r}"
        assert not self.secret or self.secret not in told

    # -------------------------------------------------------------- what is staged

    def test_a_staged_file_that_is_damaged_is_noticed_and_not_published(self) -> None:
        driver = self.driver(1).open()
        last, decided = self.run(driver, 0), driver.stage(1, self.rows(1))
        for file in decided.files:
            verify(file, file.path)  # `stage` says rightly what it staged
        path = Path(decided.files[0].path)
        right = path.read_bytes()
        path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
        with pytest.raises(Damaged):
            self.driver(2).open(decided)
        self.check(last, 0, term=2)
        path.write_bytes(right)
        self.driver(3).open(decided)
        self.check(decided, 0, 1, term=3)

    def test_an_epoch_with_a_staged_file_gone_is_not_published(self) -> None:
        driver = self.driver(1).open()
        last, decided = self.run(driver, 0), driver.stage(1, self.rows(1))
        os.remove(decided.files[-1].path)
        with pytest.raises(OnceflowError):
            driver.publish(decided)
        assert self.ledger() == Ledger(1, last.position, last.decision)
        same(self.read_epochs(self.folder), self.rows(0))

    def test_a_sweep_removes_what_older_terms_staged_in_the_target(self) -> None:
        older = self.driver(1).open()
        own = self._staged_in_target(older)
        self.driver(2).open()
        left = [path for path in own if path.exists()]
        assert not left, f"a sweep below term 2 left what term 1 staged: {left}"

    def test_a_sweep_leaves_what_its_own_term_staged_in_the_target(self) -> None:
        self.driver(1).open()
        newer = self.driver(2).open()
        own = self._staged_in_target(newer)
        clean_up_of(newer.sink).sweep(below_term=2)
        gone = [path for path in own if not path.exists()]
        assert not gone, f"a sweep below term 2 removed what term 2 staged: {gone}"

    def _staged_in_target(self, driver: StandIn) -> list[Path]:
        paths = [Path(file.path) for file in driver.stage(0, self.rows(0)).files]
        own = [path for path in paths if not path.is_relative_to(driver.home)]
        if not own:
            pytest.skip("the sink stages nothing in the target")
        return own


def _publish(case: SinkUnderTest, decided: Publication, term: int, moment: int) -> None:
    driver = case.driver(term)
    driver.fence()
    with kill_at(moment):
        driver.publish(decided)


def _ledger(case: SinkUnderTest) -> Ledger:
    return case.ledger()
