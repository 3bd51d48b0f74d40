"""The PostgreSQL sink as far as it goes without a server."""

from __future__ import annotations

import json
import sys
from operator import attrgetter
from typing import Any

import pytest

from onceflow.contract.schema import parse_schema
from onceflow.errors import JobError, PublishFailed, SetupError
from onceflow.jobs.flow import targets
from onceflow.postgres.connection import Server
from onceflow.postgres.values import postgres_type
from onceflow.protocol.query_spec import QuerySpec
from onceflow.sinks import Postgres, open_target

SECRETS = (
    "postgresql://me:open-sesame@host:5432/shop",
    "host=host dbname=shop user=me password=open-sesame",
    "host=host dbname=shop sslkey=me.key sslpassword=open-sesame",
)


def test_two_tables_are_one_target_only_in_the_same_schema_of_the_same_database() -> None:
    def place(dsn: str, schema: str = "public") -> tuple[str, ...]:
        sink = Postgres(f"host=host dbname={dsn} password=x", table="orders", schema=schema)
        return targets(QuerySpec(df=None, outputs={"a": sink}))[0]

    assert place("shop") == place("shop")
    assert len({place("shop"), place("crm"), place("shop", "archive")}) == 3


@pytest.mark.parametrize("dsn", SECRETS)
def test_a_password_is_shown_nowhere(dsn: str) -> None:
    sink = Postgres(dsn, table="orders")
    told = f"{sink} {sink!r} {json.dumps(sink.describe())} {sink._server!r}"
    assert "sesame" not in told
    assert "host=host" in told
    assert "public.orders" in str(sink)


def test_a_target_is_found_again() -> None:
    sink = Postgres(SECRETS[0], table="orders", schema="sales", key=["id", "at"])
    found = open_target(json.loads(json.dumps(sink.describe())))
    assert isinstance(found, Postgres)
    assert (str(found), found.describe()) == (str(sink), sink.describe())


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SetupError, match="psycopg") as refused:
        Postgres(table="orders")
    assert refused.value.hint == "pip install 'onceflow[postgres]'"


@pytest.mark.parametrize("name", ["", "1st", "_onceflow_ledger", 'a"b', "x" * 64])
def test_names_that_are_none_are_refused(name: str) -> None:
    for settings in ({"table": name}, {"table": "t", "schema": name}):
        with pytest.raises(JobError, match="is not a name"):
            Postgres(**settings)


def test_a_server_that_is_not_there_is_tried_again_until_it_is() -> None:
    with pytest.raises(PublishFailed, match="cannot connect") as failed:
        Postgres("host=127.0.0.1 port=1 connect_timeout=2", table="t").published("a/b/c")
    assert failed.value.retryable
    assert failed.value.away


@pytest.mark.parametrize(
    ("kind", "away"),
    [
        ("OperationalError", True),  # the connection is lost: there is no code
        ("errors.AdminShutdown", True),
        ("errors.TooManyConnections", True),
        ("errors.DiskFull", False),
        ("errors.LockNotAvailable", False),
        ("errors.QueryCanceled", False),
        ("DataError", False),
    ],
)
def test_only_a_server_that_is_away_is_waited_for_without_end(kind: str, away: bool) -> None:
    import psycopg

    raised = attrgetter(kind)(psycopg)("it says so")
    told = Server("host=h", table="t", seconds=1).translate(raised)
    assert (told.retryable, told.away) == (True, away)


@pytest.mark.parametrize(
    ("columns", "kinds"),
    [
        ("a byte, b short, c integer, d long", ["smallint", "smallint", "integer", "bigint"]),
        ("a decimal(20,4), b array<decimal(3,0)>", ["numeric(20,4)", "numeric(3,0)[]"]),
        ("a array<array<long>>, b map<date, binary>, c array<struct<x: long>>", ["jsonb"] * 3),
        ("a timestamp, b timestamp_ntz", ["timestamp with time zone",
                                          "timestamp without time zone"]),
    ],
)  # fmt: skip
def test_types_of_spark_have_one_in_postgresql(columns: str, kinds: list[str]) -> None:
    fields = json.loads(parse_schema(columns))["fields"]
    assert [postgres_type(field["type"]) for field in fields] == kinds


@pytest.mark.parametrize(
    "kind",
    ["interval day to second", "void", {"type": "array", "elementType": "variant"},
     {"type": "struct", "fields": [{"name": "x", "type": "void"}]}],
)  # fmt: skip
def test_types_that_postgresql_does_not_have_have_none(kind: Any) -> None:
    assert postgres_type(kind) is None
