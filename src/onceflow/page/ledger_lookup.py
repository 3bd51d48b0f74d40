"""What each target itself says is published. A server may be away or hang, so a thread asks it,
and nobody waits longer than a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from onceflow.errors import OnceflowError, ServerSilent
from onceflow.protocol.home import JobFolder, Query
from onceflow.service.ledger_view import LedgerRow, ledger_of

T = TypeVar("T")


class DeadlineThreads:
    """Calls of targets, in at most `most` threads. A thread cannot be ended, so it counts until
    its call returns, even if nobody waits for the call any longer."""

    def __init__(self, most: int) -> None:
        self._free = threading.BoundedSemaphore(most)

    def start(self, work: Callable[[], T]) -> TargetCall[T]:
        """`ServerSilent`: all threads are taken by targets that do not answer."""
        if not self._free.acquire(blocking=False):
            raise ServerSilent(
                "not asked: other targets were asked before and do not answer",
                hint="try again when they answer",
            )
        call = TargetCall(work)
        threading.Thread(
            target=self._run, args=(call,), name="onceflow target", daemon=True
        ).start()
        return call

    def within(self, seconds: float, work: Callable[[], T]) -> T:
        """The result or the error of `work`. `ServerSilent`: it takes longer."""
        return self.start(work).result(time.monotonic() + seconds, seconds)

    def _run(self, call: TargetCall[Any]) -> None:
        try:
            call.run()
        finally:
            self._free.release()
            call.done.set()


@dataclass
class TargetCall(Generic[T]):
    """A call in a thread that may outlive those who wait for it."""

    work: Callable[[], T]
    done: threading.Event = field(default_factory=threading.Event)
    value: T | None = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.work()
        except BaseException as error:
            self.error = error

    def result(self, until: float, seconds: float) -> T:
        """`until`: on the monotonic clock, the end of the `seconds` that are allowed."""
        if not self.done.wait(max(0.0, until - time.monotonic())):
            raise ServerSilent(
                f"a target has not answered within {seconds:g} s",
                hint="check the server: the ledgers of the job show which target does not answer",
            )
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


_threads = DeadlineThreads(8)


def ledgers(folder: JobFolder, deadline: float) -> list[LedgerRow]:
    """The ledger of each output of a job. All targets are asked at the same time; one that does
    not answer within `deadline` seconds says so in its row."""
    until = time.monotonic() + deadline
    waiting: list[Callable[[], LedgerRow]] = []
    for query in folder.queries():
        try:
            log = query.epoch_log().read()
        except OnceflowError as error:
            waiting.append(partial(_unknown, query, error.message))
            continue
        decided = log.last.epoch if log.last else None
        for output, target in ((log.leader or {}).get("outputs") or {}).items():
            waiting.append(_ask(query, output, target, decided, until=until, deadline=deadline))
    return [answer() for answer in waiting]


def _ask(
    query: Query, output: str, target: dict[str, Any], decided: int | None, *,
    until: float, deadline: float,
) -> Callable[[], LedgerRow]:  # fmt: skip
    def unknown(says: str) -> LedgerRow:
        guarantee, kind = target.get("guarantee"), str(target.get("kind"))
        facts = {"output": output, "decided": decided, "guarantee": guarantee, "target": kind}
        return cast(LedgerRow, {**_unknown(query, says), **facts})

    try:
        call = _threads.start(lambda: ledger_of(query, output, target, decided))
    except ServerSilent as error:
        return partial(unknown, error.message)

    def answer() -> LedgerRow:
        try:
            return call.result(until, deadline)
        except ServerSilent:
            return unknown(f"no answer within {deadline:g} s")
        except Exception as error:  # a client library may raise anything
            return unknown(f"{type(error).__name__}: {error}")

    return answer


def _unknown(query: Query, says: str) -> LedgerRow:
    return {
        "query": query.name, "output": None, "decided": None, "published": None, "term": None,
        "lineage": None, "guarantee": None, "target": None, "says": says,
    }  # fmt: skip
