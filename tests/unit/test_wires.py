"""Messages on the wire are told apart however the network cuts them, and answers find requests."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from onceflow.testing.servers.wires import KafkaWire, PostgresWire, commit, end_txn, messages


def kafka_message(*fields: bytes) -> bytes:
    body = b"".join(fields)
    return struct.pack(">i", len(body)) + body


def kafka_request(key: int, correlation: int) -> bytes:
    return kafka_message(struct.pack(">hhi", key, 5, correlation), b"body")


def postgres_message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">i", 4 + len(body)) + body


def in_pieces(stream: bytes, size: int, size_of: Callable[[bytearray], int]) -> list[bytes]:
    buffer, found = bytearray(), []
    for start in range(0, len(stream), size):
        buffer += stream[start : start + size]
        found += messages(buffer, size_of)
    assert not buffer
    return found


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_kafka_is_understood_in_pieces_of_any_size(size: int) -> None:
    said = [kafka_request(0, 1), kafka_request(26, 2), kafka_message(b"\0\0\0\2")]
    assert in_pieces(b"".join(said), size, KafkaWire().request_size) == said


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_postgres_is_understood_from_its_start_on(size: int) -> None:
    wire = PostgresWire()
    asked = [struct.pack(">ii", 8, 80877104), struct.pack(">ii", 8, 80877103),
             struct.pack(">ii", 13, 196608) + b"user\0", postgres_message(b"p", b"secret"),
             postgres_message(b"Q", b"COMMIT\0")]  # fmt: skip
    told = [b"N", b"N", postgres_message(b"R", b"\0\0\0\0"), postgres_message(b"N", b"a notice"),
            postgres_message(b"C", b"COMMIT\0")]  # fmt: skip
    assert in_pieces(b"".join(asked), size, wire.request_size) == asked
    assert in_pieces(b"".join(told), size, wire.answer_size) == told


def test_the_answer_of_kafka_has_the_number_of_its_request() -> None:
    wire, request = KafkaWire(), kafka_request(26, 7)
    assert wire.answers(kafka_message(b"\0\0\0\7", b"more"), request)
    assert not wire.answers(kafka_message(b"\0\0\0\6", b"\0\0\0\7"), request)


def test_the_answer_to_a_commit_says_so() -> None:
    wire, request = PostgresWire(), postgres_message(b"Q", b"COMMIT\0")
    assert wire.answers(postgres_message(b"C", b"COMMIT\0"), request)
    assert not wire.answers(postgres_message(b"C", b"INSERT 0 1\0"), request)
    assert not wire.answers(postgres_message(b"D", b"COMMIT\0"), request)


def test_only_the_requests_that_are_meant_are_meant() -> None:
    assert end_txn(kafka_request(26, 1))
    assert not any(end_txn(kafka_request(key, 26)) for key in range(90) if key != 26)
    assert commit(postgres_message(b"Q", b"commit\0"))
    assert commit(postgres_message(b"P", b"\0COMMIT\0\0\0"))
    assert not commit(postgres_message(b"Q", b"BEGIN\0"))
    assert not commit(postgres_message(b"d", b"a row that says COMMIT"))
