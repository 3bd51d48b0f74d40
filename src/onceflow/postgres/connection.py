"""Connections to PostgreSQL: calls have a deadline, errors name the fix and show no secret."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onceflow.contract.extras import require
from onceflow.errors import (
    DiskFull,
    JobError,
    OnceflowError,
    PublishFailed,
    TargetAway,
    TargetBehind,
    TargetError,
)

if TYPE_CHECKING:
    import psycopg

    Db = psycopg.Connection[tuple[Any, ...]]

LOCK_SECONDS = 30.0
_CONNECT_SECONDS = "10"
_GRACE_SECONDS = 5.0  # the server ends a transaction by itself, before we cut the connection
_NOTICES_A_DEAD_PEER = {
    "keepalives": "1", "keepalives_idle": "10", "keepalives_interval": "5",
    "keepalives_count": "3", "tcp_user_timeout": "30000",
}  # fmt: skip
_AGAIN = "nothing became visible; onceflow tries again"
_LONG = f"give the sink a larger timeout=, or make epochs smaller; {_AGAIN}"
_ALTERED = (
    "the table was altered under the job: give it back its columns and types, then start the job "
    "again; nothing is lost"
)


class NoAnswer(Exception):
    """COMMIT was sent, and the connection ended before the server answered."""

    def __init__(self, error: Exception, backend: int) -> None:
        super().__init__(str(error))
        self.backend = backend


class Server:
    """A database: where it is, from a DSN, a URL, a service file or the environment.

    It opens a connection for each piece of work and keeps none.
    """

    def __init__(self, dsn: str, *, table: str, seconds: float) -> None:
        self._given = _parse(dsn)
        self.label = f"Postgres({self.shown!r}, table={table!r})"
        self.seconds = seconds

    @property
    def shown(self) -> str:
        """The connection string without secrets."""
        from psycopg.conninfo import make_conninfo

        return make_conninfo(**{k: v for k, v in self._given.items() if not _is_secret(k)})

    def __repr__(self) -> str:
        return f"Server({self.shown!r})"

    @contextlib.contextmanager
    def connect(self, name: str, *, seconds: float | None = None) -> Iterator[Db]:
        """A connection in autocommit, for at most so many seconds. Translates errors.

        `name` appears in pg_stat_activity: by it a successor finds and ends our connections.
        """
        psycopg = client()
        most = seconds or self.seconds
        try:
            db = psycopg.connect(**self._parameters(name), autocommit=True)
        except psycopg.Error as error:
            raise self._unreachable(error) from None  # a chained error could show the password
        with contextlib.closing(db), _deadline(db, most + _GRACE_SECONDS):
            try:
                _configure(db, most)
                yield db
            except psycopg.Error as error:
                raise self.translate(error) from error

    @contextlib.contextmanager
    def transaction(self, db: Db) -> Iterator[None]:
        """All of it, or nothing; `NoAnswer` if nobody knows which."""
        psycopg = client()
        db.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(psycopg.Error):
                db.execute("ROLLBACK")
            raise
        backend = db.info.backend_pid
        try:
            said = db.execute("COMMIT").statusmessage
        except psycopg.Error as error:
            if db.broken:
                raise NoAnswer(error, backend) from error
            raise
        if said != "COMMIT":  # after an error the server treats it as ROLLBACK
            raise PublishFailed(f"{self.label}: the server rolled back", hint=_AGAIN)

    def resolved(self, db: Db) -> str:
        """All that another machine needs to connect to the same server, with what libpq found."""
        from psycopg.conninfo import make_conninfo

        found: dict[str, Any] = {**self._given, **db.info.get_parameters()}
        found.pop("service", None)  # a file that it may not have
        return make_conninfo(**{**found, "password": db.info.password or None})

    def _parameters(self, name: str) -> dict[str, Any]:
        """The DSN overrides our settings, except for the name."""
        ours = {"connect_timeout": _CONNECT_SECONDS, **_NOTICES_A_DEAD_PEER}
        return {**ours, **self._given, "application_name": name, "client_encoding": "UTF8"}

    # -------------------------------------------------------------- errors

    def _unreachable(self, error: psycopg.Error) -> OnceflowError:
        pgconn, text = error.pgconn, self._without_secrets(str(error).strip())
        if pgconn is not None and (pgconn.needs_password or "no password supplied" in text):
            return TargetError(
                f"{self.label}: the server asks for a password and none was found. onceflow does "
                "not store a password of a DSN: commands read PGPASSWORD, a passfile or a service",
                hint="set PGPASSWORD, or write a ~/.pgpass",
            )
        refused = ("authentication failed", "does not exist", "no pg_hba.conf entry",
                   "not permitted to log in", "permission denied for database",
                   "does not support SSL", "certificate")  # fmt: skip
        if any(words in text for words in refused):
            return TargetError(
                f"{self.label}: the server refuses the connection: {text}",
                hint="check user, password, database and TLS options of the connection",
            )
        return TargetAway(
            f"{self.label}: cannot connect: {text}",
            hint=f"start the server, or make it reachable from here; {_AGAIN}",
        )

    def translate(self, error: psycopg.Error) -> OnceflowError:
        code = error.sqlstate or ""
        said = error.diag.message_primary or str(error).strip()
        detail = f" ({error.diag.message_detail})" if error.diag.message_detail else ""
        what = self._without_secrets(f"{self.label}: {said}{detail}")
        kinds: tuple[tuple[str, type[OnceflowError], str], ...] = (
            ("53100", DiskFull, "free some space on the server's disk and start the job again; "
             "it continues where it stopped"),
            ("53", TargetAway, f"the server lacks resources; {_AGAIN}"),
            ("08", TargetAway, _AGAIN),
            ("57P", TargetAway, _AGAIN),
            ("55P03", PublishFailed, "somebody holds a lock on the table or the ledger: see "
             f"pg_locks and pg_blocking_pids(); {_AGAIN}"),
            ("25P04", PublishFailed, _LONG),
            ("57014", PublishFailed, _LONG),
            ("25006", TargetError, "this is a standby or read only: connect to the primary, for "
             "instance with target_session_attrs=read-write"),
            ("42501", TargetError, "docs/postgres.md lists the rights that the role needs"),
            ("23", TargetError, "the table refuses rows that are decided: drop the constraint, or "
             "delete the rows that conflict, then start the job again; nothing is lost"),
            ("54000", TargetError, "a key is too long for its index: choose a shorter key"),
            ("42", TargetError, _ALTERED),
            ("55000", TargetError, _ALTERED),
            ("22", TargetError, _ALTERED),
            ("3F000", TargetBehind, "bring back the schema as it was"),
        )  # fmt: skip
        for prefix, kind, hint in kinds:
            if code.startswith(prefix):
                return kind(what, hint=hint)
        lost = not code and isinstance(error, client().OperationalError)
        return (TargetAway if lost else PublishFailed)(what, hint=_AGAIN)

    def _without_secrets(self, text: str) -> str:
        for name, value in self._given.items():
            if _is_secret(name) and value:
                text = text.replace(str(value), "***")
        return text


def client() -> Any:
    require("postgres", "the PostgreSQL client")
    import psycopg

    return psycopg


def _parse(dsn: str) -> dict[str, Any]:
    psycopg = client()
    from psycopg.conninfo import conninfo_to_dict

    try:
        return dict(conninfo_to_dict(dsn))
    except psycopg.Error:
        pass  # the error may quote a password
    raise JobError(
        "the connection string of a Postgres sink cannot be read",
        hint="write it like postgresql://user@host:5432/database or 'host=… dbname=…'; escape "
        "special characters in a password (%40 for @ in a URL)",
    )


def _is_secret(name: str) -> bool:
    return "password" in name or "secret" in name or name.startswith("scram_")


def _configure(db: Db, seconds: float) -> None:
    """The server ends our work soon after we are gone, and a commit must reach its disk."""
    limits = {
        "lock_timeout": min(LOCK_SECONDS, seconds),
        "idle_in_transaction_session_timeout": seconds,
        "statement_timeout": seconds,
        "transaction_timeout": seconds,
    }
    if db.info.server_version < 170000:
        del limits["transaction_timeout"]
    settings = {name: f"{int(value * 1000)}ms" for name, value in limits.items()}
    settings |= {"datestyle": "ISO, YMD", "standard_conforming_strings": "on"}
    calls = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in settings.items())
    asked = "current_setting('synchronous_commit')"
    flushed = f"CASE {asked} WHEN 'off' THEN 'on' ELSE {asked} END"
    db.execute(f"SELECT {calls}, set_config('synchronous_commit', {flushed}, false)")


@contextlib.contextmanager
def _deadline(db: Db, seconds: float) -> Iterator[None]:
    """Cut the connection at the deadline: a frozen server never answers, and its kernel keeps the
    connection open."""
    wire = socket.socket(fileno=os.dup(db.fileno()))

    def cut() -> None:
        with contextlib.suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        wire.close()
