"""The reference application's own clients of Kafka and PostgreSQL: feed, budget, answers, check."""

from __future__ import annotations

import contextlib
import json
import sys
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from ads import outputs
from ads.answers import Answers
from ads.budget import Budget, campaigns
from ads.feed import Feed, Lines, RawTopics
from ads.order_service import OrderService
from ads.places import Places
from ads.stream import Stream
from ads.world import ADS, BUDGETS, PARTITIONS, REGIONS, count_id

from onceflow.errors import JobError, ServerSilent
from onceflow.testing.servers import Kafka, Postgres


@dataclass(frozen=True)
class OwnPlaces(Places):
    """Topics that no other test has."""

    prefix: str = ""

    def topic(self, stream: str, region: str) -> str:
        return f"{self.prefix}.{super().topic(stream, region)}"


@pytest.fixture
def places(tmp_path: Path, kafka: Kafka) -> OwnPlaces:
    own = OwnPlaces(tmp_path, kafka=kafka.servers, prefix=uuid.uuid4().hex[:8])
    own.create()
    return own


class DiedError(BaseException):
    pass


def test_a_feed_that_dies_around_its_commit_sends_each_line_once(
    places: OwnPlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DyingProducer:
        """Everything a producer does, until the commit."""

        def __init__(self, producer: Any, *, commits: bool) -> None:
            self._producer, self._commits = producer, commits

        def __getattr__(self, name: str) -> Any:
            return getattr(self._producer, name)

        def commit_transaction(self, *args: Any) -> None:
            self._producer.flush()
            if self._commits:
                self._producer.commit_transaction(*args)
            raise DiedError

    asked_for = Stream(seed=6, per_minute=600)
    feed = Feed(places, asked_for)
    feed.send(10)
    for commits in (False, True):
        topics = feed._raw
        assert isinstance(topics, RawTopics)
        monkeypatch.setattr(topics, "_producer", DyingProducer(topics._producer, commits=commits))
        with pytest.raises(DiedError):
            feed.send(10)
        feed = Feed(places, asked_for)
        feed.send(5)
    feed.close()
    assert feed.stream.chunks == 40

    truth: Counter[Any] = Counter()
    for lines in feed.stream.lines():
        truth.update(texts(lines))
    found: Counter[Any] = Counter()
    for region in REGIONS:
        latest = [0] * PARTITIONS
        for message in messages(places, places.topic("raw", region), truth_of(truth, region)):
            when = message.timestamp()[1]
            assert when >= latest[message.partition()]
            latest[message.partition()] = when
            found[region, message.value().decode(), when] += 1
        assert all(latest)
        assert max(latest) - min(latest) < 1000  # closing lines are in every partition
    assert found == truth


def texts(lines: Lines) -> list[tuple[str, str, int]]:
    return [
        (region, line.value, round(line.received.timestamp() * 1000))
        for region, some in lines.items()
        for line in some
    ]


def truth_of(truth: Counter[Any], region: str) -> int:
    return sum(n for (where, *_), n in truth.items() if where == region)


def messages(places: Places, topic: str, at_least: int) -> list[Any]:
    consumer = Consumer(
        {
            "bootstrap.servers": places.kafka,
            "group.id": "test",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    with closing(consumer):
        consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
        found: list[Any] = []
        ended: set[int] = set()
        while len(ended) < PARTITIONS:
            message = consumer.poll(30)
            assert message is not None
            if message.error():
                ended.add(message.partition())
            else:
                found.append(message)
    assert len(found) >= at_least
    return found


def panes(number: int, region: str) -> list[dict[str, Any]]:
    minute = datetime(2026, 3, 2, 11, number, tzinfo=UTC)
    return [
        {
            "record_id": count_id(region, ad.name, minute, number),
            "region": region,
            "ad": ad.name,
            "campaign": ad.campaign,
            "minute": minute.isoformat().replace("+00:00", "Z"),
            "pane": number,
            "impressions": 9,
            "clicks": number + 1,
        }
        for ad in ADS.values()
    ]


def test_committed_panes_are_charged_once_and_others_never(places: OwnPlaces) -> None:
    producer = Producer({"bootstrap.servers": places.kafka, "transactional.id": places.prefix})
    producer.init_transactions(60)
    spend = dict.fromkeys(BUDGETS, 0)
    budget = Budget(places)
    assert budget.step() == 0
    for number in range(8):
        producer.begin_transaction()
        for region in REGIONS:
            for pane in panes(number, region):
                producer.produce(places.topic("counts", region), json.dumps(pane))
                if number % 4 != 3:
                    spend[pane["campaign"]] += pane["clicks"] * ADS[pane["ad"]].price_micros
        if number % 4 == 3:
            producer.flush()
            producer.abort_transaction(60)
        else:
            producer.commit_transaction(60)
        if number == 4:  # another life, from what is in its database
            drain(budget, 4 * 2 * len(ADS))
            budget.close()
            budget = Budget(places)
        if number == 5:  # it is read again
            budget._db.execute("DELETE FROM progress")
    drain(budget, 6 * 2 * len(ADS))
    budget.close()
    assert {each.campaign: each.spent_micros for each in campaigns(places)} == spend
    read = [row for region in REGIONS for row in outputs.stream(places, "counts", region)]
    assert len(read) == 6 * 2 * len(ADS)
    assert {row["minute"] - timedelta(minutes=row["pane"]) for row in read} == {
        datetime(2026, 3, 2, 11, tzinfo=UTC)
    }


def published(places: OwnPlaces, numbers: range) -> int:
    """Panes of these epochs, each a transaction; how many there are."""
    producer = Producer({"bootstrap.servers": places.kafka, "transactional.id": places.prefix})
    producer.init_transactions(60)
    for number in numbers:
        producer.begin_transaction()
        for region in REGIONS:
            for pane in panes(number, region):
                producer.produce(places.topic("counts", region), json.dumps(pane))
        producer.commit_transaction(60)
    return len(numbers) * len(REGIONS) * len(ADS)


def charges(places: OwnPlaces) -> int:
    return len(outputs.charges(places))


def test_all_that_is_committed_is_charged_by_one_who_comes_and_goes(places: OwnPlaces) -> None:
    with closing(Budget(places)) as budget:
        budget.catch_up()  # nothing is there, and it ends
    first = published(places, range(3))
    with closing(Budget(places)) as budget:
        budget.catch_up()
        assert charges(places) == first
        more = published(places, range(3, 5))
        budget.catch_up()
    assert charges(places) == first + more


def test_what_a_failed_step_has_read_is_read_again(
    places: OwnPlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Budget(places)) as budget:
        wanted = published(places, range(2))
        read, failures = budget._panes._messages, iter(range(2))

        def fails_after_reading() -> Any:
            found = [message for message in read() if not message.error()]
            if found and next(failures, None) is not None:
                raise ServerSilent("the connection is gone", hint="")
            return found

        monkeypatch.setattr(budget._panes, "_messages", fails_after_reading)
        while charges(places) < wanted:
            with contextlib.suppress(ServerSilent):
                budget.step()
        assert next(failures, None) is None


def test_topics_that_were_made_anew_are_not_charged_on(places: OwnPlaces) -> None:
    wanted = published(places, range(2))
    with closing(Budget(places)) as budget:
        budget.catch_up()
    admin, topic = AdminClient({"bootstrap.servers": places.kafka}), places.topic("counts", "eu")
    admin.delete_topics([topic])[topic].result()
    while topic in admin.list_topics(timeout=30).topics:
        pass
    places.create()
    with pytest.raises(JobError, match="is not the one that was charged from"):
        Budget(places)
    assert charges(places) == wanted


def drain(budget: Budget, charges: int) -> None:
    """Until so many are charged, and nothing more is there."""
    while budget.step() or len(budget._db.execute("SELECT 1 FROM charges").fetchall()) < charges:
        pass


def test_the_first_answer_is_the_one_in_postgres_too(postgres: Postgres) -> None:
    schema = f"ads_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(postgres.dsn) as db:
        db.execute(f"CREATE SCHEMA {schema}")
    dsn = psycopg.conninfo.make_conninfo(postgres.dsn, options=f"-c search_path={schema}")
    orders = [f"order-1-{number}" for number in range(300)]
    with OrderService(slow=0.05) as service:
        answers = Answers(dsn, service.url)
        assert dsn not in repr(answers)
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(answers.of, [orders] * 6))
        assert all(each == found[0] for each in found)
    assert answers.of(orders) == found[0]
    staged = outputs.answers(Places(dsn=dsn))
    assert {row["order_id"]: row["answer_id"] for row in staged} == {
        order: answer.answer_id for order, answer in found[0].items()
    }
