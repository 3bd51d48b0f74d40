"""Faults of servers: kills, frozen servers, lost answers, foreign transactions on the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from onceflow.harness.case_runner import CaseRunner, FaultOutcome
from onceflow.harness.fault_moments import REACH_WITHIN, disarm, pause_driver, wait_at_random
from onceflow.harness.fault_schedule import Fault
from onceflow.harness.server_targets import LEDGER
from onceflow.harness.servers import TRANSACTION_TIMEOUT, Servers
from onceflow.testing.servers import Kafka

_MOMENT = 1.0  # seconds that a server is away, not counting its start
_FROZEN = TRANSACTION_TIMEOUT + 2.0
_HELD = 5.0  # seconds that a foreign transaction stays open while a driver reads the ledger


def _servers(runner: CaseRunner) -> Servers:
    assert runner.case.servers is not None
    return runner.case.servers


@contextlib.contextmanager
def _standing(
    runner: CaseRunner, fault: Fault, outcome: FaultOutcome
) -> Iterator[Callable[[], None] | None]:
    """Inside the block the driver waits at the point of the fault, if it has one. Yields a function
    that lets it continue, or None if it did not reach the point."""
    if not fault.point:
        wait_at_random(runner, fault)
        yield lambda: None
        return
    folder = pause_driver(runner, fault, outcome)
    if folder is None:
        yield None
        return
    try:
        yield (folder / "resume").touch
    finally:
        (folder / "resume").touch()


def _break(
    runner: CaseRunner, fault: Fault, outcome: FaultOutcome, *, what: str,
    down: Callable[[], None], up: Callable[[], None], away: float = _MOMENT,
) -> None:  # fmt: skip
    """With `fault.back` the server is up again before the driver continues."""
    with _standing(runner, fault, outcome) as resume:
        if resume is None:
            return
        down()
        try:
            at = f" at {fault.point}" if fault.point else ""
            runner.hit(outcome, f"{what}, the driver{at}")
            if not fault.back:
                resume()
            runner.wait(lambda: False, away)
        finally:
            up()
        runner.start_recovery_clock(outcome)


def _broker(runner: CaseRunner, fault: Fault) -> tuple[Kafka, int]:
    """Each fault takes the next broker."""
    servers = _servers(runner)
    assert servers.kafka is not None
    return servers.kafka, fault.number % servers.brokers


def _kill_broker(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    kafka, i = _broker(runner, fault)
    _break(
        runner, fault, outcome, what=f"broker {i}",
        down=lambda: kafka.kill(i), up=lambda: kafka.start(i),
    )  # fmt: skip


def _freeze_broker(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    kafka, i = _broker(runner, fault)
    _break(
        runner, fault, outcome, what=f"broker {i} for {_FROZEN:.0f} s",
        down=lambda: kafka.freeze(i), up=lambda: kafka.thaw(i), away=_FROZEN,
    )  # fmt: skip


def _kill_postgres(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    postgres = _servers(runner).postgres
    assert postgres is not None
    _break(runner, fault, outcome, what="PostgreSQL", down=postgres.kill, up=postgres.start)


def _lost_answer(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    wait_at_random(runner, fault)
    with _servers(runner).losing_answers(fault.file) as lost:
        if runner.wait(lost, REACH_WITHIN):
            runner.hit(outcome, f"{lost()} answers of {fault.file}")
        else:
            outcome.what = f"{fault.file} was not asked to commit anything"


def _open_transaction(runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
    """The driver publishes an epoch behind the beginning of a foreign transaction, and ends before
    it can note that. The next driver must not trust the ledger until that transaction has ended."""
    life = runner.life
    folder = pause_driver(runner, fault, outcome, then="kafka.committed-one:raise")
    if folder is None:
        return
    with _somebody(runner):
        (folder / "resume").touch()
        if not runner.wait(lambda: life.over, REACH_WITHIN):
            disarm(runner, fault, outcome)
            return
        runner.hit(outcome, "a transaction was open on the ledger")
        about_to_read = folder.with_name(f"{folder.name}-opening")
        about_to_read.mkdir()
        runner.start_life(fault=f"open.fenced:pause:1:{about_to_read}")
        opening = runner.life
        runner.wait(lambda: (about_to_read / "paused").exists() or opening.over, REACH_WITHIN)
        (about_to_read / "resume").touch()
        runner.wait(lambda: opening.started or opening.over, _HELD)
    runner.start_recovery_clock(outcome)


@contextlib.contextmanager
def _somebody(runner: CaseRunner) -> Iterator[None]:
    """Inside the block a foreign transaction is open on every partition of the ledger."""
    from confluent_kafka import Producer

    target = next(target for target in runner.case.targets if target.kind == "kafka")
    somebody: Any = Producer({
        "bootstrap.servers": target.path, "transactional.id": f"somebody-{target.table}",
        "linger.ms": 0, "log_level": 0,
    })  # fmt: skip
    somebody.init_transactions(REACH_WITHIN)
    somebody.begin_transaction()
    ledger = target.table + LEDGER
    for partition in somebody.list_topics(ledger, timeout=REACH_WITHIN).topics[ledger].partitions:
        somebody.produce(ledger, b"{}", b"somebody else", partition=partition)
    somebody.flush(REACH_WITHIN)
    try:
        yield
    finally:
        somebody.abort_transaction(REACH_WITHIN)


ACTS: dict[str, Callable[[CaseRunner, Fault, FaultOutcome], None]] = {
    "kill-broker": _kill_broker,
    "freeze-broker": _freeze_broker,
    "kill-postgres": _kill_postgres,
    "lost-answer": _lost_answer,
    "open-transaction": _open_transaction,
}
