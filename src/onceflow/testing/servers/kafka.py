"""A real Kafka broker in KRaft mode, or several with everything replicated."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onceflow.contract.extras import require
from onceflow.errors import SetupError
from onceflow.spark import jars
from onceflow.testing.servers.process import (
    HOST,
    Process,
    free_ports,
    listens,
    make_folder,
    refuse,
)
from onceflow.testing.servers.proxy import Proxy
from onceflow.testing.servers.wires import KafkaWire

_GIVEN = "ONCEFLOW_KAFKA"
_UP_WITHIN = 90.0  # seconds
_ANSWERS_WITHIN = 10.0  # seconds, for a server that runs already
_FORMATTED_WITHIN = 90.0  # seconds
_PROTOCOLS = "PLAIN:PLAINTEXT,BEHIND:PLAINTEXT,CONTROLLER:PLAINTEXT"
QUICK = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_LOG_LEVEL = "-Dorg.apache.logging.log4j.level=WARN"
_SETTINGS = {
    "auto.create.topics.enable": "false",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.dedupe.buffer.size": "8388608",
    # The broker aborts a transaction within a second of its timeout, not within ten.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # A killed broker can register again only when its old session has ended.
    "broker.heartbeat.interval.ms": "300",
    "broker.session.timeout.ms": "2000",
}


class Kafka:
    """Clients connect to `servers`. `settings` go into each broker's server.properties; `java` are
    options of its JVM, by default for a quick start: benchmarks use others.

    Plain clients and brokers use one listener. Another one is for `proxy`: it advertises the port
    of the proxy, so clients that connect through the proxy stay there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        brokers: int = 1,
        settings: Mapping[str, str] | None = None,
        java: Sequence[str] = QUICK,
    ) -> None:
        self._folder = folder
        self._count = brokers
        self._settings = dict(settings or {})
        self._java = list(java)
        self._brokers: list[_Broker] = []
        own = brokers > 1 or settings
        self._given = None if own else os.environ.get(_GIVEN)

    @property
    def servers(self) -> str:
        return self._given or ",".join(f"{HOST}:{broker.port}" for broker in self._brokers)

    def __repr__(self) -> str:
        return f"Kafka({self.servers})"

    def __enter__(self) -> Kafka:
        from onceflow.spark.session import java_command

        if self._given:
            _check(self._given)
            return self
        _client()
        java = [java_command(), *self._java, "-cp", f"{jars.fetch('broker')}/*"]
        folder = self._folder = make_folder(self._folder)
        try:
            self._brokers = _configure(folder, java, self._count, self._settings)
            _format([broker.format for broker in self._brokers])
            for broker in self._brokers:
                broker.process.launch()
            for i in range(self._count):
                self.start(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._given:
            return
        for broker in self._brokers:
            broker.process.kill()
        shutil.rmtree(self._folder)

    def start(self, i: int = 0) -> None:
        """Start it on the same port and data, unless it runs. Returns when it is ready."""
        broker = self._broker(i, "cannot start")
        broker.process.launch()
        broker.process.wait_until(lambda: listens(broker.port), seconds=_UP_WITHIN)
        admin = _admin(f"{HOST}:{broker.port}")
        broker.process.wait_until(lambda: self._leads(admin, i), seconds=_UP_WITHIN)

    def kill(self, i: int = 0) -> None:
        """`kill -9`: data that it had not written to the file system is lost."""
        self._broker(i, "cannot kill").process.kill()

    def freeze(self, i: int = 0) -> None:
        """Stop it (SIGSTOP): connections stay open, and it answers nothing."""
        self._broker(i, "cannot freeze").process.freeze()

    def thaw(self, i: int = 0) -> None:
        self._broker(i, "cannot thaw").process.thaw()

    def proxy(self, i: int = 0) -> Proxy:
        """A proxy before this broker: clients connect to its `address`."""
        broker = self._broker(i, "cannot stand before")
        return Proxy(broker.behind, KafkaWire, port=broker.proxy)

    def pid(self, i: int = 0) -> int | None:
        """The process of the broker; None while it does not run."""
        return self._broker(i, "does not know the process of").process.pid

    def _broker(self, i: int, what: str) -> _Broker:
        if self._given:
            raise refuse(what, _GIVEN)
        return self._brokers[i]

    def _leads(self, admin: Any, i: int) -> bool:
        """Is it part of the cluster? While all brokers run, every partition must have a leader."""
        from confluent_kafka import KafkaException

        try:
            seen = admin.list_topics(timeout=2)
        except KafkaException:
            return False
        led = all(p.leader >= 0 for t in seen.topics.values() for p in t.partitions.values())
        return i in seen.brokers and (led or any(b.process.pid is None for b in self._brokers))


class _Broker:
    """`behind` is the listener for clients that connect through a proxy at the port `proxy`."""

    def __init__(self, folder: Path, java: list[str]) -> None:
        self.port, self.behind, self.proxy, self.controller = free_ports(4)
        self.properties = folder / "server.properties"
        # A JVM unpacks native libraries to the temporary folder, and leaves them if it is killed.
        java = [*java, f"-Djava.io.tmpdir={folder}", "-XX:-UsePerfData", _LOG_LEVEL]
        self.format = [*java, "kafka.tools.StorageTool", "format", "-c", str(self.properties)]
        self.process = Process(
            f"the Kafka broker at {HOST}:{self.port}",
            [*java, "kafka.Kafka", str(self.properties)],
            log=folder / "broker.log",
            folder=folder.parent,
        )


def _configure(
    folder: Path, java: list[str], count: int, settings: Mapping[str, str]
) -> list[_Broker]:
    brokers = []
    for i in range(count):
        (folder / f"broker-{i}").mkdir()
        brokers.append(_Broker(folder / f"broker-{i}", java))
    voters = ",".join(f"{i}@{HOST}:{broker.controller}" for i, broker in enumerate(brokers))
    for i, broker in enumerate(brokers):
        said = {
            "node.id": i,
            "process.roles": "broker,controller",
            "controller.quorum.voters": voters,
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAIN",
            "listener.security.protocol.map": _PROTOCOLS,
            "listeners": f"PLAIN://{HOST}:{broker.port},BEHIND://{HOST}:{broker.behind},"
            f"CONTROLLER://{HOST}:{broker.controller}",
            "advertised.listeners": f"PLAIN://{HOST}:{broker.port},BEHIND://{HOST}:{broker.proxy}",
            "log.dirs": broker.properties.parent / "data",
            "default.replication.factor": count,
            "offsets.topic.replication.factor": count,
            "transaction.state.log.replication.factor": count,
            "share.coordinator.state.topic.replication.factor": count,
            "min.insync.replicas": count // 2 + 1,
            "transaction.state.log.min.isr": count // 2 + 1,
            "share.coordinator.state.topic.min.isr": count // 2 + 1,
            **_SETTINGS,
            **settings,
        }
        broker.properties.write_text("".join(f"{name}={value}\n" for name, value in said.items()))
    return brokers


def _format(commands: list[list[str]]) -> None:
    """Write the id of a new cluster to each broker's disk; in parallel, since each is a JVM."""
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    running = [
        subprocess.Popen([*command, f"--cluster-id={cluster}"], stdin=subprocess.DEVNULL,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]  # fmt: skip
    for process in running:
        try:
            said, _ = process.communicate(timeout=_FORMATTED_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        if process.returncode != 0:
            raise SetupError(
                f"Kafka's StorageTool ended with {process.returncode}: {said.strip()[-1000:]}",
                hint="fix the settings of the broker, or the disk",
            )


# ---------------------------------------------------------------- clients


def _client() -> Any:
    require("kafka", "the Kafka client")
    import confluent_kafka.admin

    return confluent_kafka.admin


def _admin(servers: str) -> Any:
    quiet = {"log_level": 0, "error_cb": lambda error: None}
    return _client().AdminClient({"bootstrap.servers": servers, **quiet})


def _check(servers: str) -> None:
    admin = _admin(servers)
    from confluent_kafka import KafkaException

    try:
        admin.list_topics(timeout=_ANSWERS_WITHIN)
    except KafkaException as error:
        raise SetupError(
            f"{_GIVEN} names {servers}, where no broker answers: {error}",
            hint=f"start the broker, or unset {_GIVEN}: then a broker is started for you",
        ) from error
