"""Each wrong protocol is found by an ordinary run of `onceflow verify` with a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from baits import BAITS, ELSEWHERE, SERVER_BAITS

from mutants import MUTANTS
from onceflow.harness.drivers import Drivers
from onceflow.harness.verification import Verification


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    """A raised fault leaves the driver's Spark alive, so that one serves many mutants."""
    found = Drivers(tmp_path_factory.mktemp("drivers"), "local[2,4]", {})
    yield found
    found.close()


def test_each_mutant_has_a_bait() -> None:
    assert {*BAITS, *SERVER_BAITS, *ELSEWHERE} == set(MUTANTS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", BAITS)
def test_a_mutant_is_invalid(tmp_path: Path, drivers: Drivers, mutant: str) -> None:
    bait = BAITS[mutant]
    result = Verification(bait.settings(tmp_path / "run", mutant), lambda _: None, drivers).run()
    print(*result.faults, *result.violations, sep="\n")
    assert result.verdict == "invalid"
    assert bait.caught({violation.kind for violation in result.violations})
