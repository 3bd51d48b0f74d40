"""The staged answers of the order service: the first answer for an order stays.

1. look     into the store for answers that this attempt or another one got before
2. ask      the service for the rest
3. put      each answer if there is none yet
4. read     all of them from the store; these count, even if another attempt was quicker

So a replay of an epoch, and two attempts at once, get the same answers. The service may be asked
more than once for an order (when a process dies before step 3), but nobody has used that answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from ads.database import connect, transaction
from ads.places import COMMAND
from onceflow.errors import JobError, OnceflowError, ServerSilent

_AT_ONCE = 200  # orders in one request, and in one statement
_TABLE = (
    "CREATE TABLE IF NOT EXISTS answers (order_id text PRIMARY KEY, value_cents bigint NOT NULL, "
    "courier text NOT NULL, answer_id text NOT NULL)"
)
_LOCK = 0x616473  # so that two do not create the table at once


@dataclass(frozen=True)
class Answer:
    value_cents: int
    courier: str
    answer_id: str


@dataclass(frozen=True)
class Answers:
    """The staged answers at `place`: a path is an sqlite file, text is a DSN of PostgreSQL.

    It holds no connection, so it can be sent to any process. If the service does not answer within
    `patience` seconds it raises `ServerSilent`, after which the job is tried again.
    """

    place: Path | str = field(repr=False)
    url: str
    patience: float = 30.0

    def of(self, orders: Iterable[str]) -> dict[str, Answer]:
        """The answer for each order."""
        wanted = sorted(set(orders))
        if not wanted:
            return {}
        with self._store() as store:
            # Step 1.
            found = _look(store, wanted)
            missing = [order for order in wanted if order not in found]
        if not missing:
            return found
        # Step 2: nothing is locked meanwhile.
        new = {order: answer for part in _parts(missing) for order, answer in self._ask(part)}
        with self._store() as store:
            # Steps 3 and 4.
            store.put([(order, a.value_cents, a.courier, a.answer_id) for order, a in new.items()])
            return found | _look(store, missing)

    @contextmanager
    def _store(self) -> Iterator[_Store]:
        opened = _postgres(self.place) if isinstance(self.place, str) else _sqlite(self.place)
        with opened as store:
            yield store

    def _ask(self, orders: list[str]) -> list[tuple[str, Answer]]:
        body = json.dumps(orders).encode()
        request = Request(f"{self.url}/orders", body, {"Content-Type": "application/json"})
        deadline, pause = time.monotonic() + self.patience, 0.05
        while True:
            try:
                return _told(_fetch(request), orders, self.url)
            except (OSError, HTTPException) as error:  # no connection, cut off, or 503
                if time.monotonic() + pause > deadline:
                    raise ServerSilent(
                        f"the order service at {self.url} does not answer: {error}",
                        hint=f"start it: {COMMAND} order-service --port …",
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 2.0)


def _told(said: bytes, orders: list[str], url: str) -> list[tuple[str, Answer]]:
    """The answers of the service, by order."""
    try:
        answers = json.loads(said)
        return [
            (
                order,
                Answer(
                    value_cents=int(answers[order]["value_cents"]),
                    courier=str(answers[order]["courier"]),
                    answer_id=str(answers[order]["answer_id"]),
                ),
            )
            for order in orders
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise OnceflowError(
            f"the order service at {url} says {said[:200]!r}, which is no answer for "
            f"{len(orders)} orders ({type(error).__name__}: {error})",
            hint="look at whether it is the order service at all, and at what it answers",
        ) from error


def _fetch(request: Request) -> bytes:
    try:
        # A proxy has no business on loopback.
        with build_opener(ProxyHandler({})).open(request, timeout=5) as response:
            return bytes(response.read())
    except HTTPError as error:
        if error.code >= 500:
            raise
        raise OnceflowError(
            f"the order service refuses: {error.code} {error.read().decode(errors='replace')}",
            hint="look at what it is asked, and whether it is the order service at all",
        ) from error


# ---------------------------------------------------------------- the two stores


@dataclass(frozen=True)
class _Store:
    rows: Callable[[str, list[str]], list[Any]]
    put: Callable[[list[tuple[str, int, str, str]]], None]
    mark: str  # what stands for a value in SQL


def _look(store: _Store, orders: list[str]) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for part in _parts(orders):
        marks = ", ".join([store.mark] * len(part))
        found |= _as_answers(store.rows(f"SELECT * FROM answers WHERE order_id IN ({marks})", part))
    return found


@contextmanager
def _sqlite(place: Path) -> Iterator[_Store]:
    with closing(connect(place)) as db:
        db.execute(_TABLE)

        def put(rows: list[tuple[str, int, str, str]]) -> None:
            with transaction(db):
                db.executemany(
                    "INSERT INTO answers VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", rows
                )

        yield _Store(lambda sql, args: db.execute(sql, args).fetchall(), put, "?")


@contextmanager
def _postgres(dsn: str) -> Iterator[_Store]:
    try:
        import psycopg
    except ImportError as error:
        raise JobError("psycopg is missing", hint="pip install 'onceflow[postgres]'") from error
    try:
        with psycopg.connect(dsn, connect_timeout=10) as db:
            if db.execute("SELECT to_regclass('answers')").fetchone() == (None,):
                db.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
                db.execute(_TABLE)
                db.commit()

            def put(rows: list[tuple[str, int, str, str]]) -> None:
                with db.cursor() as cursor:
                    cursor.executemany(
                        "INSERT INTO answers VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING", rows
                    )
                db.commit()

            yield _Store(lambda sql, args: db.execute(sql, args).fetchall(), put, "%s")
    except psycopg.OperationalError as error:
        raise ServerSilent(
            f"the database of the answers fails: {error}",
            hint="see what it says: is it up, has it room, is the connection string right?",
        ) from error


def _as_answers(rows: Iterable[tuple[str, int, str, str]]) -> dict[str, Answer]:
    return {order: Answer(cents, courier, id) for order, cents, courier, id in rows}


def _parts(orders: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(orders), _AT_ONCE):
        yield orders[first : first + _AT_ONCE]
