"""The jobs of the reference application, embedded: every output equals the truth, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import ads
from ads import outputs
from ads.aggregation import aggregation, uuid5
from ads.attribution import attribution
from ads.budget import Budget, campaigns
from ads.check import check
from ads.feed import Feed
from ads.generator import Line, table
from ads.load import load
from ads.order_service import OrderService
from ads.places import Places
from ads.stream import Stream
from ads.truth import Truth
from ads.world import (
    ADS,
    BEGIN,
    FIELD_MISSING,
    FIELD_TOO_LONG,
    NAMESPACE,
    NOT_A_TIME,
    NOT_JSON,
    NULL_CHARACTER,
)

import onceflow
from onceflow import faults
from onceflow.log import EmbeddedLog

pytestmark = pytest.mark.timeout(600)

cloudpickle.register_pickle_by_value(ads)  # workers of the session that is there do not find it

JOBS = {job.name: job for job in (aggregation, attribution, load)}


class Application:
    """All of it in one folder: what was sent, and the jobs, one life after the other."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.places, self._spark = Places(folder), spark
        self.places.create()
        self._feed = Feed(self.places, Stream(seed=9, per_minute=1500))
        self._truth = Truth()

    def send(self, chunks: int) -> None:
        self._truth.add(self._feed.send(chunks))

    def close(self) -> None:
        """What comes last is about nothing that is still open, so all orders are answered."""
        self._truth.add(self._feed.close())

    def live(self, job: str) -> None:
        """A start, and all that is there to do."""
        onceflow.start(JOBS[job], home="home", spark=self._spark, once=True).wait()

    def die(self, job: str, fault: str) -> None:
        """A start in a process of its own, which is killed at the fault."""
        quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        child = subprocess.run(
            [sys.executable, __file__, job],
            env={**os.environ, "ONCEFLOW_FAULT": fault, "JDK_JAVA_OPTIONS": quick},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr

    def charge(self) -> None:
        budget = Budget(self.places)
        while budget.step():
            pass
        budget.close()

    def check(self, *parts: str) -> None:
        verdict = check(self.places, self._truth, parts=parts or None)
        assert verdict.exact, "\n".join(map(str, verdict.differences[:10]))
        assert verdict.compared


@pytest.fixture
def orders() -> Iterator[OrderService]:
    with OrderService(failing=0.1) as service:
        yield service


@pytest.fixture
def application(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession, orders: OrderService
) -> Application:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADS_ORDERS", orders.url)
    for name in ("ADS_KAFKA", "ADS_POSTGRES_FILE"):
        monkeypatch.delenv(name, raising=False)
    return Application(Path(), spark)


def test_all_outputs_are_exact_over_several_starts(
    application: Application, orders: OrderService
) -> None:
    for last in (False, True):
        application.send(120)
        if last:
            application.close()
        for job in JOBS:
            application.live(job)
        application.charge()
        application.check("events", "rejected", "counts", "charges")
    application.check()
    assert set(orders.asked.values()) == {1}


@pytest.mark.kill
def test_jobs_that_die_before_and_after_a_decision_leave_no_trace(application: Application) -> None:
    application.send(100)
    application.die("aggregation", "epoch.staged:kill:1")
    application.send(30)
    application.die("aggregation", "epoch.output-published:kill:2")
    application.charge()  # what is committed by now, and no more
    application.send(30)
    application.close()
    for job, points in {
        "aggregation": ("epoch.hardened",),
        "attribution": ("keyed.ran", "epoch.hardened", "epoch.decided"),
        "load": ("epoch.decided", "epoch.output-published"),
    }.items():
        for point in points:
            faults.arm(point, "raise")
            with pytest.raises(faults.InjectedFault):
                application.live(job)
            faults.disarm()
        application.live(job)
        application.charge()
    application.check()


def test_a_line_may_say_anything_and_stops_nobody(application: Application) -> None:
    click = {
        "id": "c", "kind": "click", "at": "2026-03-02T11:00:00Z", "user": "eu-001",
        "restaurant": "restaurant-01", "ad": "ad-01",
    }  # fmt: skip
    order = click | {"kind": "order", "ad": "ad-99", "order": "o"}  # an ad that nobody has
    clicks = [click | {"id": f"{p}/{offset}"} for p in (0, 1) for offset in range(20)]
    text = json.dumps(click | {"id": "bad"})
    rejected = {
        **{text + behind: NOT_JSON for behind in (text, "x", "]", "}", ",5]", "],{}", "],[{}")},
        **{
            json.dumps(click | {"id": f"bad {at}", "at": at}): NOT_A_TIME
            for at in ("11:00:00", "-290308-12-21T19:59:30Z", "+294247-01-10T04:00:54Z")
        },
        **{text.replace('"bad"', number): NOT_JSON for number in ("NaN", "-INF", "Infinity")},
        json.dumps(click | {"user": "a\0b"}): NULL_CHARACTER,
        json.dumps(click | {"id": ""}): FIELD_MISSING + "id",
        json.dumps(order | {"order": ""}): FIELD_MISSING + "order",
        json.dumps(order | {"order": "o" * 201}): FIELD_TOO_LONG + "order",
        json.dumps(click | {"order": "o" * 201}): FIELD_TOO_LONG + "order",
        json.dumps(click | {"user": "\U0001d538" * 201}): FIELD_TOO_LONG + "user",
    }
    endless = '"' * 600_000
    orders = [order | {"id": "o1"}, order | {"id": "o2"}]  # one order, told twice
    texts = [*rejected, endless, *map(json.dumps, clicks), *map(json.dumps, orders)]
    lines = [Line(text, BEGIN, None, None, False) for text in texts]
    EmbeddedLog(application.places.log("raw", "eu")).append(table(lines))
    for job in JOBS:
        application.live(job)
    application.charge()

    def found(stream: str) -> list[dict[str, Any]]:
        return outputs.stream(application.places, stream, "eu")

    assert {row["value"]: row["reason"] for row in found("rejected")} == {
        **rejected,
        endless[:100_000]: NOT_JSON,
    }
    events = {row["id"] for row in found("events")}
    assert events - {"o1", "o2"} == {event["id"] for event in clicks}
    assert len(events) == len(clicks) + 1
    assert [(row["ad"], row["clicks"]) for row in found("counts")] == [("ad-01", len(clicks))]
    charged = {one.campaign: one.clicks for one in campaigns(application.places)}
    assert charged[ADS["ad-01"].campaign] == sum(charged.values()) == len(clicks)


def test_an_id_in_sql_is_the_one_of_python(spark: SparkSession) -> None:
    names = [
        "",
        "a",
        "aggregation/eu/ad-01/2026-03-02T11:00:00Z/17",
        "Žofie 😀",
        *map(str, range(99)),
    ]
    rows = spark.createDataFrame([(name,) for name in names], "name string")
    found = rows.selectExpr("name", f"{uuid5(NAMESPACE, 'name')} as id").collect()
    assert {row.name: row.id for row in found} == {n: str(uuid.uuid5(NAMESPACE, n)) for n in names}


def main(job: str) -> None:
    os.environ["PYTHONPATH"] = sys.path[0]
    faults.arm_from_environment()
    onceflow.start(JOBS[job], home="home", master="local[1]", once=True).wait()


if __name__ == "__main__":
    main(sys.argv[1])
