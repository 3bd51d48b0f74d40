"""Targets asked for their ledgers, each with a deadline: a server may be away or hang."""

from __future__ import annotations

import threading
import time
from typing import Any

from onceflow.errors import OnceflowError
from onceflow.home import JobFolder, Query
from onceflow.runtime.ledgers import ledger_of

Row = dict[str, Any]

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
