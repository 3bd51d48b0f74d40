"""The description of a log for `onceflow log info`."""

from __future__ import annotations

from typing import Any

from onceflow.contract.schema import columns
from onceflow.log.embedded import EmbeddedLog
from onceflow.log.reader_positions import Reader, readers
from onceflow.log.row_output import show_time


def facts_of(log: EmbeddedLog) -> dict[str, Any]:
    """The settings with which a log was created."""
    facts = log.facts
    return {
        "log": str(log.path), "id": facts.id, "columns": columns(facts.schema),
        "key": list(facts.key), "partitions": facts.partitions, "retain_ms": facts.retain_ms,
        "retain_bytes": facts.retain_bytes,
    }  # fmt: skip


def describe(log: EmbeddedLog) -> dict[str, Any]:
    """The content of a log, its producers, and the rows that its readers still need."""
    view = log.view
    parts = [
        {"partition": p, "earliest": view.low[p], "next": view.next[p], "rows": view.rows(p)}
        for p in range(log.facts.partitions)
    ]
    return {
        **facts_of(log),
        "partitions": parts,
        "rows": sum(part["rows"] for part in parts),
        "bytes": view.bytes - view.removed,
        "commits": view.position,
        "created": _time(view.created_at),
        "last_append": _time(view.appended_at),
        "producers": [_producer(log, name) for name in sorted(view.ledgers)],
        "readers": [_reader(log, reader) for reader in readers(log.path)],
    }


def _producer(log: EmbeddedLog, name: str) -> dict[str, Any]:
    """Outputs of jobs, whose names have slashes, have term, lineage and epoch; other producers
    have a sequence."""
    said = log.view.ledger(name)
    at = said.position
    if "/" in name:
        return {
            "name": name, "term": said.term, "lineage": at.lineage if at else None,
            "epoch": at.epoch if at else None,
        }  # fmt: skip
    return {"name": name, "sequence": at.epoch if at else None}


def _reader(log: EmbeddedLog, reader: Reader) -> dict[str, Any]:
    held = [
        log.view.next[p] - max(needs, log.view.low[p])
        for p, needs in enumerate(reader.needs[: log.facts.partitions])
    ]
    return {
        "name": reader.name, "home": reader.home, "lineage": reader.lineage,
        "needs": reader.needs, "holds_rows": sum(max(0, rows) for rows in held), "at": reader.at,
    }  # fmt: skip


def _time(microseconds: int) -> str | None:
    return show_time(microseconds, digits="milliseconds") if microseconds else None
