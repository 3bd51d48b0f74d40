"""One broker and one PostgreSQL serve all tests; each test has topics and schemas of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import onceflow
from onceflow.spark import jars
from onceflow.spark import packages as connector
from onceflow.spark.session import AGEING
from onceflow.testing.servers import Kafka, Postgres


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    with Kafka(tmp_path_factory.mktemp("servers") / "kafka") as server:
        yield server


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with Postgres(tmp_path_factory.mktemp("servers") / "postgres") as server:
        yield server


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """With Kafka's connector, which `scripts/test` has named already."""
    with pytest.MonkeyPatch.context() as patch:
        if connector.FOLDER not in os.environ:
            patch.setenv(connector.FOLDER, str(jars.fetch("connector")))
        session = onceflow.get_session("local[2]", AGEING)  # tests/spark may get it too
    yield session
    session.stop()
