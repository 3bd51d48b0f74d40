"""`onceflow verify` allows what a weaker guarantee allows, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mutants import environment
from onceflow.harness.drivers import Drivers
from onceflow.harness.result import Result
from onceflow.harness.verification import Settings, Verification


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    """A raised fault leaves the driver's Spark alive, so that one serves all."""
    with closing(Drivers(tmp_path_factory.mktemp("drivers"), "local[2,4]", {})) as found:
        yield found


def run(folder: Path, drivers: Drivers, guarantee: str, point: str, mutant: str = "") -> Result:
    settings = Settings(
        folder=folder, seed=1, faults=2, kinds=("raise-point",), points=(point,),
        cases=(("echo", "files"), ("echo", "sqlite")), guarantee=guarantee,
        environment=environment(mutant) if mutant else {},
    )  # fmt: skip
    result = Verification(settings, lambda _: None, drivers).run()
    print(*result.faults, *result.violations, *result.unknown, sep="\n")
    return result


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("guarantee", "point", "shows"),
    [
        ("at-least-once", "epoch.published", {"duplicated"}),
        ("at-most-once", "epoch.decided", {"lost"}),
    ],
)
def test_under_the_same_faults_each_guarantee_shows_what_it_allows(
    tmp_path: Path, drivers: Drivers, guarantee: str, point: str, shows: set[str]
) -> None:
    result = run(tmp_path / "run", drivers, guarantee, point)
    assert result.verdict == "valid"
    assert {violation.kind for violation in result.allowed} == shows


@pytest.mark.timeout(600)
def test_what_a_guarantee_does_not_allow_is_still_a_violation(
    tmp_path: Path, drivers: Drivers
) -> None:
    result = run(tmp_path / "run", drivers, "at-least-once", "epoch.published", "drop-a-partition")
    assert result.verdict == "invalid"
    assert "lost" in {violation.kind for violation in result.violations}
