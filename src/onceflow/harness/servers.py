"""The servers that cases write to: started in the folder of the run, or named by the environment.

ONCEFLOW_KAFKA and ONCEFLOW_POSTGRES name servers that run already. Those are never broken; each
case has a topic and a schema of its own there, which are removed at the end of the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from onceflow.contract.extras import require
from onceflow.testing.servers import Kafka, Postgres, Proxy, commit, end_txn

TRANSACTION_TIMEOUT = 6.0  # seconds, of the Kafka sinks of the built-in jobs
_VARIABLES = {"kafka": "ONCEFLOW_KAFKA", "postgres": "ONCEFLOW_POSTGRES"}
# The broker ends a transaction soon after its timeout.
_BROKER = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000"}


def given(kind: str) -> str:
    """The variable that names such a server, if it is set: then we must not break it."""
    name = _VARIABLES[kind]
    return name if os.environ.get(name) else ""


class Servers:
    """`kinds` of them, running inside the `with` block."""

    def __init__(self, folder: Path, kinds: Iterable[str], *, brokers: int = 1) -> None:
        wanted = set(kinds)
        for kind in wanted:
            require(kind, f"a run with {kind}")
        self.brokers = brokers
        self.kafka: Kafka | None = None
        self.postgres: Postgres | None = None
        self.proxies: dict[str, list[Proxy]] = {}
        self._token = secrets.token_hex(3)
        self.places: list[str] = []
        self._stack = contextlib.ExitStack()
        if "kafka" in wanted:
            ours = not given("kafka")
            self.kafka = Kafka(
                folder / "kafka", brokers=brokers if ours else 1, settings=_BROKER if ours else None
            )
        if "postgres" in wanted:
            self.postgres = Postgres(folder / "postgres")

    def __enter__(self) -> Servers:
        with self._stack as stack:
            for server in (self.kafka, self.postgres):
                if server is not None:
                    stack.enter_context(server)
            stack.callback(self._clear)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -------------------------------------------------------------- where a case goes

    def new_place(self) -> str:
        """A name for the topic and the schema of a case. Creates the schema."""
        name = f"onceflow_verify_{self._token}_{len(self.places):02d}"
        if self.postgres is not None:
            import psycopg

            with psycopg.connect(self.postgres.dsn, autocommit=True) as db:
                db.execute(f"CREATE SCHEMA {name}")
        self.places.append(name)
        return name

    def where(self, kind: str, place: str) -> tuple[str, str]:
        """For readers: the address of the server, and the topic or schema.table of the place."""
        if kind == "kafka":
            assert self.kafka is not None
            return self.kafka.servers, place
        assert self.postgres is not None
        return self.postgres.dsn, f"{place}.result"

    def environment(self) -> dict[str, str]:
        """For the job, which connects through the proxies if there are any."""
        found = {"ONCEFLOW_VERIFY_KAFKA": "", "ONCEFLOW_VERIFY_POSTGRES": ""}
        if self.kafka is not None:
            through = ",".join(proxy.address for proxy in self.proxies.get("kafka", ()))
            found["ONCEFLOW_VERIFY_KAFKA"] = through or self.kafka.servers
        if self.postgres is not None:
            dsns = [self.postgres.dsn_through(p) for p in self.proxies.get("postgres", ())]
            found["ONCEFLOW_VERIFY_POSTGRES"] = (*dsns, self.postgres.dsn)[0]
        return found

    def for_commands(self) -> dict[str, str]:
        """The password, which onceflow stores nowhere, for commands on a job."""
        if self.postgres is None:
            return {}
        from psycopg.conninfo import conninfo_to_dict

        password = conninfo_to_dict(self.postgres.dsn).get("password")
        return {"PGPASSWORD": str(password)} if password else {}

    def _clear(self) -> None:
        """Remove what cases left on servers that are not ours."""
        if self.kafka is not None and given("kafka"):
            from confluent_kafka.admin import AdminClient

            admin = AdminClient({"bootstrap.servers": self.kafka.servers, "log_level": 0})
            listed = admin.list_topics(timeout=10).topics
            mine = [name for name in listed if name.startswith(tuple(self.places))]
            for deleted in admin.delete_topics(mine).values() if mine else ():
                deleted.result(30)
        if self.postgres is not None and given("postgres"):
            import psycopg

            with psycopg.connect(self.postgres.dsn, autocommit=True) as db:
                for name in self.places:
                    db.execute(f"DROP SCHEMA {name} CASCADE")

    # -------------------------------------------------------------- answers that get lost

    @contextlib.contextmanager
    def behind_proxies(self, kinds: Iterable[str]) -> Iterator[None]:
        """Inside the block jobs reach these servers through proxies."""
        wanted = set(kinds)
        with contextlib.ExitStack() as stack:
            if self.kafka is not None and "kafka" in wanted:
                self.proxies["kafka"] = [
                    stack.enter_context(self.kafka.proxy(i)) for i in range(self.brokers)
                ]
            if self.postgres is not None and "postgres" in wanted:
                self.proxies["postgres"] = [stack.enter_context(self.postgres.proxy())]
            stack.callback(self.proxies.clear)
            yield

    @contextlib.contextmanager
    def losing_answers(self, kind: str) -> Iterator[Callable[[], int]]:
        """Lose the answers to COMMIT or to the end of a Kafka transaction; yields their count."""
        meant = {"kafka": end_txn, "postgres": commit}[kind]
        with contextlib.ExitStack() as stack:
            lost = [stack.enter_context(proxy.losing(meant)) for proxy in self.proxies[kind]]
            yield lambda: sum(loss.count for loss in lost)
