"""A home as the ads application leaves it, without Spark, and far busier: for the page's memory.

Jobs whose epochs are decided as fast as is asked for, with what a driver writes beside them, and a
board. What is written is written by the product's own code; only the rows are missing.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from onceflow.contract.ledger import Committable, Position
from onceflow.protocol.epoch_log import Decision, EpochLog, OutputDecision
from onceflow.protocol.home import JobFolder, now
from onceflow.protocol.lease import Lease
from onceflow.protocol.step_times import StepTimes
from onceflow.service.journal import Journal

JOBS = {  # query -> outputs, as in examples/ads
    "aggregation": {"ads": ["counts", "events", "orders", "corrections", "late", "rejected"]},
    "attribution": {"orders": ["attributed", "unattributed"]},
    "load": {"counts": ["serving", "warehouse"], "orders": ["serving", "warehouse"]},
}
BOARD = "ads"
_KEEP = 100  # epochs, as by default
_STEPS = ("checked", "staged", "hardened", "decided", "published", "swept")
_SCHEMA = json.dumps({
    "type": "struct",
    "fields": [
        {"name": f"column_{n}", "type": "string", "nullable": True, "metadata": {}}
        for n in range(8)
    ],
})  # fmt: skip


class _Spark:
    def report(self, epoch: int) -> dict[str, Any]:
        return {
            "numInputRows": 2000, "durationMs": {"addBatch": 5},
            "stateOperators": [{"numRowsTotal": 7}],
        }  # fmt: skip


class _Query:
    def __init__(self, folder: JobFolder, name: str, outputs: list[str], term: int) -> None:
        query = folder.query(folder.open_lineage("4.2.1"), name)
        self.name, self._outputs, self._lineage = name, outputs, query.lineage
        self._log: EpochLog = query.epoch_log()
        self._times = StepTimes(query.folder / "onceflow", _KEEP)
        self._term, self.epoch, self._place = term, -1, str(folder.home)
        targets = {
            output: {"guarantee": "exactly-once", "kind": "log", "path": f"{self._place}/{output}"}
            for output in outputs
        }
        sources = {"in": {"kind": "log", "place": f"{self._place}/in"}}
        facts = {"at": now(), "spark": "4.2.1", "code": "c0de"}
        self._log.fence(term, {**facts, "outputs": targets, "sources": sources})

    def run(self) -> None:
        self.epoch += 1
        self._times.begin(self.epoch)
        self._log.decide(self._decision())
        for step in _STEPS:
            self._times.passed(f"epoch.{step}")
        self._times.end(_Spark())
        self._log.roll_up(keep=_KEEP, slack=_KEEP)

    def _decision(self) -> Decision:
        epoch, path = self.epoch, f"{self._place}/in"
        start, end = (
            {"in": {"path": path, "next": [number * 1000, number * 1000]}}
            for number in (epoch, epoch + 1)
        )
        outputs = {
            output: OutputDecision(
                Position(self._lineage, epoch - 1) if epoch else None,
                tuple(
                    Committable(
                        f"{output}/{epoch}-{self._term}/part-{part:05}.parquet", 50, 4000, 7
                    )
                    for part in range(2)
                ),
                _SCHEMA,
                "append",
            )
            for output in self._outputs
        }
        offsets = f'v2\n{{"batchWatermarkMs":0}}\nin:{json.dumps(end["in"])}'
        return Decision(epoch, self._term, now(), start, end, offsets, {}, {}, 0, outputs)

    def told(self) -> dict[str, Any]:
        return {
            "query": self.name, "epoch": self.epoch, "epochs": self.epoch + 1,
            "rows_in": 2000 * self.epoch, "rows_out": 100 * self.epoch, "rows_in_per_s": 2000.0,
            "rows_out_per_s": 100.0, "lag_s": 0.7, "published_s_ago": 0.2, "watermark": None,
            "state_rows": None, "epoch_ms": 500, "late_rows": 0, "rejected_rows": 0,
            "outputs": dict.fromkeys(self._outputs, 50 * self.epoch), **self._times.sums.as_json(),
        }  # fmt: skip


class BusyHome:
    """Goes on in a thread while the block lasts; `epochs`: of each query, up to now."""

    def __init__(self, home: Path, *, per_second: float) -> None:
        self.home, self.epochs = home, 0
        self._every, self._done = 1 / per_second, threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self._failure: BaseException | None = None

    def __enter__(self) -> BusyHome:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _go_on(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._failure = error

    def _write(self) -> None:
        jobs = []
        for name, queries in JOBS.items():
            folder = JobFolder(self.home, name)
            made = [_Query(folder, query, outputs, 1) for query, outputs in queries.items()]
            lease, journal = Lease(folder.folder / "lease", name), Journal(folder.folder)
            journal.starting()
            lease.acquire()
            lease.next_term(0)
            journal.event("started", job=name, pid=1, queries={})
            jobs.append((journal, made))
        board = Board(self.home)
        while not self._done.wait(self._every):
            for journal, queries_of in jobs:
                for query in queries_of:
                    query.run()
                journal.progress([query.told() for query in queries_of])
            board.sample()
            self.epochs += 1


class Board:
    """One that grows as that of `onceflow demo` does."""

    def __init__(self, home: Path) -> None:
        self._path, self._began, self._clicks = home / "_boards" / f"{BOARD}.jsonl", time.time(), 0
        self._path.parent.mkdir(parents=True)
        head = {"board": BOARD, "title": "Ads", "unit": {"spend": "EUR"}}
        self._path.write_text(json.dumps(head) + "\n")

    def sample(self) -> None:
        self._clicks += 40
        told = {
            "clicks": self._clicks, "spend_micros": self._clicks * 250_000,
            "truth_clicks": self._clicks + 9, "truth_spend_micros": (self._clicks + 9) * 250_000,
        }  # fmt: skip
        campaigns = [
            {"campaign": f"campaign {n}", **told, "budget_micros": 10**10, "paused": False}
            for n in range(8)
        ]
        line = {"at": now(), "t": time.time() - self._began, "totals": told, "campaigns": campaigns}
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
