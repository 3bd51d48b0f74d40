"""A loopback proxy before a server: it cuts connections, and loses answers to finished requests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onceflow.testing.servers.process import HOST
from onceflow.testing.servers.wires import Wire, messages

_CHUNK = 1 << 16
_ENDS_WITHIN = 10.0  # seconds


@dataclass
class Lost:
    """Requests whose answers are lost. `count`: how many answers of the server were lost."""

    is_meant: Callable[[bytes], bool]
    count: int = 0


class Proxy:
    """Forwards connections to `port` (any free one) to the server at `to`."""

    def __init__(self, to: int, wire: Callable[[], Wire], *, port: int = 0) -> None:
        self._to, self._wire = to, wire
        self._lock = threading.Lock()
        self._losses: list[Lost] = []
        self._connections: set[_Connection] = set()
        self._listener = socket.create_server((HOST, port))
        self.port = int(self._listener.getsockname()[1])
        self.address = f"{HOST}:{self.port}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._thread.join(_ENDS_WITHIN)
        for connection in self._open():
            connection.cut()
            connection.join(_ENDS_WITHIN)

    def cut(self) -> None:
        """End all connections. New ones are accepted."""
        for connection in self._open():
            connection.cut()

    @contextlib.contextmanager
    def losing(self, is_meant: Callable[[bytes], bool]) -> Iterator[Lost]:
        """Inside the block, requests that `is_meant` selects (`commit`, `end_txn`) reach the
        server; when it answers, their connection ends, before the client gets the answer."""
        lost = Lost(is_meant)
        with self._lock:
            self._losses.append(lost)
        try:
            yield lost
        finally:
            with self._lock:
                self._losses.remove(lost)

    def loss(self, request: bytes) -> Lost | None:
        with self._lock:
            return next((lost for lost in self._losses if lost.is_meant(request)), None)

    def forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _open(self) -> list[_Connection]:
        with self._lock:
            return list(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection((HOST, self._to))
            except OSError:  # the server is down: refuse the client
                client.close()
                continue
            connection = _Connection(self, client, server, self._wire())
            with self._lock:
                self._connections.add(connection)
            connection.start()


class _Connection(threading.Thread):
    """This thread forwards requests, another one forwards answers."""

    def __init__(
        self, proxy: Proxy, client: socket.socket, server: socket.socket, wire: Wire
    ) -> None:
        super().__init__(daemon=True)
        self._proxy, self._client, self._server, self._wire = proxy, client, server, wire
        self._waited_for: list[tuple[bytes, Lost]] = []

    def run(self) -> None:
        answers = threading.Thread(target=self._carry_answers, daemon=True)
        answers.start()
        self._carry_requests()
        answers.join()
        self._client.close()
        self._server.close()
        self._proxy.forget(self)

    def cut(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _carry_requests(self) -> None:
        for request in self._read(self._client, self._wire.request_size):
            if lost := self._proxy.loss(request):
                self._waited_for.append((request, lost))  # before the server can answer
            if not self._send(self._server, request):
                break
        self.cut()

    def _carry_answers(self) -> None:
        for answer in self._read(self._server, self._wire.answer_size):
            meant = [
                lost for request, lost in self._waited_for if self._wire.answers(answer, request)
            ]
            if meant:
                meant[0].count += 1
                break
            if not self._send(self._client, answer):
                break
        self.cut()

    @staticmethod
    def _read(end: socket.socket, size_of: Callable[[bytearray], int]) -> Iterator[bytes]:
        buffer = bytearray()
        while True:
            try:
                data = end.recv(_CHUNK)
            except OSError:
                return
            if not data:
                return
            buffer += data
            yield from messages(buffer, size_of)

    @staticmethod
    def _send(end: socket.socket, data: bytes) -> bool:
        try:
            end.sendall(data)
        except OSError:
            return False
        return True
