"""The messages on a connection: their sizes, and which answer belongs to which request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

_ENCRYPTION = {80877103, 80877104}  # SSLRequest and GSSENCRequest of PostgreSQL
_END_TXN = 26  # the key of this request in Kafka's protocol


class Wire(Protocol):
    """The messages of one connection. A size is 0 while the message is not complete."""

    def request_size(self, data: bytearray) -> int:
        """The size of the first message in the data of the client."""

    def answer_size(self, data: bytearray) -> int:
        """The size of the first message in the data of the server."""

    def answers(self, message: bytes, request: bytes) -> bool:
        """Is this message of the server the answer to this request?"""


class KafkaWire:
    """Size, then (request) key, version, correlation id, or (answer) correlation id."""

    def request_size(self, data: bytearray) -> int:
        return _whole(data, 4 + _number(data[:4])) if len(data) >= 4 else 0

    answer_size = request_size

    def answers(self, message: bytes, request: bytes) -> bool:
        return message[4:8] == request[8:12]


class PostgresWire:
    """Type and size; but no type before the start-up message, and one byte in answer to a request
    for encryption. If the server agrees to encrypt, the messages cannot be read."""

    def __init__(self) -> None:
        self._started = False
        self._questions = 0

    def request_size(self, data: bytearray) -> int:
        if self._started:
            return _whole(data, 1 + _number(data[1:5])) if len(data) >= 5 else 0
        size = _whole(data, _number(data[:4])) if len(data) >= 8 else 0
        if size and _number(data[4:8]) in _ENCRYPTION:
            self._questions += 1
        elif size:
            self._started = True
        return size

    def answer_size(self, data: bytearray) -> int:
        if self._questions and data:
            self._questions -= 1
            return 1
        return _whole(data, 1 + _number(data[1:5])) if len(data) >= 5 else 0

    def answers(self, message: bytes, request: bytes) -> bool:
        return message[:1] == b"C" and b"COMMIT" in message  # CommandComplete


def end_txn(request: bytes) -> bool:
    """`commit_transaction` or `abort_transaction` of a Kafka producer."""
    return _number(request[4:6]) == _END_TXN


def commit(request: bytes) -> bool:
    """COMMIT, as a simple query or as a statement that is parsed."""
    return request[:1] in (b"Q", b"P") and b"COMMIT" in request.upper()


def messages(buffer: bytearray, size_of: Callable[[bytearray], int]) -> list[bytes]:
    """Remove the complete messages from the buffer, and return them."""
    found = []
    while size := size_of(buffer):
        found.append(bytes(buffer[:size]))
        del buffer[:size]
    return found


def _number(data: bytes | bytearray) -> int:
    return int.from_bytes(data, "big")


def _whole(data: bytearray, size: int) -> int:
    return size if len(data) >= size else 0
