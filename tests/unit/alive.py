"""The files of a running job, without a driver: for tests of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from saved import Saved

from onceflow.contract.ledger import Committable, Guarantee
from onceflow.protocol.epoch_log import OutputDecision
from onceflow.protocol.lease import Lease
from onceflow.protocol.step_times import StepTimes
from onceflow.service.journal import Journal

STEPS = ("epoch.checked", "epoch.staged", "epoch.hardened", "epoch.decided", "epoch.published",
         "epoch.swept")  # fmt: skip


class Spark:
    """A query that has finished every epoch."""

    def report(self, epoch: int) -> dict[str, Any]:
        return {
            "numInputRows": 100, "durationMs": {"addBatch": 5},
            "stateOperators": [{"numRowsTotal": 7}],
        }  # fmt: skip


class Alive(Saved):
    """A job with one query, `out`, with the outputs `clicks` and `rejected`."""

    def __init__(self, home: Path, job: str = "shop", **facts: Any) -> None:
        super().__init__(home, job)
        self.times = StepTimes(self.query.folder / "onceflow", 100)
        self.journal = Journal(self.folder.folder)
        self.lease = Lease(self.folder.folder / "lease", job)
        self.facts = {
            "outputs": {
                "clicks": {"guarantee": "exactly-once", "kind": "log", "path": f"{home}/clicks"},
                "rejected": {"guarantee": "exactly-once", "kind": "files", "path": f"{home}/bad"},
            },
            "sources": {"lines": {"kind": "log", "place": f"{home}/lines"}},
            **facts,
        }
        self.term = 0

    def start(self) -> None:
        """Do what a driver does before its first epoch."""
        self.journal.starting()
        self.lease.acquire()
        self.term = self.lease.next_term(self.log.read().term)
        self.lead(self.term, **self.facts)
        queries = {"out": {"term": self.term, "resumes_after": None}}
        self.journal.event("started", job=self.folder.name, pid=1, queries=queries)

    def run(self, epochs: int = 1, rows: int = 10) -> None:
        """Publish epochs, each with `rows` rows to `clicks` and one to `rejected`."""
        for _ in range(epochs):
            epoch = self.log.last.epoch + 1 if self.log.last else 0
            self.times.begin(epoch)
            decision = self.decision(epoch, self.term)
            outputs = {
                name: OutputDecision(
                    None, (Committable("x", n, 1, 0),), "{}", "append", Guarantee.EXACTLY_ONCE
                )
                for name, n in (("clicks", rows), ("rejected", 1))
            }
            self.log.decide(replace(decision, outputs=outputs))
            for point in STEPS:
                self.times.passed(point)
            self.times.end(Spark())

    def tell(self, **more: Any) -> None:
        """Write the progress as a driver does."""
        last = self.log.last
        told = {
            "query": "out", "epoch": last and last.epoch, "epochs": 3, "rows_in": 300,
            "rows_out": 33, "rows_in_per_s": 30.0, "rows_out_per_s": 3.3, "lag_s": 0.7,
            "published_s_ago": 0.2, "watermark": None, "state_rows": 7, "epoch_ms": 50,
            "late_rows": 4, "rejected_rows": 3, "outputs": {"clicks": 30, "rejected": 3},
            **self.times.sums.as_json(), **more,
        }  # fmt: skip
        self.journal.progress([told])
