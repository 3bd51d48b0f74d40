"""What each target itself says is published. A server may be away or hang, so a thread asks it,
and nobody waits longer than a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar, cast

from onceflow.errors import OnceflowError, ServerSilent
from onceflow.protocol.home import JobFolder, Query
from onceflow.service.ledger_view import LedgerRow, ledger_of

T = TypeVar("T")


class DeadlineThreads:
    """Calls of targets, in at most `most` threads. A thread cannot be ended, so it counts until
    its call returns, even if nobody waits for the call any longer. (An executor would wait for its
    threads when the page stops.)"""

    def __init__(self, most: int) -> None:
        self._free = threading.BoundedSemaphore(most)

    def start(self, work: Callable[[], T]) -> Future[T]:
        """`ServerSilent`: all threads are taken by targets that do not answer."""
        if not self._free.acquire(blocking=False):
            raise ServerSilent(
                "not asked: other targets were asked before and do not answer",
                hint="try again when they answer",
            )
        call: Future[T] = Future()
        threading.Thread(
            target=self._run, args=(call, work), name="onceflow target", daemon=True
        ).start()
        return call

    def within(self, seconds: float, work: Callable[[], T]) -> T:
        """The result or the error of `work`. `ServerSilent`: it takes longer."""
        return result_of(self.start(work), time.monotonic() + seconds, seconds)

    def _run(self, call: Future[T], work: Callable[[], T]) -> None:
        found = error = None
        try:
            found = work()
        except BaseException as raised:
            error = raised
        self._free.release()
        if error is None:
            call.set_result(cast(T, found))
        else:
            call.set_exception(error)


def result_of(call: Future[T], until: float, seconds: float) -> T:
    """`until`: on the monotonic clock, the end of the `seconds` that are allowed."""
    done, _ = wait([call], max(0.0, until - time.monotonic()))
    if not done:
        raise ServerSilent(
            f"a target has not answered within {seconds:g} s",
            hint="check the server: the ledgers of the job show which target does not answer",
        )
    return call.result()


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
            return result_of(call, until, deadline)
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
