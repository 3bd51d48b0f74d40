"""The Kafka sink, held to the contract that anybody's sink is held to."""

from __future__ import annotations

import base64
import json
import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from topics import message_rows, topic_exists

from onceflow.sinks import Kafka, Sink
from onceflow.testing import SinkContract

_FORMS: dict[str, Any] = {
    "amount": lambda text: Decimal(str(text)),
    "day": date.fromisoformat,
    "at": lambda text: datetime.fromisoformat(text).astimezone(UTC),
    "data": base64.b64decode,
}


class TestKafka(SinkContract):
    tries = 1000 if os.environ.get("ONCEFLOW_TEST_ALL") else 8
    secret = "a password that nobody may read"
    servers = ""

    @pytest.fixture(autouse=True)
    def _broker(self, kafka: Any) -> None:
        self.servers = kafka.servers

    modes = ("append",)

    def make_sink(self, folder: Path) -> Sink:
        return Kafka(folder.name, servers=self.servers, create={"partitions": 1},
                     settings={"ssl.key.password": self.secret})  # fmt: skip

    def has_target(self, folder: Path) -> bool:
        names = (folder.name, f"{folder.name}-onceflow-ledger")
        return any(topic_exists(self.servers, name) for name in names)

    def read_rows(self, folder: Path) -> list[dict[str, Any]]:
        found = message_rows(self.servers, folder.name)
        return [_row(message.value) for message in found]


class TestKafkaWithKey(TestKafka):
    modes = ("append", "update")

    def make_sink(self, folder: Path) -> Sink:
        return Kafka(folder.name, servers=self.servers, key="id", create={"partitions": 3})

    def read_rows(self, folder: Path) -> list[dict[str, Any]]:
        found = message_rows(self.servers, folder.name)
        return [{"id": int(message.key), **_row(message.value)} for message in found]

    def read_latest(self, folder: Path) -> list[dict[str, Any]]:
        return list({row["id"]: row for row in self.read_rows(folder)}.values())


class Everywhere(Kafka):
    few_rows = 0  # also the smallest epoch is spread over all slots


class TestKafkaTwoSlots(TestKafka):
    """Each slot is atomic, an epoch is not: a part of one is not yet what the ledger says."""

    test_a_reader_sees_whole_epochs_and_none_of_them_goes = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _by_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("onceflow.kafka.sink._session", lambda: None)

    def make_sink(self, folder: Path) -> Sink:
        return Everywhere(folder.name, servers=self.servers, slots=2, create={"partitions": 1})

    def read_epochs(self, folder: Path) -> list[dict[str, Any]]:
        at = self.ledger().position
        return [row for row in self.read_rows(folder) if at and row["id"] // 10_000 <= at.epoch]


def _row(value: bytes) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(value, parse_float=Number)
    return {
        name: field if field is None else _FORMS.get(name, lambda value: value)(field)
        for name, field in row.items()
    }


class Number(float):
    """Decimals keep the digits that they were written with."""

    def __new__(cls, text: str) -> Number:
        found = super().__new__(cls, text)
        found.text = text
        return found

    text: str

    def __str__(self) -> str:
        return self.text
