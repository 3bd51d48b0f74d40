"""The epoch logs of a job, read without onceflow: its lineages and their decisions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onceflow.harness.targets import Corrupt, body

_TRIES = 200


Position = tuple[str, tuple[int, ...]]  # a log or topic, and the next offset of each partition


def positions(offset: Any) -> Iterator[Position]:
    """In an offset of Spark: {"path", "next", …} of a log, {topic: {partition: next}} of Kafka."""
    if not isinstance(offset, dict):
        return
    if isinstance(offset.get("next"), list):
        yield offset.get("path", ""), tuple(offset["next"])
        return
    for topic, partitions in offset.items():
        if isinstance(partitions, dict):
            yield topic, tuple(partitions[number] for number in sorted(partitions, key=int))


@dataclass(frozen=True)
class Decision:
    """A decision, as the epoch log has it."""

    epoch: int
    term: int
    end: dict[str, Any]
    watermark: int  # of the next epoch, milliseconds
    stateful: bool
    rows: dict[str, int]  # output -> rows
    keyed: dict[str, Any] = field(default_factory=dict)  # of each keyed step

    def read_to(self, source: str) -> list[int]:
        """The next offset of each partition of a source."""
        ((_, read_to),) = positions(self.end[source])
        return list(read_to)

    @property
    def is_waited_for(self) -> bool:
        """Will keyed steps have an epoch without rows, because a timer is due or a partition counts
        as idle soon?"""
        return any(
            step["idle_at"] is not None
            or any(
                at is not None and at <= (step["watermark"] or 0) for at in step["next"].values()
            )
            for step in self.keyed.values()
        )


@dataclass
class _Log:
    """Everything seen so far of the epoch log of one query in one lineage."""

    decided: dict[int, Decision] = field(default_factory=dict)  # by epoch
    parent: str = ""  # the lineage that it continues
    cut: int = -1  # the last epoch of the parent that counts
    ended: str = ""  # the lineage that continues this one


class Lineages:
    """The lineages of one job, from the first to the current one. A log removes old decisions, so
    decisions are kept here once they were seen."""

    def __init__(self, job: Path) -> None:
        self.chain: list[str] = []
        self._job = job
        self._logs: dict[str, dict[str, _Log]] = {}  # lineage -> query -> its log

    def look(self) -> None:
        if not self.chain and (self._job / "job.json").exists():
            self.chain.append(body(self._job / "job.json")["lineage"])
        while self.chain:
            logs = self._logs.setdefault(self.chain[-1], {})
            queries = sorted((self._job / "lineages" / self.chain[-1]).glob("*/onceflow/log"))
            for log in queries:
                with contextlib.suppress(Corrupt):  # the driver reports it
                    _read(log, logs.setdefault(log.parents[1].name, _Log()))
            first = queries[0].parents[1].name if queries else ""  # all queries end together
            if not first or not logs[first].ended:
                return
            self.chain.append(logs[first].ended)

    def folder(self) -> Path:
        """The folder of the current lineage."""
        return self._job / "lineages" / (self.chain[-1] if self.chain else "")

    def cut(self, lineage: str, query: str) -> int:
        """The last epoch of the parent lineage that counts; -1 if there is none."""
        log = self._logs.get(lineage, {}).get(query)
        return -1 if log is None else log.cut

    def decided(self) -> dict[str, dict[int, Decision]]:
        """query -> epoch -> the decision that counts; a cut removes those after it."""
        if not self.chain:
            return {}
        return {q: self._decided(self.chain[-1], q) for q in self._logs.get(self.chain[-1], {})}

    def _decided(self, lineage: str, query: str) -> dict[int, Decision]:
        log = self._logs.get(lineage, {}).get(query, _Log())
        before = self._decided(log.parent, query) if log.parent else {}
        found = {epoch: d for epoch, d in before.items() if epoch <= log.cut}
        return found | {epoch: d for epoch, d in log.decided.items() if epoch > log.cut}


def _read(folder: Path, log: _Log) -> None:
    for _ in range(_TRIES):
        try:
            entries = _entries(folder)
            break
        except FileNotFoundError:
            continue  # rolled up while we read: start over
    else:
        return
    for entry in entries:
        match entry["type"]:
            case "epoch":
                log.decided[entry["epoch"]] = _decision(entry)
            case "begin":
                log.parent, log.cut = entry["origin"]["parent"], entry["origin"]["cut"]
            case "end":
                log.ended = entry["to"]


def _entries(folder: Path) -> list[dict[str, Any]]:
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    newest = max((n for n in names if n.startswith("rollup-")), default="")
    rolled = body(folder / newest) if newest else {"decisions": []}
    found = [rolled[name] for name in ("begin", "end") if rolled.get(name)]
    above = newest.removeprefix("rollup-")
    return [
        *found, *rolled["decisions"],
        *(body(folder / n) for n in names if n[0].isdigit() and n > above),
    ]  # fmt: skip


def _decision(entry: dict[str, Any]) -> Decision:
    rows = {
        name: sum(file["rows"] for file in output["files"])
        for name, output in entry["outputs"].items()
    }
    return Decision(
        entry["epoch"], entry["term"], entry["end"], entry["watermark"], bool(entry["state"]), rows,
        entry.get("keyed", {}),
    )  # fmt: skip
