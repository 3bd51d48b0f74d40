"""How jobs are linked by what they write and read, and how lineages come from each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from onceflow.contract.registry import place_argument
from onceflow.page.files import Row
from onceflow.page.shapes import Link
from onceflow.snapshots.shapes import Lineage

Place = tuple[str, str]  # kind, path or topic

DEEPEST = 8  # steps to the right in the tree; a job may be rolled back any number of times


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
    """A path, a table in it, or a topic, as people read it."""
    for part in ("place", "path", "topic"):
        if facts.get(part):
            table = f", table {facts['table']}" if facts.get("table") else ""
            return f"{facts[part]}{table}"
    if facts.get("table"):
        schema = f"{facts['schema']}." if facts.get("schema") else ""
        return f"table {schema}{facts['table']}"
    return written_to(facts)


def written_to(target: Row) -> str | None:
    """The place of a target, as a source that reads it names it."""
    place = target.get(place_argument(str(target.get("kind"))))
    return str(place) if place else None


def _written(target: Row) -> Place | None:
    place = written_to(target)
    return None if place is None else (str(target.get("kind")), place)


def _reads(facts: Row) -> set[Place]:
    """A source that reads several places names them as `topics`."""
    places = facts.get("topics") or ([facts["place"]] if facts.get("place") else [])
    return {(str(facts.get("kind")), str(place)) for place in places}


def links(job: _Job, others: Sequence[_Job]) -> list[Link]:
    """Other jobs that read what this one writes, or write what it reads."""
    found: dict[tuple[Any, ...], Link] = {}
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


def lineage_tree(lineages: Sequence[Lineage]) -> list[Row]:
    """Each lineage below the one that it came from, with its `depth`. A lineage whose parent is
    not among them has depth 0."""
    known = {one["lineage"] for one in lineages}
    children: dict[str | None, list[Lineage]] = {}
    for one in lineages:
        parent = one["parent"] if one["parent"] in known else None
        children.setdefault(parent, []).append(one)
    found: list[Row] = []
    waiting = [(one, 0) for one in reversed(children.get(None, []))]
    while waiting:
        one, depth = waiting.pop()
        found.append({**one, "depth": min(depth, DEEPEST)})
        below = children.pop(one["lineage"], [])
        waiting += [(child, depth + 1) for child in reversed(below)]
    return found
