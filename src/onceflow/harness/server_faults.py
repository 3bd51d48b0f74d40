"""Faults of servers: killed, frozen, their answers lost, their ledgers held by somebody else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from onceflow.harness.play import Play, Struck
from onceflow.harness.reaching import REACH_WITHIN, at_work, disarm, epoch, stand_still
from onceflow.harness.schedule import Fault
from onceflow.harness.server_targets import LEDGER
from onceflow.harness.servers import TRANSACTION_TIMEOUT, Servers
from onceflow.testing.servers import Kafka

_MOMENT = 1.0  # seconds that a server is away, its own start apart
_FROZEN = TRANSACTION_TIMEOUT + 2.0
_HELD = 5.0  # seconds that somebody's transaction stays open while a driver reads the ledger


def _servers(play: Play) -> Servers:
    assert play.case.servers is not None
    return play.case.servers


@contextlib.contextmanager
def _standing(play: Play, fault: Fault, struck: Struck) -> Iterator[Callable[[], None] | None]:
    """The driver stands at the fault's point, if it has one, until what is given is called. None:
    the point was not reached."""
    if not fault.point:
        at_work(play, fault)
        yield lambda: None
        return
    folder = stand_still(play, fault, struck)
    if folder is None:
        yield None
        return
    try:
        yield (folder / "resume").touch
    finally:
        (folder / "resume").touch()


def _break(
    play: Play, fault: Fault, struck: Struck, *, what: str,
    down: Callable[[], None], up: Callable[[], None], away: float = _MOMENT,
) -> None:  # fmt: skip
    """`back`: the server is there again before the driver goes on from where it stands."""
    with _standing(play, fault, struck) as go_on:
        if go_on is None:
            return
        down()
        try:
            at = f" at {fault.point}" if fault.point else ""
            play.hit(struck, f"{what}, the driver{at} after epoch {epoch(play)}")
            if not fault.back:
                go_on()
            play.wait(lambda: False, away)
        finally:
            up()
        play.mended(struck)


def _broker(play: Play, fault: Fault) -> tuple[Kafka, int]:
    """The brokers come in turn."""
    servers = _servers(play)
    assert servers.kafka is not None
    return servers.kafka, fault.number % servers.brokers


def _kill_broker(play: Play, fault: Fault, struck: Struck) -> None:
    kafka, i = _broker(play, fault)
    _break(
        play, fault, struck, what=f"broker {i}",
        down=lambda: kafka.kill(i), up=lambda: kafka.start(i),
    )  # fmt: skip


def _freeze_broker(play: Play, fault: Fault, struck: Struck) -> None:
    kafka, i = _broker(play, fault)
    _break(
        play, fault, struck, what=f"broker {i} for {_FROZEN:.0f} s",
        down=lambda: kafka.freeze(i), up=lambda: kafka.thaw(i), away=_FROZEN,
    )  # fmt: skip


def _kill_postgres(play: Play, fault: Fault, struck: Struck) -> None:
    postgres = _servers(play).postgres
    assert postgres is not None
    _break(play, fault, struck, what="PostgreSQL", down=postgres.kill, up=postgres.start)


def _lost_answer(play: Play, fault: Fault, struck: Struck) -> None:
    at_work(play, fault)
    with _servers(play).losing_answers(fault.file) as lost:
        if play.wait(lost, REACH_WITHIN):
            play.hit(struck, f"{lost()} answers of {fault.file}, after epoch {epoch(play)}")
        else:
            struck.what = f"{fault.file} was not asked to commit anything"


def _open_transaction(play: Play, fault: Fault, struck: Struck) -> None:
    """An epoch is published behind the beginning of somebody's transaction, and the driver ends
    before it could note that. The next one must not believe what it sees before the transaction
    has ended."""
    life = play.life
    assert life is not None
    folder = stand_still(play, fault, struck, then="kafka.committed-one:raise")
    if folder is None:
        return
    with _somebody(play):
        (folder / "resume").touch()
        if not play.wait(lambda: life.over, REACH_WITHIN):
            disarm(play, fault, struck)
            return
        play.hit(struck, f"it lay there from before epoch {epoch(play)}")
        about_to_read = folder.with_name(f"{folder.name}-opening")
        about_to_read.mkdir()
        play.start_life(fault=f"open.fenced:pause:1:{about_to_read}")
        opening = play.life
        assert opening is not None
        play.wait(lambda: (about_to_read / "paused").exists() or opening.over, REACH_WITHIN)
        (about_to_read / "resume").touch()
        play.wait(lambda: opening.started or opening.over, _HELD)
    play.mended(struck)


@contextlib.contextmanager
def _somebody(play: Play) -> Iterator[None]:
    """Who writes to every partition of the ledger, and has not ended the transaction."""
    from confluent_kafka import Producer

    target = next(target for target in play.case.targets if target.kind == "kafka")
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


ACTS: dict[str, Callable[[Play, Fault, Struck], None]] = {
    "kill-broker": _kill_broker,
    "freeze-broker": _freeze_broker,
    "kill-postgres": _kill_postgres,
    "lost-answer": _lost_answer,
    "open-transaction": _open_transaction,
}
