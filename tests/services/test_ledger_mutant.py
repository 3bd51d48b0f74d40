"""A ledger that is compared by the number of the epoch only: no run of `onceflow verify` has two
decisions of one epoch, so the contract of sinks is what finds it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_kafka_contract
import test_postgres_contract

import mutants
from onceflow.testing import SinkContract
from onceflow.testing.servers import Kafka, Postgres

STORIES = {
    "another decision": SinkContract.test_another_decision_of_the_same_epoch_is_refused,
    "another lineage": SinkContract.test_an_epoch_of_another_lineage_is_refused,
}


@pytest.fixture
def _mutant() -> Iterator[None]:
    with mutants.installed("ledger-compared-by-number-only"):
        yield


@pytest.fixture(params=["kafka", "postgres"])
def contract(
    request: pytest.FixtureRequest, tmp_path: Path, kafka: Kafka, postgres: Postgres
) -> SinkContract:
    found: SinkContract
    if request.param == "kafka":
        found = of_kafka = test_kafka_contract.TestKafka()
        of_kafka.servers = kafka.servers
    else:
        found = of_postgres = test_postgres_contract.TestPostgres()
        of_postgres.dsn = postgres.dsn
    found.begin(tmp_path, None)
    return found


@pytest.mark.usefixtures("_mutant")
@pytest.mark.parametrize("story", STORIES)
def test_a_ledger_compared_by_number_only_breaks_the_contract(
    contract: SinkContract, story: str
) -> None:
    told: Callable[[SinkContract], None] = STORIES[story]
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        told(contract)
