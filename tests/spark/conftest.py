"""One Spark session serves all tests that need one."""

from collections.abc import Iterator
from typing import Any

import pytest

import onceflow
from onceflow.spark.session import AGEING


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    session = onceflow.get_session("local[2]", AGEING)
    yield session
    session.stop()
