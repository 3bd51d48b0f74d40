"""Orders from Kafka, checked and priced: good ones to PostgreSQL and to a topic, bad ones to files.

    python -m examples.orders

starts a broker and a database, sends orders in two halves, runs the job after each, and compares
what is in the targets with what was sent. Against servers of yours:

    export ORDERS_KAFKA=broker:9092 ORDERS_POSTGRES=postgresql://shop@db/shop
    onceflow run examples/orders.py
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

import onceflow
from onceflow import Flow, job
from onceflow.sinks import Files, Postgres
from onceflow.sinks import Kafka as Topic
from onceflow.sources import Kafka

ORDER = "id long, customer string, item string, quantity int"
PRICES = {"coffee": 420, "tea": 350, "cake": 480}  # cents
SENT = 20_000


@job("orders", every="500ms")
def orders(flow: Flow) -> None:
    """Every order is in one decision, whichever targets it goes to."""
    servers, out = os.environ["ORDERS_KAFKA"], Path(os.environ.get("ORDERS_OUT", "out"))
    source = Kafka("orders", servers=servers, value=ORDER, on_bad=Files(out / "unreadable"))
    price = F.create_map(*(F.lit(part) for pair in PRICES.items() for part in pair))
    priced = flow.read("orders", source).withColumn("cents", price[F.col("item")])
    reason = (
        F.when(F.col("id").isNull() | F.col("customer").isNull(), "no id, or no customer")
        .when(F.col("cents").isNull(), "no such item")
        .when(~F.coalesce(F.col("quantity") > 0, F.lit(False)), "no quantity")
    )
    checked = priced.select(
        "id", "customer", "item", "quantity",
        (F.col("cents") * F.col("quantity")).alias("total"),
        reason.alias("reason"),
        F.explode(
            F.when(reason.isNull(), F.array(F.lit("table"), F.lit("topic")))
            .otherwise(F.array(F.lit("rejected")))
        ).alias("outcome"),
    )  # fmt: skip
    targets = {
        "table": Postgres(os.environ["ORDERS_POSTGRES"], table="orders", key="id"),
        "topic": Topic("priced-orders", servers=servers, key="customer",
                       value=["id", "customer", "item", "quantity", "total"]),
        "rejected": Files(out / "rejected"),
    }  # fmt: skip
    flow.write("orders", checked, to=targets, by="outcome")


# ---------------------------------------------------------------- servers, generator and checks


def generate(seed: int, count: int) -> Iterator[dict[str, Any] | bytes]:
    """Orders: some are changed later, some are wrong, some are not JSON."""
    chance = random.Random(seed)
    for number in range(count):
        changed = chance.randrange(number) if number and chance.random() < 0.1 else number
        order: dict[str, Any] = {
            "id": changed,
            "customer": f"customer {chance.randrange(500)}",
            "item": chance.choice(["coffee", "tea", "cake"]),
            "quantity": chance.randint(1, 5),
        }
        match chance.randrange(50):
            case 0:
                order["item"] = "unicorn"
            case 1:
                order["quantity"] = 0
            case 2:
                del order["customer"]
        yield b"{not json" if chance.random() < 0.01 else order


def send(servers: str, sent: list[dict[str, Any] | bytes]) -> None:
    """Changes of one order stay in their order: it is the key, so it has one partition."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    for order in sent:
        key = b"" if isinstance(order, bytes) else str(order["id"]).encode()
        value = order if isinstance(order, bytes) else json.dumps(order).encode()
        producer.produce("orders", value, key=key)
        producer.poll(0)
    producer.flush()


def is_good(order: dict[str, Any] | bytes) -> bool:
    return not isinstance(order, bytes) and (
        "customer" in order and order["item"] in PRICES and order["quantity"] > 0
    )


def with_total(order: dict[str, Any]) -> dict[str, Any]:
    return {**order, "total": PRICES[order["item"]] * order["quantity"]}


def create_topics(servers: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics(
        [NewTopic(t, 3) for t in ("orders", "priced-orders")]
    ).values():
        future.result()


def read_topic(servers: str) -> list[dict[str, Any]]:
    """All messages that a `read_committed` consumer sees."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": servers, "group.id": "check", "enable.partition.eof": True}
    consumer = Consumer({**settings, "isolation.level": "read_committed"})
    consumer.assign([TopicPartition("priced-orders", partition, 0) for partition in range(3)])
    found, ended = [], 0
    while ended < 3:
        message = consumer.poll(30)
        if message is None:
            raise TimeoutError("the topic has no end")
        if message.error():
            ended += 1
        else:
            found.append(json.loads(message.value()))
    consumer.close()
    return found


def read_table(dsn: str) -> list[dict[str, Any]]:
    import psycopg
    from psycopg.rows import dict_row

    with psycopg.connect(dsn, row_factory=dict_row) as db:
        query = "SELECT id, customer, item, quantity, total FROM orders"
        return list(db.execute(query).fetchall())


def as_set(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(row, sort_keys=True) for row in rows)


def difference(name: str, found: list[dict[str, Any]], sent: list[dict[str, Any]]) -> int:
    lost, more = as_set(sent) - as_set(found), as_set(found) - as_set(sent)
    print(f"{name:12} {len(found):7,} rows, lost {lost.total()}, too many {more.total()}")  # noqa: T201
    return lost.total() + more.total()


def main() -> int:
    from onceflow.spark import jars
    from onceflow.testing.servers import Kafka as Broker
    from onceflow.testing.servers import Postgres as Database

    if "ONCEFLOW_JARS" not in os.environ:
        os.environ["ONCEFLOW_JARS"] = str(jars.fetch("connector"))
    sent = list(generate(seed=7, count=SENT))
    good = [order for order in sent if isinstance(order, dict) and is_good(order)]
    latest = {order["id"]: with_total(order) for order in good}
    with (
        tempfile.TemporaryDirectory() as folder,
        Broker(Path(folder, "kafka")) as broker,
        Database(Path(folder, "postgres")) as database,
    ):
        os.environ.update(
            ORDERS_KAFKA=broker.servers, ORDERS_POSTGRES=database.dsn, ORDERS_OUT=f"{folder}/out"
        )
        create_topics(broker.servers)
        for part in (sent[: SENT // 2], sent[SENT // 2 :]):
            send(broker.servers, part)
            started = time.monotonic()
            onceflow.start(orders, home=f"{folder}/home", once=True).wait()
            print(f"{len(part):,} orders in {time.monotonic() - started:.1f} s")  # noqa: T201
        spark = onceflow.get_session()
        rejected = Files.read(spark, f"{folder}/out/rejected").count()
        unreadable = Files.read(spark, f"{folder}/out/unreadable").count()
        wrong = difference("PostgreSQL", read_table(database.dsn), list(latest.values()))
        wrong += difference("topic", read_topic(broker.servers), [with_total(o) for o in good])
        bad = sum(isinstance(order, bytes) for order in sent)
        print(f"{'rejected':12} {rejected:7,} rows, unreadable {unreadable}")  # noqa: T201
        wrong += abs(unreadable - bad) + abs(rejected - (SENT - len(good) - bad))
    print("all are exact" if not wrong else "NOT EXACT")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
