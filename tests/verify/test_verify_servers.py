"""`onceflow verify` with Kafka and PostgreSQL: servers that break, and wrong protocols."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from baits import SERVER_BAITS, first_seed
from confluent_kafka.admin import AdminClient

from onceflow.harness import fault_schedule
from onceflow.harness.drivers import Drivers
from onceflow.harness.fault_schedule import Fault
from onceflow.harness.result import Result
from onceflow.harness.server_targets import LEDGER
from onceflow.harness.servers import Servers
from onceflow.harness.verification import Settings, Verification, connector_settings

pytestmark = [pytest.mark.kill, pytest.mark.timeout(1800)]
KINDS = (*fault_schedule.SERVERS, "kill-point", "zombie")


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    folder = tmp_path_factory.mktemp("drivers")
    with closing(Drivers(folder, "local[2,4]", connector_settings())) as found:
        yield found


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("servers"), ("kafka", "postgres")) as found:
        yield found


def run(settings: Settings, drivers: Drivers, servers: Servers) -> Result:
    result = Verification(settings, lambda _: None, drivers, servers).run()
    print(
        *result.faults, *result.violations, *result.unknown, result.as_json()["seconds"], sep="\n"
    )
    return result


def test_servers_are_broken_twelve_times_and_every_row_is_there_once(
    tmp_path: Path, drivers: Drivers, servers: Servers
) -> None:
    def fits(faults: list[Fault]) -> bool:
        lost = {fault.file for fault in faults if fault.kind == "lost-answer"}
        return {fault.kind for fault in faults} >= {*KINDS} and lost == {"kafka", "postgres"}

    seed = first_seed(fits, [("files", "kafka", "postgres"), ("kafka",)], count=12, kinds=KINDS)
    settings = Settings(
        folder=tmp_path / "run", seed=seed, faults=12, kinds=KINDS,
        cases=(("several", "servers"), ("topic", "kafka")),
    )  # fmt: skip
    result = run(settings, drivers, servers)
    assert result.verdict == "valid"
    struck = {fault["kind"] for fault in result.faults if fault["hit"]}
    assert struck >= set(fault_schedule.SERVERS), "every kind of fault that a server can have"
    assert all(case.polls > 5 for case in result.cases), "a reader read through it all"


def test_servers_of_ones_own_are_not_broken_and_keep_nothing(
    tmp_path: Path, drivers: Drivers, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert servers.kafka is not None
    assert servers.postgres is not None
    monkeypatch.setenv("ONCEFLOW_KAFKA", servers.kafka.servers)
    monkeypatch.setenv("ONCEFLOW_POSTGRES", servers.postgres.dsn)
    settings = Settings(
        folder=tmp_path / "run", seed=1, faults=2, kinds=(*KINDS, "raise-point"),
        cases=(("several", "servers"),),
    )  # fmt: skip
    with Servers(tmp_path, ("kafka", "postgres")) as given:
        result = run(settings, drivers, given)
        assert topics(given) == {f"{place}{end}" for place in given.places for end in ("", LEDGER)}
    assert result.verdict == "valid"
    said = "\n".join(result.left_out)
    assert all(f"{kind}: ONCEFLOW_" in said for kind in fault_schedule.BREAK_SERVERS)
    assert servers.kafka.pid() is not None, "it runs on"
    while topics(given):  # the broker has been told, and forgets them one after the other
        pass
    with psycopg.connect(servers.postgres.dsn) as db:
        names = [name for (name,) in db.execute("SELECT nspname FROM pg_namespace")]
        assert not set(names) & set(given.places)


def topics(servers: Servers) -> set[str]:
    """Those of its places."""
    assert servers.kafka is not None
    admin = AdminClient({"bootstrap.servers": servers.kafka.servers})
    return {t for t in admin.list_topics(timeout=30).topics if t.startswith(tuple(servers.places))}


@pytest.mark.parametrize("mutant", SERVER_BAITS)
def test_a_mutant_is_invalid(
    tmp_path: Path, drivers: Drivers, servers: Servers, mutant: str
) -> None:
    bait = SERVER_BAITS[mutant]
    result = run(bait.settings(tmp_path / "run", mutant), drivers, servers)
    assert result.verdict == "invalid"
    assert bait.caught({violation.kind for violation in result.violations})
