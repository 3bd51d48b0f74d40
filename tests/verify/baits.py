"""The faults that reveal each wrong protocol of `mutants.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from mutants import environment
from onceflow.harness.builtin_catalog import JOBS
from onceflow.harness.fault_schedule import KEYED, Fault, plan
from onceflow.harness.verification import Settings


def first_seed(fits: Callable[[list[Fault]], bool], cases: Any, **planned: Any) -> int:
    """The first one whose schedule is as it has to be: new fault points change schedules."""
    return next(seed for seed in count(1) if fits(plan(seed, cases, **planned)))


@dataclass(frozen=True)
class Bait:
    """`like`: values that the faults must have, so that a zombie continues, or a driver ends, at
    the right moment. The seed is the first one that gives such faults."""

    found: str  # the violation, or several of which timing decides; "": any
    kind: str
    point: str = ""
    job: str = "echo"
    sinks: str = "files"
    faults: int = 1
    like: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        keyed = (KEYED,) if JOBS[self.job].keyed else ()
        return first_seed(
            lambda faults: all(getattr(f, n) == v for f in faults for n, v in self.like.items()),
            [(self.sinks, *keyed)], count=self.faults, kinds=(self.kind,),
            at=(self.point,) if self.point else (),
        )  # fmt: skip

    def settings(self, folder: Path, mutant: str) -> Settings:
        return Settings(
            folder=folder, seed=self.seed, faults=self.faults, kinds=(self.kind,),
            points=(self.point,) if self.point else (), cases=((self.job, self.sinks),),
            environment=environment(mutant),
        )  # fmt: skip

    def caught(self, kinds: set[str]) -> bool:
        """Do the violations fit the mutant?"""
        return not self.found or bool(kinds & set(self.found.split(" or ")))


BAITS = {
    "publish-before-deciding": Bait("stuck", "raise-point", "folder.committed"),
    "skip-the-ledger": Bait("duplicated", "raise-point", "epoch.output-published"),
    "ledger-in-another-transaction": Bait(
        "duplicated", "raise-point", "sqlite.written", sinks="sqlite"
    ),
    "drop-a-partition": Bait("lost", "raise-point", "epoch.staged"),
    "sweep-a-decided-file": Bait("stuck", "raise-point", "epoch.decided", sinks="sqlite"),
    "evaluate-again": Bait("", "raise-point", "epoch.decided", "dice", "sqlite"),
    "decision-without-offsets": Bait("lost or stuck", "lost-commit", like={"file": "offsets"}),
    "prune-without-a-roll-up": Bait("stuck", "raise-point", "epoch.swept", faults=3),
    "ignore-the-term": Bait(
        "torn or stuck", "zombie", "epoch.hardened", like={"wakes": "", "visit": 2}
    ),
    "no-fence-entry": Bait("stuck", "zombie", "epoch.hardened", like={"wakes": "open.swept"}),
    "sweep-before-fencing": Bait("stuck", "zombie", "epoch.hardened", like={"wakes": "open.led"}),
    # Back over two epochs of three, after a driver that ended between deciding and sweeping.
    "rewind-the-ledger-only": Bait(
        "duplicated",
        "rollback",
        like={"visit": 3, "file": "rewind", "ends": "epoch.output-published", "point": ""},
    ),
    "skip-and-publish-again": Bait(
        "duplicated",
        "rollback",
        sinks="sqlite",
        like={"visit": 3, "file": "skip", "ends": "epoch.output-published", "point": ""},
    ),
    "restore-before-publishing": Bait(
        "stuck",
        "rollback",
        like={"visit": 3, "file": "rewind", "ends": "epoch.decided", "point": ""},
    ),
    "drop-a-run": Bait("stuck", "raise-point", "open.led", "keyed", "sqlite"),
    "state-of-the-newest-manifest": Bait("stuck", "raise-point", "keyed.listed", "keyed", "sqlite"),
}
SERVER_BAITS = {
    "ledger-to-the-last-stable-offset": Bait("duplicated", "open-transaction", sinks="kafka"),
    # Behind the second of two slots there is nothing left to do wrong.
    "slots-changed-between-decision-and-publish": Bait(
        "duplicated or lost",
        "raise-point",
        "kafka.committed-one",
        sinks="kafka",
        faults=4,
        like={"visit": 1},
    ),
    "copy-trusted-after-a-server-crash": Bait(
        "lost", "kill-postgres", "postgres.copied", sinks="postgres", like={"back": True}
    ),
}
# Found by the contract of sinks instead, in tests/services/test_ledger_mutant.py.
ELSEWHERE = {"ledger-compared-by-number-only"}
