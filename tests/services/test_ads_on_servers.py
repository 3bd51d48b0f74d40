"""The jobs of the reference application on Kafka and PostgreSQL: every output equals the truth."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import ads
from ads import outputs
from ads.aggregation import aggregation
from ads.attribution import attribution
from ads.budget import Budget
from ads.check import check
from ads.feed import Feed
from ads.load import load
from ads.order_service import OrderService
from ads.places import Places
from ads.stream import Stream
from ads.truth import Truth
from ads.world import REGIONS

import onceflow
from onceflow import faults
from onceflow.testing.servers import Kafka, Postgres

pytestmark = pytest.mark.timeout(900)

cloudpickle.register_pickle_by_value(ads)  # workers of the session that is there do not find it


def test_all_outputs_are_exact_on_kafka_and_postgres(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: Any, kafka: Kafka, postgres: Postgres
) -> None:
    secret = tmp_path / "dsn"
    secret.write_text(postgres.dsn)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADS_KAFKA", kafka.servers)
    monkeypatch.setenv("ADS_POSTGRES_FILE", str(secret))
    places = Places.from_environment()
    assert postgres.dsn not in repr(places)
    places.create()
    places.create()  # does no harm
    feed, truth = Feed(places, Stream(seed=12, per_minute=1200)), Truth()
    budget = Budget(places)
    with OrderService() as orders:
        monkeypatch.setenv("ADS_ORDERS", orders.url)
        for last in (False, True):
            truth.add(feed.send(90))
            if last:
                truth.add(feed.close())
            for job in (aggregation, attribution, load):
                if last:
                    faults.arm("epoch.decided", "raise")
                    with pytest.raises(faults.InjectedFault):
                        onceflow.start(job, home="home", spark=spark, once=True).wait()
                    faults.disarm()
                onceflow.start(job, home="home", spark=spark, once=True).wait()
    panes = sum(len(outputs.stream(places, "counts", region)) for region in REGIONS)
    while len(outputs.charges(places)) < panes:
        budget.step()
    budget.close()
    verdict = check(places, truth)
    assert verdict.exact, "\n".join(map(str, verdict.differences[:10]))
    home = b"".join(path.read_bytes() for path in Path("home").rglob("*") if path.is_file())
    assert postgres.dsn.encode() not in home
