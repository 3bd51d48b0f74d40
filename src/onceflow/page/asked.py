"""Targets asked with a deadline, for their ledgers or for a plan: a server may be away or hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from onceflow.errors import OnceflowError, ServerSilent
from onceflow.protocol.home import JobFolder, Query
from onceflow.service.ledger_view import ledger_of

Row = dict[str, Any]
T = TypeVar("T")

_AT_ONCE = 8  # look-ups of this process, those included that nobody waits for any more
_free = threading.BoundedSemaphore(_AT_ONCE)


class _LookUp:
    """One target, asked by a thread that may outlive whoever waits for it."""

    def __init__(self, query: Query, output: str, target: Row, decided: int | None) -> None:
        self._arguments = (query, output, target, decided)
        self._answer: Row | None = None
        self._said = threading.Event()
        self._busy = not _free.acquire(blocking=False)
        if not self._busy:
            threading.Thread(target=self._run, name="onceflow ledger", daemon=True).start()

    def _run(self) -> None:
        try:
            self._answer = ledger_of(*self._arguments)
        except Exception as error:  # the edge: of a client library
            self._answer = self._none(f"{type(error).__name__}: {error}")
        finally:
            _free.release()
            self._said.set()

    def wait(self, until: float, deadline: float) -> Row:
        if self._busy:
            return self._none("not asked: other targets are asked already and do not answer")
        self._said.wait(max(0.0, until - time.monotonic()))
        return self._answer or self._none(f"no answer within {deadline:g} s")

    def _none(self, says: str) -> Row:
        query, output, target, decided = self._arguments
        return {
            "query": query.name, "output": output, "decided": decided, "published": None,
            "term": None, "lineage": None, "guarantee": target.get("guarantee"),
            "target": str(target.get("kind")), "says": says,
        }  # fmt: skip


def asked(folder: JobFolder, deadline: float) -> list[Row]:
    """What each target of a job says, all asked at once."""
    until = time.monotonic() + deadline
    looking: list[_LookUp | Row] = []
    for query in folder.queries():
        try:
            log = query.epoch_log().read()
        except OnceflowError as error:
            looking.append({
                "query": query.name, "output": None, "decided": None, "published": None,
                "term": None, "lineage": None, "guarantee": None, "target": None,
                "says": error.message,
            })  # fmt: skip
            continue
        decided = log.last.epoch if log.last else None
        for name, target in ((log.leader or {}).get("outputs") or {}).items():
            looking.append(_LookUp(query, name, target, decided))
    return [one.wait(until, deadline) if isinstance(one, _LookUp) else one for one in looking]


class Asking:
    """Work that waits for targets, by threads that may outlive whoever waits for them: so many at
    once, those included that nobody waits for any more."""

    def __init__(self, at_once: int) -> None:
        self._free = threading.BoundedSemaphore(at_once)

    def within(self, seconds: float, work: Callable[[], T]) -> T:
        """What it returns or raises. `ServerSilent`: it has not ended in time."""
        if not self._free.acquire(blocking=False):
            raise ServerSilent(
                "not asked: other targets are asked already and do not answer",
                hint="try again when they do",
            )
        ended: list[tuple[T | None, BaseException | None]] = []
        done = threading.Event()

        def run() -> None:
            try:
                ended.append((work(), None))
            except BaseException as error:
                ended.append((None, error))
            finally:
                self._free.release()
                done.set()

        threading.Thread(target=run, name="onceflow asks", daemon=True).start()
        if not done.wait(seconds):
            raise ServerSilent(
                f"a target has not answered within {seconds:g} s",
                hint="see whether its server runs: the ledgers of the job say which it is",
            )
        value, error = ended[0]
        if error is not None:
            raise error
        return cast(T, value)
