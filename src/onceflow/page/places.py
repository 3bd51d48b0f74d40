"""Where sources read and outputs write, and which jobs meet there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from onceflow.page.files import Row

Place = tuple[str, str]  # kind, where


class _Query(Protocol):
    @property
    def outputs(self) -> Mapping[str, Row]: ...
    @property
    def sources(self) -> Mapping[str, Row]: ...


class _Job(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def queries(self) -> Mapping[str, _Query]: ...


def kind_of(facts: Row) -> str | None:
    kind = facts.get("kind")
    return None if kind is None else str(kind)


def place_of(facts: Row) -> str | None:
    """For people: a path, a table in it, or a topic."""
    for part in ("place", "path", "topic"):
        if facts.get(part):
            table = f", table {facts['table']}" if facts.get("table") else ""
            return f"{facts[part]}{table}"
    if facts.get("table"):
        schema = f"{facts['schema']}." if facts.get("schema") else ""
        return f"table {schema}{facts['table']}"
    return None


def _written(facts: Row) -> Place | None:
    """What another job may read: the rows of a log, of a folder of files, of a topic."""
    if facts.get("kind") in ("log", "files"):
        return str(facts["kind"]), str(facts.get("path"))
    if facts.get("kind") == "kafka":
        return "kafka", str(facts.get("topic"))
    return None


def _reads(facts: Row) -> set[Place]:
    if facts.get("kind") == "kafka":
        topics = facts.get("topics") or str(facts.get("place") or "").split(",")
        return {("kafka", str(topic)) for topic in topics}
    return {(str(facts.get("kind")), str(facts.get("place")))} if facts.get("place") else set()


def links(job: _Job, others: Sequence[_Job]) -> list[Row]:
    """Other jobs that read what this one writes, or write what it reads."""
    found: dict[tuple[Any, ...], Row] = {}
    for other in others:
        if other.name == job.name:
            continue
        for writer, reader, reads in ((job, other, True), (other, job, False)):
            for place in sorted(_all_written(writer) & _all_read(reader)):
                verb = "reads what this job writes" if reads else "writes what this job reads"
                found[other.name, reads, place] = {
                    "job": other.name, "reads": reads, "kind": place[0], "place": place[1],
                    "says": f"{other.name} {verb}: {place[1]}",
                }  # fmt: skip
    return list(found.values())


def _all_written(job: _Job) -> set[Place]:
    found = {_written(t) for q in job.queries.values() for t in q.outputs.values()}
    return {place for place in found if place is not None}


def _all_read(job: _Job) -> set[Place]:
    return {p for q in job.queries.values() for facts in q.sources.values() for p in _reads(facts)}
