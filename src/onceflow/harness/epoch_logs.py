"""What the epoch logs of a job say, read without onceflow: its lineages, and their decisions."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onceflow.harness.targets import Corrupt, body

_TRIES = 200


@dataclass(frozen=True)
class Decision:
    """A decision as it stands in the epoch log."""

    epoch: int
    term: int
    end: dict[str, Any]
    watermark: int  # of the next epoch, milliseconds
    stateful: bool
    rows: dict[str, int]  # output -> rows
    keyed: dict[str, Any] = field(default_factory=dict)  # what it says of each keyed step

    def read_to(self, source: str) -> list[int]:
        """How far a source was read: the next offset of each partition."""
        end = self.end[source]
        if "next" in end:
            return list(end["next"])
        ((_, topic),) = end.items()  # of Spark's connector: topic -> partition -> next offset
        return [topic[str(partition)] for partition in range(len(topic))]

    @property
    def is_waited_for(self) -> bool:
        """Will keyed steps have an epoch without rows: a timer is behind the watermark, or a
        partition counts as idle soon?"""
        return any(
            step["idle_at"] is not None
            or any(
                at is not None and at <= (step["watermark"] or 0) for at in step["next"].values()
            )
            for step in self.keyed.values()
        )


@dataclass
class _Log:
    """All that was seen of the epoch log of one query in one lineage."""

    decided: dict[int, Decision] = field(default_factory=dict)  # by epoch
    parent: str = ""  # the lineage that it goes on from
    cut: int = -1  # and the last epoch of it that counts
    ended: str = ""  # the lineage that goes on from here


class Lineages:
    """Of one job, from its first to the one that it is in. A log frees its old decisions: what was
    seen once is remembered."""

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
                with contextlib.suppress(Corrupt):  # the driver is to say so
                    _read(log, logs.setdefault(log.parents[1].name, _Log()))
            first = queries[0].parents[1].name if queries else ""  # its end is that of all
            if not first or not logs[first].ended:
                return
            self.chain.append(logs[first].ended)

    def folder(self) -> Path:
        """Of the lineage that the job is in."""
        return self._job / "lineages" / (self.chain[-1] if self.chain else "")

    def cut(self, lineage: str, query: str) -> int:
        """The last epoch of the lineage before that counts; -1: it began with nothing."""
        log = self._logs.get(lineage, {}).get(query)
        return -1 if log is None else log.cut

    def decided(self) -> dict[str, dict[int, Decision]]:
        """query -> epoch -> the decision that counts: what came after a cut does not."""
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
            continue  # rolled up while we read: begin again
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
