"""The model of the epoch protocol: every state keeps the rules, and without a rule one does not."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from model.explorer import explore
from model.invariants import RULES, Onceflow
from model.steps import QUIET, STEPS, Mutant, Settings
from model.targets import judge
from model.world import Attempt, Target
from onceflow import faults
from onceflow.contract.ledger import Ledger, Position, Publication
from onceflow.contract.ledger import judge as judge_ledger
from onceflow.errors import Fenced, TargetBehind

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "model.md").read_text()

BREAKS = {
    Mutant.PUBLISH_FIRST: "never torn",
    Mutant.NO_LEDGER: "never twice",
    Mutant.NO_FENCE: "fenced",
    Mutant.NO_TERM: "fenced",
    Mutant.NO_OFFSETS: "never lost",
    Mutant.TRUST_FILE: "never lost",
    Mutant.NO_ROLL_UP: "fenced",
    Mutant.SWEEP_FIRST: "never lost",
    Mutant.EVALUATE_AGAIN: "never torn",
    Mutant.BELIEVE_WON: "fenced",
    Mutant.BELIEVE_LOST: "never lost",
    Mutant.REMOVE_STATE: "never lost",
}


@pytest.mark.parametrize(
    "settings",
    [
        Settings(drivers=2, rows=3, outputs=("table", "folder")),
        Settings(drivers=2, rows=1, no_data=True),
        Settings(drivers=3, rows=1),
    ],
    ids=["two drivers, three epochs, two outputs", "epochs without data", "three drivers"],
)
def test_nothing_is_lost_doubled_or_torn_in_any_state(settings: Settings) -> None:
    found = explore(Onceflow(settings))
    print(f"{found.states:,} states, {found.transitions:,} transitions, {found.worlds:,} worlds")
    assert found.violation is None, str(found.violation)
    assert f"| {found.states:,} |" in PAGE, f"docs/model.md: there are {found.states:,} states"


@pytest.mark.parametrize("mutant", Mutant, ids=lambda mutant: mutant.value)
def test_without_one_of_its_rules_the_protocol_breaks(mutant: Mutant) -> None:
    rows = 3 if mutant is Mutant.BELIEVE_WON else 2
    violation = explore(Onceflow(Settings(rows=rows, mutant=mutant))).violation
    assert violation is not None
    assert violation.rule == BREAKS[mutant], str(violation)
    assert f"| `{mutant.value}` | {violation.rule} |" in PAGE


def test_only_the_rule_about_fenced_drivers_needs_the_term_in_a_ledger() -> None:
    """Where (lineage, epoch) is compared, rows are right without it. docs/model.md says so."""

    class RowsOnly(Onceflow):
        def judge_step(self, *_: object) -> None:
            return None

    assert explore(RowsOnly(Settings(rows=2, mutant=Mutant.NO_TERM))).violation is None


def test_every_point_of_opening_and_epoch_is_a_step_and_every_step_can_be_taken() -> None:
    assert {*faults.OPENING, *faults.EPOCH} <= set(STEPS)
    taken = set()

    class Watched(Onceflow):
        def steps(self, world, driver):  # type: ignore[no-untyped-def]
            for name, after, moved in super().steps(world, driver):
                taken.add(name.split()[2])
                yield name, after, moved

    explore(Watched(Settings(rows=2)))
    assert taken - {"not"} == set(STEPS)
    assert set(STEPS) > QUIET


def test_the_model_judges_a_ledger_as_the_product_does() -> None:
    """All small ledgers, publications and terms."""
    attempts = [
        Attempt(epoch, epoch, epoch + 1, term, 0) for epoch, term in product(range(3), (1, 2))
    ]
    ledgers = [(), *((a,) for a in attempts if a.epoch == 0), *product(attempts[:2], attempts[2:4])]
    for shown, rows, in_ledger, term in product(ledgers, attempts, (1, 2), (1, 2)):
        said = judge(Settings(), Target(in_ledger, shown), rows, term)
        assert said == verdict(shown, rows, in_ledger, term)


def verdict(shown: tuple[Attempt, ...], rows: Attempt, in_ledger: int, term: int) -> str:
    def position(epoch: int) -> Position | None:
        return Position("lineage", epoch) if epoch >= 0 else None

    nonce = f"{shown[-1].epoch}/{shown[-1].term}" if shown else ""
    ledger = Ledger(in_ledger, position(shown[-1].epoch if shown else -1), nonce)
    publication = Publication(
        output="job/query/output",
        lineage="lineage",
        epoch=rows.epoch,
        term=term,
        previous=position(rows.epoch - 1),
        files=(),
        schema="",
        mode="append",
        decision=f"{rows.epoch}/{rows.term}",
    )
    try:
        said = judge_ledger(ledger, publication, "the target")
    except (Fenced, TargetBehind) as error:
        return type(error).__name__
    return said.value


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "model", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS)


def test_the_command_prints_states_and_rules() -> None:
    said = run("--rows", "1")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("2 drivers, 1 epochs, 2 outputs: 3,143 states")
    assert all(rule in said.stdout for rule in RULES)


def test_the_command_prints_the_trace_of_a_mutant() -> None:
    said = run("--rows", "1", "--mutant", "skip-the-ledger")
    assert said.returncode == 1
    assert "never twice: the table shows epoch 0 twice" in said.stdout
    assert "driver 2  sqlite.committed        the table shows epoch 0" in said.stdout


def test_the_command_follows_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"driver": 1, "point": "epoch.decided", "term": 1}\n')
    said = run("--trace", str(tmp_path / "trace"))
    assert said.returncode == 1
    assert said.stdout == "line 1: epoch.decided (term 1); the model allows open.led\n"
