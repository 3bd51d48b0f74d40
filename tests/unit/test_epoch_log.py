"""The epoch log: who may decide, through lost answers, roll-ups and drivers that wake up late."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from turns import Killed, Stepped, Truth, Turns, seeds

from onceflow import faults
from onceflow.contract.ledger import Committable, Position
from onceflow.errors import Damaged, Fenced, OnceflowError
from onceflow.protocol.epoch_log import Decision, EpochLog, OutputDecision
from onceflow.store.posix import LocalStore, NumberedLog, Put, Store
from onceflow.testing.processes import run_and_kill

LINEAGE = "0f8fad5b-d9cb-469f-a165-70867728950e"
SUBJECT = f"job/{LINEAGE}/query"


def decision(epoch: int, term: int, **changes: Any) -> Decision:
    facts: dict[str, Any] = {
        "epoch": epoch,
        "term": term,
        "at": "2026-11-15T10:00:00.000Z",
        "start": {"lines": {"logOffset": epoch - 1}} if epoch else {},
        "end": {"lines": {"logOffset": epoch}},
        "offsets": f'v2\n{{"batchWatermarkMs":0}}\nlines:{{"logOffset":{epoch}}}',
        "sources": {"lines": {str(epoch): [f'{{"path":"/in/{epoch}","batchId":{epoch}}}']}},
        "state": {"0": [["a-1"], ["b-1"]]},
        "watermark": 1_000 * epoch,
        "outputs": {
            "counts": OutputDecision(
                previous=Position(LINEAGE, epoch - 1) if epoch else None,
                files=(Committable("tag/part-0.parquet", 3, 700, 0xABCDEF, "country=NL"),),
                schema='{"type":"struct","fields":[]}',
                mode="append",
            )
        },
    }
    return Decision(**{**facts, **changes})


def opened(root: Path, store: Store | None = None) -> EpochLog:
    return EpochLog(store or LocalStore(root), SUBJECT)


def leading(root: Path, term: int, *, decided: int = 0, store: Store | None = None) -> EpochLog:
    """A driver that fenced with `term` and then decided some epochs."""
    log = opened(root, store)
    log.fence(term, {"holder": {"pid": 100 + term, "host": "here"}, "at": "today"})
    decide(log, term, decided)
    return log


def decide(log: EpochLog, term: int, count: int) -> None:
    for _ in range(count):
        log.decide(decision(following(log), term))


def following(log: EpochLog) -> int:
    return log.last.epoch + 1 if log.last else 0


def epochs(root: Path) -> list[int]:
    return [d.epoch for d in opened(root).read().decisions]


def numbered(root: Path) -> NumberedLog:
    return NumberedLog(LocalStore(root), "log", "epoch log", SUBJECT)


def append(root: Path, entry: dict[str, Any]) -> None:
    """What another driver, or a later onceflow, appends."""
    log = numbered(root)
    number = 1 + max((int(n[:12]) for n in os.listdir(root / "log") if n[0].isdecimal()), default=0)
    assert log.put(number, entry) is Put.WON


# ---------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"start": {}, "sources": {}, "state": {}, "watermark": 0},
        {"offsets": "v2\n{}\nlines:ä\u2028\x00"},
        {"outputs": {}},
        {"end": {"topic": {"0": 2**60, "1": None}, "nested": [1, {"a": 1.5}]}},
        {"outputs": {"o": OutputDecision(None, (), "{}", "complete")}},
        {"outputs": {"o": OutputDecision(Position(LINEAGE, 0), (), "{}", "update")}},
    ],
)
def test_a_decision_comes_back_from_its_json_as_it_was(changes: dict[str, Any]) -> None:
    before = decision(3, 2, **changes)
    after = Decision.from_json(json.loads(json.dumps(before.to_json())))
    assert after == before
    assert hash(tuple(after.outputs.values())) == hash(tuple(before.outputs.values()))


def test_every_decision_has_a_nonce_of_its_own() -> None:
    assert decision(3, 2).nonce != decision(3, 2).nonce


def test_a_decision_is_read_from_the_log_as_it_was_decided(tmp_path: Path) -> None:
    log = leading(tmp_path, 1)
    first = decision(0, 1)
    log.decide(first)
    assert log.last == first
    assert opened(tmp_path).read().last == first


# ---------------------------------------------------------------- leading


def test_an_empty_log_has_no_term_and_no_decision(tmp_path: Path) -> None:
    log = opened(tmp_path).read()
    assert (log.term, log.last, log.leader, log.decisions, log.empty) == (0, None, None, [], True)
    assert not (tmp_path / "log").exists()


def test_the_newest_fence_names_the_leader(tmp_path: Path) -> None:
    leading(tmp_path, 1, decided=2)
    leading(tmp_path, 5)
    log = opened(tmp_path).read()
    assert log.term == 5
    assert log.leader is not None
    assert log.leader["holder"] == {"pid": 105, "host": "here"}
    assert not log.empty


def test_a_successor_goes_on_where_the_last_decision_stands(tmp_path: Path) -> None:
    leading(tmp_path, 1, decided=2)
    leading(tmp_path, 2, decided=2)
    assert epochs(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("term", [1, 2, 3])
def test_a_term_that_is_not_above_the_log_cannot_fence(tmp_path: Path, term: int) -> None:
    leading(tmp_path, 3)
    before = os.listdir(tmp_path / "log")
    with pytest.raises(Fenced, match=r"term 3 leads this query now \(process 103 on here"):
        leading(tmp_path, term)
    assert os.listdir(tmp_path / "log") == before


def test_a_fence_that_loses_its_number_to_a_lower_term_tries_the_next(tmp_path: Path) -> None:
    class Late(LocalStore):
        """While term 5 is about to put its fence, the older driver decides."""

        def put_if_absent(self, name: str, data: bytes) -> bool:
            if older.last is None:
                decide(older, 1, 1)
            return super().put_if_absent(name, data)

    older = leading(tmp_path, 1)
    newer = leading(tmp_path, 5, store=Late(tmp_path))
    assert newer.last == older.last
    with pytest.raises(Fenced):
        decide(older, 1, 1)
    decide(newer, 5, 1)
    assert epochs(tmp_path) == [0, 1]


def test_a_fence_that_loses_its_number_to_a_higher_term_is_fenced(tmp_path: Path) -> None:
    class Late(LocalStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            if opened(tmp_path).read().empty:
                leading(tmp_path, 9)
            return super().put_if_absent(name, data)

    with pytest.raises(Fenced, match="term 9 leads"):
        leading(tmp_path, 5, store=Late(tmp_path))
    assert len(os.listdir(tmp_path / "log")) == 1


# ---------------------------------------------------------------- an older driver wakes up


def take_over(root: Path) -> None:
    leading(root, 2)


def take_over_and_decide(root: Path) -> None:
    leading(root, 2, decided=1)


def take_over_and_roll_up(root: Path) -> None:
    """So far that the number at which the older driver aims is free again."""
    newer = leading(root, 2, decided=8)
    assert newer.roll_up(keep=2, slack=1)
    assert not (root / numbered(root).entry_name(5)).exists()


def fence_with_the_same_term(root: Path) -> None:
    append(root, {"type": "fence", "term": 1, "nonce": "another driver with our term"})


def decide_with_the_same_term(root: Path) -> None:
    append(root, decision(3, 1).to_json())


def end_the_lineage(root: Path) -> None:
    append(root, {"type": "end", "term": 2, "nonce": "end", "child": "another lineage"})


def end_the_lineage_with_the_same_term(root: Path) -> None:
    append(root, {"type": "end", "term": 1, "nonce": "end", "child": "another lineage"})


MEANWHILE = [
    take_over,
    take_over_and_decide,
    take_over_and_roll_up,
    fence_with_the_same_term,
    decide_with_the_same_term,
    end_the_lineage,
    end_the_lineage_with_the_same_term,
]


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("operation", range(10))
def test_a_driver_that_was_overtaken_before_any_of_its_steps_cannot_decide(
    tmp_path: Path, meanwhile: Callable[[Path], None], operation: int
) -> None:
    """Another driver acts before the n-th operation that deciding does on the store."""

    class Paused(LocalStore):
        left = -1  # counts down from the moment that the test sets it

        def _pause(self) -> None:
            if self.left == 0:
                meanwhile(tmp_path)
            self.left -= 1

        def put_if_absent(self, name: str, data: bytes) -> bool:
            self._pause()
            return super().put_if_absent(name, data)

        def read(self, name: str) -> bytes | None:
            self._pause()
            return super().read(name)

        def list(self, folder: str = "") -> list[str]:
            self._pause()
            return super().list(folder)

    store = Paused(tmp_path)
    older = leading(tmp_path, 1, decided=3, store=store)
    store.left = operation
    late = decision(3, 1)
    try:
        older.decide(late)
    except Fenced:
        decided = False
    else:
        decided = True

    if store.left >= 0:  # deciding took fewer operations: the other driver comes after it
        assert decided
        meanwhile(tmp_path)
    after = opened(tmp_path).read()
    mine = [d for d in after.decisions if d.nonce == late.nonce]
    others = [d for d in after.decisions if d.nonce != late.nonce]
    if decided and meanwhile is not take_over_and_roll_up:
        assert mine, "decided, and not in the log"
    if not decided and meanwhile is not take_over_and_roll_up:
        assert not mine, "in the log, and not decided"
    if meanwhile is not decide_with_the_same_term or not decided:
        found = [d.epoch for d in after.decisions]
        assert found == sorted(set(found)), "two decisions for one epoch"
    assert all(d.term == 2 for d in others if d.epoch > 3)


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("look", [EpochLog.read, EpochLog.check, lambda log: decide(log, 1, 1)])
def test_a_driver_that_was_overtaken_stays_fenced_however_often_it_looks(
    tmp_path: Path, meanwhile: Callable[[Path], None], look: Callable[[EpochLog], Any]
) -> None:
    older = leading(tmp_path, 1, decided=3)
    meanwhile(tmp_path)
    with contextlib.suppress(Fenced):
        look(older)
    for _ in range(2):
        with pytest.raises(Fenced):
            decide(older, 1, 1)


def test_the_message_of_a_fenced_driver_names_the_leader_and_both_terms(tmp_path: Path) -> None:
    older = leading(tmp_path, 1)
    leading(tmp_path, 7)
    with pytest.raises(Fenced, match=r"term 7 .*process 107 on here, since today.* had term 1"):
        older.check()


def test_an_end_closes_the_log_for_every_term(tmp_path: Path) -> None:
    log = leading(tmp_path, 1, decided=2)
    end_the_lineage(tmp_path)
    with pytest.raises(Fenced, match="this lineage has ended"):
        log.check()
    with pytest.raises(Fenced, match="this lineage has ended"):
        leading(tmp_path, 100)
    assert epochs(tmp_path) == [0, 1]


def test_an_end_stays_known_when_a_late_driver_rolls_up(tmp_path: Path) -> None:
    log = leading(tmp_path, 1, decided=8)
    end_the_lineage(tmp_path)
    assert log.roll_up(keep=2, slack=1)
    with pytest.raises(Fenced, match="this lineage has ended"):
        leading(tmp_path, 100)


def test_a_leader_under_whom_the_log_was_set_back_decides_nothing(tmp_path: Path) -> None:
    """An older copy of the home was restored while the driver ran."""
    log = leading(tmp_path, 1, decided=2)
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    decide(log, 1, 2)
    shutil.rmtree(tmp_path / "log")
    shutil.copytree(tmp_path / "copy", tmp_path / "log")

    with pytest.raises(OnceflowError):
        decide(log, 1, 1)

    assert epochs(tmp_path) == [0, 1]  # and no entry stands behind a hole


# ---------------------------------------------------------------- lost answers


class LosesAnswers(LocalStore):
    """Puts land, but the answer says that somebody else was first."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        super().put_if_absent(name, data)
        return False


def test_an_entry_whose_answer_got_lost_is_known_by_its_nonce(tmp_path: Path) -> None:
    log = leading(tmp_path, 1, decided=3, store=LosesAnswers(tmp_path))
    assert [d.epoch for d in log.decisions] == [0, 1, 2]
    assert epochs(tmp_path) == [0, 1, 2]
    assert log.entries == 4


def test_an_entry_of_somebody_else_is_not_taken_for_a_lost_answer(tmp_path: Path) -> None:
    class Overtaken(LocalStore):
        """Somebody else's entry gets the number, of our own term, with our own content."""

        armed = False

        def put_if_absent(self, name: str, data: bytes) -> bool:
            if self.armed:
                append(tmp_path, decision(1, 1).to_json())
            return super().put_if_absent(name, data)

    store = Overtaken(tmp_path)
    log = leading(tmp_path, 1, decided=1, store=store)
    store.armed = True
    with pytest.raises(Fenced):
        decide(log, 1, 1)


def test_a_lost_answer_to_an_entry_that_was_freed_since_is_not_a_win(tmp_path: Path) -> None:
    """Our put landed on a freed name; the answer got lost; whose file it is proves nothing."""

    class Overtaken(LosesAnswers):
        armed = False

        def put_if_absent(self, name: str, data: bytes) -> bool:
            if self.armed:
                self.armed = False
                take_over_and_roll_up(tmp_path)
            return super().put_if_absent(name, data)

    store = Overtaken(tmp_path)
    log = leading(tmp_path, 1, decided=3, store=store)
    store.armed = True
    late = decision(3, 1)
    with pytest.raises(Fenced, match="term 2 leads"):
        log.decide(late)
    assert late.nonce not in {d.nonce for d in opened(tmp_path).read().decisions}


@pytest.mark.parametrize("point", faults.PUT)
def test_a_driver_whose_put_failed_does_not_go_on(tmp_path: Path, point: str) -> None:
    """It cannot know whether it decided, so it must open again with a new term."""
    log = leading(tmp_path, 1, decided=1)
    faults.arm(point, "raise")
    with pytest.raises(faults.InjectedFault):
        decide(log, 1, 1)
    faults.disarm()

    landed = point == "put.linked"
    if landed:
        with pytest.raises(Fenced):
            decide(log, 1, 1)
    leading(tmp_path, 2, decided=1)
    assert epochs(tmp_path) == ([0, 1, 2] if landed else [0, 1])


# ---------------------------------------------------------------- roll-up


def test_a_roll_up_keeps_the_last_decisions_as_entries(tmp_path: Path) -> None:
    log = leading(tmp_path, 1, decided=10)
    assert log.roll_up(keep=3, slack=2)
    assert log.entries == 3
    # and the two newest that it covers, from which recovery writes offsets/<N-1> and <N>
    assert [d.epoch for d in log.decisions] == [5, 6, 7, 8, 9]
    assert opened(tmp_path).read().decisions == log.decisions
    assert opened(tmp_path).read().term == 1


def test_a_roll_up_waits_until_there_is_enough_to_free(tmp_path: Path) -> None:
    log = leading(tmp_path, 1, decided=5)
    assert not log.roll_up(keep=3, slack=2)
    assert log.entries == 6
    decide(log, 1, 1)
    assert log.roll_up(keep=3, slack=2)


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
@pytest.mark.parametrize("slack", [0, 1, 3])
def test_the_leader_and_a_new_reader_know_the_same_through_many_roll_ups(
    tmp_path: Path, keep: int, slack: int
) -> None:
    log = leading(tmp_path, 1)
    for epoch in range(20):
        log.decide(decision(epoch, 1))
        log.roll_up(keep=keep, slack=slack)
        fresh = opened(tmp_path).read()
        assert fresh.decisions == log.decisions
        assert fresh.leader == log.leader
        kept = [d.epoch for d in fresh.decisions]
        assert kept == list(range(kept[0], epoch + 1))
        assert len(kept) >= min(epoch + 1, max(keep, 2))
        assert log.entries <= keep + slack + 2


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_roll_up_carries_the_term_and_the_leader(tmp_path: Path, keep: int) -> None:
    leading(tmp_path, 4, decided=3)
    log = leading(tmp_path, 6, decided=3)
    assert log.roll_up(keep=keep, slack=0)
    fresh = opened(tmp_path).read()
    assert fresh.term == 6
    assert fresh.leader is not None
    assert fresh.leader["holder"]["pid"] == 106
    with pytest.raises(Fenced):
        leading(tmp_path, 6)
    leading(tmp_path, 7)


def test_a_paused_drivers_roll_up_hides_neither_the_new_leader_nor_its_decisions(
    tmp_path: Path,
) -> None:
    older = leading(tmp_path, 1, decided=8)
    newer = leading(tmp_path, 2, decided=2)
    assert older.roll_up(keep=2, slack=1)
    fresh = opened(tmp_path).read()
    assert fresh.term == 2
    assert fresh.last == newer.last
    decide(newer, 2, 1)
    with pytest.raises(Fenced):
        decide(older, 1, 1)


def test_a_paused_drivers_roll_up_behind_a_newer_one_is_not_looked_at(tmp_path: Path) -> None:
    older = leading(tmp_path, 1, decided=8)
    newer = leading(tmp_path, 2, decided=8)
    assert newer.roll_up(keep=2, slack=1)
    expected = opened(tmp_path).read().decisions
    assert older.roll_up(keep=2, slack=1)
    assert opened(tmp_path).read().decisions == expected
    decide(newer, 2, 1)


def roll_up_in_a_child(root: Path) -> None:
    log = leading(root, 1, decided=8)
    log.roll_up(keep=2, slack=1)


@pytest.mark.kill
@pytest.mark.parametrize(("point", "visit"), [("rollup.written", 1), ("rollup.pruned-one", 3)])
def test_a_roll_up_that_was_killed_is_finished_by_the_successor(
    tmp_path: Path, point: str, visit: int
) -> None:
    run_and_kill(point, roll_up_in_a_child, tmp_path, visit=visit)
    log = leading(tmp_path, 2)
    assert following(log) == 8
    log.prune()
    assert log.entries == 3  # two decisions and the new fence
    assert epochs(tmp_path) == [4, 5, 6, 7]


def test_a_roll_up_that_is_gone_is_damage(tmp_path: Path) -> None:
    log = leading(tmp_path, 1, decided=8)
    log.roll_up(keep=2, slack=1)
    for name in os.listdir(tmp_path / "log"):
        if name.startswith("rollup-"):
            os.remove(tmp_path / "log" / name)
    with pytest.raises(Damaged, match="is missing, and later entries are there"):
        opened(tmp_path).read()


# ---------------------------------------------------------------- three drivers, any order


def three_drivers(root: Path, seed: int, *, kill: float, lose: float) -> int:
    """Drivers that take terms, decide, roll up and die in any order. How many epochs it came to."""
    turns, truth = Turns(seed, kill=kill), Truth()
    terms = iter(range(1, 1000))
    acknowledged: list[Decision] = []
    refused: list[Decision] = []

    def live_once() -> None:
        term = next(terms)
        log = opened(root, Stepped(LocalStore(root), turns, truth, lose=lose))
        log.fence(term, {})
        for _ in range(5):
            mine = decision(following(log), term)
            try:
                log.decide(mine)
            except Fenced:
                refused.append(mine)
                raise
            acknowledged.append(mine)
            log.roll_up(keep=2, slack=1)

    def drive() -> None:
        for _ in range(4):
            try:
                live_once()
            except (Fenced, Killed):
                continue

    turns.run(drive, drive, drive)

    decided = [Decision.from_json(e) for e in truth.entries if e["type"] == "epoch"]
    assert [d.epoch for d in decided] == list(range(len(decided))), "one decision for each epoch"
    fenced = 0
    for entry in truth.entries:
        assert entry["term"] >= fenced, f"{entry['type']} below a higher fence"
        fenced = max(fenced, entry["term"])
    nonces = {d.nonce for d in decided}
    assert {d.nonce for d in acknowledged} <= nonces, "an epoch that was decided is gone"
    for mine in refused:  # if it stands all the same, somebody else has read it and leads
        assert mine.nonce not in nonces or fenced > mine.term
    survivor = opened(root).read()
    assert survivor.decisions == decided[len(decided) - len(survivor.decisions) :]
    assert survivor.last == (decided[-1] if decided else None)
    assert survivor.term == fenced
    return len(decided)


@pytest.mark.parametrize(
    ("kill", "lose"), [(0.0, 0.0), (0.02, 0.0), (0.0, 0.3), (0.02, 0.3)], ids=str
)
def test_three_drivers_in_any_order_decide_every_epoch_once(
    tmp_path: Path, kill: float, lose: float
) -> None:
    lengths = []
    for seed in seeds(8):
        lengths.append(three_drivers(tmp_path / str(seed), seed, kill=kill, lose=lose))
    assert max(lengths) > 5, "the drivers came far enough to roll up"
