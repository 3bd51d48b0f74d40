"""The contract of sinks bites: each wrong sink fails just the tests that name its fault."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import wrong_sinks as wrong
from json_sink import JsonFile

import rotation
from onceflow.errors import SetupError
from onceflow.sinks import CanStage, Committable, Sink, Staged
from onceflow.testing import SinkContract


class Json(SinkContract):
    """The contract for the sink of `docs/write-a-sink.md` and for those that are made of it."""

    columns = "id long, name string, tags array<string>"
    secret = wrong.TellsItsPassword.password
    tries = 4
    kind: type[Sink] = JsonFile

    def make_sink(self, folder: Path) -> Sink:
        return self.kind(folder / "rows.json")

    def read_rows(self, folder: Path) -> list[dict[str, Any]]:
        path = folder / "rows.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        return [entry[3] for entry in rows if not entry[4:]]  # longer ones were replaced

    @contextmanager
    def commit_fails(self, sink: Any, *, landed: bool) -> Iterator[None]:
        save = sink.store.save

        def failing(content: dict[str, Any]) -> None:
            sink.store.save = save
            if landed:
                save(content)
            raise OSError(errno.EIO, "Input/output error")

        sink.store.save = failing
        yield
        sink.store.save = save


TESTS = {name for name in dir(Json) if name.startswith("test_")}


def is_todays(name: str) -> bool:
    """A tenth of the tests that a wrong sink should pass runs on a day, all with --all."""
    turn = crc32(name.encode()) % rotation.DAYS
    return rotation.runs_all() or turn == rotation.today() % rotation.DAYS


# Right sinks too: their names are those of no fault.
NEEDS_MANY = ("CommitsEvery1000", "KeepsTheFirst500", "JsonFile", "Owned", "Keyed", "StagesIn")


def hold(kind: type[Sink], root: Path, tests: set[str]) -> tuple[set[str], set[str]]:
    """Hold a sink to the contract: the names of the tests that it passed, and that it failed."""
    passed, failed = set(), set()
    for name in tests:
        case = Json()
        case.kind, case.upserts = kind, issubclass(kind, wrong.Keyed)
        (root / name).mkdir()
        case.begin(root / name)
        if not kind.__name__.startswith(NEEDS_MANY):
            case.many = case.few
        try:
            getattr(case, name)()
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception) as error:
            print(f"{name}: {error}")
            failed.add(name)
        else:
            passed.add(name)
    return passed, failed


REPLAYED = "test_a_lineage_that_publishes_epochs_once_more_adds_their_rows"
LATER = "test_of_two_rows_of_a_key_in_one_epoch_the_later_one_stays"
NULL = "test_null_is_refused_as_a_key_or_is_one_key"
NO_ROWS = "test_complete_mode_without_rows_leaves_none"
NOT_SWEPT = "test_a_driver_that_is_replaced_by_one_that_has_not_swept_changes_nothing"
REPLACED = "test_a_driver_that_is_replaced_in_the_middle_of_a_publish_changes_nothing"
READER = "test_a_reader_sees_whole_epochs_and_none_of_them_goes"
WITHOUT_EFFECT = "test_a_commit_that_failed_without_effect_is_published_once"
WITH_EFFECT = "test_a_commit_that_failed_and_took_effect_is_published_once"
KILLED = "test_a_publish_that_is_killed_shows_its_epoch_whole_or_not_at_all"
FAULTS: dict[type[Sink], set[str]] = {
    wrong.RowsBeforeLedger: {KILLED},
    wrong.ShowsHalfAnEpoch: {READER, WITH_EFFECT},
    wrong.CommitsEvery5: {KILLED, READER, NOT_SWEPT, WITH_EFFECT},
    wrong.CommitsEvery1000: {KILLED, READER},
    wrong.TakesCommitErrorsForSuccess: {WITHOUT_EFFECT},
    wrong.TakesCommitErrorsForFailure: {WITH_EFFECT},
    wrong.CleansUpAfterCommitErrors: {WITH_EFFECT},
    wrong.RetriesAfterCommitErrors: {WITH_EFFECT},
    wrong.ReadsTheLedgerFirst: {NOT_SWEPT},
    wrong.KeepsTheFirst500: {KILLED, READER},  # those are the tests with many rows
    wrong.DropsEqualRows: {"test_equal_rows_are_all_there"},
    wrong.DropsRowsOfKnownNumbers: {REPLAYED},
    wrong.ReadsTheFirstRowGroup: {"test_rows_of_all_row_groups_are_there"},
    wrong.StopsAtAnEmptyFile: {"test_rows_behind_an_empty_file_are_there"},
    wrong.KeepsTheFirstOfAKey: {LATER},
    wrong.NeverFindsNull: {NULL},
    wrong.KeepsRowsWithoutNewOnes: {NO_ROWS},
    wrong.ForgetsOlderEpochs: {"test_an_epoch_that_is_published_again_adds_nothing"},
    wrong.KnowsOnlyWhatItPublishedItself: {
        "test_an_epoch_whose_answer_got_lost_is_published_once_by_the_next_driver",
        # Neither does a driver that is killed behind its commit have an answer, nor a failed one.
        KILLED,
        WITHOUT_EFFECT,
        WITH_EFFECT,
    },
    wrong.SkipsEmptyEpochs: {"test_an_epoch_without_rows_moves_the_ledger", REPLAYED},
    wrong.KeepsTheTermInMemory: {"test_the_ledger_is_the_same_in_another_process"},
    wrong.IgnoresTheDecision: {"test_another_decision_of_the_same_epoch_is_refused"},
    wrong.IgnoresTheTerm: {
        "test_an_older_term_publishes_nothing",
        "test_a_driver_that_was_overtaken_hears_that_it_is_fenced",
    },
    wrong.TakesOlderEpochsForPublished: {
        "test_a_driver_that_was_overtaken_hears_that_it_is_fenced"
    },
    wrong.TakesNoLock: {REPLACED, NOT_SWEPT},
    wrong.LetsLowerTermsFence: {"test_a_lower_term_cannot_fence"},
    wrong.IgnoresTheToken: {"test_the_same_term_of_another_driver_cannot_fence"},
    wrong.RefusesItsOwnFence: {"test_a_fence_whose_answer_got_lost_can_be_asked_for_again"},
    wrong.IgnoresGaps: {"test_a_gap_between_the_ledger_and_an_epoch_is_refused"},
    wrong.IgnoresTheLineage: {"test_an_epoch_of_another_lineage_is_refused", REPLAYED},
    wrong.HasOneLedger: {"test_outputs_that_share_a_target_do_not_disturb_each_other"},
    wrong.TakesAnyOutput: {"test_a_target_of_another_output_is_refused"},
    wrong.TakesOtherColumns: {"test_other_columns_are_refused_before_anything_is_staged"},
    wrong.TakesAnyMode: {"test_a_mode_that_the_sink_does_not_take_is_refused"},
    wrong.CreatesTheFileWhenAsked: {"test_asking_what_is_published_creates_nothing"},
    wrong.TellsItsPassword: {"test_the_target_is_described_without_a_secret"},
    wrong.DescribesWrongly: {
        "test_a_staged_file_that_is_damaged_is_noticed_and_not_published",
        # Recovery compares what is staged with what was decided, and these recover an epoch.
        KILLED,
        "test_an_older_term_publishes_nothing",
        REPLACED,
        NOT_SWEPT,
    },
    wrong.LeavesOutMissingFiles: {"test_an_epoch_with_a_staged_file_gone_is_not_published"},
    wrong.SweepsNothing: {"test_a_sweep_removes_what_older_terms_staged_in_the_target"},
    wrong.SweepsEverything: {"test_a_sweep_leaves_what_its_own_term_staged_in_the_target"},
    wrong.TurnsNullIntoText: {"test_values_come_back_as_they_were"},
    wrong.AddsInUpdateMode: {"test_update_mode_keeps_the_last_row_of_each_key", LATER, NULL},
    wrong.AddsInCompleteMode: {"test_complete_mode_replaces_all_rows", NO_ROWS},
    wrong.ThrowsOldRowsAway: {"test_keeping_house_changes_neither_rows_nor_ledger", NOT_SWEPT},
    wrong.ReadsBackTheLastEpoch: {"test_what_the_sink_reads_back_is_what_readers_see"},
    wrong.KeepsTheDecision: {"test_a_rewind_takes_back_what_came_after_the_cut"},
    wrong.LeavesLaterLineages: {
        "test_a_rewind_also_takes_back_the_lineages_that_came_after_the_cut",
        # Here all rows that came after the cut are of a later lineage.
        "test_a_rewind_to_an_epoch_without_rows_takes_back_what_came_after_it",
    },
    wrong.LosesTrackOfEmptyLineages: {
        "test_a_rewind_to_an_epoch_without_rows_takes_back_what_came_after_it"
    },
    wrong.TakesBackTheRowsOfAll: {"test_a_rewind_leaves_the_rows_of_other_outputs"},
    wrong.ForgetsWhatUpdatesReplaced: {"test_a_rewind_brings_back_what_updates_changed"},
    wrong.ForgetsWhatCompleteModeReplaced: {
        "test_a_rewind_brings_back_what_complete_mode_replaced"
    },
    wrong.RewindsTwice: {"test_a_rewind_that_was_done_before_changes_nothing"},
    wrong.RemembersTheParent: {"test_a_driver_of_the_old_lineage_is_refused_after_a_rewind"},
    wrong.LetsOlderTermsRewind: {"test_an_older_term_cannot_rewind"},
    wrong.RewindsAhead: {"test_a_rewind_to_what_was_not_published_is_refused"},
    wrong.RewindsToWhatIsGone: {"test_a_rewind_to_what_was_taken_back_is_refused"},
    wrong.RewindsInTwoSteps: {"test_a_rewind_that_is_killed_is_done_whole_or_not_at_all"},
}


# Whether one of few moments lies between its commits follows from the number of rows.
SOMETIMES: dict[type[Sink], set[str]] = {wrong.CommitsEvery5: {REPLACED}}


@pytest.mark.kill
@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_wrong_sink_fails_just_the_tests_that_name_its_fault(
    tmp_path: Path, kind: type[Sink]
) -> None:
    named = FAULTS[kind]
    others = {name for name in TESTS - named if is_todays(f"{kind.__name__} {name}")}
    assert hold(kind, tmp_path, named | others)[1] - SOMETIMES.get(kind, set()) == FAULTS[kind]


@pytest.mark.kill
def test_right_sinks_pass_and_leave_no_test_out(tmp_path: Path) -> None:
    passed = set()
    for kind in (JsonFile, wrong.Owned, wrong.Keyed, wrong.StagesInTarget):
        (tmp_path / kind.__name__).mkdir()
        held, failed = hold(kind, tmp_path / kind.__name__, TESTS)
        assert failed == set()
        passed |= held
    assert passed == TESTS


def test_every_test_of_the_contract_has_a_sink_that_it_catches() -> None:
    assert set().union(*FAULTS.values()) == TESTS


class ReadsWithSpark(wrong.Plain, CanStage):
    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        return tuple(staged.read())


def test_a_sink_that_needs_spark_is_told_how_the_contract_gets_a_session(tmp_path: Path) -> None:
    case = Json()
    case.kind = ReadsWithSpark
    case.begin(tmp_path)
    with pytest.raises(SetupError, match="override the fixture `session`"):
        case.test_values_come_back_as_they_were()
