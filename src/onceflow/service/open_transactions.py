"""The transactions that a job left open in Kafka."""

from __future__ import annotations

from typing import Any

from onceflow.contract.registry import open_target
from onceflow.errors import LeaseHeld
from onceflow.kafka.sink import Kafka
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.lease import Lease


def open_transactions(folder: JobFolder, *, abort: bool) -> list[dict[str, Any]]:
    """For each Kafka output its transactional ids and what is open in its topics. `abort` ends what
    the job left open; it is refused while a driver leads the job."""
    if abort:
        _refuse_while_led(folder)
    sinks: list[tuple[Query, str, Kafka]] = []
    for query in folder.queries():
        outputs = (query.epoch_log().read().leader or {}).get("outputs") or {}
        for name, described in outputs.items():
            if described.get("kind") == Kafka.kind:
                sink = open_target(described)
                assert isinstance(sink, Kafka)
                sinks.append((query, name, sink))
    ids = []
    for query, name, sink in sinks:  # outputs may share a topic, so end all before listing the rest
        output = f"{query.job}/{query.name}/{name}"
        ids.append(sink.end_transactions(output) if abort else sink.transactional_ids(output))
    return [
        {
            "query": query.name, "output": name, "topic": sink.topic, "ledger": sink.ledger,
            "ids": taken, "aborted": abort, "open": sink.held_back(),
        }
        for (query, name, sink), taken in zip(sinks, ids, strict=True)
    ]  # fmt: skip


def _refuse_while_led(folder: JobFolder) -> None:
    lease = Lease(folder.folder / "lease", folder.name)
    holder = lease.holder()
    if holder is not None and lease.alive(holder):
        raise LeaseHeld(
            f"job {folder.name} is led by {holder}: its transactions are its own",
            hint="stop it first; a driver that runs leaves nothing open",
        )
