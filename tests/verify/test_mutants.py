"""It bites: each wrong protocol is found out by an ordinary run with a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from onceflow.verify.drivers import Drivers
from onceflow.verify.mutants import MUTANTS
from onceflow.verify.runner import Runner, Settings


@dataclass(frozen=True)
class Bait:
    """The few faults that reveal a mutant. The seed lets a zombie wake up at the right moment."""

    found: str  # what is found, or several of which the moment decides; "": chance decides
    kind: str
    point: str = ""
    job: str = "echo"
    sinks: str = "files"
    faults: int = 1
    seed: int = 1


BAITS = {
    "publish-before-deciding": Bait("stuck", "raise-point", "folder.committed"),
    "skip-the-ledger": Bait("duplicated", "raise-point", "epoch.output-published"),
    "ledger-in-another-transaction": Bait(
        "duplicated", "raise-point", "sqlite.written", sinks="sqlite"
    ),
    "drop-a-partition": Bait("lost", "raise-point", "epoch.staged"),
    "sweep-a-decided-file": Bait("stuck", "raise-point", "epoch.decided", sinks="sqlite"),
    "evaluate-again": Bait("", "raise-point", "epoch.decided", "dice", "sqlite"),
    "decision-without-offsets": Bait("lost or stuck", "lost-commit"),
    "prune-without-a-roll-up": Bait("stuck", "raise-point", "epoch.swept", faults=3),
    "ignore-the-term": Bait("torn or stuck", "zombie", "epoch.hardened", seed=2),  # late
    "no-fence-entry": Bait("stuck", "zombie", "epoch.hardened", seed=6),  # at open.swept
    "sweep-before-fencing": Bait("stuck", "zombie", "epoch.hardened", seed=24),  # at open.led
}


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    """A raised fault leaves the driver's Spark alive, so that one serves many mutants."""
    found = Drivers(tmp_path_factory.mktemp("drivers"), "local[2,4]", {})
    yield found
    found.close()


def test_each_mutant_has_a_bait() -> None:
    assert set(BAITS) == set(MUTANTS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", BAITS)
def test_a_mutant_is_invalid(tmp_path: Path, drivers: Drivers, mutant: str) -> None:
    bait = BAITS[mutant]
    settings = Settings(
        folder=tmp_path / "run", seed=bait.seed, faults=bait.faults, kinds=(bait.kind,),
        points=(bait.point,) if bait.point else (), cases=((bait.job, bait.sinks),), mutant=mutant,
    )  # fmt: skip
    result = Runner(settings, lambda _: None, drivers).run()
    print(*result.faults, *result.violations, sep="\n")
    assert result.verdict == "invalid"
    kinds = {violation.kind for violation in result.violations}
    assert not bait.found or kinds & set(bait.found.split(" or "))
