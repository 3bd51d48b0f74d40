"""Make a second job from the cut of a first one, with outputs of its own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.contract.registry import open_target
from onceflow.errors import JobError
from onceflow.protocol.home import JobFolder, jobs
from onceflow.protocol.lease import Lease
from onceflow.protocol.lineage import Origin
from onceflow.snapshots.cut import Cut
from onceflow.snapshots.new_lineage import make_job, refuse_taken


@dataclass(frozen=True)
class Move:
    """Where an output of the fork goes."""

    query: str
    output: str
    of: str  # the target of the parent
    to: str


class Fork:
    """A fork, planned and then made."""

    def __init__(
        self,
        parent: str,
        cuts: Mapping[str, tuple[str, Cut]],
        targets: Mapping[str, Mapping[str, dict[str, Any]]],
        starts: dict[str, dict[str, Any]],
        folder: JobFolder,
    ) -> None:
        """`targets`: query -> output -> its target in the parent. `folder`: of the fork."""
        self._parent, self._cuts, self._targets = parent, cuts, targets
        self._starts, self._folder = starts, folder

    def plan(self, outputs: Path | None, named: Mapping[str, str]) -> list[Move]:
        """Where each output goes: file-like ones below `outputs`, others as `named` says."""
        found = []
        for query, targets in self._targets.items():
            for output, target in targets.items():
                found.append(self._move(f"{query}/{output}", target, outputs, named))
        unknown = sorted(set(named) - {f"{move.query}/{move.output}" for move in found})
        if unknown:
            raise JobError(
                f"job {self._parent} has no output {unknown[0]}",
                hint=f"it has {', '.join(f'{m.query}/{m.output}' for m in found)}",
            )
        refuse_taken(self._folder)
        for move in found:
            self._refuse_overlap(move)
        return found

    def _refuse_overlap(self, move: Move) -> None:
        """Refuse a folder that another job writes to: readers would see the files of both."""
        if not os.path.isabs(move.to):
            return  # the name of a table or a topic
        ours = Path(os.path.realpath(move.to))
        for whose, path in (*self._paths_of_parent(), *self._paths_of_forks()):
            theirs = Path(os.path.realpath(path))
            if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
                raise JobError(
                    f"output {move.query}/{move.output} of the fork would go to {move.to}, and "
                    f"{whose} is in {path}",
                    hint=f"name another path: --output {move.query}/{move.output}=PATH, or another "
                    "--outputs DIR",
                )

    def _paths_of_parent(self) -> Iterator[tuple[str, str]]:
        for query, targets in self._targets.items():
            for output, target in targets.items():
                if "path" in target:
                    yield f"output {query}/{output} of {self._parent}", str(target["path"])

    def _paths_of_forks(self) -> Iterator[tuple[str, str]]:
        for other in jobs(self._folder.home):
            fork = other.fork()
            if fork is not None and other.name != self._folder.name:
                for name, to in fork["outputs"].items():
                    if os.path.isabs(to):
                        yield f"output {name} of fork {other.name}", to

    def _move(
        self, name: str, target: dict[str, Any], outputs: Path | None, named: Mapping[str, str]
    ) -> Move:
        sink = open_target(target)
        sink.refuse_move()
        query, _, output = name.partition("/")
        if name in named:
            to = named[name]
            to = str(Path(to).absolute()) if sink.place == "path" else to
        elif sink.place == "path" and outputs is not None:
            to = str(outputs.absolute() / query / (output + Path(target["path"]).suffix))
        else:
            hint = f"--output {name}=NAME, another {sink.place}"
            raise JobError(
                f"output {name} of the fork needs a target: {sink} belongs to its parent",
                hint=f"{hint}, or --outputs DIR for all" if sink.place == "path" else hint,
            )
        if to == str(target.get(sink.place)):
            raise JobError(
                f"output {name} of the fork would go to {sink}, which belongs to its parent",
                hint=f"name another {sink.place}",
            )
        return Move(query, output, str(sink), to)

    def run(self, moves: list[Move], reason: str, facts: Mapping[str, Any]) -> str:
        """Make the fork, and return its lineage."""
        lineage = str(uuid.uuid4())
        origins = {
            query: (Origin(lineage, of, cut.decision.epoch, cut.decision.nonce, of, {}), cut)
            for query, (of, cut) in self._cuts.items()
        }
        about = {"of": self._parent, "reason": reason, **facts}
        outputs = {f"{move.query}/{move.output}": move.to for move in moves}
        fork = {"fork": {"of": self._parent, "outputs": outputs}}
        lease = Lease(self._folder.folder / "lease", self._folder.name)
        lease.acquire()
        try:
            return make_job(self._folder, origins, self._starts, about=about, facts=fork)
        finally:
            lease.release()
