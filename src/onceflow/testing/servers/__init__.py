"""Real servers for tests and examples, on loopback, with nothing left of them afterwards.

    with Kafka(tmp_path / "kafka") as kafka, Postgres(tmp_path / "postgres") as postgres:
        kafka.servers, postgres.dsn

Each can be killed (`kill`, then `start` again on the same port and data), frozen and thawed, and
be reached through a `Proxy` that loses answers. A server that runs already is used instead where
ONCEFLOW_KAFKA (host:port) or ONCEFLOW_POSTGRES (a DSN) names it.
"""

from __future__ import annotations

from onceflow.testing.servers.kafka import Kafka
from onceflow.testing.servers.postgres import Postgres
from onceflow.testing.servers.proxy import Lost, Proxy
from onceflow.testing.servers.wires import commit, end_txn

__all__ = ["Kafka", "Lost", "Postgres", "Proxy", "commit", "end_txn"]
