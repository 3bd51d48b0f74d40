"""The reference application under `verify`: its schedule, and its judge."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from ads.main import main
from ads.places import Places
from ads.verify import plan, services
from ads.verify.cases import Lines, cases
from ads.verify.judge import PARTS, judge

from onceflow.harness.fault_schedule import KEYED


def test_the_schedule_follows_from_the_seed_and_has_every_kind() -> None:
    kinds = [*plan.KINDS, *services.KINDS]
    found = plan.faults(7, 200, kinds)
    assert found == plan.faults(7, 200, kinds)
    assert [fault.number for fault in found] == list(range(200))
    assert {fault.kind for fault in found} == set(kinds)
    assert {fault.case for fault in found[:6]} == {0, 1, 2}, "the jobs are struck in turn"
    for fault in found:
        keyed = KEYED in list(plan.CASES.values())[fault.case]
        assert fault.kind != "fail-task" or (keyed and fault.point)
        assert fault.file != "rewind" or fault.case == 2, "what others have read stays"


def test_the_schedule_knows_the_jobs_as_they_are(tmp_path: Path) -> None:
    for case in cases(Places(tmp_path), Lines(1), {}):
        kinds = {target.kind for target in case.targets}
        assert {*kinds, *[KEYED] * case.keyed} == set(plan.CASES[case.name])


def test_what_is_missing_is_lost(tmp_path: Path) -> None:
    places, lines = Places(tmp_path), Lines(1)
    places.create()
    lines.commit(0)
    for who in PARTS:
        found = list(judge(who, places, lines.truth))
        assert {violation.kind for violation in found} == {"lost"}, who


def test_an_unknown_fault_and_servers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(main, ["verify", "--fault", "rain"])
    assert done.exit_code == 2
    assert "there is no 'rain'" in done.output
    monkeypatch.setenv("ADS_KAFKA", "127.0.0.1:1")
    done = CliRunner().invoke(main, ["verify"])
    assert done.exit_code == 2
    assert "unset ADS_KAFKA" in done.output
