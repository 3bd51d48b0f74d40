"""An error of a commit does not show whether the commit took effect: only the ledger does."""

from __future__ import annotations

from contextlib import suppress

import pytest

from onceflow.errors import PublishFailed
from onceflow.testing.under_test import SinkUnderTest, same


class CommitErrors(SinkUnderTest):
    """Tests of how a sink handles an error of its commit. They need `commit_fails`."""

    def test_a_commit_that_failed_without_effect_is_published_once(self) -> None:
        self._fail(landed=False)

    def test_a_commit_that_failed_and_took_effect_is_published_once(self) -> None:
        self._fail(landed=True)

    def _fail(self, *, landed: bool) -> None:
        driver = self.driver(1).open()
        self.run(driver, 0)
        decided = driver.stage(1, self.rows(1))
        failing = self.commit_fails(driver.sink, landed=landed)
        if failing is None:
            pytest.skip("commit_fails is not given, so errors of commits are not tested")
        outcome, error = None, None
        with failing:
            try:
                outcome = driver.publish(decided)
            except (
                Exception
            ) as raised:  # any error but `PublishFailed` says that the outcome is unknown
                error = raised
        when = f"a commit failed, and {'took' if landed else 'did not take'} effect"
        is_there = self.ledger().position == decided.position
        same(self.read_epochs(self.folder), self.rows(*([0, 1] if is_there else [0])), when)
        assert outcome is None or is_there, f"{when}: publish returned {outcome}"
        assert not (is_there and isinstance(error, PublishFailed)), f"{when}: {error}"
        with suppress(Exception):  # a sink may want to be opened again first
            driver.publish(decided)
        self.driver(2).open(decided)
        self.check(decided, 0, 1, term=2, when=f"{when}, repeated")
