"""The few faults that reveal each wrong protocol of `mutants.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mutants import environment
from onceflow.harness.verification import Settings


@dataclass(frozen=True)
class Bait:
    """The seed lets a zombie wake up, or a server come back, at the right moment."""

    found: str  # what is found, or several of which the moment decides; "": chance decides
    kind: str
    point: str = ""
    job: str = "echo"
    sinks: str = "files"
    faults: int = 1
    seed: int = 1

    def settings(self, folder: Path, mutant: str) -> Settings:
        return Settings(
            folder=folder, seed=self.seed, faults=self.faults, kinds=(self.kind,),
            points=(self.point,) if self.point else (), cases=((self.job, self.sinks),),
            environment=environment(mutant),
        )  # fmt: skip

    def caught(self, kinds: set[str]) -> bool:
        """Is what was found what the mutant does?"""
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
    "decision-without-offsets": Bait("lost or stuck", "lost-commit"),
    "prune-without-a-roll-up": Bait("stuck", "raise-point", "epoch.swept", faults=3),
    "ignore-the-term": Bait("torn or stuck", "zombie", "epoch.hardened", seed=2),  # late
    "no-fence-entry": Bait("stuck", "zombie", "epoch.hardened", seed=6),  # at open.swept
    "sweep-before-fencing": Bait("stuck", "zombie", "epoch.hardened", seed=24),  # at open.led
    # Back over two epochs of three, after a driver that ended between deciding and sweeping.
    "rewind-the-ledger-only": Bait("duplicated", "rollback", seed=382),
    "skip-and-publish-again": Bait("duplicated", "rollback", sinks="sqlite", seed=41),
    "restore-before-publishing": Bait("stuck", "rollback", seed=156),
    "drop-a-run": Bait("stuck", "raise-point", "open.led", "keyed", "sqlite"),
    "state-of-the-newest-manifest": Bait("stuck", "raise-point", "keyed.listed", "keyed", "sqlite"),
}
SERVER_BAITS = {
    "ledger-to-the-last-stable-offset": Bait("duplicated", "open-transaction", sinks="kafka"),
    # Behind the second of two slots there is nothing left to do wrong: of these four faults three
    # strike behind the first.
    "slots-changed-between-decision-and-publish": Bait(
        "duplicated or lost", "raise-point", "kafka.committed-one", sinks="kafka", faults=4, seed=2
    ),
    "copy-trusted-after-a-server-crash": Bait(
        "lost", "kill-postgres", "postgres.copied", sinks="postgres"
    ),
}
# Who finds it out instead: the contract of sinks, in tests/services/test_ledger_mutant.py.
ELSEWHERE = {"ledger-compared-by-number-only"}
