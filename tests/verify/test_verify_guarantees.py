"""A weaker guarantee is measured: it keeps what it promises, and shows what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants import environment
from onceflow.harness.result import Result
from onceflow.harness.verification import Settings, Verification


def run(folder: Path, guarantee: str, point: str, mutant: str = "") -> Result:
    settings = Settings(
        folder=folder, seed=1, faults=2, kinds=("raise-point",), points=(point,),
        cases=(("echo", "files"), ("echo", "sqlite")), guarantee=guarantee,
        environment=environment(mutant) if mutant else {},
    )  # fmt: skip
    result = Verification(settings, lambda _: None).run()
    print(*result.faults, *result.violations, *result.unknown, sep="\n")
    return result


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("guarantee", "point", "shows"),
    [
        ("exactly-once", "epoch.published", set()),
        ("at-least-once", "epoch.published", {"duplicated"}),
        ("at-most-once", "epoch.decided", {"lost"}),
    ],
)
def test_under_the_same_faults_each_guarantee_shows_what_it_allows(
    tmp_path: Path, guarantee: str, point: str, shows: set[str]
) -> None:
    result = run(tmp_path / "run", guarantee, point)
    assert result.verdict == "valid"
    assert {violation.kind for violation in result.allowed} == shows


@pytest.mark.timeout(600)
def test_what_a_guarantee_does_not_allow_is_still_a_violation(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "at-least-once", "epoch.published", "drop-a-partition")
    assert result.verdict == "invalid"
    assert "lost" in {violation.kind for violation in result.violations}
