"""Real servers for tests and examples, on loopback. Nothing of them is left afterwards.

    with Kafka(tmp_path / "kafka") as kafka, Postgres(tmp_path / "postgres") as postgres:
        kafka.servers, postgres.dsn

Tests can kill each server (`kill`, then `start` again on the same port and data), freeze and thaw
it, and reach it through a `Proxy` that loses answers. If ONCEFLOW_KAFKA (host:port) or
ONCEFLOW_POSTGRES (a DSN) names a running server, that one is used instead.
"""

from __future__ import annotations

from onceflow.testing.servers.kafka import Kafka
from onceflow.testing.servers.postgres import Postgres
from onceflow.testing.servers.proxy import Lost, Proxy
from onceflow.testing.servers.wires import commit, end_txn

__all__ = ["Kafka", "Lost", "Postgres", "Proxy", "commit", "end_txn"]
